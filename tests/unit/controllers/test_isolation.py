"""One Model on which Shoal itself fails, or that asks for too much work, stops nobody but itself."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import pytest

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers import isolation, sizes
from shoal.controllers import planner as planning
from shoal.controllers.isolation import internal_error, isolated
from shoal.controllers.placementrequest import PlacementRequest
from shoal.controllers.scaling import scaler as scaling
from shoal.core import candidates
from shoal.core.budget import StepBudget, TooExpensive
from shoal.core.candidates import consider
from shoal.core.placement import messages
from shoal.core.placement.types import Unplannable
from shoal.core.sizing import GPU, SGLangTuning
from shoal.kube.errors import APIServerUnavailable
from shoal.kube.resources import MODELS
from shoal.kube.store import Table
from tests.support.controlplane import FACTS
from tests.support.operators import gpu_class, model
from tests.unit.controllers.test_scale_writes import UID, Plane, _versioned
from tests.unit.controllers.test_scaler import Stage

BAD = "bad-uid"
placing: Any = import_module("shoal.core.placement.plan")  # the package has a function of this name


def with_a_bad_one(wanted: int = 1) -> tuple[Plane, list[str]]:
    """A plane with a second Model, which a test lets fail; and who is woken."""
    plane = Plane(replicas=wanted)
    raw = _versioned(model("bad", "ns"), uid=BAD)
    plane.world.models.upsert(raw)
    plane.state.enter(PlacementRequest(Model.model_validate(raw), ArtifactFacts.model_validate(FACTS), "placed"))
    plane.woken.clear()
    return plane, plane.woken


def replicas(plane: Plane, uid: str = UID) -> int | None:
    decided = plane.state.record(uid).placement
    return None if decided is None else sum(v.replicas for v in decided.placement.variants)


def fails(real: Callable[..., Any], uid_of: Callable[..., str]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if uid_of(*args) == BAD:
            raise TypeError("a secret from the object")
        return real(*args, **kwargs)

    return called


BREAKS = {
    "sizing": (sizes.candidates, "consider", lambda found, *_: found.metadata.uid),
    "what engines proved": (sizes.Sizes, "proven", lambda _self, request, *_: request.model.metadata.uid),
    "demand": (candidates, "demand", lambda found, *_: found.metadata.uid),
    "placement": (placing, "fill", lambda case, *_: case.demand.uid),
    "words": (messages.PlacementMessages, "placement", lambda _self, case: case.demand.uid),
}


@pytest.mark.parametrize("where", BREAKS)
def test_a_model_whose_decision_raises_is_left_out_and_the_others_are_planned(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, uid_of = BREAKS[where]
    plane, woken = with_a_bad_one()
    monkeypatch.setattr(owner, name, fails(getattr(owner, name), cast("Callable[..., str]", uid_of)))
    plane.state.record(BAD).sized = None
    plane.wanted = 2
    plane.planner.plan()
    assert replicas(plane) == 2
    sized = plane.state.record(BAD).sized
    considered = sized.considered if where == "sizing" and sized is not None else None
    problem = considered.problem if considered is not None else plane.state.record(BAD).failure
    assert problem is not None
    assert problem.reason == reasons.INTERNAL_ERROR
    assert "TypeError at " in problem.message
    assert "secret" not in problem.message
    assert plane.state.record(UID).failure is None
    assert "ns/bad" in woken


def test_without_the_isolation_nobody_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, _ = with_a_bad_one()
    monkeypatch.setattr(placing, "fill", fails(placing.fill, lambda case, *_: case.demand.uid))
    plane.wanted = 2
    demands = [m.demand for m in plane.planner._plan_input(plane.world.accepted_classes()).fleet.models]
    with pytest.raises(Unplannable):  # the first one: whoever made the plan had none at all
        placing.plan(demands, ())
    assert replicas(plane) == 1


def test_a_model_that_could_not_be_planned_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, woken = with_a_bad_one()
    with monkeypatch.context() as broken:
        broken.setattr(placing, "fill", fails(placing.fill, lambda case, *_: case.demand.uid))
        plane.planner.plan()
        assert plane.state.record(BAD).failure is not None
        asked = list[str]()
        broken.setattr(placing, "fill", lambda case, *_: asked.append(case.demand.uid))
        plane.planner.plan()
        assert BAD not in asked  # not with each plan
    monkeypatch.setattr(planning, "RETRY_SECONDS", 0.0)
    failed = plane.state.record(BAD).plan_failure
    assert failed is not None
    plane.state.record(BAD).plan_failure = replace(failed, until=0.0)
    woken.clear()
    plane.planner.plan()
    assert plane.state.record(BAD).failure is None
    assert replicas(plane, BAD) == 1
    assert "ns/bad" in woken


def test_what_was_decided_before_stays_for_a_model_that_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, _ = with_a_bad_one()
    plane.planner.plan()
    assert replicas(plane, BAD) == 1
    monkeypatch.setattr(placing, "fill", fails(placing.fill, lambda case, *_: case.demand.uid))
    plane.wanted = 0
    plane.planner.plan()
    assert replicas(plane) == 0
    assert replicas(plane, BAD) == 1


# --- too expensive --------------------------------------------------------------------------------------------------


def _classes(count: int, node: int) -> tuple[dict[str, Any], dict[str, GPU]]:
    from shoal.api.gpuclass import GPUClass

    made = {f"c{i}": GPUClass.model_validate(gpu_class(f"c{i}", "L4")) for i in range(count)}
    return made, {name: GPU(name, 24 * 2**30, largest_node=node) for name in made}


def test_a_model_that_would_be_sized_too_often_is_told_what_to_do() -> None:
    classes, gpus = _classes(400, 64)
    raw = _versioned(model("chat", "ns"), uid=UID)
    with pytest.raises(TooExpensive, match=r"list in `spec\.variants` the classes that it may use"):
        consider(
            Model.model_validate(raw), ArtifactFacts.model_validate(FACTS), classes, gpus, lambda _: SGLangTuning()
        )
    raw["spec"]["variants"] = [{"class": "c7"}]
    assert consider(
        Model.model_validate(raw), ArtifactFacts.model_validate(FACTS), classes, gpus, lambda _: SGLangTuning()
    ).candidates


def test_a_model_that_is_too_expensive_keeps_what_it_has_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, _ = with_a_bad_one()
    plane.planner.plan()
    real = candidates.consider

    def steps(found: Model, *args: Any) -> Any:
        if found.metadata.uid == BAD:
            StepBudget(1, "sizing the Model", "list fewer classes").spend(2)
        return real(found, *args)

    monkeypatch.setattr(sizes.candidates, "consider", steps)
    plane.state.record(BAD).sized = None
    plane.wanted = 2
    plane.planner.plan()
    assert replicas(plane) == 2
    decided = plane.state.record(BAD).placement
    assert decided is not None
    assert decided.considered.problem is not None
    assert decided.considered.problem.reason == reasons.TOO_EXPENSIVE
    planned = plane.state.record(BAD).planned
    assert planned is not None
    assert planned.demand.frozen


# --- the scaler -----------------------------------------------------------------------------------------------------


async def test_a_model_on_whose_replicas_there_is_no_decision_says_so_until_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: Any) -> Any:
        raise AssertionError

    async with Stage(1) as stage:
        woken = stage.plane.woken
        woken.clear()
        with monkeypatch.context() as broken:
            broken.setattr(scaling, "decide", breaks)
            await stage.tell(urgent=True)
            problem = stage.plane.state.record(UID).scaling_failure
            assert problem is not None
            assert problem.reason == reasons.INTERNAL_ERROR
            assert woken == ["ns/chat"]
        await stage.tell(urgent=True)
        assert stage.plane.state.record(UID).scaling_failure is None
        assert woken == ["ns/chat", "ns/chat"]


async def test_a_listener_of_decisions_that_raises_does_not_end_the_scaler() -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError

    async with Stage(0) as stage:
        stage.scaler.decided.append(breaks)
        stage.signals.ask(UID)
        await stage.tell(urgent=True)
        assert not stage._task.done()


# --- a reconcile ----------------------------------------------------------------------------------------------------


class Statuses:
    """An API server that takes statuses."""

    def __init__(self) -> None:
        self.written: list[JsonObject] = []

    async def apply_status(self, _resource: Any, body: JsonObject, **_: Any) -> JsonObject:
        self.written.append(body["status"])
        raw = _versioned(model("chat", "ns"), uid=UID)
        return raw | {"status": body["status"], "metadata": raw["metadata"] | {"resourceVersion": "2"}}


async def test_an_error_that_nobody_foresaw_becomes_a_condition_and_is_raised_again() -> None:
    plane, server = Plane(), Statuses()
    plane.world.client = cast("Any", server)

    async def breaks(_key: str) -> float | None:
        raise KeyError("x" * 10_000)

    for _ in range(2):
        with pytest.raises(KeyError):
            await isolated(plane.world, MODELS, plane.world.models, "ns/chat", breaks, manager="test")
    (status,) = server.written  # the second time it says so already
    said = {c["type"]: c for c in status["conditions"]}
    assert (said["Ready"]["status"], said["Ready"]["reason"]) == ("False", "InternalError")
    assert said["Stalled"]["status"] == "True"
    assert len(said["Ready"]["message"]) < 512


async def test_an_api_server_that_is_away_is_no_fault_of_the_object() -> None:
    plane, server = Plane(), Statuses()
    plane.world.client = cast("Any", server)

    async def away(_key: str) -> float | None:
        raise APIServerUnavailable("no answer")

    with pytest.raises(APIServerUnavailable):
        await isolated(plane.world, MODELS, plane.world.models, "ns/chat", away, manager="test")
    assert server.written == []


def test_where_it_happened_is_told_and_nothing_of_what_was_said() -> None:
    with pytest.raises(TooExpensive) as raised:
        StepBudget(0, "x", "y").spend(1)
    message = internal_error(raised.value, "on something").message
    assert "TooExpensive at shoal.core.budget:" in message
    assert isolation.__name__ not in message


# --- the store ------------------------------------------------------------------------------------------------------


def test_an_object_that_cannot_be_listed_or_told_does_not_keep_the_rest_of_a_list_from_being_read() -> None:
    def by(spec: dict[str, str]) -> list[str]:
        return [spec["color"]]

    def breaks(*_: Any) -> None:
        raise RuntimeError

    table = Table[dict[str, str]](lambda raw: raw["spec"], indexes={"color": by})
    heard: list[str] = []
    table.listeners += [breaks, lambda key, *_: heard.append(key)]
    for name, spec in (("a", {"size": "1"}), ("b", {"color": "red"})):
        table.upsert({"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec": spec})
    assert heard == ["a", "b"]
    assert table.by("color", "red") == ({"color": "red"},)
    table.remove("a")
    assert heard == ["a", "b", "a"]
