"""What a Model's status says of weights that nobody prefetches."""

from typing import Any, cast

import pytest

from shoal.controllers.modelqueue import ModelQueue
from shoal.controllers.prefetch import MOST_CLASSES, PrefetchController
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.kube.events import Recorder
from tests.support.operators import CONFIG, gpu_class, model


@pytest.mark.parametrize(
    ("variants", "told"), [([], [f"c{i}" for i in range(MOST_CLASSES)]), ([{"class": "c9"}], ["c9"])]
)
async def test_a_cache_that_is_off_is_said_of_each_class_that_is_meant(variants: list[Any], told: list[str]) -> None:
    client = cast("Any", None)
    assert not CONFIG.cache.enabled
    world = World(client, CONFIG, "shoal-system", Recorder(client, "test"))
    for i in range(MOST_CLASSES + 2):
        raw = gpu_class(f"c{i}", "")
        world.classes.upsert(raw | {"metadata": {"name": f"c{i}", "uid": f"c{i}", "resourceVersion": "1"}})
    raw = model("chat", "ns", prefetch={"nodes": 1}, variants=variants)
    world.models.upsert(raw | {"metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "1"}})
    state = FleetState(world)
    queue = cast("Any", None)
    models = cast("ModelQueue", type("Models", (), {"add_uid": lambda _self, _uid: None})())
    await PrefetchController(world, state, models, queue).reconcile("")
    found = state.record("u").prefetch
    assert [each.gpu_class for each in found] == told
    assert {each.message for each in found} == {"the node cache is off (chart value cache.enabled)"}
