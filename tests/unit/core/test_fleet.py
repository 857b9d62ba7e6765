"""One call decides a whole fleet: replicas, then the placement of all Models together."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from shoal.api import reasons
from shoal.api.model import Model
from shoal.core.candidates import Considered
from shoal.core.fleet import FleetModel, FleetPlan, FleetSnapshot, decide, decide_steps
from shoal.core.placement import Candidate, ClassUse
from shoal.core.scaling import ModelSnapshot
from tests.support.fleets import candidate, standing, supply
from tests.support.operators import model
from tests.support.scaling import snapshot, source, variant

L4 = candidate("l4-24gb", cost="0.43")
BLOCK = candidate("h100-80gb", 8, "19.92")
placing: Any = import_module("shoal.core.placement.plan")  # the package has a function of this name


def one(
    name: str, *classes: Candidate, replicas: int | ModelSnapshot = 1, priority: int = 0, **more: Any
) -> FleetModel:
    raw = model(name, "chat", priority=priority)
    raw["metadata"] |= {"uid": name, "creationTimestamp": f"2026-01-01T00:00:0{len(name)}Z"}
    return FleetModel(Model.model_validate(raw), Considered(classes, (), {}), replicas, **more)


def where(plan: FleetPlan) -> dict[str, dict[str, int]]:
    return {
        uid: {v.gpu_class: v.replicas for v in decision.placement.variants if v.replicas}
        for uid, decision in plan.models.items()
    }


def test_a_fleet_is_decided_in_one_line() -> None:
    models = [one("a", L4, replicas=2), one("bb", BLOCK, L4, replicas=2), one("ccc", BLOCK, replicas=2)]
    plan = decide(FleetSnapshot(models, [supply("l4-24gb", 3, of=4), supply("h100-80gb", 8)]), now=0.0)
    assert where(plan) == {"a": {"l4-24gb": 2}, "bb": {"l4-24gb": 1, "h100-80gb": 1}, "ccc": {}}
    assert plan.missing == {"chat/ccc": 2}
    assert plan.classes == {"l4-24gb": ClassUse(4, 4, 0), "h100-80gb": ClassUse(8, 8, 0)}


def test_replicas_are_decided_from_signals_and_placed_in_the_same_call() -> None:
    waits = snapshot(sources=[source(held=3, held_tokens=900)], variants=[variant("l4-24gb")], wanted=0)
    plan = decide(FleetSnapshot([one("a", L4, replicas=waits)], [supply("l4-24gb", 1)]), now=10.0)
    decision = plan.models["a"]
    assert decision.scaling is not None
    assert (decision.scaling.wanted, decision.scaling.reason) == (1, reasons.WAKING)
    assert decision.memory is not None
    assert decision.demand.wanted == 1
    assert where(plan) == {"a": {"l4-24gb": 1}}


def test_a_paused_model_keeps_what_it_has_and_shows_where_it_would_go_where_it_has_nothing() -> None:
    runs = {"l4-24gb": standing(1, 1, name="l4-24gb")}
    models = [one("a", L4, replicas=3, frozen=True, preview=True, replica_states=runs), one("b", L4, frozen=True)]
    shown = one("ccc", L4, frozen=True, preview=True)
    plan = decide(FleetSnapshot([*models, shown, one("d", L4)], [supply("l4-24gb", 1, of=2)]), now=0.0)
    assert where(plan) == {"a": {"l4-24gb": 1}, "b": {}, "ccc": {"l4-24gb": 1}, "d": {"l4-24gb": 1}}


def test_a_model_that_ends_in_an_error_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rounds = placing.fill, list[str]()

    def fill(plan: Any, *args: Any) -> None:
        rounds.append(plan.demand.uid)
        if plan.demand.uid == "bad":
            raise ZeroDivisionError
        real(plan, *args)

    monkeypatch.setattr(placing, "fill", fill)
    plan = decide(FleetSnapshot([one("bad", L4, priority=5), one("a", L4)], [supply("l4-24gb", 1)]), now=0.0)
    assert where(plan) == {"a": {"l4-24gb": 1}}
    assert {uid: type(error) for uid, error in plan.failed.items()} == {"bad": ZeroDivisionError}
    assert rounds == ["bad", "a"]


def test_a_caller_may_do_something_else_between_two_models() -> None:
    models = [one(f"m{i}", L4) for i in range(9)]
    steps: Iterator[None] = decide_steps(FleetSnapshot(models, [supply("l4-24gb", 9)]), now=0.0)
    assert sum(1 for _ in steps) > 2 * len(models)
