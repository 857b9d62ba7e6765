"""Where a Model's replicas go."""

from decimal import Decimal

import pytest

from shoal.core.gpus import Usage
from shoal.core.placement import Offer, place


def offer(name: str, *free: int, cost: str | None = None, capacity: int | None = None, promised: int = 0) -> Offer:
    total = capacity if capacity is not None else sum(free)
    usage = Usage(
        nodes=max(1, len(free)),
        capacity=total,
        allocatable=total,
        allocated=total - sum(free),
        free=tuple(sorted((f for f in free if f), reverse=True)),
    )
    return Offer(name, Decimal(cost) if cost else None, usage, promised)


def offers(*given: Offer) -> dict[str, Offer]:
    return {o.name: o for o in given}


def test_without_a_list_the_cheapest_class_with_room_is_taken_and_unpriced_ones_come_last() -> None:
    choice = offers(offer("gift", 8), offer("h100", 8, cost="2.49"), offer("l4", 1, cost="0.43"))
    assert [(v.gpu_class, v.replicas) for v in _place(choice, gpus=1).variants] == [("l4", 1)]
    assert [(v.gpu_class, v.replicas) for v in _place(choice, gpus=2).variants] == [("h100", 1)]
    del choice["h100"]
    assert [(v.gpu_class, v.replicas) for v in _place(choice, gpus=2).variants] == [("gift", 1)]


def test_a_replica_never_spans_nodes() -> None:
    found = _place(offers(offer("l4", 2, 2, 2)), gpus=4)
    assert found.variants == ()
    assert found.reason == "NoCapacity"
    assert found.message == "no room for a replica of 4 GPUs: l4: 6 of 6 GPUs free, at most 2 on one node"


def test_a_placed_variant_stays_when_a_cheaper_one_gets_room() -> None:
    choice = offers(offer("h100", 8, cost="2.49"), offer("l4", 8, cost="0.43"))
    found = _place(choice, current={"h100": 1})
    assert [(v.gpu_class, v.replicas) for v in found.variants] == [("h100", 1)]


def test_more_replicas_spill_over_in_the_order_of_the_list() -> None:
    choice = offers(offer("h100", 8, cost="2.49"), offer("l4", 2, cost="0.43"))
    found = _place(choice, wanted=3, listed=["l4", "h100"])
    assert [(v.gpu_class, v.replicas, v.hourly_cost) for v in found.variants] == [
        ("l4", 2, "0.86"),
        ("h100", 1, "2.49"),
    ]
    assert found.message == "2 on l4, 1 on h100, 1 GPU each"


def test_what_is_promised_to_others_is_not_free() -> None:
    found = _place(offers(offer("l4", 2, promised=2)))
    assert found.missing == 1
    assert "2 promised to replicas that are starting" in found.message


def test_a_partly_placed_model_says_what_is_missing() -> None:
    found = _place(offers(offer("l4", 1, capacity=4)), wanted=3)
    assert [(v.gpu_class, v.replicas) for v in found.variants] == [("l4", 1)]
    assert found.missing == 2
    assert found.message == "no room for 2 of 3 replicas of 1 GPU: l4: 1 of 4 GPUs free; placed: 1 on l4"


def test_without_any_class_the_message_says_what_to_do() -> None:
    found = _place({})
    assert (found.reason, found.message) == ("NoClass", "there is no GPUClass: create one for your GPU nodes")


@pytest.mark.parametrize("wanted", [1, 2])
def test_fewer_replicas_are_taken_from_the_last_of_the_list(wanted: int) -> None:
    choice = offers(offer("l4", 0, capacity=2), offer("h100", 0, capacity=8))
    found = _place(choice, wanted=wanted, listed=["l4", "h100"], current={"l4": 1, "h100": 1})
    assert {v.gpu_class: v.replicas for v in found.variants} == {"l4": 1, "h100": wanted - 1}


def _place(choice: dict[str, Offer], *, wanted: int = 1, gpus: int = 1, listed=(), current=None):
    return place(wanted=wanted, gpus=gpus, listed=listed, offers=choice, current=current or {})
