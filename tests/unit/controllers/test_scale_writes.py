"""The scaler's writes: what woke is not lowered by what was decided before, and who may lead no more writes nothing."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import API_VERSION, JsonObject
from shoal.api.model import Model
from shoal.controllers.children.replicas import ScaleWriter
from shoal.controllers.placementrequest import PlacementRequest
from shoal.controllers.planner import Planner
from shoal.controllers.state import FleetState
from shoal.controllers.triggers import remember
from shoal.controllers.world import World
from shoal.core.placement import Moves, VariantPlan
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, Conflict
from shoal.kube.events import Recorder
from tests.support.controlplane import FACTS
from tests.support.operators import CONFIG, gpu_class, model
from tests.support.owners import LabelsSuffice

UID = "model-uid"


def node(name: str, gpus: int) -> JsonObject:
    amounts = {"nvidia.com/gpu": str(gpus)}
    ready = {"type": "Ready", "status": "True"}
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": {"nvidia.com/gpu.product": "L4"}},
        "spec": {},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def deployment(replicas: int, *, version: int = 1, manager: str = names.MANAGER_SCALER) -> JsonObject:
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    return {
        "metadata": {
            "name": "chat-l4",
            "namespace": "ns",
            "uid": "deployment-uid",
            "resourceVersion": str(version),
            "generation": version,
            "labels": {names.LABEL_MODEL: "chat", names.LABEL_MODEL_UID: UID, names.LABEL_GPU_CLASS: "l4"},
            "ownerReferences": [{"apiVersion": API_VERSION, "kind": "Model", "uid": UID, "controller": True}],
            "managedFields": [{"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}}],
        },
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"resources": resources}]}}},
        "status": {"observedGeneration": version},
    }


class ScaleServer:
    """One Deployment of an API server: `/scale` with a resourceVersion, and what happens before a write arrives."""

    def __init__(self, replicas: int) -> None:
        self.stored = deployment(replicas)
        self.before_write: list[Callable[[], None]] = []
        self.written: list[int] = []

    def set(self, replicas: int) -> None:
        self.stored = deployment(replicas, version=int(self.stored["metadata"]["resourceVersion"]) + 1)

    async def get(self, *_: Any, **__: Any) -> JsonObject:
        return self.stored

    async def apply_scale(self, *_: Any, replicas: int, resource_version: str, **__: Any) -> JsonObject:
        if self.before_write:
            self.before_write.pop(0)()
        if resource_version != self.stored["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        self.written.append(replicas)
        self.set(replicas)
        return {}


class Plane:
    """A world with one class of two GPUs and one Model, and the planner over it."""

    def __init__(self, replicas: int = 0) -> None:
        self.server = ScaleServer(replicas)
        client = cast("KubeClient", self.server)
        self.world = World(client, CONFIG, "shoal-system", Recorder(client, "test"), ownership=LabelsSuffice())
        self.state = FleetState(self.world)
        remember(self.world, self.state)
        self.world.classes.upsert(_versioned(gpu_class("l4", "L4", cost="0.43", memory="24Gi")))
        self.world.nodes.upsert(node("l4-0", 2))
        raw = _versioned(model("chat", "ns"), uid=UID)
        self.world.models.upsert(raw)
        self.world.deployments.upsert(self.server.stored)
        self.model = Model.model_validate(raw)
        self.wanted = replicas
        self.woken: list[str] = []
        self.planner = Planner(self.world, self.state, self.asked, self.wake, Moves())
        self.state.enter(PlacementRequest(self.model, ArtifactFacts.model_validate(FACTS), "placed"))
        self.planner.plan()
        self.leads = True
        self.writer = ScaleWriter(self.world, lambda _: None, lambda: self.leads)

    def asked(self, _model: Model) -> int:
        """How many replicas the Model is to have; a test may say otherwise."""
        return self.wanted

    def wake(self, key: str, _delay: float) -> None:
        self.woken.append(key)

    async def scale(self, planned: int) -> int:
        return await self.writer.scale(self.model, "l4", lambda: self.state.target(UID, "l4", planned))


def _versioned(obj: JsonObject, *, uid: str = "uid") -> JsonObject:
    return obj | {"metadata": obj["metadata"] | {"uid": uid, "resourceVersion": "1", "generation": 1}}


@pytest.mark.parametrize("protected", [True, False])
async def test_a_reconcile_that_was_on_its_way_does_not_lower_what_woke_meanwhile(protected: bool) -> None:
    plane = Plane(replicas=1)
    plane.wanted = 0
    plane.planner.plan()

    def wakes() -> None:  # while the stale write is on its way to the API server
        if protected:  # the mutation: nothing tells the writer
            plane.state.reserve_wake(UID, "l4", 1, 1)
        plane.server.set(1)

    plane.server.before_write.append(wakes)
    assert await plane.scale(0) == int(protected)
    assert plane.server.written == ([] if protected else [0])


async def test_what_was_lifted_counts_until_a_plan_has_read_it_from_its_deployment() -> None:
    plane = Plane()
    plane.state.reserve_wake(UID, "l4", 1, 1)
    assert await plane.scale(0) == 1
    plane.state.wake_written(UID)
    assert plane.state.target(UID, "l4", 0) == 1
    plane.wanted = 1
    plane.planner.plan()
    assert plane.state.woken(UID, "l4") == 0
    assert plane.state.target(UID, "l4", 0) == 1  # decided by now


async def test_room_counts_what_was_asked_for_and_what_is_being_lifted() -> None:
    plane = Plane()
    assert plane.state.free_slots("l4", 1) == 2
    assert plane.state.free_slots("l4", 2) == 1
    plane.state.reserve_wake(UID, "l4", 1, 1)
    assert plane.state.free_slots("l4", 1) == 1
    assert plane.state.free_slots("l4", 2) == 0
    assert plane.state.free_slots("h100", 1) == 0


async def test_a_write_that_meets_another_reads_again_and_decides_again() -> None:
    plane = Plane(replicas=1)
    plane.wanted = 0
    plane.planner.plan()

    def another() -> None:
        plane.server.set(1)
        plane.wanted = 1
        plane.planner.plan()

    plane.server.before_write.append(another)
    assert await plane.scale(0) == 1
    assert plane.server.written == []


async def test_who_is_not_certain_to_lead_writes_nothing() -> None:
    plane = Plane(replicas=1)
    plane.wanted = 0
    plane.planner.plan()
    plane.leads = False
    with pytest.raises(APIServerUnavailable, match="not certain that this operator still leads"):
        await plane.scale(0)
    assert plane.server.written == []


def test_a_new_term_trusts_no_earlier_plan() -> None:
    plane = Plane(replicas=1)
    plane.state.reserve_wake(UID, "l4", 2, 1)
    plane.state.begin_term()
    assert plane.state.woken(UID, "l4") == 0


@pytest.mark.parametrize(("replicas", "marked"), [(1, ["a"]), (0, [])])
async def test_who_goes_first_is_said_where_some_stay_and_costs_no_write_where_all_go(
    monkeypatch: pytest.MonkeyPatch, replicas: int, marked: list[str]
) -> None:
    plan = VariantPlan("l4", replicas, 1, "0", leaving=(("l4-0", 2 - replicas),))
    assert await marks(monkeypatch, plan, {"a": "l4-0", "b": "l4-0"}) == marked


async def test_the_replica_goes_first_whose_node_an_autoscaler_can_remove_then(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = VariantPlan("l4", 2, 1, "0", leaving=(("l4-0", 1),), others=(("l4-0", 0), ("l4-1", 0)))
    assert await marks(monkeypatch, plan, {"a": "l4-0", "b": "l4-0", "c": "l4-1"}) == ["c"]


async def marks(monkeypatch: pytest.MonkeyPatch, plan: VariantPlan, pods: dict[str, str]) -> list[str]:
    """Which of the pods that serve (name -> node) get a deletion cost by the plan."""
    plane = Plane(replicas=len(pods))
    for name, node in pods.items():
        labels = {names.LABEL_MODEL_UID: UID, names.LABEL_GPU_CLASS: "l4", names.LABEL_COMPONENT: "engine"}
        metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "labels": labels}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        plane.world.pods.upsert({"metadata": metadata, "spec": {"nodeName": node}, "status": status})
    patched: list[str] = []

    async def merge_patch(_resource: Any, name: str, *_: Any, **__: Any) -> JsonObject:
        patched.append(name)
        raise Conflict("it is gone")

    monkeypatch.setattr(plane.server, "merge_patch", merge_patch, raising=False)
    await plane.writer.mark(plane.model, plan)
    return patched
