"""Replicas that a quota holds back: what is said of them, and that nobody loses a GPU for them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.model import Model, ModelSpec
from shoal.core.enginerevision import engine_revision
from shoal.core.facts import ClaimRefusal, Deployment, Pod, QueueWait
from shoal.core.placement import ClassSupply, Demand, Held, ReplicaState, plan
from shoal.core.placement.autoscalerevents import PodEvent
from shoal.core.placement.backoff import REFUSED_SECONDS, RETRY_SECONDS, ClassBackoff, observe
from shoal.core.podquota import (
    NO_WORKLOAD,
    AdmissionCheck,
    ProvisioningRequest,
    Workload,
    blocks_surge,
    claim_refusal,
    queue_labels,
    queue_wait,
    refusal,
)
from shoal.core.status.diagnosis import diagnose, progress
from shoal.core.status.quotawait import quota_wait
from shoal.core.status.variants import cold_start
from shoal.kube.projections import workload
from tests.support.fleets import candidate, demand, supply

NOW = datetime(2026, 11, 25, tzinfo=UTC)
GATE = "kueue.x-k8s.io/admission"
FULL = 'pods "chat-1" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=2, limited: requests.nvidia.com/gpu=2'  # noqa: E501
H100, L4 = candidate("h100", cost="2.49"), candidate("l4", cost="0.43")


def pod(name: str = "p", **state: Any) -> Pod:
    base: dict[str, Any] = {
        "namespace": "ns", "uid": name, "node": None, "finished": False, "deleting": False, "ready": False,
        "requests": {"nvidia.com/gpu": 1}, "model_uid": "u", "gpu_class": "h100", "created": NOW,
    }  # fmt: skip
    return Pod(name=name, **(base | state))


def gated(name: str = "p", **state: Any) -> Pod:
    return pod(name, **({"gates": (GATE,), "queue": "serving", "queue_managed": True} | state))


def deployment(refused: str | None = None) -> Deployment:
    return Deployment(
        "ns", "chat-h100", "d", "1", "u", "h100", 1, "nvidia.com/gpu", 1, 1, 1, frozenset(), 0, 0, 0, refused, False
    )


@pytest.mark.parametrize(
    ("text", "reason", "parts"),
    [
        (
            FULL,
            "ResourceQuotaExceeded",
            ["ResourceQuota gpus has no room", "requested requests.nvidia.com/gpu=1", "used requests.nvidia.com/gpu=2"],
        ),
        (
            'pods "x" is forbidden: failed quota: compute: must specify limits.cpu for: engine; limits.memory for: e',
            "ResourceQuotaExceeded",
            ["ResourceQuota compute takes no pod without: must specify limits.cpu", "spec.pod.resources"],
        ),
        (
            'pods "x" is forbidden: maximum cpu usage per Container is 2, but limit is 8',
            "LimitRangeExceeded",
            ["a LimitRange of the namespace", "maximum cpu usage per Container is 2, but limit is 8"],
        ),
        (
            'pods "x" is forbidden: [minimum memory usage per Pod is 1Gi, but request is 64Mi, maximum cpu usage per '
            "Pod is 1, but limit is 8]",
            "LimitRangeExceeded",
            ["minimum memory usage per Pod is 1Gi, but request is 64Mi"],
        ),
    ],
)
def test_a_quota_that_refuses_a_pod_is_named(text: str, reason: str, parts: list[str]) -> None:
    found = refusal(text)
    assert found is not None
    assert found.reason == reason
    for part in parts:
        assert part in found.message


@pytest.mark.parametrize(
    "text",
    ["", 'violates PodSecurity "restricted"', "exceeded quota", f"exceeded quota: {'x' * 100_000}", "a\n" * 5000],
)
def test_another_refusal_is_no_quota(text: str) -> None:
    assert refusal(text) is None


def test_a_gated_pod_waits_for_its_queue_and_says_why() -> None:
    cause = diagnose([gated(queue_wait=QueueWait("QuotaWait", "insufficient unused quota for nvidia.com/gpu"))])
    assert cause is not None
    assert cause.reason == "QuotaWait"
    assert cause.message == (
        "pod ns/p waits for quota of queue ns/serving: insufficient unused quota for nvidia.com/gpu"
    )
    assert not cause.waits_for_a_person
    assert progress([gated(), gated("q")]) == "2 waiting for quota"
    other = diagnose([pod(gates=("example.com/hold",))])
    assert other is not None
    assert (other.reason, other.message) == (
        "SchedulingGated",
        "pod ns/p is held back by the scheduling gate example.com/hold",
    )


def test_the_condition_is_there_while_a_quota_matters() -> None:
    assert quota_wait([pod()], [deployment()]) is None
    waits = quota_wait([gated(), gated("q")], [deployment()])
    assert waits is not None
    assert (waits.status, waits.reason) == ("True", "QuotaWait")
    assert waits.message.endswith("(2 replicas wait)")
    admitted = quota_wait([gated(gates=(), node="n")], [deployment()])
    assert admitted is not None
    assert (admitted.status, admitted.reason, admitted.message) == ("False", "Admitted", "admitted by queue serving")


def test_with_two_quotas_both_are_named_and_the_one_that_refuses_the_pod_comes_first() -> None:
    both = quota_wait([gated()], [deployment(FULL)])
    assert both is not None
    assert (both.status, both.reason) == ("True", "ResourceQuotaExceeded")
    assert both.message.index("ResourceQuota gpus") < both.message.index("queue ns/serving")


def test_a_queue_that_no_kueue_looks_at_is_said() -> None:
    ignored = quota_wait([pod(queue="serving", node="n", ready=True)], [deployment()])
    assert ignored is not None
    assert (ignored.status, ignored.reason) == ("False", "QueueIgnored")


def test_the_message_is_kueues_own() -> None:
    full = Workload(("p",), {"QuotaReserved": ("False", "couldn't assign flavors:\n insufficient quota")})
    other = Workload(("q",), {"QuotaReserved": ("False", "another's")})
    assert queue_wait("p", [other, full]) == QueueWait(
        "QuotaWait", "couldn't assign flavors: insufficient quota", no_room=True
    )
    assert queue_wait("x", [other, full]) == QueueWait("QuotaWait", NO_WORKLOAD)
    assert "integration `pod`" in NO_WORKLOAD
    preempted = {"QuotaReserved": ("True", "ok"), "Evicted": ("True", "preempted by a job")}
    evicted = Workload(("p",), preempted, evicted_by="Preempted")
    assert queue_wait("p", [evicted]) == QueueWait("QuotaWait", "preempted by a job", no_room=True)


# --- quotas on devices: the ResourceClaim is refused, not the pod ---------------------------------------------------

NO_DEVICES = (
    'PodResourceClaim gpus: create ResourceClaim : resourceclaims.resource.k8s.io "p-gpus-x" is forbidden: '
    "exceeded quota: devices, requested: gpu.test.deviceclass.resource.k8s.io/devices=1, "
    "used: gpu.test.deviceclass.resource.k8s.io/devices=2, limited: gpu.test.deviceclass.resource.k8s.io/devices=2"
)
DENIED = "PodResourceClaim gpus: create ResourceClaim : admission webhook denied it"


def claim_event(message: str, seconds: int = 0, reason: str = "FailedResourceClaimCreation") -> PodEvent:
    return PodEvent("resource_claim", message, NOW + timedelta(seconds=seconds), reason)


def unclaimed(name: str = "p", message: str = NO_DEVICES, **state: Any) -> Pod:
    found = claim_refusal([claim_event(message)])
    return pod(name, lacks_claim=True, claim_refusal=found, claim_was_refused=True, **state)


def test_a_quota_on_devices_is_read_from_the_last_event_of_the_pod() -> None:
    scheduler = claim_event("0/3 nodes are available", 9, "FailedScheduling")
    found = claim_refusal([claim_event(NO_DEVICES, 2), claim_event(DENIED, 1), scheduler])
    assert found == ClaimRefusal(
        "ResourceQuotaExceeded",
        "ResourceQuota devices has no room for a replica: requested gpu.test.deviceclass.resource.k8s.io/devices=1, "
        "used gpu.test.deviceclass.resource.k8s.io/devices=2, limited gpu.test.deviceclass.resource.k8s.io/devices=2",
        quota=True,
    )
    assert claim_refusal([scheduler]) is None
    other = claim_refusal([claim_event(DENIED), claim_event("x" * 100_000, -5)])
    assert other == ClaimRefusal("ResourceClaimNotCreated", DENIED, quota=False)
    long = claim_refusal([claim_event("a\n" * 50_000)])
    assert long is not None
    assert len(long.message) < 400, "an event is written by whoever may write in the namespace"


def test_a_replica_without_quota_for_its_devices_waits_and_says_so() -> None:
    cause = diagnose([unclaimed()])
    assert cause is not None
    assert cause.reason == "ResourceQuotaExceeded"
    assert cause.message.startswith("pod ns/p gets no ResourceClaim: ResourceQuota devices has no room for a replica: ")
    assert not cause.waits_for_a_person
    assert progress([unclaimed(), unclaimed("q")]) == "2 waiting for quota"
    waits = quota_wait([unclaimed(), unclaimed("q")], [deployment()])
    assert waits is not None
    assert (waits.status, waits.reason) == ("True", "ResourceQuotaExceeded")
    assert waits.message.startswith("h100: ResourceQuota devices has no room for a replica: ")
    assert waits.message.endswith("/devices=2 (2 replicas wait)")
    assert quota_wait([pod(claim_was_refused=True)], [deployment()]) is None, "the claim is there now"


def test_a_claim_that_is_refused_for_another_reason_is_no_quota() -> None:
    cause = diagnose([unclaimed(message=DENIED)])
    assert cause is not None
    assert (cause.reason, cause.message) == (
        "ResourceClaimNotCreated",
        f"pod ns/p gets no ResourceClaim: {DENIED}",
    )
    assert quota_wait([unclaimed(message=DENIED)], [deployment()]) is None
    assert not unclaimed(message=DENIED).gated


# --- admission checks: nodes that an autoscaler is asked for --------------------------------------------------------

RESERVED = {"QuotaReserved": ("True", "Quota reserved in ClusterQueue all")}


def checked(state: str = "Pending", message: str = "", **more: Any) -> Workload:
    base: dict[str, Any] = {"conditions": RESERVED, "uid": "w"}
    return Workload(("p",), checks=(AdmissionCheck("nodes", state, message),), **(base | more))


def request(number: int = 1, workload: str = "w", **conditions: tuple[str, str]) -> ProvisioningRequest:
    return ProvisioningRequest(f"ns/pod-p-nodes-{number}", workload, f"2026-11-25T00:0{number}:00Z", conditions)


def test_a_pod_with_quota_names_the_request_for_its_nodes_and_the_autoscalers_words() -> None:
    """Until then Kueue's only message is that the pod has quota: it was not told at all what it waits for."""
    unanswered = queue_wait("p", [checked()], [request(workload="another"), request()])
    assert unanswered.reason == "AdmissionCheckPending"
    assert unanswered.message == (
        "admission check nodes: ProvisioningRequest ns/pod-p-nodes-1: no autoscaler has answered it yet"
    )
    answers = {"Accepted": ("True", "ok"), "Provisioned": ("False", "ETA: 2 h,\n position 7")}
    eta = queue_wait("p", [checked()], [replace(request(), conditions=answers)])
    assert eta.message.endswith("ProvisioningRequest ns/pod-p-nodes-1: not provisioned yet, ETA: 2 h, position 7")
    cause = diagnose([gated(queue_wait=eta)])
    assert cause is not None
    assert cause.message.startswith("pod ns/p has quota of queue ns/serving, which waits for admission check nodes: ")
    assert not cause.waits_for_a_person
    # Another check than one for nodes says what its controller does.
    other = queue_wait("p", [checked(message="approval of a person")])
    assert other.message == "admission check nodes is Pending, approval of a person"


