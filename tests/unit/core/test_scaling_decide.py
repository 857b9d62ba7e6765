"""What a user sees of scaling: how many replicas, and the sentence that says why."""

from dataclasses import replace

import pytest

from shoal.api import reasons
from shoal.core.scaling import Policy, decide
from tests.support.scaling import CLASS, Term, load, pending, replica, snapshot, source, variant

# --- up -------------------------------------------------------------------------------------------------------------


def test_a_queue_asks_for_as_many_replicas_as_keep_it_at_its_target() -> None:
    seen = snapshot(replica(0, load(waiting=6)), replica(1, load(waiting=8)))

    decision, _ = decide(seen, None, 10.0)

    assert (decision.wanted, decision.reason) == (4, reasons.SCALING_UP)
    assert decision.message == "14 queued on 2 replicas, target 4"
    assert decision.rules[0].name == "queue"
    assert decision.rules[0].inputs["waiting"] == 14


def test_kv_use_above_its_target_asks_for_more_and_says_what_fewer_would_mean() -> None:
    seen = snapshot(*(replica(i, load(kv_tokens_used=91_000, running=20)) for i in range(3)))

    decision, _ = decide(seen, None, 10.0)

    assert decision.wanted == 4
    assert decision.message == "KV use 91 % on 3 replicas, target 80 %"
    assert decision.alternative == "3 replicas would hold KV use at 91 %"


def test_replicas_that_start_are_not_asked_for_again() -> None:
    queued = replica(0, load(waiting=8))
    seen = snapshot(queued, pending(1), wanted=2)

    decision, _ = decide(seen, None, 10.0)

    assert decision.wanted == 2


def test_one_decision_adds_at_most_as_many_as_there_are_or_eight() -> None:
    seen = snapshot(replica(0, load(waiting=400)), policy=Policy(maximum=100))

    decision, _ = decide(seen, None, 10.0)

    assert decision.wanted == 9
    assert decision.message == "400 queued on 1 replica, target 4; maxReplicas is 100; 8 replicas at a time"


def test_more_than_the_maximum_is_never_wanted() -> None:
    decision, _ = decide(snapshot(replica(0, load(waiting=400)), policy=Policy(maximum=3)), None, 10.0)

    assert decision.wanted == 3
    assert decision.message.endswith("maxReplicas is 3")


def test_without_a_free_gpu_the_need_is_said_all_the_same() -> None:
    seen = snapshot(replica(0, load(waiting=8)), variants=(variant("h100-80gb", replicas=1, room=0),))
    seen = replace(seen, replicas=(replace(seen.replicas[0], gpu_class="h100-80gb"),))

    decision, _ = decide(seen, None, 10.0)

    assert (decision.wanted, decision.reason) == (2, reasons.NO_CAPACITY)
    assert decision.message == "class h100-80gb has 0 free; 8 queued on 1 replica, target 4"


# --- zero -----------------------------------------------------------------------------------------------------------


def test_a_held_request_wakes_a_model_at_zero_on_the_class_that_has_room() -> None:
    seen = snapshot(
        sources=[source(held=1, held_tokens=500, arrivals=1)],
        variants=(variant("l4-24gb", room=0), variant(CLASS, room=2)),
    )

    decision, _ = decide(seen, None, 10.0)

    assert (decision.wanted, decision.reason) == (1, reasons.WAKING)
    assert decision.message == "1 request held, 500 tokens; wakes class l40s-48gb"


def test_a_request_that_may_not_wait_wakes_a_model_all_the_same() -> None:
    term, asleep = Term(), snapshot(sources=[source(arrivals=7)])
    term.at(10.0, asleep)

    decision = term.at(11.0, replace(asleep, sources=(source(arrivals=8),)))

    assert (decision.wanted, decision.reason) == (1, reasons.WAKING)
    assert decision.message == "a recent request; wakes class l40s-48gb"


