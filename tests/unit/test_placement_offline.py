"""Packing a fleet offline, and what pods tell the scheduler."""

from decimal import Decimal

from shoal.core.placement import pack, plan, steering
from tests.support.fleets import candidate, demand, standing, supply

L4 = candidate("l4-24gb", cost="0.43")
BLOCK = candidate("h100-80gb", 8, "19.92")


def test_packing_is_the_operators_plan_with_totals() -> None:
    models = [
        demand("chat/a", L4, wanted=2),
        demand("chat/b", BLOCK, L4, wanted=2, age=1),
        demand("chat/c", BLOCK, age=2, wanted=2),
        demand("chat/d", candidate("gift"), age=3),
    ]
    room = [supply("l4-24gb", 3, of=4), supply("h100-80gb", 8), supply("gift", 1)]
    found = pack(models, room)
    assert found.placements == plan(models, room)
    assert {c.name: (c.gpus, c.allocated, c.largest_free) for c in found.classes} == {
        "gift": (1, 1, 0),
        "h100-80gb": (8, 8, 0),
        "l4-24gb": (4, 4, 0),
    }
    assert (found.gpus, found.allocated, found.allocation_percent) == (13, 13, 100.0)
    assert (found.hourly_cost, found.unpriced) == (Decimal("21.21"), 1)
    assert found.missing == (("chat/c", 2),)


def test_packing_looks_at_nothing_that_stands() -> None:
    model = demand("chat/a", L4, standing={"h100-80gb": standing(8, 1, name="h100-80gb")})
    found = pack([model], [supply("l4-24gb", 1)])
    assert [(v.gpu_class, v.replicas) for v in found.placements["chat/a"].variants] == [("l4-24gb", 1)]
    assert pack([], []).allocation_percent == 0


def test_small_replicas_are_drawn_together_and_whole_blocks_are_not() -> None:
    small = steering(gpu_class="l4-24gb", model_uid="u1", gpus=1)
    assert small.near is not None
    assert small.near.labels == {"app.kubernetes.io/component": "engine", "shoal.dev/gpu-class": "l4-24gb"}
    assert steering(gpu_class="h100-80gb", model_uid="u1", gpus=8).near is None
    assert small.apart.labels["shoal.dev/model-uid"] == "u1"