def test_of_requests_that_are_repeated_the_last_one_is_told_and_when_the_next_one_comes() -> None:
    failed = request(1, Failed=("True", "no stock in zone a"))
    conditions = {"QuotaReserved": ("False", "At least one admission check is false")}
    waits = queue_wait("p", [checked(conditions=conditions, requeue_at="2026-11-25T00:02:00Z")], [failed])
    assert (waits.reason, waits.message) == (
        "AdmissionCheckPending",
        "admission check nodes: ProvisioningRequest ns/pod-p-nodes-1: Failed, no stock in zone a; "
        "Kueue asks again at 2026-11-25T00:02:00Z",
    )
    again = queue_wait("p", [checked()], [request(2), failed])
    assert "pod-p-nodes-2" in again.message
    # Without quota after a failed request it is the quota that it waits for.
    full = {"QuotaReserved": ("False", "insufficient unused quota")}
    assert queue_wait("p", [checked(conditions=full)], [failed]) == QueueWait(
        "QuotaWait", "insufficient unused quota", no_room=True
    )


def test_what_kueue_has_given_up_waits_for_a_person() -> None:
    conditions = {"QuotaReserved": ("False", "x"), "Evicted": ("True", "The workload is deactivated due to nodes")}
    gone = queue_wait("p", [checked(conditions=conditions, active=False)], [request(Failed=("True", "no stock"))])
    assert gone.reason == "AdmissionRejected"
    assert gone.message == (
        "The workload is deactivated due to nodes (ProvisioningRequest ns/pod-p-nodes-1: Failed, no stock)"
    )
    cause = diagnose([gated(queue_wait=gone)])
    assert cause is not None
    assert cause.message.endswith("Failed, no stock); delete the pod to ask again")
    assert cause.waits_for_a_person
    waits = quota_wait([gated(queue_wait=gone)], [deployment()])
    assert waits is not None
    assert (waits.status, waits.reason) == ("True", "AdmissionRejected")
    by_hand = queue_wait("p", [Workload(("p",), {}, active=False)])
    assert by_hand.message == "its Workload is deactivated"