def test_an_hour_without_a_free_gpu_changes_neither_the_number_nor_what_is_said() -> None:
    full = (variant("h100-80gb", room=0),)
    term, asked = Term(), 0
    for second in range(0, 3600, 5):
        asked += 1  # each is refused at once, and counts as demand
        wanted = term.decision.wanted if term.decision else 0
        seen = snapshot(sources=[source(arrivals=asked)], variants=full, wanted=wanted)
        term.at(float(second), seen)
        if second > 5:
            assert term.decision is not None
            assert (term.decision.wanted, term.decision.reason) == (1, reasons.NO_CAPACITY)
            assert term.decision.message == "class h100-80gb has 0 free"

    one = (variant("h100-80gb", room=1),)
    freed = term.at(3600.0, snapshot(sources=[source(arrivals=asked)], variants=one, wanted=1))
    assert freed.wanted == 1
    nobody = term.at(3600.0 + 601.0, snapshot(sources=[source(arrivals=asked)], variants=full, wanted=1))
    assert (nobody.wanted, nobody.reason) == (0, reasons.SCALED_TO_ZERO)


def test_many_held_tokens_wake_as_many_replicas_as_can_hold_them() -> None:
    seen = snapshot(sources=[source(held=100, held_tokens=200_000, arrivals=100)])

    decision, _ = decide(seen, None, 10.0)

    assert decision.wanted == 3


def test_an_idle_window_without_a_request_ends_at_zero() -> None:
    term, seen = Term(), snapshot(replica(), replica(1))

    assert term.at(0.0, seen).wanted == 2
    assert term.at(599.0, replace(seen, wanted=1)).wanted == 1
    decision = term.at(600.0, replace(seen, wanted=1))

    assert (decision.wanted, decision.reason) == (0, reasons.SCALED_TO_ZERO)
    assert decision.message == "no request for 600 s; the next one wakes class l40s-48gb"


def test_a_new_model_starts_with_one_replica_whatever_the_minimum() -> None:
    decision, _ = decide(snapshot(new=True), None, 10.0)

    assert (decision.wanted, decision.message) == (1, "the Model is new")


def test_a_number_of_which_nothing_can_be_placed_is_not_called_enough() -> None:
    seen = snapshot(wanted=1, variants=(), policy=Policy(minimum=1))
    decision, _ = decide(seen, None, 10.0)

    assert (decision.before, decision.wanted, decision.reason) == (1, 1, reasons.SCALING_UP)
    assert decision.message == "1 replica wanted, and no class is known to fit"


def test_a_model_at_zero_that_nobody_asks_for_stays_there_over_a_restart_of_the_operator() -> None:
    term, seen = Term(), snapshot(sources=[source(arrivals=7)])

    assert term.at(0.0, seen).wanted == 0
    assert term.at(5.0, seen).wanted == 0
    assert term.decision is not None
    assert term.decision.recheck_seconds is None


def test_of_two_that_are_overdue_the_one_given_up_counts_last_in_whatever_order_they_come() -> None:
    busy = replica(2, load(kv_tokens_used=100_000), created=0.0)
    overdue, given_up, starts = pending(0, created=-50.0), pending(1, created=-171.0), pending(3)
    policy = Policy(minimum=0, maximum=3, kv_percent=50, stabilization_seconds=0.0)

    one, other = (
        decide(snapshot(*replicas, busy, starts, policy=policy, wanted=0), None, 10.0)[0]
        for replicas in ((overdue, given_up), (given_up, overdue))
    )

    assert (one.wanted, one.reason, one.message) == (other.wanted, other.reason, other.message)


# --- gateways that are stale for a while ----------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [{"a"}, {"a", "b"}])
@pytest.mark.parametrize("away", [20, 600])
def test_requests_that_came_while_a_gateway_was_stale_are_no_burst(stale: set[str], away: int) -> None:
    term, tokens, arrivals = Term(), 0, 0
    for second in range(300 + away + 1):
        full = 30 <= second < 90
        tokens, arrivals = tokens + (2000 if full else 1000), arrivals + (20 if full else 10)
        busy = load(running=8, waiting=3 if full else 0, prompt_tokens_total=tokens)
        gone = stale if 300 <= second < 300 + away else set[str]()
        gateways = [source(name, arrivals=arrivals, in_flight=8, dark=name in gone) for name in "ab"]
        seen = snapshot(*(replica(i, busy) for i in range(3)), sources=gateways, policy=Policy(maximum=50))
        term.at(float(second), seen)

    assert term.memory is not None
    assert term.decision is not None
    assert term.memory.speeds[CLASS].learned, "the rule `rate` has all that it reads"
    assert term.memory.arrival_rate == pytest.approx(20, rel=0.02)
    assert term.memory.arrival_rate_now == pytest.approx(20, rel=0.02)
    assert term.decision.wanted == 3
