"""Labels on nodes whose GPUs are out of use, once their GPUClass is gone."""

import asyncio
from typing import Any, cast

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.controllers.gpuclass import GPUClassController
from shoal.controllers.state import FleetState
from shoal.controllers.triggers import remember
from shoal.controllers.world import World
from shoal.kube.queue import WorkQueue
from tests.support.operators import CONFIG, gpu_class
from tests.unit.controllers.test_rollout_room import node, versioned


class Cluster:
    def __init__(self) -> None:
        self.patched: list[tuple[str, JsonObject]] = []

    async def merge_patch(self, _resource: Any, name: str, _namespace: None, body: JsonObject, **_: Any) -> JsonObject:
        self.patched.append((name, body["metadata"]["labels"]))
        found = node(name, "L4", 1)
        return found | {"metadata": found["metadata"] | {"resourceVersion": "2"}}


def test_a_class_that_was_deleted_while_no_operator_ran_leaves_no_label() -> None:
    cluster = Cluster()
    world = World(cast("Any", cluster), CONFIG, "shoal-system", cast("Any", None))
    state = FleetState(world)
    remember(world, state)
    world.classes.upsert(versioned(gpu_class("l4", "L4"), "l4"))
    for name, of in (("one", "gone"), ("two", "l4")):
        found = node(name, "L4", 1)
        found["metadata"]["labels"][f"{names.QUARANTINE_PREFIX}{of}"] = "XidError"
        world.nodes.upsert(found)
    none = cast("Any", None)
    controller = GPUClassController(
        world, state.gpus, none, none, none, WorkQueue("gpuclass"), consolidation=none, state=state
    )
    added: list[str] = []
    controller.queue.add = added.append  # pyright: ignore[reportAttributeAccessIssue]
    controller.enqueue_all()
    assert sorted(added) == ["gone", "l4"]
    assert asyncio.run(controller.reconcile("gone")) is None
    assert cluster.patched == [("one", {f"{names.QUARANTINE_PREFIX}gone": None})]
    added.clear()
    controller.enqueue_all()
    assert added == ["l4"]