# --- a request for nodes that failed for good: an outage of the class, not a quota -----------------------------------

NO_STOCK = "no stock in zone a"
WHY = f"Kueue got no node for a replica there: ProvisioningRequest ns/pod-p-nodes-1: Failed, {NO_STOCK}"


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def given_up(message: str = NO_STOCK, *, active: bool = False, **conditions: tuple[str, str]) -> QueueWait:
    said = conditions or {"Failed": ("True", message)}
    failed = at(100) if "Failed" in said else None
    evicted = {"Evicted": ("True", "The workload is deactivated due to nodes")}
    return queue_wait(
        "p", [checked(conditions=evicted, active=active)], [replace(request(), conditions=said, failed=failed)]
    )


def shown(
    wait: QueueWait | None, seconds: float = 105, made: datetime | None = None, provision: float | None = 600.0
) -> dict[str, ClassBackoff]:
    return observe(
        {}, [gated(queue_wait=wait)], now=at(seconds), timeout=lambda _: 1.0, provision=lambda _: provision,
        newest_node=lambda _: made,
    )  # fmt: skip


def test_nodes_that_kueue_asked_for_in_vain_are_an_outage_of_the_class_with_the_autoscalers_words() -> None:
    assert shown(given_up()) == {"h100": ClassBackoff(WHY, at(100 + REFUSED_SECONDS), "StockOut")}
    full = shown(given_up("Quota 'NVIDIA_H100_GPUS' exceeded. Limit: 8.0"))
    assert [each.no_nodes for each in full.values()] == ["LimitReached"]
    # It counts from the failure on, once: nothing is asked for anew while the pod stands there for days.
    assert shown(given_up(), 100 + REFUSED_SECONDS) == {}
    assert shown(given_up(), 800, made=at(699)), "that node had been ordered before"
    assert shown(given_up(), 800, made=at(701)) == {}, "nodes come again"
    assert shown(given_up(), provision=None) == {}, "no autoscaler adds nodes to the class"


