"""What a request costs at each replica: the choice, what is learned for it, and that nothing unknown counts as zero."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.replica import ReplicaKeys
from shoal.core.hold.capacity import BYTES_PER_TOKEN
from shoal.core.routing.replica import Replica
from shoal.core.routing.reuse import MOST_HEADS, MOST_PLACES, Prompt, ReuseMemory, Trust
from shoal.core.routing.score import MOST_CANDIDATES, Pick, ReplicaLoad, ReplicaScores, work
from shoal.core.routing.speeds import FASTEST, PRIOR_RATE, PRIOR_STAY, SLOWEST, Pace, Speeds
from tests.support.gateway import replica

NOW = 1000.0
IDLE = ReplicaKeys(
    running=0, waiting=0, waiting_tokens=0, kv_tokens_used=0, kv_tokens_total=200_000, max_running=64, engine_boot="a"
)
PODS = [replica(n) for n in (1, 2, 3)]


def busy(**keys: int) -> ReplicaKeys:
    return IDLE.model_copy(update=keys)


def known(*rates: float, pods: list[Replica] = PODS, reports: dict[int, ReplicaKeys] | None = None) -> ReplicaScores:
    """Scores of replicas whose rates are learned, and which are idle but for `reports` (by index)."""
    scores = ReplicaScores()
    for at, pod in enumerate(pods):
        for _ in range(40):
            rate = rates[at % len(rates)]
            scores.observe(pod, prompt=4096, cached=0, seconds=work(4096, 0) / rate, now=NOW)
        scores.reported(pod.uid, (reports or {}).get(at, IDLE), 0, NOW)
    return scores


def picked(scores: ReplicaScores, prompt: Prompt, now: float = NOW, **options: object) -> Pick:
    found = scores.pick(PODS, {}, prompt, now, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def names(scores: ReplicaScores, prompt: Prompt) -> set[str]:
    return {picked(scores, prompt, rotation=turn).replica.uid for turn in range(6)}


def test_nothing_is_chosen_while_no_load_is_known() -> None:
    assert ReplicaScores().pick(PODS, {}, Prompt(1000), NOW) is None
    assert known(10_000.0).pick(PODS[:1], {}, Prompt(1000), NOW) is None


def test_a_gateway_that_has_just_started_sends_where_least_is_ahead() -> None:
    scores = ReplicaScores()
    for pod, waiting in zip(PODS, (20_000, 0, 3_000), strict=True):
        scores.reported(pod.uid, busy(waiting=1, waiting_tokens=waiting), 0, NOW)
    assert names(scores, Prompt(1000)) == {"pod-2"}
    scores.sent(picked(scores, Prompt(8000)))
    assert picked(scores, Prompt(1000)).replica.uid == "pod-3"


@pytest.mark.parametrize("rate", [500.0, 5_000.0, 300_000.0])
def test_a_wrong_prior_is_corrected_by_the_first_samples(rate: float) -> None:
    speeds = Speeds()
    assert speeds.pace("a", "m", "l40s").rate == PRIOR_RATE
    for _ in range(4):
        speeds.observe("a", "m", "l40s", 4000, 4000 / rate)
    assert speeds.pace("a", "m", "l40s").rate == pytest.approx(rate, rel=0.05)
    # A replica that has just joined has what its class has.
    assert speeds.pace("b", "m", "l40s").rate == pytest.approx(rate, rel=0.05)


def test_a_replica_that_was_slow_for_a_while_is_tried_again() -> None:
    scores = known(10_000.0, 10_000.0, 20.0)
    for second in range(300):
        scores.reported(PODS[2].uid, IDLE, 0, NOW + second)
        for pod in PODS[:2]:
            scores.reported(pod.uid, busy(running=9, waiting=2, waiting_tokens=4_000), 0, NOW + second)
            scores.observe(pod, prompt=4096, cached=0, seconds=0.45, now=NOW + second)
        pick = picked(scores, Prompt(2000), NOW + second, rotation=second)
        if pick.replica is PODS[2]:
            assert second > 20  # at first it is not worth it
            return
    raise AssertionError("the replica was never tried again")


def test_a_full_batch_costs_what_requests_stay() -> None:
    load = ReplicaLoad()
    load.paced(Pace(10_000.0, stay=64.0))
    load.reported(busy(running=64), 0, NOW)
    assert load.slots(63) == 0.0
    assert load.slots(64) == pytest.approx(1.0)
    assert load.slots(73) == pytest.approx(10.0)


def test_where_prompts_wait_for_space_in_the_cache_the_wait_counts() -> None:
    scores = known(10_000.0, 40_000.0)
    for other in PODS[1:]:
        scores.reported(other.uid, busy(running=40, waiting=4, waiting_tokens=20_000, kv_tokens_used=198_000), 0, NOW)
    slow, fast = busy(waiting=4, waiting_tokens=20_000, running=40), PODS[1]
    scores.reported(PODS[0].uid, slow, 0, NOW)
    # Four times as fast and as much in the queue, but its queue waits for space and not for computation.
    pick = picked(scores, Prompt(8000))
    assert pick.replica is PODS[0]
    assert fast.uid != pick.replica.uid


def test_answers_tell_how_long_requests_stay() -> None:
    speeds = Speeds()
    for _ in range(50):
        speeds.ran("a", "m", "l4", 101, 20.0)
    pace = speeds.pace("a", "m", "l4")
    assert (pace.stay, pace.step) == (pytest.approx(20.0), pytest.approx(0.2))
    assert speeds.pace("b", "m", "l4").stay == PRIOR_STAY  # no rate of the class is known yet
    for absurd in (-5.0, 0.0, math.nan, math.inf, 1e18):
        speeds.ran("a", "m", "l4", 101, absurd)
    assert speeds.pace("a", "m", "l4").stay < 25.0


def test_equals_take_turns() -> None:
    assert len(names(known(10_000.0), Prompt(1000))) == 3


@pytest.mark.parametrize(
    "worse",
    [
        {"waiting": 4, "waiting_tokens": 20_000},
        {"running": 60},
        {"running": 64},
        {"kv_tokens_used": 190_000},
    ],
)
def test_what_all_gateways_have_there_counts(worse: dict[str, int]) -> None:
    assert names(known(10_000.0, reports={0: busy(**worse)}), Prompt(1000)) == {"pod-2", "pod-3"}


def test_a_replica_of_half_the_speed_gets_a_prompt_only_while_the_others_are_twice_as_loaded() -> None:
    assert names(known(5_000.0, 10_000.0, 10_000.0), Prompt(2000)) == {"pod-2", "pod-3"}
    loaded = busy(waiting=8, waiting_tokens=16_000, running=20)
    assert names(known(5_000.0, 10_000.0, 10_000.0, reports={1: loaded, 2: loaded}), Prompt(2000)) == {"pod-1"}


def test_what_this_gateway_sent_counts_at_once_and_until_the_answer_begins() -> None:
    scores = known(10_000.0)
    first = picked(scores, Prompt(8000))
    scores.sent(first)
    assert picked(scores, Prompt(8000)).replica.uid != first.replica.uid
    scores.sent(picked(scores, Prompt(8000)))
    third = picked(scores, Prompt(8000))
    scores.sent(third)
    scores.began(first, NOW + 0.1)
    for other in PODS:
        scores.reported(other.uid, IDLE, 0, NOW + 0.4)
    # The reports say that nothing waits; the prompts of the two others are being read.
    again = picked(scores, Prompt(8000), NOW + 0.4)
    assert again.replica.uid == first.replica.uid


def test_a_queue_gets_shorter_between_two_reports() -> None:
    load = ReplicaLoad(per_token=1e-4, as_of=NOW)
    load.reported(busy(waiting=1, waiting_tokens=10_000), 0, NOW)
    assert load.ahead(NOW + 0.5) == pytest.approx(5_000)
    assert load.ahead(NOW + 5.0) == 0.0


def test_a_conversation_stays_where_its_prompts_are_cached_until_waiting_costs_more() -> None:
    scores = known(10_000.0)
    turn = Prompt(4000, head=7, repeated=0)
    first = picked(scores, turn)
    scores.sent(first)
    scores.answered(first, first=NOW + 0.4, prompt=4000, cached=0, answer=200)
    later = Prompt(4300, head=7, repeated=4200)
    again = picked(scores, later, NOW + 30)
    assert again.replica.uid == first.replica.uid
    assert again.expected.kind == "remembered"
    assert again.expected.promised == 4200
    scores.reported(first.replica.uid, busy(waiting=10, waiting_tokens=40_000), 0, NOW + 30)
    assert picked(scores, later, NOW + 30).replica.uid != first.replica.uid


def test_all_gateways_expect_a_later_turn_at_the_same_replica() -> None:
    homes = {picked(known(10_000.0), Prompt(4300, head=head, repeated=4200)).replica.uid for head in [99] * 4}
    assert len(homes) == 1
    assert len({picked(known(10_000.0), Prompt(4300, head=h, repeated=4200)).replica.uid for h in range(40)}) == 3


def test_requests_with_the_same_long_system_prompt_go_where_it_is() -> None:
    scores = known(10_000.0)
    first = picked(scores, Prompt(3200, head=1, system=5, system_tokens=3000))
    scores.sent(first)
    asked = [Prompt(3200, head=n, system=5, system_tokens=3000) for n in range(2, 9)]
    assert {picked(scores, one, NOW + 10).replica.uid for one in asked} == {first.replica.uid}
    scores.reported(first.replica.uid, busy(waiting=5, waiting_tokens=15_000), 0, NOW + 10)
    assert first.replica.uid not in {picked(scores, one, NOW + 10).replica.uid for one in asked}


def test_an_engine_that_starts_again_has_an_empty_cache() -> None:
    scores = known(10_000.0)
    first = picked(scores, Prompt(4000, head=7))
    scores.sent(first)
    scores.reported(first.replica.uid, IDLE.model_copy(update={"engine_boot": "b"}), 0, NOW + 9)
    assert scores.reuse.places(7) is None


def test_what_promises_too_much_is_trusted_less() -> None:
    scores = known(10_000.0)
    trust = scores.reuse.trust(PODS[0].model_uid).of
    before = trust["home"]
    for head in range(200):
        pick = picked(scores, Prompt(4000, head=head, repeated=3900))
        scores.answered(pick, first=None, prompt=4000, cached=0, answer=10)
    assert trust["home"] < 0.1 < before
    assert scores.reuse.trust("another model").of["home"] == before


def test_an_adapter_is_loaded_elsewhere_only_if_that_is_sooner() -> None:
    scores = known(10_000.0, reports={0: busy(waiting=2, waiting_tokens=3_000)})
    waits = {"pod-2": 1.0, "pod-3": 1.0}
    assert picked(scores, Prompt(500), waits=waits).replica.uid == "pod-1"
    scores.reported("pod-1", busy(waiting=9, waiting_tokens=30_000), 0, NOW)
    pick = picked(scores, Prompt(500), waits=waits)
    assert pick.replica.uid != "pod-1"
    assert pick.terms.adapter == 1.0


def test_the_message_names_terms_and_the_runner_up() -> None:
    pick = picked(known(10_000.0, 20_000.0, 10_000.0), Prompt(4000))
    assert pick.replica.uid == "pod-2"
    assert "prefill 0.2" in pick.message
    assert pick.runner_up is not None
    assert f"next {pick.runner_up}: 0.4" in pick.message


def test_the_message_is_of_the_time_of_the_choice_whenever_it_is_read() -> None:
    scores = known(10_000.0, 20_000.0, 10_000.0, reports={1: busy(running=3, waiting=1, waiting_tokens=900)})
    early, late = (picked(scores, Prompt(4000, head=3, repeated=3000)) for _ in range(2))
    before = early.message
    assert "queue" in before
    scores.sent(late)
    scores.answered(late, first=NOW + 9, prompt=4000, cached=0, answer=200, ended=NOW + 99)
    for pod in PODS:
        scores.reported(pod.uid, busy(running=60, waiting=9, waiting_tokens=90_000, kv_tokens_used=199_000), 0, NOW + 1)
    scores.keep([])
    assert late.message == before


def test_of_many_replicas_a_sample_and_those_with_knowledge_are_scored() -> None:
    pods = [replica(n) for n in range(200)]
    scores = known(10_000.0, pods=pods)
    turn = Prompt(4000, head=7)
    first = scores.pick(pods, {}, turn, NOW)
    assert first is not None
    scores.sent(first)
    scores.began(first, NOW)
    for rotation in range(20):
        again = scores.pick(pods, {}, Prompt(4300, 7, 4200), NOW + 60, rotation=rotation)
        assert again is not None
        assert again.replica.uid == first.replica.uid
    spread: set[str] = set()
    for rotation in range(400):
        one = scores.pick(pods, {}, Prompt(1000), NOW, rotation=rotation)
        assert one is not None
        spread.add(one.replica.uid)
    assert len(spread) > 4 * MOST_CANDIDATES


@pytest.mark.parametrize("count", [9, 10, 12, 15])
def test_a_sample_has_as_many_replicas_as_it_should(count: int) -> None:
    """So the busy ones alone can never be one."""
    pods = [replica(n) for n in range(count)]
    waiting = busy(waiting=9, waiting_tokens=90_000)
    scores = known(10_000.0, pods=pods, reports=dict.fromkeys(range(MOST_CANDIDATES - 1), waiting))
    idle = {pod.uid for pod in pods[MOST_CANDIDATES - 1 :]}
    for rotation in range(300):
        one = scores.pick(pods, {}, Prompt(1000), NOW, rotation=rotation)
        assert one is not None
        assert one.replica.uid in idle


def test_pods_that_are_gone_are_forgotten() -> None:
    scores = known(10_000.0)
    pick = picked(scores, Prompt(4000, head=7))
    scores.sent(pick)
    scores.keep([])
    assert len(scores.speeds) == 0
    assert scores.reuse.places(7) is None


# --- learning


def test_a_rate_is_found_although_most_samples_had_other_work_ahead() -> None:
    speeds = Speeds()
    for n in range(200):
        speeds.observe("a", "m", "l40s", 2000, 2000 / (10_000 if n % 2 else 4_000))
    assert 6_000 < (speeds.own("a") or 0) < 11_000


def test_a_replica_without_samples_has_the_mean_of_its_class_and_then_its_own() -> None:
    speeds = Speeds()
    for uid, gpu, rate in (("a", "l40s", 8_000), ("b", "h100", 40_000)):
        for _ in range(20):
            speeds.observe(uid, "m", gpu, 4000, 4000 / rate)
    assert speeds.pace("new", "m", "h100").rate == pytest.approx(40_000, rel=0.01)
    assert 8_000 < speeds.pace("new", "m", "other").rate < 40_000
    assert speeds.pace("new", "another model", "h100").rate == PRIOR_RATE
    for _ in range(40):
        speeds.observe("new", "m", "h100", 4000, 4000 / 20_000)
    assert speeds.pace("new", "m", "h100").rate == pytest.approx(20_000, rel=0.01)


def test_one_absurd_sample_changes_little() -> None:
    speeds = Speeds()
    for _ in range(50):
        speeds.observe("a", "m", None, 4000, 0.4)
    for seconds in (1e-9, 1e9):
        before = speeds.own("a") or 0.0
        speeds.observe("a", "m", None, 4000, seconds)
        assert 0.8 < (speeds.own("a") or 0.0) / before < 1.25


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_a_rate_is_always_within_bounds(samples: list[tuple[float, float]]) -> None:
    speeds = Speeds()
    for tokens, seconds in samples:
        speeds.observe("a", "m", None, tokens, seconds)
    rate = speeds.own("a")
    assert rate is None or SLOWEST * 0.999 <= rate <= FASTEST * 1.001


def test_the_memory_of_heads_is_bounded() -> None:
    memory, trust = ReuseMemory(), Trust()
    for head in range(MOST_HEADS + 500):
        memory.sent(Prompt(1000, head=head, system=head, system_tokens=500), f"pod-{head % 9}", trust)
    assert len(memory) <= MOST_HEADS + MOST_HEADS // 4
    for pod in range(50):
        memory.sent(Prompt(1000, head=3), f"pod-{pod}", trust)
    assert list(memory.places(3) or {}) == [f"pod-{n}" for n in range(50 - MOST_PLACES, 50)]


# --- laws of the choice

counts = st.none() | st.integers(0, 2**53 - 1)
reports = st.builds(
    ReplicaKeys,
    running=counts,
    waiting=counts,
    waiting_tokens=counts,
    kv_tokens_used=counts,
    kv_tokens_total=counts,
    max_running=counts,
)
prompts = st.builds(
    Prompt,
    tokens=st.integers(1, 10**8),
    head=st.none() | st.integers(0, 5),
    repeated=st.integers(0, 10**8),
    system=st.none() | st.integers(0, 5),
    system_tokens=st.integers(0, 10**8),
)


@given(st.lists(reports, min_size=3, max_size=3), st.lists(prompts, max_size=8), prompts)
def test_the_choice_is_the_least_sum_of_its_terms_whatever_was_reported(
    reported: list[ReplicaKeys], sent: list[Prompt], prompt: Prompt
) -> None:
    scores = known(10_000.0, 20_000.0, 10_000.0, reports=dict(enumerate(reported)))
    for one in sent:
        scores.sent(picked(scores, one))
    pick = picked(scores, prompt)
    assert all(math.isfinite(term) for term in pick.terms)
    assert all(term >= 0 for term in pick.terms[:-1])
    assert pick.terms.home <= 0
    assert pick.runner_up_terms is not None
    assert pick.terms.total <= pick.runner_up_terms.total * (1 + 1e-9) + 1e-6


events = st.lists(
    st.tuples(st.sampled_from(["report", "down", "gone", "ask", "answer"]), st.integers(0, 2), st.floats(-1e6, 1e6)),
    max_size=40,
)


@given(events, reports, prompts)
def test_the_choice_is_of_those_that_are_there_whatever_the_clock_and_the_replicas_do(
    events: list[tuple[str, int, float]], report: ReplicaKeys, prompt: Prompt
) -> None:
    scores, under_way = ReplicaScores(), list[Pick]()
    there: set[str] = set()
    for what, which, now in events:
        uid = PODS[which].uid
        if what == "report":
            scores.reported(uid, report, 1, now)
            there.add(uid)
        elif what in ("down", "gone"):
            scores.down(uid)
            there.discard(uid)
            if what == "gone":
                scores.keep(there)
        elif what == "ask" and (pick := scores.pick(PODS, {}, prompt, now)) is not None:
            assert pick.replica.uid in there
            assert all(math.isfinite(term) for term in pick.terms)
            scores.sent(pick)
            under_way.append(pick)
        elif what == "answer" and under_way:
            pick = under_way.pop()
            scores.began(pick, now)
            scores.answered(pick, first=now, prompt=prompt.tokens, cached=0, answer=9, ended=now + 1.0)
        pace = scores.speeds.pace(uid, PODS[which].model_uid, None)
        assert SLOWEST * 0.999 <= pace.rate <= FASTEST * 1.001
        assert 0.0 < pace.step <= 0.5
        assert 0.0 < pace.stay <= 900.0
    assert len(scores.speeds) <= len(PODS)


@given(prompts, st.integers(0, 60))
def test_more_load_never_attracts(prompt: Prompt, more: int) -> None:
    """A replica that is not chosen is not chosen with more to do either."""
    before = picked(known(10_000.0), prompt)
    other = next(at for at, pod in enumerate(PODS) if pod.uid != before.replica.uid)
    loaded = busy(running=more, waiting=more, waiting_tokens=1000 * more)
    assert picked(known(10_000.0, reports={other: loaded}), prompt).replica.uid != PODS[other].uid


def test_another_gpu_class_differs_only_by_its_rate() -> None:
    pods = [dataclasses.replace(PODS[0], gpu_class="l40s"), dataclasses.replace(PODS[1], gpu_class="h100")]
    scores = known(8_000.0, 40_000.0, pods=pods)
    pick = scores.pick(pods, {}, Prompt(8000), NOW)
    assert pick is not None
    assert pick.replica.gpu_class == "h100"
    assert pick.runner_up_terms is not None
    assert pick.runner_up_terms.prefill == pytest.approx(5 * pick.terms.prefill, rel=0.05)


def test_a_beginning_that_all_have_is_no_reason_to_score_all_of_many() -> None:
    pods = [replica(n) for n in range(200)]
    scores = known(10_000.0, pods=pods)
    common, own = 2000 * 4 << 32 | 1, 3000 * 4 << 32 | 2
    for pod in pods:
        scores.told(pod.uid, [common])
    prompt = Prompt(4000, points=[common, own])
    chosen: set[str] = set()
    for rotation in range(60):
        pick = scores.pick(pods, {}, prompt, NOW, rotation=rotation)
        assert pick is not None
        # What all have is expected of each of the sample.
        assert (pick.expected.kind, pick.expected.promised) == ("held", 2000)
        chosen.add(pick.replica.uid)
    assert len(chosen) > 40
    # The few with more of it are always looked at.
    scores.told("pod-77", [common, own])
    for rotation in range(60):
        pick = scores.pick(pods, {}, prompt, NOW, rotation=rotation)
        assert pick is not None
        assert (pick.replica.uid, pick.expected.promised) == ("pod-77", 3000)


def test_a_replica_of_which_nothing_was_reported_keeps_nothing() -> None:
    scores = known(10_000.0)
    scores.told("pod-of-nobody", [4000 << 32 | 1])
    assert not len(scores.prefixes)


def sent_elsewhere(tokens: int, mark: int = 1) -> list[int]:
    """Points of a prompt of so many tokens that another gateway sent."""
    return [tokens * BYTES_PER_TOKEN << 32 | mark]


def test_what_another_gateway_says_that_it_sent_is_ahead_until_the_next_report() -> None:
    scores = known(10_000.0)
    scores.told("pod-1", sent_elsewhere(8000), NOW + 0.1)
    scores.told("pod-2", sent_elsewhere(8000, 2), NOW + 0.2)
    assert {picked(scores, Prompt(1000), NOW + 0.2, rotation=turn).replica.uid for turn in range(6)} == {"pod-3"}
    for pod in PODS:
        scores.reported(pod.uid, IDLE, 0, NOW + 0.5)
    assert {picked(scores, Prompt(1000), NOW + 0.5, rotation=turn).replica.uid for turn in range(6)} == {
        "pod-1",
        "pod-2",
        "pod-3",
    }
    # It was said before the report, or may have been long ago: the report contains it, or it is over.
    scores.told("pod-1", sent_elsewhere(8000, 3), NOW + 0.4)
    scores.told("pod-2", sent_elsewhere(8000, 4))
    assert len({picked(scores, Prompt(1000), NOW + 0.5, rotation=turn).replica.uid for turn in range(6)}) == 3
    assert scores.prefixes.tokens("pod-1") == 16_000


def test_what_no_report_confirms_is_no_load_for_long() -> None:
    """The answer may have been complete before its gateway spoke of it, and an idle agent reports nothing."""
    scores = known(10_000.0)
    for number in range(80):
        scores.told("pod-1", sent_elsewhere(2000, number), NOW + 0.1 + number / 1000)
    assert "pod-1" not in {picked(scores, Prompt(1000), NOW + 0.2, rotation=turn).replica.uid for turn in range(6)}
    later = NOW + 60
    assert {picked(scores, Prompt(1000), later, rotation=turn).replica.uid for turn in range(6)} == {
        "pod-1",
        "pod-2",
        "pod-3",
    }
    pick = scores.pick(PODS[:1], {}, Prompt(1000), later, alone=True)
    assert pick is not None
    assert (pick.terms.batch, pick.terms.slots, pick.terms.queue) == (0, 0, 0)


def test_of_a_prompt_that_the_replica_has_only_the_rest_is_ahead() -> None:
    scores = known(10_000.0)
    for pod in PODS[:2]:
        scores.told(pod.uid, sent_elsewhere(8000))
    long = [*sent_elsewhere(8000), *sent_elsewhere(8200, 2)]
    scores.told("pod-1", long, NOW + 0.1)  # 200 tokens to read
    scores.told("pod-2", sent_elsewhere(4000, 3), NOW + 0.1)
    scores.told("pod-3", sent_elsewhere(2000, 4), NOW + 0.1)
    assert picked(scores, Prompt(1000), NOW + 0.1).replica.uid == "pod-1"


def test_what_is_cached_takes_no_further_space_in_the_kv_cache() -> None:
    """Requests with one beginning share its space, so a holder of it is not full although it runs many of them."""
    half = busy(kv_tokens_used=100_000)
    scores = known(10_000.0, reports={0: half, 1: half, 2: half})
    shared = sent_elsewhere(60_000)
    scores.told("pod-1", shared)
    prompt = Prompt(60_400, points=[*shared, *sent_elsewhere(60_400, 2)])
    for number in range(4):
        pick = picked(scores, prompt._replace(points=[*shared, *sent_elsewhere(60_400, number + 2)]))
        assert pick.replica.uid == "pod-1"
        assert pick.terms.kv < 0.45
        scores.sent(pick)
    scores.told("pod-1", [*shared, *sent_elsewhere(60_400, 9)], NOW + 0.1)
    assert picked(scores, prompt, NOW + 0.1).terms.kv < 0.45


def putting_out(scores: ReplicaScores, pod: Replica) -> None:
    """Prompts of which the replica's cache holds half are sent to it in turn."""
    for _ in range(4):
        for name in range(8):
            scores.told(pod.uid, sent_elsewhere(40_000, 100 + name))
            scores.told(pod.uid, sent_elsewhere(40_000, 100 + name))


