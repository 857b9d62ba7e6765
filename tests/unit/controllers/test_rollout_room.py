"""Room for a rollout: GPUs of one replica more, those of nodes that may come, or another class."""

from typing import Any, cast

from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.placementrequest import PlacementRequest
from shoal.controllers.planner import Planner
from shoal.controllers.state import FleetState
from shoal.controllers.triggers import remember
from shoal.controllers.world import World
from shoal.core.placement import Held, Moves, ReplicaState
from shoal.kube.client import KubeClient
from shoal.kube.events import Recorder
from tests.support.controlplane import FACTS
from tests.support.operators import CONFIG, gpu_class, model
from tests.support.owners import LabelsSuffice

UID = "model-uid"


def versioned(obj: JsonObject, uid: str) -> JsonObject:
    return obj | {"metadata": obj["metadata"] | {"uid": uid, "resourceVersion": "1", "generation": 1}}


def fleet(*classes: JsonObject) -> FleetState:
    client = cast("KubeClient", None)
    world = World(client, CONFIG, "shoal-system", Recorder(client, "test"), ownership=LabelsSuffice())
    state = FleetState(world)
    remember(world, state)
    for each in classes:
        world.classes.upsert(versioned(each, each["metadata"]["name"]))
    world.models.upsert(versioned(model("chat", "ns"), UID))
    return state


def node(name: str, product: str, gpus: int) -> JsonObject:
    amounts = {"nvidia.com/gpu": str(gpus)}
    labels = {"nvidia.com/gpu.product": product}
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": labels},
        "spec": {},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def test_nodes_that_an_autoscaler_may_add_are_room_for_so_many_rollouts() -> None:
    autoscaled: dict[str, Any] = {"autoscaled": {"max": 2, "gpusPerNode": 2, "provisionSeconds": 30}}
    spot, fixed = gpu_class("spot", "SPOT"), gpu_class("fixed", "FIXED")
    spot["spec"] |= {"nodes": autoscaled}
    state = fleet(spot, fixed)
    state.supplies()
    assert not state.reserve_surge(UID, "fixed", 1), "it has no node, and none comes"
    assert not state.reserve_surge(UID, "spot", 4), "no node has as many GPUs"
    assert [state.reserve_surge(f"model-{n}", "spot", 2) for n in range(3)] == [True, True, False]


def test_a_rollout_without_room_is_planned_on_another_class_and_its_model_hears_of_it() -> None:
    state = fleet(gpu_class("l4", "L4", cost="0.43", memory="24Gi"), gpu_class("h100", "H100", cost="2.49"))
    world, woken = state.gpus._world, []
    world.nodes.upsert(node("l4-0", "L4", 1))
    world.nodes.upsert(node("h100-0", "H100", 1))
    planner = Planner(world, state, lambda _: 1, lambda key, delay: woken.append((key, delay)), Moves())
    raw = versioned(model("chat", "ns"), UID)
    request = PlacementRequest(Model.model_validate(raw), ArtifactFacts.model_validate(FACTS), "placed")
    state.enter(request)
    state.record(UID).replica_states = {"l4": ReplicaState(1, 1, {"l4-0": Held(1, 1)}, 1)}
    planner.plan()
    woken.clear()
    state.plan_urgent.clear()

    state.lack_surge(UID, "l4", lacks=True)
    assert state.plan_urgent.is_set()
    planner.plan()
    decided = state.decided(request)
    assert decided is not None
    assert decided.lacks_surge == {"l4"}
    assert {v.gpu_class: (v.replicas, v.relocated) for v in decided.placement.variants} == {
        "l4": (1, True),
        "h100": (1, False),
    }
    assert woken == [("ns/chat", 0.0)]

    woken.clear()
    state.lack_surge(UID, "l4", lacks=False)
    planner.plan()
    assert woken == [("ns/chat", 0.0)]
    decided = state.decided(request)
    assert decided is not None
    assert {v.gpu_class: v.replicas for v in decided.placement.variants if v.replicas} == {"l4": 1}