def test_a_request_that_failed_with_words_that_nobody_knows_is_a_backoff_of_its_model_only() -> None:
    for message in ("CA could not find requested capacity", "ProvisioningRequest is expired", ""):
        [found] = shown(given_up(message)).values()
        assert (found.no_nodes, found.until) == ("", at(100 + RETRY_SECONDS))


def test_no_class_is_given_up_for_a_quota_nor_while_kueue_goes_on_asking() -> None:
    full = Workload(("p",), {"QuotaReserved": ("False", "insufficient quota: no stock")})
    by_hand = Workload(("p",), {}, active=False)
    other_check = checked("Rejected", "over budget: quota exceeded", active=False)
    for waits in (
        queue_wait("p", [full]), queue_wait("p", [by_hand]), queue_wait("p", [other_check]), given_up(active=True),
        given_up(Provisioned=("True", "here they are")), given_up(BookingExpired=("True", "nobody came")), None,
    ):  # fmt: skip
        assert shown(waits) == {}
        assert waits is None or waits.refusal is None


def test_pods_carry_the_labels_of_the_model() -> None:
    raw = {
        "apiVersion": "shoal.dev/v1alpha1", "kind": "Model",
        "metadata": {"name": "chat", "namespace": "ns", "labels": {"kueue.x-k8s.io/queue-name": "serving", "a": "b"}},
        "spec": {"source": {"uri": "hf://a/b"}},
    }  # fmt: skip
    assert queue_labels(Model.model_validate(raw)) == {"kueue.x-k8s.io/queue-name": "serving"}


