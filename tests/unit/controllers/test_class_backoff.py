"""The operator notices that a Model has no luck with a class, tells the planner once, and forgets after a while."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.api.meta import GROUP, JsonObject
from shoal.api.model import ModelSpec
from shoal.controllers.classbackoffs import ClassBackoffs
from shoal.controllers.coldstarts import LONGEST_TIMEOUT_SECONDS, ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.core.enginerevision import engine_revision
from shoal.core.facts import Deployment, Pod
from shoal.core.ownership import Link, Owner
from shoal.core.placement.backoff import RETRY_SECONDS, ClassBackoff
from shoal.kube.projections import Child
from shoal.kube.store import Table
from tests.support.operators import CONFIG, gpu_class, model
from tests.unit.controllers.test_scale_writes import UID, Plane, node

START = datetime(2026, 1, 1, tzinfo=UTC)
MODEL = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "a", "namespace": "chat", "uid": "m", "resourceVersion": "1", "generation": 1},
    "spec": {"source": {"uri": "hf://org/model"}},
}


class Cluster:
    """One Model with one pod, and a clock."""

    def __init__(self, updated: int = 1, *, replacing: bool = False, overdue: str | None = None) -> None:
        self.seconds, self.told, self.version = 0.0, 0, 0
        self.pods: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda pod: (pod.model_uid,)})
        deployments: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda child: (child.model_uid,)})
        found = Deployment(
            "chat", "a-l4", "d", "1", "m", "l4", 1, "nvidia.com/gpu", 1, 1, 1, frozenset(), updated, 0, 1, None,
            deleting=False, replacing=replacing, overdue=overdue,
        )  # fmt: skip
        link = Link("d", "chat", "a-l4", "a", "m", "l4", Owner(GROUP, "Model", "m"))
        self.put(deployments, Child("chat", "a-l4", "d", "m", b"{}", found, link))
        nothing = cast("Any", None)
        world = World(
            nothing, CONFIG, "shoal-system", nothing,
            now=lambda: START + timedelta(seconds=self.seconds), deployments=deployments,
        )  # fmt: skip
        world.pods = self.pods
        world.models.upsert(MODEL)
        self.state = FleetState(world)
        self.state.record("m").applied["l4"] = engine_revision(
            ModelSpec.model_validate(MODEL["spec"]), "l4", None, None
        )
        self.backoffs = ClassBackoffs(world, self.state, ColdStarts(world, self.state))
        subscribe(world.pods, self.backoffs.on_pod)
        self.pod(ready=False)

    def put(self, table: Table[Any], value: Any) -> None:
        self.version += 1
        meta = {"name": value.name, "namespace": "chat", "uid": value.uid, "resourceVersion": str(self.version)}
        table.upsert({"metadata": meta, "value": value}, since=None)

    def pod(self, *, ready: bool) -> None:
        pod = Pod("chat", "a-0", "p", "n1", False, False, ready, {}, "m", "l4", created=START, was_ready=ready)
        self.put(self.pods, pod)

    def after(self, seconds: float) -> dict[str, str]:
        self.seconds = seconds
        self.state.plan_due.clear()
        self.backoffs.check()
        self.told += self.state.plan_due.is_set()
        return dict(self.state.record("m").backoff_reasons)


def test_a_pod_that_starts_for_too_long_is_told_once_and_forgotten_after_an_hour() -> None:
    cluster = Cluster()
    assert cluster.after(LONGEST_TIMEOUT_SECONDS - 1) == {}
    assert cluster.told == 0
    minutes = f"{LONGEST_TIMEOUT_SECONDS / 60:.0f} min"
    why = {"l4": f"a replica there was not ready after {minutes}, three cold starts"}
    assert cluster.after(LONGEST_TIMEOUT_SECONDS) == why
    cluster.pod(ready=True)
    assert cluster.after(LONGEST_TIMEOUT_SECONDS + RETRY_SECONDS - 1) == why
    assert cluster.told == 1
    assert cluster.after(LONGEST_TIMEOUT_SECONDS + RETRY_SECONDS) == {}
    assert cluster.told == 2


def test_a_pod_counts_from_when_its_queue_has_admitted_it() -> None:
    """The API keeps no time for it: the operator notes when it last saw the gate."""
    cluster = Cluster()

    def pod(*gates: str) -> None:
        node = None if gates else "n1"
        found = Pod("chat", "a-0", "p", node, False, False, False, {}, "m", "l4", created=START, gates=gates)
        cluster.put(cluster.pods, replace(found, queue_managed=True))

    days = 3 * 86_400.0
    pod("kueue.x-k8s.io/admission")
    assert cluster.after(days) == {}
    pod()
    assert cluster.after(days + LONGEST_TIMEOUT_SECONDS - 1) == {}
    assert list(cluster.after(days + LONGEST_TIMEOUT_SECONDS)) == ["l4"]


def test_one_that_gets_ready_in_time_is_nothing() -> None:
    cluster = Cluster()
    cluster.pod(ready=True)
    assert cluster.after(LONGEST_TIMEOUT_SECONDS * 2) == {}
    assert cluster.told == 0


def test_a_rollout_is_judged_elsewhere() -> None:
    late = LONGEST_TIMEOUT_SECONDS * 2
    assert Cluster(updated=0).after(late) == {}
    assert Cluster(updated=0, replacing=True, overdue="no progress").after(late) == {}, "the former revision is there"
    assert Cluster(replacing=True).after(late) == {}


def test_a_rollout_that_is_overdue_and_has_nothing_left_of_the_former_revision_excuses_nothing() -> None:
    cluster = Cluster(replacing=True, overdue="no progress")
    assert list(cluster.after(LONGEST_TIMEOUT_SECONDS)) == ["l4"], "else it would hang there, and another class is free"
    working = Cluster(replacing=True, overdue="no progress")
    working.pod(ready=True)
    assert working.after(LONGEST_TIMEOUT_SECONDS) == {}


def test_the_plan_knows_that_the_engine_crashes_on_a_class_and_asks_for_a_node_of_another() -> None:
    plane = Plane(replicas=1)
    dear = gpu_class("h100", "H100", cost="2.49", memory="80Gi")
    dear["metadata"] |= {"uid": "h100", "resourceVersion": "1", "generation": 1}
    dear["spec"]["nodes"] = {"autoscaled": {"max": 1, "gpusPerNode": 1, "provisionSeconds": 600}}
    plane.world.classes.upsert(dear)

    def planned(*, crashes: bool) -> dict[str, int]:
        request = plane.state.record(UID).request
        assert request is not None
        runs = request.engine_revision("l4")
        backoff = ClassBackoff("a replica there did not start", START, revision=runs, crashes=crashes)
        plane.state.record(UID).all_backoffs = {"l4": backoff}
        return replan(plane)

    assert planned(crashes=False) == {"l4": 1}, "a GPU is free there"
    assert planned(crashes=True) == {"h100": 1}


def replan(plane: Plane) -> dict[str, int]:
    """Class -> replicas, by a new plan."""
    plane.planner.plan()
    decided = plane.state.record(UID).placement
    assert decided is not None
    return {v.gpu_class: v.replicas for v in decided.placement.variants if v.replicas}


def pod_on_l4(*, crashes: bool, template: str = "t1") -> JsonObject:
    """A pod whose engine crashes, or runs and never answers."""
    labels = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL: "chat", names.LABEL_MODEL_UID: UID}
    ended = {"exitCode": 1, "reason": "Error", "message": "CUDA out of memory"}
    engine: JsonObject = {"name": "engine", "restartCount": 0}
    if crashes:
        engine = {"name": "engine", "restartCount": 3, "lastState": {"terminated": ended}}
    return {
        "metadata": {
            "name": f"chat-l4-{template}",
            "namespace": "ns",
            "uid": template,
            "resourceVersion": "1",
            "creationTimestamp": "2020-01-01T00:00:00Z",
            "labels": labels | {names.LABEL_GPU_CLASS: "l4", "pod-template-hash": template},
        },
        "spec": {"nodeName": "l4-0", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
        "status": {"phase": "Running", "containerStatuses": [engine]},
    }


class BrokenModel:
    """A Model whose engine does not start on the cheaper of two classes. Where it crashes, an autoscaler adds the nodes
    of the dearer class; where it hangs, that class has a node."""

    def __init__(self, *, crashes: bool = True) -> None:
        self.plane = plane = Plane(replicas=1)
        dear = gpu_class("h100", "H100", cost="2.49", memory="80Gi")
        dear["metadata"] |= {"uid": "h100", "resourceVersion": "1", "generation": 1}
        if crashes:
            dear["spec"]["nodes"] = {"autoscaled": {"max": 1, "gpusPerNode": 1, "provisionSeconds": 600}}
        else:
            there = node("h100-0", 1)
            there["metadata"]["labels"] = {"nvidia.com/gpu.product": "H100"}
            plane.world.nodes.upsert(there)
        plane.world.classes.upsert(dear)
        self.backoffs = ClassBackoffs(plane.world, plane.state, ColdStarts(plane.world, plane.state))
        subscribe(plane.world.pods, self.backoffs.on_pod)
        plane.world.pods.upsert(pod_on_l4(crashes=crashes))

    def applied(self) -> None:
        """The Executor has written the Deployment of the cheaper class."""
        request = self.plane.state.record(UID).request
        assert request is not None
        self.plane.state.template_written(UID, "l4", request)

    def edited(self, **spec: Any) -> None:
        """The user changes the Model."""
        request = self.plane.state.record(UID).request
        assert request is not None
        changed = model("chat", "ns", **spec)["spec"]
        self.plane.model = request.model.model_copy(update={"spec": ModelSpec.model_validate(changed)})
        self.plane.state.enter(replace(request, model=self.plane.model))

    def placed(self) -> dict[str, int]:
        self.backoffs.check()
        return replan(self.plane)


CRASHES_OR_HANGS = pytest.mark.parametrize("crashes", [True, False], ids=["crashes", "hangs"])


@CRASHES_OR_HANGS
def test_a_model_that_the_user_mended_gets_the_class_back_where_its_former_revision_did_not_start(
    crashes: bool,
) -> None:
    chat = BrokenModel(crashes=crashes)
    chat.applied()
    assert chat.placed() == {"h100": 1}
    chat.plane.world.pods.remove("ns/chat-l4-t1")
    chat.edited(engine={"extraArgs": ["--mem-fraction-static=0.8"]})
    assert chat.placed() == {"l4": 1}, "a GPU is free there"
    chat.edited()
    assert chat.placed() == {"h100": 1}, "the user has taken the change back"


@CRASHES_OR_HANGS
def test_what_changes_no_engine_and_a_sleep_at_zero_end_no_backoff(crashes: bool) -> None:
    chat = BrokenModel(crashes=crashes)
    chat.applied()
    assert chat.placed() == {"h100": 1}
    chat.plane.world.pods.remove("ns/chat-l4-t1")
    chat.edited(scaling={"minReplicas": 1}, priority=3)
    chat.applied()
    assert chat.placed() == {"h100": 1}
    chat.plane.wanted = 0
    assert chat.placed() == {}
    chat.plane.wanted = 1
    assert chat.placed() == {"h100": 1}


@CRASHES_OR_HANGS
def test_a_replica_that_still_fails_as_before_says_nothing_of_the_mended_model(crashes: bool) -> None:
    """The Deployment is rolled out a moment after the Model was changed."""
    chat = BrokenModel(crashes=crashes)
    chat.applied()
    assert chat.placed() == {"h100": 1}
    chat.edited(engine={"extraArgs": ["--mem-fraction-static=0.8"]})
    chat.backoffs.check()
    assert chat.plane.state.record(UID).backoffs == {}
    assert chat.plane.state.record(UID).all_backoffs["l4"].template == "t1", "so that its successor is told from it"


@CRASHES_OR_HANGS
def test_a_new_leader_waits_until_it_knows_which_revision_does_not_start(crashes: bool) -> None:
    chat = BrokenModel(crashes=crashes)
    chat.applied()
    chat.plane.state.begin_term()
    assert chat.placed() == {"l4": 1}
    chat.applied()
    assert chat.placed() == {"h100": 1}
