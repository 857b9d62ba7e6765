"""The operator notices that a Model has no luck with a class, tells the planner once, and forgets after a while."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from shoal.api.meta import GROUP
from shoal.controllers.classbackoffs import ClassBackoffs
from shoal.controllers.coldstarts import LONGEST_TIMEOUT_SECONDS, ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.core.facts import Deployment, Pod
from shoal.core.ownership import Link, Owner
from shoal.core.placement.backoff import RETRY_SECONDS, ClassBackoff
from shoal.kube.projections import Child
from shoal.kube.store import Table
from tests.support.operators import CONFIG, gpu_class
from tests.unit.controllers.test_scale_writes import UID, Plane

START = datetime(2026, 1, 1, tzinfo=UTC)
MODEL = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "a", "namespace": "chat", "uid": "m", "resourceVersion": "1", "generation": 1},
    "spec": {"source": {"uri": "hf://org/model"}},
}


class Cluster:
    """One Model with one pod, and a clock."""

    def __init__(self, updated: int = 1) -> None:
        self.seconds, self.told, self.version = 0.0, 0, 0
        self.pods: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda pod: (pod.model_uid,)})
        deployments: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda child: (child.model_uid,)})
        found = Deployment(
            "chat", "a-l4", "d", "1", "m", "l4", 1, "nvidia.com/gpu", 1, 1, 1, frozenset(), updated, 0, 1, None,
            deleting=False,
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
    assert Cluster(updated=0).after(LONGEST_TIMEOUT_SECONDS * 2) == {}


def test_the_plan_knows_that_the_engine_crashes_on_a_class_and_asks_for_a_node_of_another() -> None:
    plane = Plane(replicas=1)
    dear = gpu_class("h100", "H100", cost="2.49", memory="80Gi")
    dear["metadata"] |= {"uid": "h100", "resourceVersion": "1", "generation": 1}
    dear["spec"]["nodes"] = {"autoscaled": {"max": 1, "gpusPerNode": 1, "provisionSeconds": 600}}
    plane.world.classes.upsert(dear)

    def planned(*, crashes: bool) -> dict[str, int]:
        backoff = ClassBackoff("a replica there did not start", START, crashes=crashes)
        plane.state.record(UID).backoffs = {"l4": backoff}
        plane.planner.plan()
        decided = plane.state.record(UID).placement
        assert decided is not None
        return {v.gpu_class: v.replicas for v in decided.placement.variants if v.replicas}

    assert planned(crashes=False) == {"l4": 1}, "a GPU is free there"
    assert planned(crashes=True) == {"h100": 1}