# --- placement does not fight admission -----------------------------------------------------------------------------


def state(replicas: int, *, bound: int = 0, gated: int = 0, pods: int | None = None) -> ReplicaState:
    held = {"n0": Held(bound, bound)} if bound else {}
    return ReplicaState(replicas, 1, held, pods=replicas if pods is None else pods, gated=gated)


def test_nobody_loses_a_gpu_for_a_replica_that_a_quota_holds_back() -> None:
    low = demand("chat/low", H100, priority=0, replica_states={"h100": state(1, bound=1)})
    high = demand("chat/high", H100, priority=100, replica_states={"h100": state(1, gated=1)})
    full = replace(supply("h100", 0, of=1), nodes=(replace(supply("h100", 0, of=1).nodes[0], name="n0"),))
    found = plan([low, high], [full])
    assert [(v.replicas, v.leaving) for v in found[low.uid].variants] == [(1, ())]
    assert [(v.gpu_class, v.replicas) for v in found[high.uid].variants] == [("h100", 1)]
    assert "1 on h100 waits for quota and takes no GPU until then" in found[high.uid].message
    # The mutation: without the gate the lower priority yields.
    free = plan([low, replace(high, replica_states={"h100": state(1)})], [full])
    assert free[low.uid].missing == 1


def test_no_other_class_is_used_and_no_gpu_is_kept_idle() -> None:
    waits = demand("chat/a", L4, H100, replica_states={"l4": state(1, gated=1)})
    other = demand("chat/b", L4)
    found = plan([waits, other], [supply("l4", 1), supply("h100", 1)])
    assert [(v.gpu_class, v.replicas) for v in found[waits.uid].variants if v.replicas] == [("l4", 1)]
    assert [(v.gpu_class, v.replicas) for v in found[other.uid].variants if v.replicas] == [("l4", 1)]