def test_a_prompt_stays_where_it_is_while_a_copy_would_put_out_what_comes_again() -> None:
    scores = known(10_000.0)
    shared = sent_elsewhere(8000)
    scores.told("pod-1", shared)
    prompt = Prompt(8200, points=[*shared, *sent_elsewhere(8200, 2)])
    scores.reported("pod-1", busy(running=1, waiting=2, waiting_tokens=12_000), 0, NOW)
    assert picked(scores, prompt).replica.uid in ("pod-2", "pod-3")  # its queue takes longer than the prompt
    for pod in PODS[1:]:
        putting_out(scores, pod)
    pick = picked(scores, prompt)
    assert pick.replica.uid == "pod-1"
    assert pick.runner_up_terms is not None
    assert pick.runner_up_terms.evict > pick.runner_up_terms.prefill
    assert "evict" in pick.message
    # A longer queue is worth a copy.
    scores.reported("pod-1", busy(running=1, waiting=9, waiting_tokens=60_000), 0, NOW)
    assert picked(scores, prompt).replica.uid in ("pod-2", "pod-3")
    # Between replicas that do not have a prompt it decides nothing.
    putting_out(scores, PODS[0])
    pick = picked(scores, Prompt(1000))
    assert pick.replica.uid in ("pod-2", "pod-3")
    assert pick.runner_up_terms is not None
    assert pick.terms.evict / pick.terms.prefill == pytest.approx(
        pick.runner_up_terms.evict / pick.runner_up_terms.prefill
    )
    # Another engine has nothing to put out.
    scores.reported("pod-2", IDLE.model_copy(update={"engine_boot": "b"}), 0, NOW)
    assert picked(scores, prompt).terms.evict == 0.0


