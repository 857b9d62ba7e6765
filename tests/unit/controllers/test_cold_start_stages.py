"""What engines say of their starts finds its way to the stages of a cold start."""

from dataclasses import replace
from typing import cast

from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.kube.client import KubeClient
from shoal.kube.events import Recorder
from tests.support.operators import CONFIG, model
from tests.support.owners import LabelsSuffice
from tests.unit.core.test_coldstart import pod


def test_the_capture_of_graphs_belongs_to_the_start_of_its_pod() -> None:
    client = cast("KubeClient", None)
    world = World(client, CONFIG, "shoal-system", Recorder(client, "test"), ownership=LabelsSuffice())
    world.models.upsert(model("chat", "ns") | {"metadata": {"name": "chat", "namespace": "ns", "uid": "u"}})
    cold = ColdStarts(world, FleetState(world))
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
