"""When an engine may be stopped: the table of core/drain.py, one row at a time."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.drain import (
    DrainState,
    EngineObservation,
    EngineProgress,
    GatewayProgress,
    Stop,
    Wait,
    decide,
    observe,
    over,
)

BARRIER = 7
IDLE = EngineProgress(boot="b", observed_at=103.0, idle_since=100.0, requests=5)


def gateway(name: str = "gw-0", **fields: Any) -> GatewayProgress:
    return replace(GatewayProgress(name, last_message=102.0, seq=BARRIER, running=0), **fields)


def state(*gateways: GatewayProgress, engine: EngineProgress = IDLE, **fields: Any) -> DrainState:
    return replace(
        DrainState(began=100.0, barrier=BARRIER, drain_seconds=900, gateways=gateways, engine=engine), **fields
    )


def reason(given: DrainState, now: float = 103.0) -> tuple[type, str]:
    decision = decide(given, now)
    return type(decision), decision.reason


def test_all_gateways_through_and_an_idle_engine_end_the_drain_at_once() -> None:
    assert reason(state(gateway(), gateway("gw-1", seq=9))) == (Stop, "idle")
    assert reason(state()) == (Stop, "idle")


@pytest.mark.parametrize(
    ("fields", "why", "message"),
    [
        ({"running": 2}, "in-flight", "gw-0: 2 in flight"),
        ({"seq": 6}, "not-acknowledged", "gw-0 did not acknowledge message 7 yet"),
        ({"seq": None, "running": None}, "not-acknowledged", "gw-0 did not acknowledge message 7 yet"),
        ({"seq": 6, "running": 0, "closed": 99.0}, "silent", "the stream of gw-0 ended less than 12 s ago"),
        ({"running": 1, "closed": 99.0}, "silent", "the stream of gw-0 ended less than 12 s ago"),
    ],
)
def test_a_gateway_holds_the_engine_and_the_reason_says_which(fields: dict[str, Any], why: str, message: str) -> None:
    assert decide(state(gateway(**fields), gateway("gw-1")), 103.0) == Wait(why, message)  # pyright: ignore[reportArgumentType]


def test_of_several_the_reason_names_one_and_counts_the_others() -> None:
    given = state(gateway(running=1), gateway("gw-1", running=3), gateway("gw-2", seq=1))
    assert decide(given, 103.0).message == "gw-1 and 2 more: 4 in flight"


def test_zero_in_flight_before_the_barrier_says_nothing_of_what_was_sent_since() -> None:
    assert reason(state(gateway(seq=BARRIER - 1, running=0))) == (Wait, "not-acknowledged")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"seq": 6, "last_message": 90.0, "closed": 99.0}, 111.0),
        # An acknowledgement after the stream ended here: over there it has not.
        ({"seq": 6, "last_message": 104.0, "closed": 99.0}, 116.0),
        # Silent on an open stream: it may have heard the message before the barrier.
        ({"seq": 6, "last_message": 90.0}, 112.0),
        ({"seq": 6, "last_message": 110.0}, 122.0),
    ],
)
def test_a_claim_ends_12_seconds_after_the_last_word(fields: dict[str, Any], end: float) -> None:
    def at(now: float) -> tuple[type, str]:
        return reason(state(gateway(**fields), engine=replace(IDLE, observed_at=now)), now)

    assert at(end - 0.01)[0] is Wait
    # From then on the engine itself counts, at both ends of a second.
    assert at(end) == (Wait, "engine-busy")
    assert at(end + 0.99) == (Wait, "engine-busy")
    assert at(end + 1.0) == (Stop, "idle")


def test_who_was_through_when_its_stream_ended_holds_no_claim() -> None:
    assert reason(state(gateway(closed=102.9))) == (Stop, "idle")


def test_an_agent_that_restarted_beside_its_engine_waits_15_seconds() -> None:
    given = state(gateway(), engine=replace(IDLE, observed_at=120.0), restarted=95.0)
    assert reason(given, 109.9) == (Wait, "restarted")
    assert reason(given, 120.0) == (Stop, "idle")


def test_an_engine_that_answers_nothing_is_not_taken_for_idle() -> None:
    assert reason(state(engine=EngineProgress(boot="b"))) == (Wait, "engine-unknown")
    assert reason(state(engine=EngineProgress(boot="b", observed_at=103.0, requests=None))) == (Wait, "engine-unknown")
    assert reason(state(engine=EngineProgress(boot="b", observed_at=103.0, requests=3))) == (Wait, "engine-busy")


def test_a_stalled_engine_is_stopped_whatever_runs() -> None:
    given = state(gateway(running=9), engine=EngineProgress(boot="b", stalled=True), restarted=100.0)
    assert reason(given) == (Stop, "stalled")


def test_drain_seconds_end_it_in_any_case() -> None:
    given = state(gateway(running=9, last_message=159.0), engine=EngineProgress(boot="b"), drain_seconds=60.0)
    assert reason(given, 159.9) == (Wait, "in-flight")
    assert reason(given, 160.0) == (Stop, "time-over")


def test_a_port_on_which_nothing_listens_needs_no_drain() -> None:
    gone = EngineProgress(boot="b", observed_at=103.0, idle_since=102.0, gone_since=102.0)
    assert reason(state(gateway(running=9), engine=gone)) == (Stop, "gone")
    assert reason(state(gateway(running=9), engine=replace(gone, gone_since=102.5))) == (Wait, "in-flight")


# --- looks ----------------------------------------------------------------------------------------------------------

QUIET = EngineObservation(at=1.0, boot="b", listening=True, running=0, waiting=0, active=0, requests=5)


def idle_since(*looks: EngineObservation) -> float | None:
    engine = EngineProgress()
    for number, look in enumerate(looks):
        engine = observe(engine, replace(look, at=float(number)))
    return engine.idle_since


def test_idle_is_a_row_of_looks_with_no_request_in_between() -> None:
    assert idle_since(QUIET, QUIET, QUIET) == 0.0
    assert idle_since(QUIET, replace(QUIET, running=1), QUIET) == 2.0
    # It came and went between two looks.
    assert idle_since(QUIET, replace(QUIET, requests=6), replace(QUIET, requests=6)) == 1.0
    assert idle_since(QUIET, replace(QUIET, boot="c")) == 1.0


@pytest.mark.parametrize("field", ["running", "waiting", "active", "requests"])
def test_what_is_not_known_is_not_idle(field: str) -> None:
    assert idle_since(QUIET, replace(QUIET, **{field: None})) is None
    if field != "requests":
        assert idle_since(QUIET, replace(QUIET, **{field: 1})) is None


def test_a_closed_port_is_told_from_one_that_does_not_answer() -> None:
    closed, silent = replace(QUIET, listening=False), EngineObservation(0.0, "b", None)
    assert observe(EngineProgress(), replace(closed, at=4.0)).gone_since == 4.0
    assert observe(EngineProgress(boot="b", gone_since=3.0), replace(closed, at=4.0)).gone_since == 3.0
    assert observe(EngineProgress(boot="b", gone_since=3.0), silent).gone_since is None
    assert observe(EngineProgress(boot="b", idle_since=3.0), silent).idle_since is None


def test_a_drain_ends_with_its_engine_or_30_seconds_after_the_hook_returned() -> None:
    assert not over("b", EngineProgress(boot="b"), None, 1e9)
    assert not over("b", EngineProgress(boot="b"), 100.0, 129.9)
    assert over("b", EngineProgress(boot="b"), 100.0, 130.0)
    assert over("b", EngineProgress(boot="c"), None, 0.0)
