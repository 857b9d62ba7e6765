"""A gateway whose signals are stale is named in the Model's status after a while, and written once."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from shoal.api.meta import Condition
from shoal.api.model import Model, ModelStatus
from shoal.controllers.scaling.stalesignals import StaleSignals
from shoal.controllers.state import FleetState
from shoal.controllers.status import _events
from shoal.controllers.world import World
from shoal.core.scaling import Policy, ScalingDecision, Steady, describe_stale, due, steady
from shoal.core.scaling.sources import STEADY_SECONDS
from shoal.core.status import modelstatus
from shoal.core.status.conditions import find
from shoal.kube.projections import Custom
from shoal.kube.resources import MODELS
from tests.support.operators import CONFIG, model
from tests.unit.core.test_model_status import NOW, observed

SAYS = "no live signals from shoal-gateway-0: nothing scales down"


def decision(*sources: str, wanted: int = 2) -> ScalingDecision:
    return ScalingDecision(wanted, wanted, "SignalsUnknown", "", stale=sources)


def test_what_is_held_up_by_a_stale_signal_source_is_said_by_name_and_in_one_order() -> None:
    assert describe_stale(decision("shoal-gateway-0"), Policy()) == SAYS
    assert describe_stale(decision("b", "a"), Policy()) == describe_stale(decision("a", "b"), Policy())


def test_where_nothing_could_go_down_there_is_nothing_to_say() -> None:
    assert describe_stale(decision(), Policy()) is None
    assert describe_stale(decision("shoal-gateway-0", wanted=0), Policy()) is None
    assert describe_stale(decision("shoal-gateway-0", wanted=2), Policy(minimum=2)) is None


def test_it_is_told_when_it_has_held_for_a_while_and_taken_back_likewise() -> None:
    known = steady(Steady(), SAYS, 100.0)
    assert (known.published, due(known, 100.0)) == (None, STEADY_SECONDS)
    known = steady(known, SAYS, 100.0 + STEADY_SECONDS - 1)
    assert known.published is None
    known = steady(known, SAYS, 100.0 + STEADY_SECONDS)
    assert (known.published, due(known, 200.0)) == (SAYS, None)
    known = steady(known, None, 200.0)
    assert known.published == SAYS
    assert steady(known, None, 200.0 + STEADY_SECONDS).published is None


def test_what_comes_and_goes_is_never_told() -> None:
    known = Steady()
    for second in range(0, 600, 20):
        known = steady(known, SAYS if second % 40 else None, float(second))
        assert known.published is None


def parsed(told: str | None = None) -> Model:
    raw = model("chat", "ns")
    raw["metadata"]["uid"] = "u"
    found = Model.model_validate(raw)
    if told is None:
        return found
    condition = Condition(
        type="SignalsUnknown",
        status="True",
        observed_generation=1,
        last_transition_time=NOW,
        reason="SignalsStale",
        message=told,
    )
    return found.model_copy(update={"status": ModelStatus(conditions=(condition,))})


def stale_signals(changed: Callable[[str], None], clock: Callable[[], float]) -> tuple[StaleSignals, FleetState]:
    nothing = cast("Any", None)
    world = World(nothing, CONFIG, "shoal-system", nothing)
    raw = model("chat", "ns")
    raw["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    world.models.upsert(raw)
    state = FleetState(world)
    return StaleSignals(state, changed, clock), state


async def test_the_status_is_asked_for_once_when_the_time_has_come() -> None:
    now = 1000.0
    told: list[str] = []
    stale, _ = stale_signals(told.append, lambda: now)
    for _ in range(5):  # decisions go on meanwhile
        stale.update(parsed(), SAYS)
        now += 1
    assert (stale.message(parsed()), told) == (None, [])
    now += STEADY_SECONDS
    for _ in range(5):
        stale.update(parsed(), SAYS)
        now += 1
    assert (stale.message(parsed()), told) == (SAYS, ["ns/chat"])
    stale.clear()


async def test_without_another_decision_a_timer_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.core.scaling.sources.STEADY_SECONDS", 0.01)
    heard = asyncio.Event()
    stale, state = stale_signals(lambda _key: heard.set(), asyncio.get_running_loop().time)
    stale.update(parsed(), SAYS)
    async with asyncio.timeout(20):
        await heard.wait()
    assert stale.message(parsed()) == SAYS
    stale = state.record("u").stale
    assert stale is not None
    assert stale.timer is None or stale.timer.cancelled()


async def test_a_new_leader_takes_over_what_stands_and_takes_it_back_when_it_knows_better() -> None:
    now = 1000.0
    stale, _ = stale_signals(lambda _key: None, lambda: now)
    known = parsed(told=SAYS)
    assert stale.message(known) == SAYS  # before its first decision
    stale.update(known, None)
    assert stale.message(known) == SAYS
    now += STEADY_SECONDS
    stale.update(known, None)
    assert stale.message(known) is None


def test_the_condition_stands_there_only_while_it_is_so() -> None:
    found = find(modelstatus.status(observed(stale_signals=SAYS), NOW).conditions, "SignalsUnknown")
    assert found is not None
    assert (found.status, found.reason, found.message) == ("True", "SignalsStale", SAYS)
    assert find(modelstatus.status(observed(), NOW).conditions, "SignalsUnknown") is None


def test_it_comes_with_one_warning() -> None:
    raw: dict[str, Any] = model("chat", "ns")
    custom: Custom[Any] = Custom(Model.model_validate(raw).metadata, Model.model_validate(raw), "", {})
    after = [{"type": "SignalsUnknown", "status": "True", "reason": "SignalsStale", "message": SAYS}]
    (event,) = _events(MODELS, custom, [], after, ())
    assert (event.type, event.reason, event.note) == ("Warning", "SignalsStale", SAYS)
    assert list(_events(MODELS, custom, after, after, ())) == []
