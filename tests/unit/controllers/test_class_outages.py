"""What one Model finds out of the nodes of a class holds for all Models, and for the operator that leads next."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.api.meta import API_VERSION, JsonObject
from shoal.controllers import pendingpodevents, triggers
from shoal.controllers.classbackoffs import ClassBackoffs
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.pendingpodevents import PendingPodEvents
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.facts import NodeRefusal, QueueWait
from shoal.core.status import gpuclassstatus
from shoal.kube.errors import KubeError
from tests.support.operators import CONFIG, gpu_class, model
from tests.support.owners import LabelsSuffice

START = datetime(2026, 1, 1, tzinfo=UTC)
FULL_NODES = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "3 Insufficient nvidia.com/gpu.",
}  # fmt: skip
LIMITS = "pod didn't trigger scale-up: 1 max node group size reached"
WHY = f"for 40 s no autoscaler added a node for a replica there: cluster-autoscaler: {LIMITS}"


class Events:
    """What an autoscaler has said, by the uid of the pod."""

    def __init__(self) -> None:
        self.of: dict[str, list[JsonObject]] = {}
        self.fails: KubeError | None = None

    def say(self, uid: str, reason: str, note: str, seconds: int) -> None:
        at = f"{START + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"
        event = {"reason": reason, "note": note, "reportingController": "cluster-autoscaler"}
        self.of.setdefault(uid, []).append(event | {"deprecatedLastTimestamp": at})

    async def list_pages(self, _: Any, *, field_selector: str, **__: Any) -> Any:
        if self.fails is not None:
            raise self.fails

        class Page:
            items = self.of.get(field_selector.removeprefix("regarding.uid="), [])

        yield Page


class Fleet:
    """Two Models with a pending replica each on the same class."""

    def __init__(self, events: Events, classes: Iterable[JsonObject] = (), *, models: Iterable[str] = "ab") -> None:
        self.seconds = 0.0
        none = cast("Any", None)
        self.world = World(
            cast("Any", events), CONFIG, "s", none,
            now=lambda: START + timedelta(seconds=self.seconds), ownership=LabelsSuffice(),
        )  # fmt: skip
        self.state = FleetState(self.world)
        triggers.remember(self.world, self.state)
        cold = ColdStarts(self.world, self.state)
        self.backoffs = ClassBackoffs(self.world, self.state, cold)
        triggers.subscribe(self.world.pods, self.backoffs.on_pod)
        self.reader = PendingPodEvents(self.world, self.state, cold)
        self.told: list[None] = []
        triggers.after(self.backoffs.changed, lambda: self.told.append(None))
        for raw in classes or [spot()]:
            self.world.classes.upsert(raw)
        for uid in models:
            raw = model(uid, "chat")
            raw["metadata"] |= {"uid": uid, "resourceVersion": "1", "generation": 1}
            self.world.models.upsert(raw)
            self.world.pods.upsert(pod(uid))

    async def look(self, seconds: float) -> dict[str, str]:
        """Class -> why no node of it is expected."""
        self.seconds = seconds
        await self.reader.check()
        self.backoffs.check()
        return {name: each.why for name, each in self.state.outages.items()}


def spot(status: JsonObject | None = None, generation: int = 1) -> JsonObject:
    raw = gpu_class("spot", "SPOT", cost="0.10")
    raw["metadata"] |= {"uid": "spot", "resourceVersion": "1", "generation": generation}
    raw["spec"]["nodes"] = {"autoscaled": {"max": 3, "gpusPerNode": 4, "provisionSeconds": 600}}
    return raw | ({"status": status} if status else {})


def pod(uid: str, version: int = 1) -> JsonObject:
    labels = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL_UID: uid, names.LABEL_GPU_CLASS: "spot"}
    metadata = {"namespace": "chat", "name": f"p-{uid}", "uid": f"p-{uid}", "resourceVersion": str(version),
                "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}  # fmt: skip
    return {
        "metadata": metadata,
        "spec": {"containers": []},
        "status": {"phase": "Pending", "conditions": [FULL_NODES]},
    }


def deployment(uid: str) -> JsonObject:
    owner = {"apiVersion": API_VERSION, "kind": "Model", "uid": uid, "controller": True}
    metadata = {
        "namespace": "chat", "name": f"{uid}-spot", "uid": f"d-{uid}", "resourceVersion": "1", "generation": 1,
        "labels": {names.LABEL_MODEL: uid, names.LABEL_MODEL_UID: uid, names.LABEL_GPU_CLASS: "spot"},
        "ownerReferences": [owner],
    }  # fmt: skip
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    return {
        "metadata": metadata,
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"resources": resources}]}}},
        "status": {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1},
    }


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's clock does not move in these tests."""
    monkeypatch.setattr(pendingpodevents, "AGAIN_SECONDS", 0.0)