def test_space_in_the_kv_cache_is_free_again_as_requests_end() -> None:
    """Between two reports a gateway only saw what came."""
    scores = known(10_000.0, reports={n: busy(running=20, kv_tokens_used=190_000) for n in range(3)})
    at_first = picked(scores, Prompt(2000)).terms.kv
    assert picked(scores, Prompt(2000), NOW + PRIOR_STAY / 2).terms.kv < at_first / 2
    assert picked(scores, Prompt(2000), NOW + 2 * PRIOR_STAY).terms.kv < 0.01
    pick = picked(scores, Prompt(150_000))
    scores.sent(pick)  # is in no report yet
    there = scores.pick([pick.replica], {}, Prompt(2000), NOW + 2 * PRIOR_STAY, alone=True)
    assert there is not None
    assert there.terms.kv > 0.4


def test_prompts_that_run_are_known_to_be_in_the_cache() -> None:
    scores = known(10_000.0)
    scores.told("pod-1", sent_elsewhere(60_000))
    scores.reported("pod-1", busy(running=30, kv_tokens_used=190_000), 0, NOW)
    assert scores.prefixes.held(sent_elsewhere(60_000)) == {"pod-1": 60_000}


def test_how_many_tokens_a_text_has_is_learned() -> None:
    """Another language than English, or another tokenizer, has more or fewer of them than four characters each."""
    scores = known(10_000.0)
    shared = sent_elsewhere(8000)
    prompt = Prompt(8200, repeated=4100, system_tokens=800, points=[*shared, *sent_elsewhere(8200, 2)])
    for _ in range(30):
        pick = picked(scores, prompt)
        scores.sent(pick)
        scores.answered(pick, first=None, prompt=24_600, cached=24_000, answer=10)
    pick = picked(scores, prompt)
    length = scores.reuse.trust(PODS[0].model_uid).length
    assert length == pytest.approx(3.0, rel=0.1)
    assert pick.prompt == prompt._replace(
        tokens=int(8200 * length), repeated=int(8200 * length) // 2, system_tokens=int(800 * length)
    )
    assert pick.expected.promised == pytest.approx(24_000, rel=0.1)
    # The replica's 200,000 tokens hold a third as many as estimated.
    for number in range(40):
        scores.told("pod-2", sent_elsewhere(2000, 100 + number))
    scores.reported("pod-2", IDLE, 0, NOW)
    assert scores.prefixes.tokens("pod-2") == pytest.approx(0.8 * 200_000 / 3, rel=0.1)
    # What another gateway sent is as long there.
    before = scores.pick(PODS[1:2], {}, Prompt(100), NOW + 0.1, alone=True)
    scores.told("pod-2", sent_elsewhere(2000, 1), NOW + 0.1)
    after = scores.pick(PODS[1:2], {}, Prompt(100), NOW + 0.1, alone=True)
    assert before is not None
    assert after is not None
    assert after.ahead - before.ahead == pytest.approx(work(6000, 0), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=50))
def test_the_length_of_tokens_is_always_within_bounds(counted: list[tuple[int, int]]) -> None:
    trust = Trust()
    for estimated, tokens in counted:
        trust.counted(estimated, tokens)
        assert 1 / 8 <= trust.length <= 8
    trust = Trust()
    trust.counted(100, 1000)
    assert trust.length == 1.0


def test_an_absurd_length_from_another_gateway_counts_as_a_full_cache_at_most() -> None:
    scores = known(10_000.0)
    scores.told("pod-1", [(1 << 30) << 32 | 1], NOW + 0.1)
    pick = scores.pick(PODS[:1], {}, Prompt(1000), NOW + 0.1, alone=True)
    assert pick is not None
    assert pick.terms.queue <= work(200_000, 0) / 9_000.0
    scores.reported("pod-1", IDLE, 0, NOW + 0.2)
    assert names(scores, Prompt(1000)) == {"pod-1", "pod-2", "pod-3"}
