"""When the scaler decides, what it does at once, and what it never does."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.children import inferencepools
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.executor import Executor
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.keda.driver import Driver
from shoal.controllers.keda.targets import ScalerTargets
from shoal.controllers.placementrequest import PlacementRequest
from shoal.controllers.planner import Planner
from shoal.controllers.scaling import scaler as module
from shoal.controllers.scaling.observe import ModelObserver, no_past
from shoal.controllers.scaling.scaler import PACE_SECONDS, Scaler
from shoal.controllers.scaling.stalesignals import StaleSignals
from shoal.controllers.scaling.wake import Waker
from shoal.controllers.state import FleetState
from shoal.controllers.transport import CertificateIssuer
from shoal.controllers.triggers import remember, subscribe
from shoal.core.candidates import Considered
from shoal.core.placement import Moves, VariantPlan
from shoal.kube.queue import WorkQueue
from tests.support.controlplane import FACTS
from tests.support.signals import FakeSignals, gateway_pod
from tests.unit.controllers.test_scale_writes import UID, Plane, node

SINCE = "2026-01-01T00:00:00Z"


class NoEndpoint:
    """KEDA is not answered."""

    ca: str | None = None
    problem: str | None = None

    def need(self) -> None:
        """Nobody listens."""


class Stage:
    """A plane with a scaler that leads, one gateway, and a clock of the test's own."""

    def __init__(self, replicas: int) -> None:
        self.plane = Plane(replicas)
        self.now = 1000.0
        self.signals = FakeSignals()
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": SINCE}
        pod = gateway_pod()
        pod["metadata"] |= {"uid": "g", "resourceVersion": "1"}
        self.plane.world.pods.upsert(pod | {"status": {"conditions": [ready], "startTime": SINCE}})
        world, state = self.plane.world, self.plane.state
        wake = self.plane.woken.append
        targets = ScalerTargets(world, state.reservations, wake)
        cold = ColdStarts(world, state)
        install = InstallKeySource(world.client, world.namespace, behind=lambda: False, in_use=set)
        driver = Driver(world, targets, NoEndpoint(), wake)
        self.executor = Executor(
            world, state, driver, install, CertificateIssuer(world), cold, lambda _: None, inferencepools.kinds(world)
        )
        self.waker = Waker(world, state, self.executor, WorkQueue("wake"))

        def clock() -> float:
            return self.now

        observer = ModelObserver(world, state, cold, self.signals, clock, no_past)
        stale_signals = StaleSignals(state, wake, clock)
        self.scaler = Scaler(world, state, observer, self.waker, stale_signals, self.plane.wake, clock=clock)
        self.planner = Planner(world, state, self.scaler.wanted, self.plane.wake, Moves())
        subscribe(world.pods, self.scaler.on_pod)
        subscribe(world.deployments, self.scaler.on_deployment)
        subscribe(world.models, self.scaler.on_model)
        self.signals.heard.append(self.scaler.changed)
        self.decided: list[float] = []

    async def __aenter__(self) -> "Stage":
        self._task = asyncio.create_task(self.scaler.run())
        await asyncio.sleep(0)
        self.planner.plan()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def wanted(self) -> int:
        return self.scaler.wanted(self.plane.model)

    async def tell(self, *, urgent: bool, after: float = 0.0) -> None:
        self.now += after
        self.signals.tell(UID, urgent=urgent)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which something was decided."""
    times: list[float] = []
    real = module.decide

    def decide(snapshot: Any, memory: Any, now: float) -> Any:
        times.append(now)
        return real(snapshot, memory, now)

    monkeypatch.setattr(module, "decide", decide)
    return times


async def test_a_request_at_zero_is_asked_for_in_the_same_breath() -> None:
    async with Stage(0) as stage:
        assert stage.wanted == 0
        stage.signals.ask(UID)
        for _ in range(3):
            await asyncio.sleep(0)
        assert stage.wanted == 1
        assert stage.plane.state.woken(UID, "l4") == 1
        assert stage.plane.state.target(UID, "l4", 0) == 1  # whatever the last plan said


async def test_nobody_is_woken_ahead_of_the_plan_where_another_model_waits_for_the_same_gpus() -> None:
    async with Stage(0) as stage:
        stage.plane.state._contested = frozenset({"l4"})
        stage.signals.ask(UID)
        for _ in range(3):
            await asyncio.sleep(0)
        assert stage.wanted == 1
        assert stage.plane.state.woken(UID, "l4") == 0


async def test_what_changes_all_the_time_is_decided_once_a_second_and_what_is_urgent_at_once(
    counted: list[float],
) -> None:
    async with Stage(1) as stage:
        await stage.tell(urgent=False, after=PACE_SECONDS)
        counted.clear()
        for _ in range(50):
            await stage.tell(urgent=False, after=PACE_SECONDS / 100)
        assert counted == []
        await stage.tell(urgent=True)
        assert len(counted) == 1
        await stage.tell(urgent=False, after=PACE_SECONDS)
        assert len(counted) == 2


async def test_who_does_not_lead_decides_nothing(counted: list[float]) -> None:
    stage = Stage(0)
    stage.signals.ask(UID)
    await asyncio.sleep(0)
    assert counted == []
    assert stage.plane.state.woken(UID, "l4") == 0


async def test_each_term_begins_at_what_the_deployments_ask_for() -> None:
    stage = Stage(0)
    async with stage:
        stage.signals.ask(UID)
        for _ in range(3):
            await asyncio.sleep(0)
        assert stage.wanted == 1
    stage.plane.server.set(2)
    stage.plane.world.deployments.upsert(stage.plane.server.stored)
    async with stage:
        assert stage.wanted == 2


async def test_a_model_that_cannot_be_decided_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        raise ArithmeticError

    async with Stage(1) as stage:
        monkeypatch.setattr(module, "decide", breaks)
        await stage.tell(urgent=True)
        assert stage.wanted == 1


def test_who_is_asked_how_many_knows_the_classes_from_the_first_plan_on() -> None:
    """The first decision of a term says which class the next request wakes."""
    plane = Plane()
    state = FleetState(plane.world)
    seen: list[Considered | None] = []

    def wanted(_: Model) -> int:
        seen.append(state.record(UID).considered)
        return 0

    remember(plane.world, state)
    state.enter(PlacementRequest(plane.model, ArtifactFacts.model_validate(FACTS), "placed"))
    Planner(plane.world, state, wanted, plane.wake, Moves()).plan()
    (known,) = seen
    assert known is not None
    assert [c.gpu_class for c in known.candidates] == ["l4"]


async def test_a_deployment_does_not_shrink_by_a_plan_whose_pods_are_not_marked_yet() -> None:
    stage = Stage(3)
    plane = stage.plane
    plane.world.nodes.upsert(node("l4-1", 2))
    pods = {name: serving_pod(name, on) for name, on in {"a": "l4-0", "b": "l4-0", "c": "l4-1"}.items()}
    for pod in pods.values():
        plane.world.pods.upsert(pod)
    marked: list[str] = []
    while_marked: list[Callable[[], object]] = []

    async def merge_patch(_resource: Any, name: str, _namespace: str, body: JsonObject, **_: Any) -> JsonObject:
        marked.append(name)
        while while_marked:
            while_marked.pop()()
        metadata = pods[name]["metadata"] | {"resourceVersion": "2", "annotations": body["metadata"]["annotations"]}
        return pods[name] | {"metadata": metadata}

    def planned(wanted: int) -> VariantPlan:
        stage.planner = Planner(plane.world, plane.state, lambda _model: wanted, plane.wake, Moves())
        stage.planner.plan()
        placement = plane.state.record(UID).placement
        assert placement is not None
        (variant,) = placement.placement.variants
        return variant

    async def run(plan: VariantPlan) -> list[int]:
        await stage.executor._replicas(plane.model, plan, 0)
        return plane.server.written

    plane.server.merge_patch = merge_patch  # pyright: ignore[reportAttributeAccessIssue]
    two = planned(2)
    while_marked.append(lambda: planned(1))
    # While one pod is marked, it is decided that two shall go. The second one would be any.
    assert await run(two) == []
    assert len(marked) == 1
    # The later plan's own run, whichever plan it began with.
    assert await run(two) == [1]
    assert len(set(marked)) == 2
    # No pod is to be chosen where all go.
    planned(0)
    assert await run(two) == [1, 0]


def serving_pod(name: str, on: str) -> JsonObject:
    labels = {names.LABEL_MODEL_UID: UID, names.LABEL_GPU_CLASS: "l4", names.LABEL_COMPONENT: "engine"}
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "labels": labels}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    spec = {"nodeName": on, "containers": [{"name": "engine", "resources": resources}]}
    return {"metadata": metadata, "spec": spec, "status": status}