async def test_one_model_is_refused_and_no_other_waits_for_nodes_of_the_class() -> None:
    events = Events()
    events.say("p-a", "NotTriggerScaleUp", LIMITS, 5)
    events.say("p-b", "TriggeredScaleUp", "pod triggered scale-up: [{spot 2->3 (max: 3)}]", 2)
    fleet = Fleet(events)
    assert await fleet.look(10) == {}
    assert await fleet.look(40) == {"spot": WHY}
    assert await fleet.look(45) == {"spot": WHY}
    assert len(fleet.told) == 1, "the class's status is written once"
    assert fleet.state.record("a").backoffs == {}, "GPUs of nodes that exist are as good as before"
    assert [s.outage for s in fleet.state.supplies()] == [WHY]
    assert not fleet.state.reserve_surge("a", "spot", 1), "a rollout counts on no node either"
    # The node that was announced to the other Model's replica comes: it goes on waiting.
    announced = {uid: next(iter(fleet.world.pods.by("model", uid))).node_announced for uid in "ab"}
    assert announced == {"a": False, "b": True}
    assert (fleet.state.dead_ends("a"), fleet.state.dead_ends("b")) == ({"spot"}, set())


async def test_a_scale_up_that_begins_after_all_is_waited_for() -> None:
    events = Events()
    events.say("p-a", "NotTriggerScaleUp", LIMITS, 5)
    fleet = Fleet(events, models="a")
    assert await fleet.look(10) == {}
    events.say("p-a", "TriggeredScaleUp", "pod triggered scale-up: [{spot 2->3 (max: 3)}]", 20)
    assert await fleet.look(40) == {}
    assert await fleet.look(70) == {}


async def test_an_outage_ends_after_its_time_while_events_cannot_be_read() -> None:
    """What was read last would renew it each time."""
    events = Events()
    events.say("p-a", "NotTriggerScaleUp", LIMITS, 5)
    fleet = Fleet(events, models="a")
    await fleet.look(10)
    assert await fleet.look(40) == {"spot": WHY}
    events.fails = KubeError("events is forbidden")
    assert await fleet.look(70) == {"spot": WHY}
    await fleet.look(200)
    assert await fleet.look(945) == {}, "its time is over, and nothing new was seen"
    # When they can be read again, what they say counts as at first.
    events.fails = None
    assert await fleet.look(975) == {}
    assert list(await fleet.look(1005)) == ["spot"]


async def test_the_operator_that_leads_next_does_not_wait_anew() -> None:
    events = Events()
    events.say("p-a", "NotTriggerScaleUp", LIMITS, 5)
    first = Fleet(events)
    await first.look(10)
    await first.look(40)
    found = first.world.accepted_classes()["spot"]
    written = gpuclassstatus.status(
        found, first.state.gpus.usage(found), (), overlapping={}, overhead=None, now=first.world.now(),
        outage=first.state.outages["spot"],
    ).model_dump(mode="json", by_alias=True, exclude_none=True)  # fmt: skip

    second = Fleet(Events(), [spot(written)], models="b")
    second.backoffs.begin_term()
    assert await second.look(60) == {"spot": WHY}
    assert [s.outage for s in second.state.supplies()] == [WHY]
    assert await second.look(941) == {}, "its time is over, and nobody is refused now"
    assert [s.outage for s in second.state.supplies()] == [""]

    changed = Fleet(Events(), [spot(written, generation=2)], models="b")
    changed.backoffs.begin_term()
    assert await changed.look(60) == {}, "the class is another one now"


