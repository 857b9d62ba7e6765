"""What the planner is told of a Model's Deployments and pods, and which pods go first."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from shoal.api.meta import GROUP, JsonObject
from shoal.controllers.reservations import Reservation
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.facts import ClaimRefusal, Deployment, HeldDevice, Pod
from shoal.core.goesfirst import GOES_FIRST, deletion_costs
from shoal.core.keda import ScaledObject
from shoal.core.ownership import Link, Owner
from shoal.core.placement import Held, ReplicaState
from shoal.core.placement.types import BROKEN
from shoal.kube.projections import Child
from shoal.kube.store import Table
from tests.support.operators import CONFIG

GPU = "nvidia.com/gpu"
MODEL = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "1", "generation": 1},
    "spec": {"source": {"uri": "hf://org/model"}},
}


def pod(name: str, node: str | None, *, ready: bool = True, deleting: bool = False, **more: Any) -> Pod:
    return Pod("ns", name, name, node, False, deleting, ready, {GPU: 2}, "u", "l4", **more)


def deployment(replicas: int, *, updated: int | None = None, total: int | None = None) -> Child:
    count = replicas if total is None else total
    found = Deployment(
        "ns", "chat-l4", "d", "1", "u", "l4", 2, GPU, 1, 1, replicas,
        frozenset(), count if updated is None else updated, count, count, None, deleting=False,
    )  # fmt: skip
    link = Link("d", "ns", "chat-l4", "chat", "u", "l4", Owner(GROUP, "Model", "u"))
    return Child("ns", "chat-l4", "d", "u", b"{}", found, link)


def class_without(node: str, device: str) -> JsonObject:
    """The class, one GPU of which is out of use."""
    out = {"node": node, "device": device, "state": "Quarantined", "reason": "GPUUnhealthy", "message": "Xid 79",
           "by": "Shoal", "since": "2026-11-27T00:00:00Z", "times": 1}  # fmt: skip
    metadata = {"name": "l4", "uid": "l4", "resourceVersion": "1", "generation": 1}
    return {
        "metadata": metadata,
        "spec": {"nodeSelector": {"gpu": "l4"}, "memoryPerGPU": "24Gi"},
        "status": {"quarantined": [out]},
    }


def claim_of(pod: str, *devices: str) -> JsonObject:
    """A ResourceClaim that a pod holds."""
    results = [{"driver": "gpu.test", "pool": "n1", "device": device} for device in devices]
    status = {"allocation": {"devices": {"results": results}},
              "reservedFor": [{"resource": "pods", "name": pod, "uid": pod}]}  # fmt: skip
    metadata = {"namespace": "ns", "name": pod, "uid": f"claim-{pod}", "resourceVersion": "1"}
    return {"metadata": metadata, "status": status}


def fleet_state(
    *pods: Pod,
    deployments: tuple[Child, ...] = (),
    scaled_objects: tuple[Child, ...] = (),
    classes: tuple[JsonObject, ...] = (),
    claims: tuple[JsonObject, ...] = (),
) -> FleetState:
    def table(values: tuple[Any, ...]) -> Table[Any]:
        found: Table[Any] = Table(lambda raw: raw["value"], indexes={"model": lambda v: (v.model_uid,)})
        for value in values:
            found.upsert(
                {"metadata": {"name": value.name, "namespace": "ns", "uid": value.uid}, "value": value}, since=None
            )
        return found

    nothing = cast("Any", None)
    world = World(
        nothing, CONFIG, "shoal-system", nothing, deployments=table(deployments), scaled_objects=table(scaled_objects)
    )
    world.pods = table(pods)
    world.models.upsert(MODEL)
    for gpu_class in classes:
        world.classes.upsert(gpu_class)
    for claim in claims:
        world.resource_claims.upsert(claim)
    return FleetState(world)


def test_a_pod_that_a_quota_keeps_without_its_claim_needs_no_gpu() -> None:
    refused = ClaimRefusal("ResourceQuotaExceeded", "full", quota=True)
    denied = replace(refused, quota=False)
    old, new = datetime.now(UTC) - timedelta(minutes=1), datetime.now(UTC)

    def held_back(**state: Any) -> int:
        fields: dict[str, Any] = {"lacks_claim": True, "created": old} | state
        waits = pod("a", None, ready=False, **fields)
        return fleet_state(waits, deployments=(deployment(1),)).replica_states("u")["l4"].gated

    assert held_back(claim_refusal=refused) == 1
    assert held_back() == 1, "after a restart of the operator, until its events are read"
    assert held_back(created=new) == 0, "its claim is being made"
    assert held_back(claim_refusal=denied) == 0
    assert held_back(lacks_claim=False) == 0


def test_pods_stand_where_they_are_bound_and_terminating_ones_hold_their_gpus() -> None:
    found = fleet_state(
        pod("a", "n1"),
        pod("b", "n1", ready=False),
        pod("c", "n2", deleting=True),
        pod("d", None, ready=False),
        deployments=(deployment(3),),
    ).replica_states("u")
    on = {"n1": Held(2, 1), "n2": Held(0, 0, terminating=1)}
    assert found == {"l4": ReplicaState(3, 2, on, pods=3, settled=True)}


def test_a_pod_that_may_not_be_evicted_is_told_to_the_planner() -> None:
    def keeps(**state: Any) -> str:
        found = fleet_state(pod("a", "n1"), pod("b", "n1", keeps="x/y", **state), deployments=(deployment(2),))
        return found.replica_states("u")["l4"].keeps

    assert keeps() == "x/y"
    assert keeps(deleting=True) == "", "it goes already"


def test_a_pod_with_a_broken_device_is_on_no_node_of_the_class() -> None:
    found = fleet_state(
        pod("a", "n1", devices=(HeldDevice("GPU-7", healthy=False),)), deployments=(deployment(1),)
    ).replica_states("u")
    assert dict(found["l4"].by_node) == {f"n1{BROKEN}": Held(1, 1)}


@pytest.mark.parametrize(
    ("said", "out_of_use", "goes"),
    [
        # A replica that went would take its signal along, and the next one would be given the same device.
        ("gpu.test/device=gpu-0", False, False),
        ("gpu.test/device=gpu-0", True, True),
        # Nobody knows which of the two is meant, so neither can be out of use.
        ("gpu.test/device=7", False, True),
    ],
)
def test_a_claimed_device_is_out_of_use_before_its_replica_goes(said: str, out_of_use: bool, goes: bool) -> None:
    found = fleet_state(
        pod("a", "n1", devices=(HeldDevice(said, healthy=False),)),
        deployments=(deployment(1),),
        classes=(class_without("n1", "gpu.test/n1/gpu-0"),) if out_of_use else (),
        claims=(claim_of("a", "gpu-0", "gpu-1"),),
    ).replica_states("u")
    assert dict(found["l4"].by_node) == {f"n1{BROKEN}" if goes else "n1": Held(1, 1)}


def test_a_rollout_is_not_settled() -> None:
    assert not fleet_state(deployments=(deployment(1, updated=0, total=1),)).replica_states("u")["l4"].settled


def test_a_decision_on_its_way_counts_until_it_stands() -> None:
    seen = fleet_state(deployments=(deployment(1),))
    seen.begin_apply("u", [("l4", 2, 2), ("h100", 1, 4)])
    found = seen.replica_states("u")
    assert (found["l4"].replicas, found["h100"].replicas, found["h100"].gpus) == (2, 1, 4)
    seen.end_apply("u")
    assert set(seen.replica_states("u")) == {"l4"}
    assert seen.replica_states("u")["l4"].replicas == 1


def test_pods_of_a_deployment_that_is_gone_still_hold() -> None:
    found = fleet_state(pod("a", "n1", deleting=True)).replica_states("u")
    assert found == {"l4": ReplicaState(0, 2, {"n1": Held(0, 0, terminating=1)}, pods=0)}


def test_a_pod_that_was_bound_when_its_deployment_went_is_no_replica_any_more() -> None:
    """Else the plan wants the class back, drops the one that it went to, and the Model goes to and fro for ever."""
    found = fleet_state(pod("a", "n1"), pod("b", "n1", deleting=True)).replica_states("u")
    assert found == {"l4": ReplicaState(0, 2, {"n1": Held(0, 0, terminating=2)}, pods=0)}


def test_of_a_node_that_is_left_those_that_do_not_serve_go_first_and_others_are_ordinary_again() -> None:
    marked = pod("c", "n2", deletion_cost=GOES_FIRST)
    foreign = pod("e", "n2", deletion_cost=7)
    pods = [pod("a", "n1"), pod("b", "n1", ready=False), marked, pod("d", "n1", deleting=True), foreign]
    changes = deletion_costs(pods, {"n1": 1}, {"n1": 1})
    assert [(change.pod.name, change.cost) for change in changes] == [("b", GOES_FIRST), ("c", 0)]
    assert deletion_costs([marked], {"n2": 1}, {"n2": 1}) == []


def scaled(minimum: int, *, deleting: bool = False) -> Child:
    found = ScaledObject(
        "ns", "chat-l4", "so", "l4", deleting=deleting, minimum=minimum, maximum=10, ready=True, message="",
        paused_by=None, was_active=True,
    )  # fmt: skip
    return Child("ns", "chat-l4", "so", "u", b"{}", scaled=found)


@pytest.mark.parametrize(("answered", "counts"), [(0, 2), (2, 2), (5, 5)])
def test_what_keda_was_answered_counts_until_it_stands_and_what_stands_counts_until_it_is_gone(
    answered: int, counts: int
) -> None:
    found = fleet_state(pod("a", "n1"), deployments=(deployment(2),))
    assert found.replica_states("u")["l4"].replicas == 2, "without it the GPUs would be given away once more"
    found.reservations.put(Reservation("u", "l4", answered, 2, "keda"))
    assert found.replica_states("u")["l4"].replicas == counts
    assert found.replica_states("u")["l4"].pods == 1


def test_the_minimum_of_a_scaled_object_is_promised_too_as_an_hpa_goes_there_whatever_it_is_answered() -> None:
    before = (deployment(1),)
    assert fleet_state(deployments=before, scaled_objects=(scaled(4),)).replica_states("u")["l4"].replicas == 4
    assert (
        fleet_state(deployments=before, scaled_objects=(scaled(4, deleting=True),)).replica_states("u")["l4"].replicas
        == 1
    )
