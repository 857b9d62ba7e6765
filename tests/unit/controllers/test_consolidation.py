"""What the decision to empty a node is told of a class, and that a node is emptied only once pods avoid it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, cast

import pytest

from shoal.api import names, reasons
from shoal.api.gpuclass import ConsolidatedNode, GPUClass
from shoal.api.meta import JsonObject
from shoal.controllers import triggers
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.consolidation import FleetConsolidation
from shoal.controllers.health import FleetHealth
from shoal.controllers.placementrequest import PlacementDecision, PlacementRequest
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.candidates import Considered
from shoal.core.consolidation import ConsolidationSnapshot, NodeThere
from shoal.core.health import HealthPlan, Unit
from shoal.core.placement import Placement
from shoal.core.status import healthstatus
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden
from shoal.kube.events import Recorder
from tests.support.operators import CONFIG, NAMESPACE, gpu_class, model
from tests.support.owners import LabelsSuffice
from tests.support.signals import NOTHING, FakeSignals, gateway_pod

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
GPU = "nvidia.com/gpu"
HEALTHY = HealthPlan(())


_versions = count(1)


def stored(raw: JsonObject, uid: str, **more: Any) -> JsonObject:
    made = {
        "uid": uid,
        "resourceVersion": str(next(_versions)),
        "generation": 1,
        "creationTimestamp": "2026-11-27T11:59:30Z",
    }
    return {**raw, "metadata": {**made, **raw["metadata"]}, **more}


class Fleet:
    """A class with nodes, and replicas of the Model `chat` on them."""

    def __init__(self) -> None:
        recorder = Recorder(cast("KubeClient", None), "test")
        self.world = World(
            cast("KubeClient", None), CONFIG, NAMESPACE, recorder, now=lambda: self.now, ownership=LabelsSuffice()
        )
        self.now = NOW
        self.state, self.signals = FleetState(self.world), FakeSignals()
        triggers.remember(self.world, self.state)
        cold = ColdStarts(self.world, self.state)
        self.consolidation = FleetConsolidation(self.world, self.state, cold, self.signals)
        raw = gpu_class("spot", "L4", cost="0.43", memory="24Gi")
        raw["spec"]["nodes"] = {"autoscaled": {"max": 3, "gpusPerNode": 4, "consolidate": {"afterSeconds": 60}}}
        self.world.classes.upsert(stored(raw, "class"))
        self.model()

    def model(self, **spec: Any) -> None:
        variants = [{"class": "spot", "coldStartSeconds": 42}]
        self.world.models.upsert(stored(model("chat", "ns", **spec), "m", status={"variants": variants}))

    def node(self, name: str, **annotations: str) -> None:
        gpus = {GPU: "4"}
        labels = {"nvidia.com/gpu.product": "L4"}
        self.world.nodes.upsert(
            stored({"metadata": {"name": name, "labels": labels, "annotations": annotations or {}}, "spec": {}}, name,
                   status={"conditions": [{"type": "Ready", "status": "True"}], "capacity": gpus, "allocatable": gpus})
        )  # fmt: skip

    def pod(self, name: str, node: str | None, annotations: dict[str, str] | None = None, *, ours: bool = True) -> None:
        labels = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL: "chat",
                  names.LABEL_MODEL_UID: "m", names.LABEL_GPU_CLASS: "spot"} if ours else {}  # fmt: skip
        container = {"name": names.CONTAINER_ENGINE, "resources": {"requests": {GPU: "1"}, "limits": {GPU: "1"}}}
        raw = {"metadata": {"namespace": "ns", "name": name, "labels": labels, "annotations": annotations or {}},
               "spec": {"containers": [container], **({"nodeName": node} if node else {})},
               "status": {"conditions": [{"type": "Ready", "status": "True"}] if node else []}}  # fmt: skip
        self.world.pods.upsert(stored(raw, name))

    def gateway(self) -> None:
        ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-27T11:00:00Z"}]}
        self.world.pods.upsert(stored(gateway_pod(), "gateway", status=ready))

    @property
    def gpu_class(self) -> GPUClass:
        custom = self.world.classes.get("spot")
        assert custom is not None
        assert custom.object is not None
        return custom.object

    def seen(self) -> ConsolidationSnapshot:
        return self.consolidation.snapshot(self.gpu_class, HEALTHY)

    def seen_node(self, name: str) -> NodeThere:
        return next(each for each in self.seen().nodes if each.name == name)


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.node("n1")
    made.node("n2")
    made.pod("a", "n1")
    return made


def test_gpus_of_other_pods_and_annotations_that_forbid_a_move_are_seen(fleet: Fleet) -> None:
    [replica] = fleet.seen_node("n1").replicas
    assert (replica.pod, replica.gpus, replica.keeps, replica.model.cold_start_seconds) == ("ns/a", 1, "", 42.0)
    assert fleet.seen_node("n1").free == 3
    fleet.pod("foreign", "n1", ours=False)
    assert (fleet.seen_node("n1").others, fleet.seen_node("n1").free) == (1, 2)
    fleet.node("n3", **{"karpenter.sh/do-not-disrupt": "true"})
    fleet.node("n4", **{"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"})
    fleet.node("n5", **{"karpenter.sh/do-not-disrupt": "false"})
    assert [fleet.seen_node(n).keeps for n in ("n2", "n3", "n4", "n5")] == [
        "", "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/scale-down-disabled", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("annotations", "keeps"),
    [
        ({"karpenter.sh/do-not-disrupt": "true"}, "karpenter.sh/do-not-disrupt"),
        ({"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}, "cluster-autoscaler.kubernetes.io/safe-to-evict"),
        ({"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}, ""),
    ],
)
def test_a_replica_says_that_it_must_not_be_disrupted(fleet: Fleet, annotations: dict[str, str], keeps: str) -> None:
    fleet.pod("b", "n2", annotations)
    assert [each.keeps for each in fleet.seen_node("n2").replicas] == [keeps]


def test_a_replica_without_a_node_is_pending(fleet: Fleet) -> None:
    assert fleet.seen().pending == ()
    fleet.pod("b", None)
    [pod] = fleet.seen().pending
    assert (pod.pod, pod.seconds, pod.why) == ("ns/b", 30.0, "")


def test_what_gateways_hold_is_known_only_while_each_of_them_says_it(fleet: Fleet) -> None:
    def held() -> int | None:
        [replica] = fleet.seen_node("n1").replicas
        return replica.model.held

    fleet.gateway()
    assert held() == 0
    fleet.signals.ask("m", held=2)
    assert held() == 2
    fleet.signals.demands["m"] = replace(NOTHING, complete=False)
    assert held() is None
    fleet.signals.demands.clear()
    fleet.signals.silent.add("gateway")
    assert held() is None


def test_replicas_beyond_the_floor_go_by_themselves(fleet: Fleet) -> None:
    def idle() -> float | None:
        return fleet.seen_node("n1").replicas[0].model.idle_seconds

    fleet.model(scaling={"minReplicas": 1, "idleSeconds": 900})
    assert idle() is None
    fleet.pod("b", "n1")
    assert idle() == 900.0
    fleet.model(scaling={"minReplicas": 0, "idleSeconds": 60})
    assert idle() == 60.0


def test_a_paused_model_keeps_its_replicas_where_they_are(fleet: Fleet) -> None:
    found = fleet.world.models.get("ns/chat")
    assert found is not None
    assert found.object is not None

    def fixed() -> str:
        return fleet.seen_node("n1").replicas[0].model.fixed

    fleet.state.enter(PlacementRequest(found.object, None, "placed"))
    assert fixed() == ""
    fleet.state.enter(PlacementRequest(found.object, None, "frozen"))
    assert fixed() == "keeps what it has"


def test_a_node_that_is_being_emptied_takes_no_replica(fleet: Fleet) -> None:
    def free() -> list[str]:
        [supply] = fleet.state.gpus.supplies()
        return [each.name for each in supply.nodes]

    assert free() == ["n1", "n2"]
    raw = gpu_class("spot", "L4", cost="0.43", memory="24Gi")
    emptied = {"node": "n1", "since": "2026-11-27T11:00:00Z", "message": "3 of its 4 GPUs are free"}
    fleet.world.classes.upsert(stored(raw, "class", status={"consolidation": emptied}))
    assert free() == ["n2"]
    assert healthstatus.out_of_use(fleet.gpu_class) == {Unit("n1")}
    assert fleet.seen().after_seconds is None, "the class does not ask for it any more"
    assert fleet.seen().emptied is not None


class Labels:
    """An API server that only labels nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.refuses = fleet, True

    async def merge_patch(self, _kind: object, name: str, _namespace: None, body: JsonObject, **_: str) -> JsonObject:
        if self.refuses:
            raise Forbidden("nodes is forbidden", status=403)
        labels = {"nvidia.com/gpu.product": "L4"} | body["metadata"]["labels"]
        return stored({"metadata": {"name": name, "labels": labels}, "spec": {}}, name)


