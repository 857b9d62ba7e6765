"""The advice on traffic whose reuse is known by arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal

import pytest

from shoal.core.advice.facts import ClassFact, PromptMark, RequestFact, TrafficWindow, after_answer
from shoal.core.advice.replay import counted
from shoal.core.advice.report import DAY, AdviceReport, NotEnoughTraffic, advise
from shoal.core.advice.sentences import sentences

QUESTION, ANSWER, TURNS, CONVERSATIONS = 400, 50, 6, 101
RATE = 5_000.0
"""Prompt tokens per second."""
H100 = ClassFact(gpus=2, kv_tokens=10_000_000, hourly_cost=Decimal("3.60"), currency="EUR")
PRICED: Mapping[str, ClassFact] = {"h100": H100}


def prompt_of(turn: int) -> int:
    return QUESTION + turn * (QUESTION + ANSWER)


def conversation_marks(conversation: int, turn: int) -> tuple[PromptMark, ...]:
    found: list[PromptMark] = []
    for each in range(turn + 1):
        key = 1_000 * conversation + each + 1
        found.append(PromptMark(key, prompt_of(each)))
        if each < turn:
            found.append(PromptMark(after_answer(key), prompt_of(each) + ANSWER))
    return tuple(found)


def conversations(place: Callable[[int, int], int] = lambda conversation, _turn: conversation % 2) -> TrafficWindow:
    """All first turns, then all second ones, and so on. The engines report what a cache of their own would have that
    forgets nothing."""
    seen: dict[int, dict[int, int]] = {}
    requests: list[RequestFact] = []
    for turn in range(TURNS):
        for conversation in range(CONVERSATIONS):
            replica = place(conversation, turn)
            had = seen.setdefault(replica, {})
            cached = had.get(conversation, 0)
            had[conversation] = prompt_of(turn) + ANSWER
            at = float(len(requests))
            first = at + (prompt_of(turn) - cached) / RATE
            marks = conversation_marks(conversation, turn)
            requests.append(
                RequestFact(at, at, first, first + 0.5, prompt_of(turn), cached, ANSWER, replica, "h100", marks=marks)
            )
    return TrafficWindow(0.0, float(len(requests)), tuple(requests))


def share_of(window: TrafficWindow, found: Callable[[RequestFact], int]) -> float:
    chosen = [window.requests[number] for number in counted(window.requests)]
    return sum(map(found, chosen)) / sum(one.prompt for one in chosen)


def turn_of(one: RequestFact) -> int:
    return (one.prompt - QUESTION) // (QUESTION + ANSWER)


def report_of(window: TrafficWindow, fleet: Mapping[str, ClassFact] = PRICED) -> AdviceReport:
    found = advise(window, fleet)
    assert isinstance(found, AdviceReport), found
    return found


def test_conversations_that_stay_at_their_replica_get_all_reuse_that_there_is() -> None:
    window = conversations()
    shares = report_of(window).shares
    ideal = share_of(window, lambda one: one.prompt - QUESTION if turn_of(one) else 0)
    for share in (shares.unlimited, shares.fleet_sized, shares.delivered, shares.replayed, shares.larger_kv):
        assert share == pytest.approx(ideal)
    said = sentences(report_of(window))
    assert "Better routing would save nothing more." in said
    assert "2 times the KV cache would save nothing more." in said


def test_round_robin_finds_the_turn_before_the_last() -> None:
    # An odd number of conversations: each turn is at the other replica.
    window = conversations()
    shares = report_of(window).shares
    two_turns = QUESTION + ANSWER + QUESTION
    expected = share_of(window, lambda one: one.prompt - two_turns if turn_of(one) >= 2 else 0)
    # The last request comes after the other replica's last one, so it has no choice.
    assert shares.round_robin == pytest.approx(expected, abs=0.002)
    # Every answer has ended when the next request comes: the least loaded replicas take turns as well.
    assert shares.least_in_flight == shares.round_robin


def test_what_was_saved_is_worth_tokens_gpu_time_and_money() -> None:
    window = conversations()
    report = report_of(window)
    saved, shares = report.saved, report.shares
    assert saved is not None
    assert shares.least_in_flight is not None
    assert saved.share == pytest.approx(shares.delivered - shares.least_in_flight)
    per_day = sum(one.prompt for one in window.requests) * DAY / window.seconds
    assert saved.tokens_per_day == pytest.approx(saved.share * per_day)
    (each,) = report.classes
    assert each.prefill_rate == pytest.approx(RATE, rel=0.01)
    hours = saved.tokens_per_day / RATE * 2 / 3600
    assert saved.gpu_hours_per_day == pytest.approx(hours, rel=0.01)
    assert float(saved.cost_per_day or 0) == pytest.approx(hours * 3.60, rel=0.01)
    assert report.currency == "EUR"
    assert sentences(report)[0].startswith("Prefix routing saved ")
    assert "EUR a day, compared with the least loaded replica." in sentences(report)[0]


def test_an_amount_a_day_from_elsewhere_counts() -> None:
    found = advise(conversations(), PRICED, prompt_tokens_per_day=1e9)
    assert isinstance(found, AdviceReport)
    assert found.saved is not None
    assert found.saved.tokens_per_day == pytest.approx(found.saved.share * 1e9)


def test_routing_that_loses_reuse_costs() -> None:
    worse = conversations(lambda conversation, turn: (conversation + turn // 2) % 2)
    at_random = conversations(lambda conversation, turn: (7 * conversation + 5 * turn * turn) % 3)
    for window in (worse, at_random):
        report = report_of(window)
        assert report.better_routing is not None
        assert report.better_routing.share > 0.05


def documents(kinds: int, size: int, replicas: int = 1) -> TrafficWindow:
    """Questions on documents, one after the other around: a cache by least recent use that is too small for all of them
    finds none."""
    requests = tuple(
        RequestFact(
            float(number),
            float(number),
            number + (size + 10) / RATE,
            number + 0.9,
            size + 10,
            0,
            1,
            number % replicas,
            "h100",
            marks=(PromptMark(number % kinds + 1, size), PromptMark(10_000 + number, size + 10)),
        )
        for number in range(600)
    )
    return TrafficWindow(0.0, 600.0, requests)


def test_a_larger_cache_gains_what_does_not_fit_now() -> None:
    # 20 documents of 1,000 tokens, and a cache for 15 of them.
    report = report_of(documents(20, 1000), {"h100": replace(H100, kv_tokens=15_000)})
    assert report.shares.replayed == report.shares.delivered == 0.0
    assert report.shares.larger_kv == pytest.approx(1000 / 1010)
    assert report.shares.unlimited == pytest.approx(1000 / 1010)
    assert report.larger_kv is not None
    assert report.larger_kv.share == pytest.approx(1000 / 1010)
    assert any("2 times the KV cache would save 99 % of the prompt tokens" in text for text in sentences(report))
    assert "one replica served all requests, so routing made no difference" in report.notes


def test_a_cache_of_the_fleets_size_is_what_routing_could_use() -> None:
    report = report_of(documents(20, 1000, replicas=3), {"h100": replace(H100, kv_tokens=9_000)})
    assert report.shares.replayed == 0.0
    assert report.shares.fleet_sized == pytest.approx(1000 / 1010)
    assert report.better_routing is not None
    assert report.better_routing.share == pytest.approx(1000 / 1010)


def test_what_runs_takes_of_the_cache() -> None:
    window = documents(4, 1000)
    # The same documents fit beside short answers, and do not fit beside one that is 5,000 tokens long all the time.
    busy = RequestFact(-1.0, -1.0, -0.5, 700.0, 10, None, 5_000, 0, "h100")
    fleet = {"h100": replace(H100, kv_tokens=6_500)}
    assert report_of(window, fleet).shares.replayed == pytest.approx(1000 / 1010)
    crowded = replace(window, requests=(busy, *window.requests))
    assert report_of(crowded, fleet).shares.replayed == 0.0


def test_equal_prompts_at_one_time_do_not_find_each_other() -> None:
    window = documents(1, 1000)
    pairs = [one.at // 2 * 2 for one in window.requests]
    together = [replace(one, at=at, sent=at, first=at + 0.2) for at, one in zip(pairs, window.requests, strict=True)]
    first = tuple(replace(one, marks=(PromptMark(n // 2 + 1, 1000),), prompt=1000) for n, one in enumerate(together))
    report = report_of(replace(window, requests=first))
    assert report.shares.unlimited == 0.0


def test_unknown_is_not_zero() -> None:
    report = report_of(conversations(), {})
    shares = report.shares
    assert shares.unlimited > 0
    assert shares.delivered > 0
    assert shares.fleet_sized is shares.replayed is shares.least_in_flight is shares.larger_kv is None
    assert report.saved is report.larger_kv is None
    assert "the KV cache of a replica on h100 is unknown, so nothing is replayed" in report.notes
    assert sentences(report)[0] == "What routing saved is unknown."
    priceless = report_of(conversations(), {"h100": replace(H100, hourly_cost=None)})
    assert priceless.saved is not None
    assert priceless.saved.gpu_hours_per_day is not None
    assert priceless.saved.cost_per_day is None
    assert "the cost of h100 is unknown" in priceless.notes


def test_without_streams_gpu_time_is_unknown() -> None:
    window = conversations()
    quiet = tuple(replace(one, stream=False, first=one.ended) for one in window.requests)
    report = report_of(replace(window, requests=quiet))
    assert report.saved is not None
    assert report.saved.gpu_hours_per_day is None
    assert report.pools.most_gain is None
    assert any(note.startswith("GPU time on h100 is unknown: fewer than 20 streams") for note in report.notes)


def test_too_few_requests_say_what_is_missing() -> None:
    window = conversations()
    few = replace(window, requests=window.requests[:150])
    found = advise(few, PRICED)
    assert found == NotEnoughTraffic(
        "advice needs at least 200 requests after the first tenth, which fills the caches; the gateways know 150"
    )
    blind = replace(window, requests=tuple(replace(one, cached=None) for one in window.requests))
    found = advise(blind, PRICED)
    assert isinstance(found, NotEnoughTraffic)
    assert "among them 606 without `cached_tokens` from the engine" in found.message
    assert isinstance(advise(replace(window, requests=()), PRICED), NotEnoughTraffic)


def test_a_replay_that_is_far_off_says_so() -> None:
    window = conversations()
    forgetful = tuple(replace(one, cached=(one.cached or 0) // 2) for one in window.requests)
    report = report_of(replace(window, requests=forgetful))
    assert any("read what other routing would get as a rough estimate" in note for note in report.notes)
    # What a rule would get is scaled by what the engines really delivered.
    assert report.shares.round_robin == pytest.approx((report_of(window).shares.round_robin or 0) / 2, rel=0.01)


def test_engines_that_keep_less_than_their_cache_are_replayed_with_less() -> None:
    # Ten documents are used in turn. The KV caches would hold all of them, and the engines find none from the start.
    window = documents(10, 1000)
    fleet = {"h100": replace(H100, kv_tokens=14_000)}
    shares = report_of(window, fleet).shares
    assert shares.replayed == pytest.approx(1000 / 1010)
    assert shares.usable_kv is not None
    assert shares.usable_kv < 0.85
    # With twice of what they use they would find all.
    assert shares.larger_kv == pytest.approx(1000 / 1010)


def test_prompts_delay_the_answers_beside_them() -> None:
    # Each answer takes 10 s, and one prompt of 1 s comes to its replica in each second third.
    requests: list[RequestFact] = []
    for number in range(300):
        at = 10.0 * number
        requests.append(
            RequestFact(at, at, at + 1.0, at + 11.0, 5_000, 0, 100, 0, "h100", marks=(PromptMark(2 * number, 5_000),))
        )
    report = report_of(TrafficWindow(0.0, 3_000.0, tuple(requests)))
    # While one is generated for 10 s, the next is prefilled for 1 s.
    assert report.pools.most_gain == pytest.approx(0.1, abs=0.005)
    assert any(
        "Estimate: prefill/decode pools would shorten generation by at most 10 %" in s for s in sentences(report)
    )
    assert report.long.requests == 0.0


def test_adapters_that_stay_at_home_need_fewer_loads() -> None:
    window = conversations()
    requests = tuple(
        replace(one, adapter=1 + number % CONVERSATIONS % 10, adapter_resident=number > 100, replica=number % 10 % 2)
        for number, one in enumerate(window.requests)
    )
    adapters = report_of(replace(window, requests=requests)).adapters
    assert adapters is not None
    assert (adapters.requests, adapters.adapters) == (606, 10)
    assert adapters.resident == pytest.approx(505 / 606)
    assert adapters.pairs <= adapters.pairs_least_in_flight <= 20
    assert report_of(window).adapters is None


def test_replicas_that_come_and_go_get_requests_only_while_they_are_there() -> None:
    window = conversations(lambda conversation, turn: 10 + turn if turn < 3 else 20 + conversation % 2)
    report = report_of(window)
    assert report.replicas == 5
    # One replica at a time for three turns: no rule could choose another.
    shares = report.shares
    assert shares.least_in_flight is not None
    assert shares.least_in_flight <= shares.unlimited
