"""A rollout of a Model with one replica, where its class has no GPU for the successor: another class has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shoal.core.placement import Demand, Held, Placement, ReplicaState, VariantPlan, plan
from tests.support.fleets import Fleet, FleetNode, candidate, demand, standing, supply

L4, H100 = candidate("l4-24gb", cost="0.43"), candidate("h100-80gb", cost="2.49")
WAITS = frozenset({"l4-24gb"})
SERVES = standing(1, 1, name="l4-24gb")
FULL, ROOM = supply("l4-24gb", 0, of=1), supply("h100-80gb", 1, of=8)


def rolling(*candidates, on: Mapping[str, ReplicaState] | None = None, **more: Any) -> Demand:
    return demand("chat/a", *candidates, standing={"l4-24gb": SERVES, **(on or {})}, lacks_surge=WAITS, **more)


def one(model: Demand, *supplies) -> Placement:
    return plan([model], supplies)[model.uid]


def by_class(placement: Placement) -> dict[str, int]:
    return {v.gpu_class: v.replicas for v in placement.variants if v.replicas}


def variant(placement: Placement, gpu_class: str) -> VariantPlan:
    return next(v for v in placement.variants if v.gpu_class == gpu_class)


def test_the_successor_starts_on_another_class_and_the_replica_goes_when_it_is_ready() -> None:
    found = one(rolling(L4, H100), FULL, ROOM)
    assert by_class(found) == {"l4-24gb": 1, "h100-80gb": 1}
    assert (variant(found, "l4-24gb").relocated, variant(found, "h100-80gb").relocated) == (True, False)
    assert (found.reason, found.placed, found.message) == (
        "Moving",
        True,
        "1 on h100-80gb, 1 GPU each; a rollout has no GPU on l4-24gb for one replica more: the replica there goes when "
        "its successor is ready",
    )
    starting = ReplicaState(1, 1, {"h100-80gb-0": Held(1, 0)}, 1)
    found = one(rolling(L4, H100, on={"h100-80gb": starting}), FULL, supply("h100-80gb", 0, of=8))
    assert by_class(found) == {"l4-24gb": 1, "h100-80gb": 1}
    ready = standing(1, 1, name="h100-80gb")
    found = one(rolling(L4, H100, on={"h100-80gb": ready}), FULL, supply("h100-80gb", 0, of=8))
    assert by_class(found) == {"h100-80gb": 1}
    assert variant(found, "l4-24gb").leaving == (("l4-24gb-0", 1),)


def test_a_successor_that_does_not_become_ready_leaves_the_former_revision_serving() -> None:
    failing = ReplicaState(1, 1, {"h100-80gb-0": Held(1, 0)}, 1)
    backoffs = {"h100-80gb": "the engine of a replica there ended 3 times"}
    model = rolling(L4, H100, on={"h100-80gb": failing}, backoffs=backoffs)
    found = one(model, FULL, supply("h100-80gb", 0, of=8))
    assert by_class(found) == {"l4-24gb": 1, "h100-80gb": 1}
    assert variant(found, "l4-24gb").relocated


@pytest.mark.parametrize(
    ("model", "room"),
    [
        (rolling(L4), ROOM),
        (rolling(L4, H100), supply("h100-80gb", 0, of=8)),
        (rolling(L4, H100, backoffs={"h100-80gb": "no replica became ready there"}), ROOM),
        (rolling(L4, replace(H100, max_replicas=0)), ROOM),
        (rolling(L4, replace(H100, interruptible=True), interruptible_percent=50), ROOM),
        (rolling(L4, H100, frozen=True), ROOM),
        (rolling(L4, H100, on={"h100-80gb": ReplicaState(1, 1, {}, 1, gated=1)}), ROOM),
    ],
    ids=["no other class", "full", "in backoff", "not allowed", "interruptible", "paused", "held back by a quota"],
)
def test_without_another_class_that_has_room_the_replica_stays(model: Demand, room) -> None:
    found = one(model, FULL, room)
    assert variant(found, "l4-24gb").replicas == 1
    assert not any(v.relocated for v in found.variants)


def test_nobody_loses_gpus_for_it() -> None:
    other = demand("chat/low", H100, priority=-1, standing={"h100-80gb": standing(1, 1, name="h100-80gb")})
    found = plan([rolling(L4, H100, priority=5), other], [FULL, supply("h100-80gb", 0, of=1)])
    assert by_class(found["chat/a"]) == {"l4-24gb": 1}
    assert by_class(found["chat/low"]) == {"h100-80gb": 1}


def test_of_several_replicas_none_is_relocated() -> None:
    two = standing(1, 2, name="l4-24gb")
    found = one(rolling(L4, H100, on={"l4-24gb": two}, wanted=2), supply("l4-24gb", 0, of=2), ROOM)
    assert by_class(found) == {"l4-24gb": 2}


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_serves_all_the_time_and_the_model_moves_back(seed: int) -> None:
    nodes = [FleetNode("l4-0", "l4-24gb", 1), FleetNode("h100-0", "h100-80gb", 8)]
    model = demand("chat/a", L4, H100)
    fleet = Fleet(nodes, [model], seed)
    for _ in range(10):
        fleet.step()
    assert fleet.wanted_replicas() == {("chat/a", "l4-24gb"): 1}
    fleet.models["chat/a"] = replace(model, lacks_surge=WAITS)
    both = False
    for _ in range(60):
        fleet.step()
        assert fleet.ready("chat/a") >= 1
        both = both or len(fleet.wanted_replicas()) == 2
        if both and fleet.wanted_replicas() == {("chat/a", "h100-80gb"): 1}:
            fleet.models["chat/a"] = model  # its Deployment has no replica, so the template is the new one now
    assert both
    assert fleet.models["chat/a"] is model
    assert fleet.wanted_replicas() == {("chat/a", "l4-24gb"): 1}