async def test_a_node_is_emptied_only_once_pods_avoid_it(fleet: Fleet) -> None:
    """The scheduler could bind the replacement to that very node."""
    fleet.model(scaling={"minReplicas": 4})
    for name in ("b", "c", "d"):
        fleet.pod(name, "n2")
    found = fleet.world.models.get("ns/chat")
    assert found is not None
    assert found.object is not None
    request = PlacementRequest(found.object, None, "placed")
    fleet.state.enter(request)
    placed = Placement((), (), 0, reasons.PLACED_ON, "4 on spot")
    fleet.state.record("m").decided = request, PlacementDecision(placed, Considered((), (), {}))
    fleet.world.client = client = cast("Any", Labels(fleet))
    health = FleetHealth(fleet.world, fleet.state.gpus)

    async def later(seconds: float) -> ConsolidatedNode | None:
        fleet.now += timedelta(seconds=seconds)
        found = await fleet.consolidation.reconcile(fleet.gpu_class, HEALTHY, health)
        assert found.condition is not None
        said.append((found.condition.status, found.condition.message))
        return found.emptied

    said: list[tuple[str, str]] = []
    assert await later(0) is None
    assert said.pop() == ("False", "the use of the class has not been the same for 60 s yet")
    assert await later(600) is None, "the label is refused"
    assert said.pop() == ("False", "n1: Shoal could not label it")
    client.refuses = False
    assert await later(600) is None, "the class is left alone for a while"
    assert "the class is left alone until" in said.pop()[1]
    shown = await later(1200)
    assert said.pop()[0] == "True"
    assert shown is not None
    assert (shown.node, shown.since) == ("n1", fleet.now)
    assert shown.message == "3 of its 4 GPUs are free, and ns/a fit on other nodes, which saves 1.72 USD per hour"
    assert health.is_labelled("spot", "n1")


async def test_a_class_that_does_not_ask_for_it_has_no_condition(fleet: Fleet) -> None:
    raw = gpu_class("spot", "L4", cost="0.43", memory="24Gi")
    raw["spec"]["nodes"] = {"autoscaled": {"max": 3, "gpusPerNode": 4}}
    fleet.world.classes.upsert(stored(raw, "class"))
    health = FleetHealth(fleet.world, fleet.state.gpus)
    found = await fleet.consolidation.reconcile(fleet.gpu_class, HEALTHY, health)
    assert (found.emptied, found.condition, found.recheck_seconds) == (None, None, None)
