"""Nodes that an autoscaler adds: supply that is late, and that only a pending pod brings."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.gpuclass import GPUClass
from shoal.core.candidates import members, supplies
from shoal.core.facts import Node, Pod
from shoal.core.gpus import Usage
from shoal.core.placement import ClassSupply, Demand, Held, Moves, NodeSupply, Placement, ReplicaState, plan
from shoal.core.placement.autoscalerevents import PodEvent, last_event, node_claims, of_node_claims
from shoal.core.placement.backoff import observe
from shoal.core.sizing import gpu_of
from shoal.core.status import gpuclassstatus
from shoal.kube.projections import pod_event
from tests.support.fleets import candidate, demand, supply

L4, H100 = candidate("l4-24gb", cost="0.43"), candidate("h100-80gb", cost="2.49")
NOW = datetime(2026, 11, 25, tzinfo=UTC)


def autoscaled(found: ClassSupply, nodes: int, gpus: int = 1) -> ClassSupply:
    return replace(found, coming=nodes, coming_gpus=gpus)


def by_class(placement: Placement) -> dict[str, int]:
    return {v.gpu_class: v.replicas for v in placement.variants if v.replicas}


def one(model: Demand, *supplies: ClassSupply, moves: Moves | None = None) -> Placement:
    return plan([model], supplies, moves=moves)[model.uid]


def standing(replicas: int, *, bound: int = 0, ready: int = 0) -> ReplicaState:
    return ReplicaState(replicas, 1, {"n0": Held(bound, ready)} if bound else {}, pods=replicas)


# --- placement ------------------------------------------------------------------------------------------------------


def test_a_class_without_nodes_gets_replicas_whose_pods_bring_the_nodes() -> None:
    found = one(demand("chat/a", L4, wanted=3), autoscaled(supply("l4-24gb"), 2, 4))
    assert by_class(found) == {"l4-24gb": 3}
    assert found.placed
    assert found.message == "3 on l4-24gb, 1 GPU each; 3 on l4-24gb wait for nodes that an autoscaler adds"
    found = one(demand("chat/a", L4), autoscaled(supply("l4-24gb"), 2, 4))
    assert found.message == "1 on l4-24gb, 1 GPU each; 1 on l4-24gb waits for a node that an autoscaler adds"


def test_no_more_is_requested_than_the_autoscaler_may_add() -> None:
    found = one(demand("chat/a", L4, wanted=3), autoscaled(supply("l4-24gb", 0, of=1), 1))
    assert (by_class(found), found.missing, found.reason) == ({"l4-24gb": 1}, 2, "NoCapacity")
    assert "all nodes that an autoscaler may add are promised to replicas that wait for them" in found.message
    eight = one(demand("chat/a", candidate("l4-24gb", 8, "3.44")), autoscaled(supply("l4-24gb"), 3, 4))
    assert (by_class(eight), eight.missing) == ({}, 1)
    assert "an autoscaler adds nodes with 4 GPUs, fewer than 8" in eight.message


def test_replicas_share_a_coming_node_before_another_one_is_added() -> None:
    models = [demand(f"chat/{n}", candidate("l4-24gb", 2, "0.86")) for n in "ab"]
    found = plan(models, [autoscaled(supply("l4-24gb"), 1, 4)])
    assert [by_class(p) for p in found.values()] == [{"l4-24gb": 1}] * 2


def test_free_gpus_go_first_even_of_a_dearer_class_and_the_cheaper_follows() -> None:
    room = [autoscaled(supply("l4-24gb"), 4), supply("h100-80gb", 1)]
    assert by_class(one(demand("chat/a", L4, H100), *room)) == {"h100-80gb": 1}
    # A request is answered at once, and the replica moves to the cheaper class at the movers' pace.
    there = {"h100-80gb": ReplicaState(1, 1, {"h100-80gb-0": Held(1, 1)}, pods=1)}
    resting = demand("chat/a", L4, H100, standing=there)
    found = one(resting, autoscaled(supply("l4-24gb"), 4), supply("h100-80gb", 0, of=1), moves=Moves())
    assert by_class(found) == {"l4-24gb": 1, "h100-80gb": 1}
    assert (found.reason, found.missing) == ("Moving", 0)


def test_a_pending_replica_stays_where_its_node_is_being_added() -> None:
    """GPUs that pods give up elsewhere would make it begin anew."""
    drains = supply("h100-80gb", 0, of=1)
    drains = replace(drains, nodes=tuple(replace(n, releasing=1) for n in drains.nodes))
    pending = demand("chat/a", L4, H100, standing={"l4-24gb": standing(1)})
    assert by_class(one(pending, autoscaled(supply("l4-24gb"), 1), drains)) == {"l4-24gb": 1}
    # A new one waits for them: no node is bought for seconds.
    assert by_class(one(demand("chat/a", L4, H100), autoscaled(supply("l4-24gb"), 1), drains)) == {"h100-80gb": 1}


def test_nobody_is_preempted_while_a_node_may_come() -> None:
    low = demand("chat/low", L4, standing={"l4-24gb": ReplicaState(1, 1, {"l4-24gb-0": Held(1, 1)}, pods=1)})
    high = demand("chat/high", L4, priority=100)
    full = supply("l4-24gb", 0, of=1)
    found = plan([low, high], [autoscaled(full, 1)])
    assert by_class(found["chat/low"]) == by_class(found["chat/high"]) == {"l4-24gb": 1}
    assert by_class(plan([low, high], [full])["chat/high"]) == {"l4-24gb": 1}
    assert plan([low, high], [full])["chat/low"].missing == 1


def test_where_no_node_came_another_class_is_used_and_the_class_is_the_last_choice() -> None:
    room = [autoscaled(supply("l4-24gb"), 4), autoscaled(supply("h100-80gb"), 1)]
    stuck = demand("chat/a", L4, H100, standing={"l4-24gb": standing(1)}, backoffs={"l4-24gb": "no stock"})
    assert by_class(one(stuck, *room)) == {"h100-80gb": 1}
    alone = demand("chat/a", L4, standing={"l4-24gb": standing(1)}, backoffs={"l4-24gb": "no stock"})
    assert by_class(one(alone, room[0])) == {"l4-24gb": 1}, "its pod stays pending: the stock may come back"


def test_a_plan_says_what_others_hold_on_the_nodes_of_a_variant_that_shrinks() -> None:
    """By it the pod is chosen whose node becomes empty."""
    nodes = (
        NodeSupply("n0", free=1, allocatable=4),  # two of the Model's, one of somebody else
        NodeSupply("n1", free=3, allocatable=4),  # one of the Model's
        NodeSupply("n2", free=2, allocatable=4, releasing=1),  # one of the Model's, and a pod that is on its way out
    )
    found = replace(autoscaled(supply("l4-24gb"), 1, 4), nodes=nodes)
    on = {"n0": Held(2, 2), "n1": Held(1, 1), "n2": Held(1, 1)}
    there = {"l4-24gb": ReplicaState(4, 1, on, pods=4)}
    [shrinks] = one(demand("chat/a", L4, wanted=3, standing=there), found).variants
    assert shrinks.others == (("n0", 1), ("n1", 0), ("n2", 0))
    [stays] = one(demand("chat/a", L4, wanted=4, standing=there), found).variants
    assert stays.others == ()
    [fixed] = one(demand("chat/a", L4, wanted=3, standing=there), replace(found, coming=0, coming_gpus=0)).variants
    assert fixed.others == (), "no autoscaler removes these nodes"
    full = replace(found, coming=0)
    [limited] = one(demand("chat/a", L4, wanted=3, standing=there), full).variants
    assert limited.others == shrinks.others, "it adds no more, and still removes"


# --- the fleet ------------------------------------------------------------------------------------------------------


def gpu_class(**autoscaled: Any) -> GPUClass:
    spec: dict[str, Any] = {"nodeSelector": {"gpu": "l4"}, "memoryPerGPU": "24Gi"}
    if autoscaled:
        spec["nodes"] = {"autoscaled": autoscaled}
    return GPUClass.model_validate({"metadata": {"name": "l4-24gb"}, "spec": spec})


def node(name: str, gpus: int, *, ready: bool = True, cordoned: bool = False) -> Node:
    have = {"nvidia.com/gpu": gpus} if gpus else {}
    return Node(name, {"gpu": "l4"}, ready=ready, unschedulable=cordoned, taints=(), capacity=have, allocatable=have)


@pytest.mark.parametrize(
    ("nodes", "coming"),
    [
        ([], 3),
        ([node("a", 4)], 2),
        ([node("a", 4, cordoned=True)], 2),
        # A node that has just registered has no GPUs until its device plugin runs: pods wait for it.
        ([node("a", 0), node("b", 4, ready=False)], 3),
        ([node(f"n{i}", 4) for i in range(5)], 0),
    ],
)
def test_as_many_nodes_may_come_as_the_autoscaler_has_left(nodes: list[Node], coming: int) -> None:
    one_class = gpu_class(max=3, gpusPerNode=4)
    (found,) = supplies([one_class], members([one_class], nodes), {})
    assert (found.coming, found.coming_gpus) == (coming, 4)
    (plain,) = supplies([gpu_class()], members([gpu_class()], nodes), {})
    assert plain.coming == 0


def test_a_replica_may_be_as_large_as_a_node_that_comes() -> None:
    assert gpu_of(gpu_class(max=3, gpusPerNode=4), []).largest_node == 4
    assert gpu_of(gpu_class(max=3, gpusPerNode=4), [node("a", 8)]).largest_node == 8
    assert gpu_of(gpu_class(), []).largest_node is None


def test_a_class_without_nodes_is_ready_and_says_what_may_come() -> None:
    none = Usage(0, 0, 0, 0, 0, ())
    status = gpuclassstatus.status(gpu_class(max=3, gpusPerNode=4), none, (), overlapping={}, overhead=None, now=NOW)
    (ready,) = status.conditions
    assert (ready.status, ready.reason) == ("True", "Autoscaled")
    assert ready.message == (
        "no node with GPUs now; an autoscaler adds up to 3 with 4 x nvidia.com/gpu each, in about 600 s"
    )
    assert status.largest_node == 4
    assert status.provision_seconds is None


def test_how_long_a_node_took_is_told_of_a_class_whose_nodes_come() -> None:
    usage = Usage(0, 0, 0, 0, 0, ())
    for one, told in ((gpu_class(max=3, gpusPerNode=4), 95), (gpu_class(), None)):
        status = gpuclassstatus.status(one, usage, (), overlapping={}, overhead=None, now=NOW, node_wait=95)
        assert status.provision_seconds == told


# --- no node comes --------------------------------------------------------------------------------------------------


def pending(age: float, why: str = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.") -> Pod:
    return Pod(
        "chat", "a-0", "u", None, False, False, False, {}, "m", gpu_class="l4-24gb", unschedulable=why,
        created=NOW - timedelta(seconds=age),
    )  # fmt: skip


def test_a_node_that_does_not_come_within_twice_its_time_is_a_backoff_of_the_class() -> None:
    def seen(age: float, provision: float | None) -> dict[str, Any]:
        return dict(observe({}, [pending(age)], now=NOW, timeout=lambda _: 1.0, provision=lambda _: provision))

    assert seen(1199, 600.0) == {}
    assert seen(5000, None) == {}, "without an autoscaler a full class is not at fault"
    assert seen(1201, 600.0)["l4-24gb"].why == (
        "for 20 min no autoscaler added a node for a replica there: there is no event of one at pod chat/a-0; is one "
        "installed, with a node pool that has the class's labels?"
    )


def test_a_replica_that_lacks_cpu_gets_the_same_time_for_its_node() -> None:
    """A node there has a free GPU and no CPU left. The autoscaler brings another one, as for a lack of GPUs."""

    def seen(age: float, provision: float, event: str | None = None) -> dict[str, Any]:
        pod = replace(pending(age, "0/1 nodes are available: 1 Insufficient cpu."), autoscaler_event=event)
        return dict(observe({}, [pod], now=NOW, timeout=lambda _: 1.0, provision=lambda _: provision))

    assert seen(1199, 600.0) == {}
    why = "for 20 min no node there had room for a replica: Insufficient cpu on 1 node(s)"
    assert seen(1200, 600.0)["l4-24gb"].why == why
    assert seen(1200, 600.0, "karpenter: no stock")["l4-24gb"].why == f"{why}; karpenter: no stock"
    assert list(seen(121, 60.0)) == ["l4-24gb"], "a fast autoscaler has had its time before five minutes"


def test_the_backoff_says_why_the_autoscaler_adds_no_node() -> None:
    pod = replace(pending(1201), autoscaler_event="karpenter: all available instance types exceed limits for nodepool")
    found = observe({}, [pod], now=NOW, timeout=lambda _: 1.0, provision=lambda _: 600.0)["l4-24gb"]
    assert found.why == (
        "for 20 min no autoscaler added a node for a replica there: karpenter: all available instance types exceed "
        "limits for nodepool"
    )


def test_an_event_that_a_user_wrote_with_the_year_0_is_an_event_without_a_time() -> None:
    """The API server takes such a time, and Python has no such year."""
    written = {"reportingController": "karpenter", "note": "x", "deprecatedLastTimestamp": "0000-01-01T00:00:00Z"}
    assert pod_event(written) == PodEvent("karpenter", "x", None)
    real = {"reportingController": "", "deprecatedSource": {"component": "cluster-autoscaler"}, "note": "y"}
    seen = pod_event(real | {"series": {"lastObservedTime": "2026-11-25T00:00:01.000000Z"}, "eventTime": None})
    assert seen == PodEvent("cluster-autoscaler", "y", NOW + timedelta(seconds=1))
    assert last_event([pod_event(written), seen]) == "cluster-autoscaler: y"


def test_the_newest_event_of_an_autoscaler_is_shown_as_one_line() -> None:
    def event(controller: str, message: str, seconds: int) -> PodEvent:
        return PodEvent(controller, message, NOW + timedelta(seconds=seconds))

    scheduler = event("default-scheduler", "0/3 nodes are available", 9)
    assert last_event([scheduler]) is None
    old, new = (
        event("cluster-autoscaler", "pod triggered scale-up", 1),
        event("cluster-autoscaler", "no\x00 stock\n", 2),
    )
    assert last_event([new, scheduler, old]) == "cluster-autoscaler: no stock"
    long = last_event([PodEvent("karpenter", "x" * 5000, None)])
    assert len(long or "") < 400, "an event is written by whoever may write in the namespace"


# The words of Karpenter 1.x, of its AWS provider, and of Cluster Autoscaler.
NO_OFFERING = (
    'Failed to schedule pod, incompatible with nodepool "l4-spot", daemonset overhead={}, no instance type has the '
    "required offering"
)
NO_STOCK = (
    "NodeClaim spot-abc event: creating instance, insufficient capacity, with fleet error(s), "
    "InsufficientInstanceCapacity: We currently do not have sufficient g6.12xlarge capacity in the Availability Zone "
    "you requested (us-west-2b)."
)


def karpenter(reason: str, seconds: int, message: str = "", **more: Any) -> PodEvent:
    return PodEvent("karpenter", message or NO_OFFERING, NOW + timedelta(seconds=seconds), reason, **more)


def nominated(claim: str, seconds: int, **more: Any) -> PodEvent:
    return karpenter("Nominated", seconds, f"Pod should schedule on: nodeclaim/{claim}", **more)


def after(seconds: int, *events: PodEvent) -> str | None:
    return last_event(events, now=NOW + timedelta(seconds=seconds), provision_seconds=600.0)


def test_a_failure_is_told_beside_the_node_that_is_announced_after_it() -> None:
    events = (karpenter("FailedScheduling", 0), nominated("spot-abc", 5))
    coming = "karpenter: Pod should schedule on: nodeclaim/spot-abc"
    assert after(30, *events) == f"{coming}; before that: karpenter: {NO_OFFERING}"
    assert after(30, *events[1:]) == coming
    assert after(30, nominated("spot-abc", 0), karpenter("FailedScheduling", 5)) == f"karpenter: {NO_OFFERING}"


def test_a_node_that_was_announced_and_did_not_come_is_no_news() -> None:
    late = "karpenter: Pod should schedule on: nodeclaim/spot-abc; that node did not come within 600 s"
    assert after(605, nominated("spot-abc", 5)) == late
    again = nominated("spot-abc", 590, first=NOW + timedelta(seconds=5))
    assert after(605, again) == late, "Karpenter repeats it every two minutes"
    failed = karpenter("FailedScheduling", 0)
    assert after(605, failed, again) == f"karpenter: {NO_OFFERING}; after that: {late}"
    anew = (nominated("spot-abc", 5), replace(failed, at=NOW + timedelta(seconds=300)), nominated("spot-def", 310))
    assert "did not come" not in (after(605, *anew) or ""), "it counts from the failure on"
    written = PodEvent("karpenter", "x", None, "Nominated")
    assert after(605, written) == "karpenter: x", "an event without a time has no age"


def test_a_stock_out_is_told_by_the_node_claim_and_not_by_the_pod() -> None:
    """Karpenter deletes the NodeClaim, makes another, and announces that at the pod."""
    no_stock = karpenter("InsufficientCapacityError", 6, NO_STOCK, about="spot-abc")
    others = replace(no_stock, about="spot-xyz", message="another pod's")
    untainted = karpenter("UnregisteredTaintMissing", 7, "Missing karpenter.sh/unregistered taint", about="spot-abc")
    pod = [nominated("spot-abc", 5)]
    assert node_claims([*pod, PodEvent("me", "nodeclaim/mine", NOW, "Nominated")]) == {"spot-abc"}
    of_claims = of_node_claims([no_stock, others, untainted], node_claims(pod))
    assert of_claims == [no_stock]
    assert after(30, *pod, *of_claims) == f"karpenter: {NO_STOCK}"
    pod.append(nominated("spot-def", 125))
    assert after(130, *pod, *of_claims) == (
        f"karpenter: Pod should schedule on: nodeclaim/spot-def; before that: karpenter: {NO_STOCK}"
    )


def test_cluster_autoscaler_tells_at_the_pod_that_its_scale_up_failed() -> None:
    def event(reason: str, seconds: int, message: str) -> PodEvent:
        return PodEvent("cluster-autoscaler", message, NOW + timedelta(seconds=seconds), reason)

    triggered = event("TriggeredScaleUp", 10, "pod triggered scale-up: [{l4-spot 0->1 (max: 20)}]")
    refused = event("NotTriggerScaleUp", 900, "pod didn't trigger scale-up: 1 in backoff after failed scale-up")
    assert after(30, triggered) == f"cluster-autoscaler: {triggered.message}"
    assert after(700, triggered) == f"cluster-autoscaler: {triggered.message}; that node did not come within 600 s"
    assert after(905, triggered, refused) == f"cluster-autoscaler: {refused.message}"


@pytest.mark.parametrize(
    "controller", ["karpenter", "eks-auto-mode/compute", "cluster-autoscaler", "gke.io/cluster-autoscaler"]
)
def test_events_of_every_known_autoscaler_are_shown_with_its_name(controller: str) -> None:
    assert last_event([PodEvent(controller, "no instance type fits", NOW)]) == f"{controller}: no instance type fits"
