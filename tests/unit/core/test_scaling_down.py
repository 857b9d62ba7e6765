"""When fewer replicas are wanted, when not, and what is said."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.api import reasons
from shoal.core.scaling import ModelSnapshot, Policy, decide
from tests.support.scaling import CLASS, KV_TOKENS, Term, load, pending, replica, snapshot, source, variant

POLICY = Policy(minimum=1, stabilization_seconds=120.0)


def busy(*percents: int, **fields: Any) -> ModelSnapshot:
    """One replica for each KV use."""
    plain: dict[str, Any] = {"policy": POLICY}
    pods = (replica(i, load(kv_tokens_used=p * KV_TOKENS // 100, running=5)) for i, p in enumerate(percents))
    return snapshot(*pods, **{**plain, **fields})


def test_fewer_only_after_they_were_enough_for_the_whole_window() -> None:
    term = Term()
    seen = busy(30, 30, 30)

    assert [term.at(at, seen).wanted for at in (0.0, 60.0, 119.0)] == [3, 3, 3]
    assert term.decision is not None
    assert term.decision.alternative == "2 would do; fewer in 1 s at the earliest"
    decision = term.at(120.0, seen)

    assert (decision.wanted, decision.reason) == (2, reasons.SCALING_DOWN)
    assert decision.message == "2 replicas are enough since 120 s"


def test_a_moment_of_need_begins_the_window_anew() -> None:
    term = Term()
    seen = busy(30, 30, 30)
    term.at(0.0, seen)
    term.at(100.0, busy(70, 70, 70))
    term.at(101.0, seen)

    assert term.at(130.0, seen).wanted == 3
    assert term.at(221.0, seen).wanted == 2


def test_nobody_goes_whose_load_the_others_could_not_take_with_room_to_spare() -> None:
    term = Term()
    seen = busy(51, 51, 51)  # on two replicas 76.5 %: below 80 %, above nine tenths of it

    assert [term.at(at, seen).wanted for at in (0.0, 200.0, 400.0)] == [3, 3, 3]


def test_a_silent_gateway_keeps_everything_and_is_named() -> None:
    term = Term()
    quiet = snapshot(replica(), replica(1), policy=POLICY)
    dark = snapshot(replica(), replica(1), policy=POLICY, sources=[source(), source("gateway-1", dark=True)])
    term.at(0.0, quiet)
    term.at(119.0, quiet)
    term.at(119.5, dark)
    decision = term.at(130.0, dark)

    assert (decision.wanted, decision.reason) == (2, reasons.SIGNALS_UNKNOWN)
    assert decision.message == "no live signals from gateway-1: nothing scales down"
    assert term.at(135.0, quiet).wanted == 2
    assert term.at(260.0, quiet).wanted == 1


def test_a_silent_replica_counts_as_loaded_to_its_target() -> None:
    seen = snapshot(replica(0, load(kv_tokens_used=85_000)), replica(1, dark=True), policy=POLICY)

    decision, _ = decide(seen, None, 0.0)

    assert decision.wanted == 3
    assert decision.stale == ("pod-1",)


def test_replicas_that_never_were_ready_or_are_on_a_dead_node_are_no_signal_sources() -> None:
    term = Term()
    gone = replica(1, dark=True, lost=True)
    seen = snapshot(replica(), pending(2), gone, policy=replace(POLICY, stabilization_seconds=10.0), wanted=2)
    term.at(0.0, seen)

    assert term.at(11.0, seen).wanted == 1


def test_nothing_goes_down_during_a_rollout() -> None:
    term = Term()
    seen = busy(1, 1, 1, rolling=True)
    term.at(0.0, seen)
    decision = term.at(1000.0, seen)

    assert decision.wanted == 3


def test_no_zero_while_a_gateway_is_silent_and_none_on_counters_that_moved_meanwhile() -> None:
    term, policy = Term(), Policy(idle_seconds=60.0)
    quiet = snapshot(replica(), sources=[source(arrivals=3)], policy=policy)
    dark = snapshot(replica(), sources=[source(dark=True)], policy=policy)
    term.at(0.0, quiet)
    assert term.at(70.0, dark).wanted == 1
    came = snapshot(replica(), sources=[source(arrivals=4)], policy=policy)

    assert term.at(75.0, came).wanted == 1
    assert term.at(134.0, came).wanted == 1
    assert term.at(135.0, came).wanted == 0


@pytest.mark.parametrize(
    "seen",
    [
        snapshot(replica(0, load(running=1)), sources=[source()]),
        snapshot(replica(), sources=[source(in_flight=1)]),
        snapshot(replica(), sources=[source(), source("gateway-1", held=1)]),
        snapshot(replica(0, replace(load(), running=None))),
        snapshot(replica(), last_wake=590.0),
    ],
    ids=["runs", "in flight", "held", "unknown", "woken by hand"],
)
def test_no_zero_while_anything_runs_waits_or_is_unknown(seen: ModelSnapshot) -> None:
    term = Term()
    term.at(0.0, seen)

    assert term.at(601.0, seen).wanted == 1


def test_the_model_is_not_idle_before_its_first_replica_is_ready() -> None:
    term, policy = Term(), Policy(idle_seconds=10.0)
    empty = snapshot(sources=[source(held=1, held_tokens=10, arrivals=1)], policy=policy)
    assert term.at(0.0, empty).wanted == 1
    starting = snapshot(pending(), sources=[source(arrivals=1)], policy=policy)  # the client left
    term.at(1.0, starting)

    assert term.at(60.0, starting).wanted == 1
    ready = snapshot(replica(), sources=[source(arrivals=1)], policy=policy)
    assert term.at(61.0, ready).wanted == 1
    assert term.at(72.0, ready).wanted == 0


def test_a_model_that_never_gets_ready_and_that_nobody_asks_for_goes_to_zero_after_three_cold_starts() -> None:
    term, policy = Term(), Policy(idle_seconds=10.0)
    starting = snapshot(pending(), policy=policy)
    term.at(0.0, starting)

    assert term.at(179.0, starting).wanted == 1
    assert term.at(180.0, starting).wanted == 0


def test_a_lower_maximum_is_followed_at_once_when_everybody_is_heard() -> None:
    decision, _ = decide(busy(70, 70, 70, policy=Policy(minimum=1, maximum=2)), None, 0.0)

    assert (decision.wanted, decision.message) == (2, "maxReplicas is 2")


def test_a_minimum_above_the_maximum_ends_at_the_maximum() -> None:
    decision, _ = decide(snapshot(policy=Policy(minimum=5, maximum=2)), None, 0.0)

    assert decision.wanted == 2


# --- several classes ------------------------------------------------------------------------------------------------


def mixed(used: int, cheap: int, dear: int) -> ModelSnapshot:
    """Cheap replicas of 100,000 tokens, dear ones of 300,000."""
    pods = [replica(i) for i in range(cheap)]
    pods += [replica(10 + i, load(kv_tokens_total=300_000), gpu_class="h100-80gb") for i in range(dear)]
    first = pods[0].load
    assert first is not None
    pods[0] = replace(pods[0], load=replace(first, kv_tokens_used=used if used < KV_TOKENS else KV_TOKENS))
    if used > KV_TOKENS:
        last = pods[-1].load
        assert last is not None
        pods[-1] = replace(pods[-1], load=replace(last, kv_tokens_used=used - KV_TOKENS))
    classes = (
        variant(CLASS, replicas=cheap, room=0),
        variant("h100-80gb", replicas=dear, room=5, kv_tokens=300_000),
    )
    return snapshot(*pods, variants=classes, policy=replace(POLICY, stabilization_seconds=0.0))


def test_what_is_added_counts_with_the_size_of_the_class_that_has_room() -> None:
    enough = mixed(used=390_000, cheap=2, dear=1)  # of 500,000, of which 80 % are 400,000
    assert decide(enough, None, 0.0)[0].wanted == 3
    said = enough.replicas[0].load
    assert said is not None
    more = replace(enough.replicas[0], load=replace(said, waiting=1, waiting_tokens=200_000))
    decision, _ = decide(replace(enough, replicas=(more, *enough.replicas[1:])), None, 0.0)

    assert decision.wanted == 4  # 590,000 of 640,000: with another cheap one it would be too many for four


def test_what_stays_counts_with_the_size_of_the_cheapest() -> None:
    seen = mixed(used=70_000, cheap=2, dear=2)
    term = Term()
    term.at(0.0, seen)

    assert term.at(40.0, seen).wanted == 1


# --- what cannot be -------------------------------------------------------------------------------------------------


def test_more_tokens_than_there_are_count_as_all_there_are_and_the_message_says_who_said_so() -> None:
    decision, _ = decide(snapshot(replica(0, load(kv_tokens_used=900_000, waiting=5))), None, 0.0)

    assert decision.wanted == 2
    assert decision.message.endswith("invalid: pod-0 reports 900000 KV tokens in use of 100000")


def test_less_than_nothing_is_unknown_not_nothing() -> None:
    term = Term()
    seen = snapshot(replica(0, load(waiting=-3)), replica(1), replica(2), policy=POLICY)
    term.at(0.0, seen)
    decision = term.at(1000.0, seen)

    assert (decision.wanted, decision.reason) == (3, reasons.SIGNALS_UNKNOWN)
    assert decision.message == "no live signals from pod-0: nothing scales down; invalid: pod-0 reports -3 waiting"


def test_who_says_what_cannot_be_is_named_though_the_number_stays() -> None:
    decision, _ = decide(snapshot(replica(0, load(kv_tokens_used=250_000))), None, 0.0)
    stays, _ = decide(snapshot(replica(0, load(kv_tokens_used=250_000)), policy=Policy(maximum=1)), None, 0.0)

    assert decision.wanted == 2, "all there is, and no more"
    assert (stays.wanted, stays.before) == (1, 1)
    assert stays.message.endswith("invalid: pod-0 reports 250000 KV tokens in use of 100000")


def test_a_cache_far_larger_than_predicted_is_not_believed() -> None:
    seen = snapshot(replica(0, load(kv_tokens_total=10**9, kv_tokens_used=170_000)))

    decision, _ = decide(seen, None, 0.0)

    assert decision.invalid == ("pod-0 reports 1000000000 KV tokens in all of 200000",)


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [100_000.0, -100.0])
def test_a_clock_that_leaps_lowers_nothing(later: float) -> None:
    term = Term()
    seen = snapshot(replica(), replica(1))
    term.at(0.0, seen)
    _, memory = decide(seen, term.memory, 100.0)

    decision, _ = decide(seen, memory, later)

    assert decision.wanted == 2


def test_a_load_that_comes_back_soon_makes_the_next_step_down_wait_twice_as_long() -> None:
    term, two, one = Term(), busy(1, 1), busy(90)
    term.at(0.0, two)
    assert term.at(121.0, two).wanted == 1
    assert term.at(130.0, one).wanted == 2
    term.at(131.0, two)

    assert term.at(370.0, two).wanted == 2
    decision = term.at(371.0, two)

    assert (decision.wanted, decision.message) == (1, "1 replica is enough since 240 s")


def test_an_overdue_replica_is_no_supply_where_others_serve() -> None:
    served = replica(0, load(waiting=8))
    overdue = pending(1, created=-200.0)

    assert decide(snapshot(served, pending(1)), None, 0.0)[0].wanted == 2
    seen = snapshot(replica(0, load(kv_tokens_used=90_000)), overdue)
    assert decide(seen, None, 0.0)[0].wanted == 3
