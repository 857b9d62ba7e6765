"""A replica whose engine ends again and again, where the nodes of another class come only when a pod asks for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.placement import ClassSupply, Demand, Held, Placement, ReplicaState, plan
from tests.support.fleets import candidate, demand, standing, supply

L4, H100 = candidate("l4-24gb", cost="0.43"), candidate("h100-80gb", cost="2.49")
CRASHES = "the engine of a replica there ended 3 times with exit code 1: CUDA out of memory"
OUT_OF_STOCK = "for 41 s no autoscaler added a node for a replica there: no stock"


def autoscaled(name: str, nodes: int, *free: int, of: int | None = None, outage: str = "") -> ClassSupply:
    return replace(supply(name, *free, of=of), coming=nodes, coming_gpus=1, outage=outage)


def starts(name: str, pods: int = 1, ready: int = 0) -> ReplicaState:
    return ReplicaState(pods, 1, {f"{name}-0": Held(pods, ready)}, pods=pods)


PENDING = ReplicaState(1, 1, {}, pods=1)


def crashing(standing: Mapping[str, ReplicaState], *, wanted: int = 1, **more: Any) -> Demand:
    """A Model whose engine crashed on the cheaper class."""
    classes = {"l4-24gb": CRASHES}
    found = demand("chat/a", L4, H100, wanted=wanted, standing=standing, backoffs=classes, crashes=frozenset(classes))
    return replace(found, **more)


def one(model: Demand, *supplies: ClassSupply) -> Placement:
    return plan([model], supplies)[model.uid]


def by_class(placement: Placement) -> dict[str, int]:
    return {v.gpu_class: v.replicas for v in placement.variants if v.replicas}


def test_a_replica_whose_engine_crashes_goes_to_a_class_whose_nodes_come_when_asked() -> None:
    found = one(crashing({"l4-24gb": starts("l4-24gb")}), autoscaled("l4-24gb", 2, 0, of=1), autoscaled("h100-80gb", 1))
    assert by_class(found) == {"h100-80gb": 1}
    waits = "1 on h100-80gb, 1 GPU each; 1 on h100-80gb waits for a node that an autoscaler adds"
    assert found.message == f"{waits}; not on l4-24gb: {CRASHES}"


def test_it_goes_there_once_and_does_not_come_back_until_that_class_is_in_backoff_too() -> None:
    l4, h100 = autoscaled("l4-24gb", 2, 0, of=1), autoscaled("h100-80gb", 1)
    there = {"l4-24gb": starts("l4-24gb")}
    # The old pod is still there, then terminates, then its GPU is free.
    assert by_class(one(crashing(there | {"h100-80gb": PENDING}), l4, h100)) == {"h100-80gb": 1}
    gone = {"l4-24gb": ReplicaState(0, 1, {}), "h100-80gb": PENDING}
    for free in (0, 1):
        drains = replace(l4, nodes=tuple(replace(n, free=free, releasing=1 - free) for n in l4.nodes))
        assert by_class(one(crashing(gone), drains, h100)) == {"h100-80gb": 1}
    full = autoscaled("h100-80gb", 0, 0, of=1)
    bound = gone | {"h100-80gb": starts("h100-80gb")}
    l4 = autoscaled("l4-24gb", 2, 1)
    assert by_class(one(crashing(bound), l4, full)) == {"h100-80gb": 1}
    # It crashes there too.
    both = {"l4-24gb": CRASHES, "h100-80gb": CRASHES}
    everywhere = crashing(bound, backoffs=both, crashes=frozenset(both))
    assert by_class(one(everywhere, l4, full)) == {"h100-80gb": 1}
    everywhere = crashing(there, backoffs=both, crashes=frozenset(both))
    assert by_class(one(everywhere, autoscaled("l4-24gb", 2, 0, of=1), h100)) == {"l4-24gb": 1}


def test_a_new_replica_asks_for_a_node_rather_than_take_a_free_gpu_where_its_engine_crashes() -> None:
    l4 = autoscaled("l4-24gb", 2, 4)
    assert by_class(one(crashing({}), l4, autoscaled("h100-80gb", 1))) == {"h100-80gb": 1}
    # As many as nodes come; the others have the last choice.
    assert by_class(one(crashing({}, wanted=3), l4, autoscaled("h100-80gb", 1))) == {"h100-80gb": 1, "l4-24gb": 2}
    for none in (supply("h100-80gb", 0, of=1), autoscaled("h100-80gb", 1, outage=OUT_OF_STOCK)):
        assert by_class(one(crashing({}), l4, none)) == {"l4-24gb": 1}
    limited = replace(H100, max_replicas=0)
    assert by_class(one(crashing({}, candidates=(L4, limited)), l4, autoscaled("h100-80gb", 1))) == {"l4-24gb": 1}


def test_without_a_node_that_may_come_it_stays_and_takes_no_gpu_from_others() -> None:
    there = {"l4-24gb": starts("l4-24gb")}
    l4 = supply("l4-24gb", 0, of=1)
    low = demand("chat/low", H100, standing={"h100-80gb": standing(1, 1, name="h100-80gb")})
    for full in (
        supply("h100-80gb", 0, of=1),
        supply("h100-80gb", 0, of=1, releasing=[1]),
        autoscaled("h100-80gb", 1, 0, of=1, outage=OUT_OF_STOCK),
    ):
        found = plan([low, crashing(there, priority=10)], [l4, full])
        assert by_class(found["chat/a"]) == {"l4-24gb": 1}
        assert by_class(found["chat/low"]) == {"h100-80gb": 1}


def test_what_is_ready_there_stays_and_shows_that_the_class_works() -> None:
    works = crashing({"l4-24gb": starts("l4-24gb", 2, ready=1)}, wanted=2)
    assert by_class(one(works, supply("l4-24gb", 0, of=2), autoscaled("h100-80gb", 2))) == {"l4-24gb": 2}


def test_a_replica_that_only_starts_slowly_stays() -> None:
    """A node takes minutes and costs money, and the replica may be ready before."""
    slow = crashing({"l4-24gb": starts("l4-24gb")}, crashes=frozenset())
    assert by_class(one(slow, supply("l4-24gb", 0, of=1), autoscaled("h100-80gb", 1))) == {"l4-24gb": 1}


def test_a_replica_that_crashes_does_not_go_to_free_gpus_of_another_class_in_backoff() -> None:
    """Nor to a node that is too small for it."""
    l40s = candidate("l40s-48gb", cost="1.2")
    backoffs = {"l4-24gb": CRASHES, "l40s-48gb": "a replica there was not ready after 15 min, three cold starts"}
    model = crashing({"l4-24gb": starts("l4-24gb")}, candidates=(L4, l40s, H100), backoffs=backoffs)
    room = (supply("l4-24gb", 0, of=1), supply("l40s-48gb", 1))
    assert by_class(one(model, *room, supply("h100-80gb", 0, of=1))) == {"l4-24gb": 1}
    assert by_class(one(model, *room, autoscaled("h100-80gb", 1))) == {"h100-80gb": 1}
    eight = replace(model, candidates=(L4, l40s, replace(H100, gpus=8)))
    assert by_class(one(eight, *room, autoscaled("h100-80gb", 1))) == {"l4-24gb": 1}