def test_further_replicas_are_planned_as_before() -> None:
    some = demand("chat/a", H100, wanted=3, replica_states={"h100": state(2, bound=1, gated=1)})
    n0 = replace(supply("h100", 2, of=4).nodes[0], name="n0")
    found = plan([some], [replace(supply("h100"), nodes=(n0,), matching=None)])[some.uid]
    assert [(v.replicas, found.missing) for v in found.variants] == [(3, 0)]


def test_fewer_replicas_are_wanted_while_they_wait() -> None:
    none = demand("chat/a", H100, wanted=0, replica_states={"h100": state(1, gated=1)})
    assert all(v.replicas == 0 for v in plan([none], [supply("h100", 1)])[none.uid].variants)


def test_a_surge_pod_that_waits_for_quota_takes_no_gpu() -> None:
    rolls = demand("chat/a", H100, replica_states={"h100": state(1, bound=1, gated=1, pods=2)})
    n0 = replace(supply("h100", 1, of=2).nodes[0], name="n0")
    found = plan([rolls, demand("chat/b", H100)], [replace(supply("h100"), nodes=(n0,), matching=None)])
    assert found["chat/b"].placed if "chat/b" in found else all(p.placed for p in found.values())
    assert blocks_surge([gated(queue_wait=QueueWait("QuotaWait", "insufficient unused quota", no_room=True))], None)
    assert blocks_surge([], FULL)
    assert not blocks_surge([pod()], "admission webhook denied it")
    assert blocks_surge([unclaimed()], None), "the old replicas have the devices that the quota counts"
    assert not blocks_surge([unclaimed(message=DENIED), unclaimed(deleting=True)], None)


def test_no_replica_that_serves_goes_for_one_that_has_quota_or_that_kueue_has_not_looked_at() -> None:
    checks = queue_wait("p", [checked()], [request()])
    assert checks.reason == "AdmissionCheckPending", "it has quota and waits for its node"
    nobody = queue_wait("p", [])
    for wait in (checks, nobody, None):
        assert not blocks_surge([gated(queue_wait=wait)], None)