async def test_a_node_that_is_announced_after_an_outage_gets_its_whole_time() -> None:
    events = Events()
    events.say("p-a", "NotTriggerScaleUp", LIMITS, 5)
    fleet = Fleet(events, models="a")
    for seconds in (10, 40, 945, 1850):
        await fleet.look(seconds)
    assert await fleet.look(1860) == {"spot": WHY}, "the Model has no other class, and waits"
    events.say("p-a", "TriggeredScaleUp", "pod triggered scale-up: [{spot 2->3 (max: 3)}]", 1890)
    await fleet.look(1900)
    assert fleet.state.record("a").backoffs == {}, "the node is on its way"
    assert await fleet.look(2491) == {"spot": WHY}
    assert [each.reason for each in fleet.state.outages.values()] == ["LimitReached"]
    await fleet.look(2760)
    assert [each.reason for each in fleet.state.outages.values()] == ["NoNodeCame"], "it is late"


async def test_the_only_serving_replica_waits_for_one_that_starts_beside_one_that_gets_no_node() -> None:
    events = Events()
    events.say("p-a", "NotTriggerScaleUp", LIMITS, 5)
    fleet = Fleet(events, models="a")
    await fleet.look(10)
    assert await fleet.look(40) == {"spot": WHY}
    starts = pod("a", 2)
    starts["metadata"] |= {"name": "p-a2", "uid": "p-a2"}
    starts["spec"]["nodeName"] = "gpu-1"
    fleet.world.pods.upsert(starts)
    assert fleet.state.dead_ends("a") == set()


def test_what_kueue_asked_for_in_vain_is_known_of_the_class_before_the_plan_moves_the_replica() -> None:
    fleet = Fleet(Events(), models="a")
    fleet.seconds = 30
    raw = pod("a", 2)
    raw["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    fleet.world.pods.upsert(raw)
    fleet.world.deployments.upsert(deployment("a"))
    assert fleet.state.outages == {}
    assert fleet.state.replica_states("a")["spot"].rejected == 0
    refused = NodeRefusal("StockOut", "ProvisioningRequest chat/a: Failed, no stock", everyone=True, repeated=True)
    wait = QueueWait("AdmissionRejected", "x", refused, START + timedelta(seconds=20))
    fleet.world.pods.amend("chat/p-a", "p-a", lambda found: replace(found, queue_wait=wait))
    assert [each.reason for each in fleet.state.outages.values()] == ["StockOut"]
    assert fleet.state.outages["spot"].until == START + timedelta(seconds=920)
    found = fleet.state.replica_states("a")["spot"]
    assert (found.rejected, found.rejection) == (1, "ProvisioningRequest chat/a: Failed, no stock")


def test_a_pod_that_kueue_has_given_up_asks_again_also_as_the_last_one_of_a_rollout() -> None:
    """Replaced in place, the only replica of a Model was gone, and its successor stood there until a person deleted
    it."""
    fleet = Fleet(Events(), models="a")
    fleet.seconds = 30
    raw = pod("a", 2)
    raw["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    fleet.world.pods.upsert(raw)
    rolling = deployment("a")
    rolling["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "2"}
    rolling["status"]["conditions"] = [{"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}]
    fleet.world.deployments.upsert(rolling)
    refused = NodeRefusal("StockOut", "no stock", everyone=True, repeated=True)
    wait = QueueWait("AdmissionRejected", "x", refused, START + timedelta(seconds=20))
    fleet.world.pods.amend("chat/p-a", "p-a", lambda found: replace(found, queue_wait=wait))
    assert fleet.state.replica_states("a")["spot"].rejected == 1
    # The Deployment has shrunk, and its controller has not seen it yet: asked for again now, the pod would stay.
    shrunk = rolling | {"spec": rolling["spec"] | {"replicas": 0}}
    shrunk["metadata"] = rolling["metadata"] | {"resourceVersion": "2", "generation": 2}
    fleet.world.deployments.upsert(shrunk)
    found = fleet.state.replica_states("a")["spot"]
    assert (found.replicas, found.rejected) == (0, 1)
    older = rolling | {"status": rolling["status"] | {"replicas": 2}}
    older["metadata"] = rolling["metadata"] | {"resourceVersion": "3", "generation": 3}
    fleet.world.deployments.upsert(older)
    assert fleet.state.replica_states("a")["spot"].rejected == 0, "a replica of before may serve, and could go instead"
