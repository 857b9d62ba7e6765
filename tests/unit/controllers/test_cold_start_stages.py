"""What engines say of their starts finds its way to the stages of a cold start, and how long nodes take to come to the
expected one."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.kube.client import KubeClient
from shoal.kube.events import Recorder
from tests.support.operators import CONFIG, gpu_class, model
from tests.support.owners import LabelsSuffice
from tests.unit.core.test_coldstart import pod


def measured() -> tuple[World, ColdStarts]:
    client = cast("KubeClient", None)
    world = World(client, CONFIG, "shoal-system", Recorder(client, "test"), ownership=LabelsSuffice())
    world.models.upsert(model("chat", "ns") | {"metadata": {"name": "chat", "namespace": "ns", "uid": "u"}})
    return world, ColdStarts(world, FleetState(world))


def test_the_capture_of_graphs_belongs_to_the_start_of_its_pod() -> None:
    world, cold = measured()
    first, second = pod(), replace(pod(), uid="q")
    for each in (first, second):
        cold.on_pod(each.key, replace(each, ready=False), each)
    custom = world.models.get("ns/chat")
    assert custom is not None
    assert custom.object is not None

    [before] = cold.stages(custom.object).values()
    assert before.last.graph_capture is None, "unknown, and not zero"
    assert cold.on_graphs(second, 12.4)
    [after] = cold.stages(custom.object).values()
    assert (after.last.load, after.last.graph_capture, after.median.graph_capture) == (60, 12, 12)
    assert not cold.on_graphs(replace(first, uid="restarted"), 30), "no start of it was measured"
    assert cold.on_graphs(first, 20)
    [both] = cold.stages(custom.object).values()
    assert (both.last.graph_capture, both.median.graph_capture) == (12, 16)


def starts(cold: ColdStarts, uid: str, schedule: int) -> None:
    """A replica is bound after so many seconds, and Ready 145 s later."""
    before = pod()
    assert before.created is not None
    assert before.ready_since is not None
    late = timedelta(seconds=schedule - 5)
    after = replace(before, uid=uid, scheduled=before.created + timedelta(seconds=schedule))
    after = replace(after, ready_since=before.ready_since + late)
    cold.on_pod(after.key, replace(after, ready=False), after)


def waits(world: World, cold: ColdStarts) -> dict[str, int]:
    custom = world.models.get("ns/chat")
    assert custom is not None
    assert custom.object is not None
    return cold.node_waits(custom.object)


def test_the_next_replica_may_wait_for_a_node_although_the_last_one_found_it() -> None:
    world, cold = measured()
    fixed = gpu_class("h100", "")["spec"]

    def classed(version: str, spec: dict[str, Any]) -> None:
        metadata = {"name": "h100", "uid": "c", "resourceVersion": version}
        world.classes.upsert(gpu_class("h100", "") | {"metadata": metadata, "spec": spec})

    def node(version: str, created: str) -> None:
        metadata = {"name": "n", "uid": "n", "resourceVersion": version, "creationTimestamp": created}
        world.nodes.upsert({"metadata": metadata})

    classed("1", fixed)
    starts(cold, "a", 5)
    assert waits(world, cold) == {}, "nobody adds nodes of the class"
    autoscaled = {"autoscaled": {"max": 3, "gpusPerNode": 1, "provisionSeconds": 300}}
    classed("2", {**fixed, "nodes": autoscaled})
    assert waits(world, cold) == {"h100": 295}, "what the class says, until a node has come"
    node("1", "2026-11-25T00:01:00Z")
    starts(cold, "b", 80)
    assert waits(world, cold) == {}, "the last start has all of the wait in it"
    node("2", "2026-11-24T00:00:00Z")
    starts(cold, "c", 5)
    assert waits(world, cold) == {"h100": 75}, "as measured, and no longer what the class says"