def test_no_replica_that_serves_goes_while_kueue_asks_for_a_node_again() -> None:
    """After a failed request for a node Kueue takes the quota back, waits, and then gives it again: that is no word on
    how much room the queue has."""
    said = "At least one admission check is false"
    status = {
        "conditions": [
            {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": said},
            {"type": "Evicted", "status": "True", "reason": "AdmissionCheck", "message": said},
            {"type": "Requeued", "status": "True", "reason": "BackoffFinished", "message": "the backoff is finished"},
        ],
        "admissionChecks": [{"name": "nodes", "state": "Pending", "message": "Reset to Pending after eviction"}],
    }
    owner = {"kind": "Pod", "uid": "p"}

    def blocked() -> bool:
        read = workload({"metadata": {"uid": "w", "ownerReferences": [owner]}, "spec": {}, "status": status})
        return blocks_surge([gated(queue_wait=queue_wait("p", [read]))], None)

    assert not blocked(), "the wait is over, and Kueue has not looked at the queue yet"
    status["conditions"][0]["message"] = "couldn't assign flavors: insufficient unused quota"
    assert blocked(), "others have taken the quota meanwhile"
    status["conditions"][0] |= {"reason": "Inadmissible", "message": "LocalQueue serving doesn't exist"}
    assert not blocked(), "no replica that goes helps"


def test_no_replica_that_serves_goes_for_one_that_has_got_its_quota_back() -> None:
    conditions = {
        "QuotaReserved": ("True", "Quota reserved in ClusterQueue all"),
        "Admitted": ("False", "The workload has no reservation"),
        "Evicted": ("False", "Previously: preempted by a job"),
    }
    wait = queue_wait("p", [Workload(("p",), conditions)])
    assert not blocks_surge([gated(queue_wait=wait)], None)


def test_a_class_is_not_given_up_for_a_pod_that_waits_for_quota() -> None:
    later = NOW + timedelta(days=2)

    def backoffs(each: Pod, admitted: dict[str, datetime] | None = None) -> bool:
        spec = ModelSpec.model_validate({"source": {"uri": "hf://org/model"}})
        return bool(
            observe(
                {}, [each], now=later, timeout=lambda _: 300.0, provision=lambda _: 60.0, admitted=admitted or {},
                applied={"h100": engine_revision(spec, "h100", None, None)},
            )
        )  # fmt: skip

    assert not backoffs(gated())
    assert not backoffs(unclaimed())
    pending = gated(gates=(), unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    assert not backoffs(pending, {"p": later - timedelta(seconds=20)}), "its time begins when it is admitted"
    assert backoffs(pending, {"p": later - timedelta(seconds=200)})
    assert not backoffs(gated(gates=(), node="n", scheduled=later - timedelta(seconds=30)))
    assert backoffs(gated(gates=(), node="n", scheduled=later - timedelta(seconds=400)))


def test_the_wait_for_quota_is_no_part_of_a_cold_start() -> None:
    bound, ready = NOW + timedelta(hours=3), NOW + timedelta(hours=3, seconds=90)
    assert cold_start(gated(gates=(), node="n", ready=True, scheduled=bound, ready_since=ready)) == 90
    plain = pod(node="n", ready=True, scheduled=NOW + timedelta(seconds=40), ready_since=NOW + timedelta(seconds=90))
    assert cold_start(plain) == 90
    late = pod(node="n", ready=True, scheduled=bound, ready_since=ready, claim_was_refused=True)
    assert cold_start(late) == 90


# --- placement of a replica that has quota and gets no node ----------------------------------------------------------


def rejected(*, gated: int = 1, rejected: int = 1) -> ReplicaState:
    return ReplicaState(gated, 1, {}, pods=gated, gated=gated, rejected=rejected)


def coming(name: str, nodes: int, *free: int, outage: str = "") -> ClassSupply:
    return replace(supply(name, *free), coming=nodes, coming_gpus=1, outage=outage)


def placed(model: Demand, *supplies: ClassSupply) -> dict[str, int]:
    return {v.gpu_class: v.replicas for v in plan([model], supplies)[model.uid].variants if v.replicas}


def test_a_replica_that_gets_no_node_goes_to_another_class_that_has_room() -> None:
    model = demand("chat/a", L4, H100, replica_states={"l4": rejected()})
    for other in (supply("h100", 1), coming("h100", 1)):
        for l4 in (coming("l4", 3, outage=WHY), coming("l4", 3), coming("l4", 3, 1)):
            assert placed(model, l4, other) == {"h100": 1}
    one_waits = demand("chat/a", L4, H100, wanted=2, replica_states={"l4": rejected(gated=2)})
    assert placed(one_waits, coming("l4", 3, outage=WHY), supply("h100", 4)) == {"l4": 1, "h100": 1}, (
        "the other one waits for quota, and no class is given up for that"
    )


def test_a_second_replica_leaves_too_while_the_first_one_waits_for_its_node_elsewhere() -> None:
    states = {"l4": rejected(), "h100": ReplicaState(1, 1, {}, pods=1)}
    model = demand("chat/a", L4, H100, wanted=2, replica_states=states)
    assert placed(model, coming("l4", 3, outage=WHY), coming("h100", 2)) == {"h100": 2}


def test_a_replica_that_gets_no_node_and_has_no_other_class_stays_and_takes_no_gpu() -> None:
    low = demand("chat/low", L4)
    for backoffs in ({}, {"l4": WHY}):
        model = demand("chat/a", L4, priority=100, replica_states={"l4": rejected()}, backoffs=backoffs)
        found = plan([model, low], [coming("l4", 0, 1, outage=WHY)])
        assert [(v.gpu_class, v.replicas) for v in found[model.uid].variants if v.replicas] == [("l4", 1)]
        assert [(v.gpu_class, v.replicas) for v in found[low.uid].variants if v.replicas] == [("l4", 1)]
    both_out = demand("chat/a", L4, H100, replica_states={"l4": rejected()})
    assert placed(both_out, coming("l4", 3, outage=WHY), coming("h100", 3, outage=WHY)) == {"l4": 1}


NO_NODE = "Kueue got no node there: ProvisioningRequest ns/pod-p-nodes-1: Failed, no stock in zone a"


def test_a_replica_that_gets_no_node_names_the_failed_request_and_does_not_wait_for_quota() -> None:
    said = given_up()
    assert said.refusal is not None
    state = replace(rejected(), rejection=said.refusal.message)
    model = demand("chat/a", L4, replica_states={"l4": state})
    found = plan([model], [coming("l4", 3, outage=WHY)])[model.uid]
    assert found.message == f"1 on l4 takes no GPU: {NO_NODE}; a new pod asks again once nodes are expected there"
    two = replace(model, wanted=2, replica_states={"l4": replace(state, replicas=2, pods=2, gated=2)})
    message = plan([two], [coming("l4", 3, outage=WHY)])[model.uid].message
    assert message.startswith("1 on l4 waits for quota and takes no GPU until then; 1 on l4 takes no GPU: Kueue got no")
    cause = diagnose([gated(queue_wait=said)])
    assert cause is not None
    assert cause.message.endswith("no stock in zone a); a new pod asks again once nodes of h100 are expected")
    assert not cause.waits_for_a_person


def test_a_replica_that_got_no_node_asks_again_on_its_only_class_when_the_outage_is_over() -> None:
    """Kueue asks for no other node for a pod that it has given up. The pod stood there until a person deleted it."""
    fails = replace(rejected(), rejection="ProvisioningRequest ns/pod-p-nodes-1: Failed, no stock in zone a")

    def planned(
        state: ReplicaState, outage: str = "", backoffs: dict[str, str] | None = None
    ) -> tuple[list[tuple[str, int]], str, str]:
        model = demand("chat/a", L4, priority=100, replica_states={"l4": state}, backoffs=backoffs or {})
        low = demand("chat/low", L4, replica_states={"l4": ReplicaState(1, 1, {"l4-0": Held(1, 1)}, pods=1)})
        found = plan([model, low], [replace(supply("l4", 0, of=1), coming=1, coming_gpus=1, outage=outage)])
        assert sum(v.replicas for v in found[low.uid].variants) == 1, "no GPU is taken for it"
        mine = found[model.uid]
        return [(v.gpu_class, v.replicas) for v in mine.variants], mine.reason, mine.message

    assert planned(fails, outage=WHY)[0] == [("l4", 1)]
    assert planned(fails, backoffs={"l4": WHY})[0] == [("l4", 1)]
    again = f"1 on l4: {NO_NODE}; nodes are expected again, so a new pod asks for them"
    assert planned(fails) == ([("l4", 0)], "Pending", again), "the Deployment stays, without its pod"
    going = replace(fails, replicas=0)
    assert planned(going) == ([("l4", 0)], "Pending", again), "until the Deployment controller has deleted the pod"
    assert planned(ReplicaState(0, 1, {}, pods=0))[0] == [("l4", 1)], "and a new pod asks"


def test_of_replicas_that_serve_or_wait_for_quota_none_goes_when_another_asks_again() -> None:
    full = replace(supply("l4", 0, of=1), coming=3, coming_gpus=1)
    serves = ReplicaState(3, 1, {"l4-0": Held(1, 1)}, pods=3, gated=2, rejected=1)
    model = demand("chat/a", L4, wanted=4, replica_states={"l4": serves})
    assert placed(model, full) == {"l4": 2}
    shrunk = replace(serves, replicas=2)
    assert placed(replace(model, replica_states={"l4": shrunk}), full) == {"l4": 2}, (
        "a further replica would keep the pod that gets no node"
    )
    gone = replace(serves, replicas=2, pods=2, gated=1, rejected=0)
    assert placed(replace(model, replica_states={"l4": gone}), full) == {"l4": 4}
