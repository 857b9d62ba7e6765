"""Quotas that decide whether a replica's pod may exist or may be scheduled: Kueue's queues, ResourceQuota, LimitRange.

Kueue holds a pod back by a scheduling gate until its queue has room. The API server refuses a pod that a ResourceQuota
or a LimitRange does not allow. A ResourceQuota on devices refuses the ResourceClaim that is to be made for a pod: the
pod exists, and no scheduler looks at it. None of these is a fault of a GPU class: another class, or GPUs taken from
another Model, would not help. An exception is a pod that has quota and gets no node: Kueue's requests for one failed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from shoal.api import names, reasons
from shoal.api.model import Model
from shoal.core.facts import ClaimRefusal, NodeRefusal, Pod, QueueWait
from shoal.core.placement.autoscalerevents import PodEvent, newest

CLAIM_EVENT: Final = "FailedResourceClaimCreation"
"""Reason of a pod's event: kube-controller-manager could not make a ResourceClaim from the pod's template. A quota on
claims or devices refuses the claim and not the pod."""
CLAIM_SECONDS: Final = 3.0
"""Age of a pod from which on the lack of its ResourceClaim counts: it is made within a second, or refused."""
_LONGEST: Final = 2048
"""Characters of a message that are read."""
_LONGEST_NOTE: Final = 300
_BLANKS: Final = re.compile(r"[\x00-\x20\x7f]+")
_EXCEEDED: Final = re.compile(
    r"exceeded quota: ([a-z0-9.-]{1,253}), requested: ([^ ]{1,512}), used: ([^ ]{1,512}), limited: ([^ ]{1,512})"
)
_UNSTATED: Final = re.compile(r"failed quota: ([a-z0-9.-]{1,253}): (must specify .{1,512})", re.DOTALL)
_RANGE: Final = re.compile(
    r"((?:maximum|minimum) [\w./-]{1,128} (?:usage )?per \w{1,32} is [^,\]]{1,64}, but [^,\]]{1,128}"
    r"|[\w./-]{1,128} max limit to request ratio per \w{1,32} is [^,\]]{1,64}, but [^,\]]{1,128})"
)

_LIMITS: Final = re.compile(
    r"\bquota\b.{0,200}\bexceeded\b|\bexceed(?:s|ed)?\b.{0,200}\b(?:quota|limits?)\b", re.IGNORECASE | re.DOTALL
)
"""In the message of a ProvisioningRequest that failed: a limit or a quota of the cloud or the autoscaler."""
_STOCK: Final = re.compile(
    r"\b(?:no|out of) stock\b|stock-?out|out of resources|resource.?pool.?exhausted|\binsufficient.?capacity"
    r"|\bsufficient capacity\b|\bno capacity\b",
    re.IGNORECASE,
)
"""The same: the cloud has no such machine."""
_BY_CHECK: Final = "AdmissionCheck"
"""Reason of the condition Evicted."""


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """A quota's answer to a pod that a Deployment wanted to create."""

    reason: str
    message: str


def refusal(text: str) -> QuotaRefusal | None:
    """What a quota says in the API server's refusal of a pod; None: no quota refuses it."""
    read = text[:_LONGEST]
    if found := _EXCEEDED.search(read):
        quota, requested, used, limited = found.groups()
        return QuotaRefusal(
            reasons.RESOURCE_QUOTA,
            f"ResourceQuota {quota} has no room for a replica: requested {requested}, used {used}, limited {limited}",
        )
    if found := _UNSTATED.search(read):
        return QuotaRefusal(
            reasons.RESOURCE_QUOTA, f"ResourceQuota {found[1]} takes no pod without: {_line(found[2])}; set them in "
            "spec.pod.resources, or give defaults by a LimitRange"
        )  # fmt: skip
    if found := _RANGE.search(read):
        return QuotaRefusal(reasons.LIMIT_RANGE, f"a LimitRange of the namespace refuses the pod: {_line(found[1])}")
    return None


def claim_refusal(events: Iterable[PodEvent]) -> ClaimRefusal | None:
    """Why the ResourceClaim of a pod is not made, from the pod's events; None: they do not say."""
    last = newest(event for event in events if event.reason == CLAIM_EVENT and event.message)
    if last is None:
        return None
    if (quota := refusal(last.message)) is not None:
        return ClaimRefusal(quota.reason, quota.message, quota=True)
    return ClaimRefusal(reasons.CLAIM_NOT_CREATED, _line(last.message[:_LONGEST]), quota=False)


def queue_labels(model: Model) -> dict[str, str]:
    """Labels by which Kueue knows the queue and the priority of a Model's pods. A label on the Model wins over the same
    label in `spec.pod.labels`."""
    return {key: model.metadata.labels[key] for key in names.QUEUE_LABELS if model.metadata.labels.get(key)}


def waits_for_queue(pod: Pod) -> bool:
    """Whether Kueue holds the pod back."""
    return any(gate.startswith(names.KUEUE_PREFIX) for gate in pod.gates)


def held_by_quota(pod: Pod) -> bool:
    """Whether a queue of Kueue holds the pod back, or a quota that refuses its ResourceClaim."""
    return pod.gated and (waits_for_queue(pod) or (pod.claim_refusal is not None and pod.claim_refusal.quota))


def blocks_surge(pods: Iterable[Pod], refused: str | None) -> bool:
    """Whether a quota has no room for the replica that a rollout starts beside the old ones. `pods`: of the Deployment;
    `refused`: why the API server refuses others.

    A pod that Kueue holds back counts once Kueue has said that there is no room: a pod that is new, or that has quota
    and waits for its node, ends no replica that serves.
    """
    if refused and refusal(refused) is not None:
        return True
    return any(_without_room(pod) for pod in pods if held_by_quota(pod) and not pod.deleting)


def _without_room(pod: Pod) -> bool:
    if pod.claim_refusal is not None and pod.claim_refusal.quota:
        return True
    return pod.queue_wait is not None and pod.queue_wait.no_room


@dataclass(frozen=True, slots=True)
class AdmissionCheck:
    """An admission check of a Workload."""

    name: str
    state: str
    """Pending, Ready, Retry or Rejected."""
    message: str


@dataclass(frozen=True, slots=True)
class Workload:
    """What Kueue says of one pod."""

    owners: tuple[str, ...]
    """Uids of its pods."""
    conditions: Mapping[str, tuple[str, str]]
    """Type -> (status, message)."""
    uid: str = ""
    checks: tuple[AdmissionCheck, ...] = ()
    active: bool = True
    """False: Kueue does not try to admit it any more."""
    requeue_at: str = ""
    """When Kueue tries again after a check that asked for that; empty: it does not wait."""
    evicted_by: str = ""
    """Kueue's word for why the Workload is evicted; empty: it is not."""
    inadmissible: bool = False
    """Its queue does not exist or is not active: what others give back does not help."""

    @property
    def checked(self) -> bool:
        """Whether admission checks matter: one is not ready, or one has failed."""
        return any(check.state != "Ready" for check in self.checks)

    @property
    def between_checks(self) -> bool:
        """A check asked Kueue to try again, which took the quota back and has not looked at the queue since: its words
        are those of the eviction still."""
        said = self.conditions.get("QuotaReserved")
        return self.evicted_by == _BY_CHECK and said == ("False", self.conditions.get("Evicted", ("", ""))[1])


@dataclass(frozen=True, slots=True)
class ProvisioningRequest:
    """A request for nodes, which Kueue makes for a Workload and an autoscaler answers."""

    key: str
    workload: str
    """Uid of the Workload."""
    created: str
    conditions: Mapping[str, tuple[str, str]]
    """Type -> (status, message)."""
    failed: datetime | None = None
    """When it failed."""

    def describe(self) -> str:
        """As part of a sentence, with the autoscaler's own words."""
        for kind in ("CapacityRevoked", "BookingExpired", "Failed", "Provisioned", "Accepted"):
            status, message = self.conditions.get(kind, ("", ""))
            if status == "True" or (kind == "Provisioned" and message):
                state = kind if status == "True" else "not provisioned yet"
                return f"ProvisioningRequest {self.key}: {state}" + (f", {_line(message)}" if message else "")
        return f"ProvisioningRequest {self.key}: no autoscaler has answered it yet"


NO_KUEUE: Final = "the cluster has no Kueue that would admit it: install it, or delete the pod after removing the label"
NO_WORKLOAD: Final = (
    "Kueue has no Workload for it: check that its controller runs, with the integration `pod` for this namespace"
)


def queue_wait(pod_uid: str, workloads: Iterable[Workload], requests: Iterable[ProvisioningRequest] = ()) -> QueueWait:
    """Why Kueue has not admitted a pod."""
    found = next((w for w in workloads if pod_uid in w.owners), None)
    if found is None:
        return QueueWait(reasons.QUOTA_WAIT, NO_WORKLOAD)
    if not found.active:
        said = _gave_up(found, requests)
        request = _last(found, requests)
        refused = _no_nodes(request) if request is not None else None
        at = request.failed if request is not None and refused is not None else None
        return QueueWait(reasons.ADMISSION_REJECTED, said, refused, at)
    reserved = found.conditions.get("QuotaReserved", ("", ""))[0] == "True"
    if found.checked and (reserved or found.requeue_at or found.between_checks):
        again = f"; Kueue asks again at {found.requeue_at}" if found.requeue_at else ""
        return QueueWait(reasons.ADMISSION_CHECK, f"{_checks(found, requests)}{again}")
    for kind in ("QuotaReserved", "Admitted", "Evicted"):
        status, message = found.conditions.get(kind, ("", ""))
        if message and (status == "False" or kind == "Evicted"):
            no_room = (not reserved or bool(found.evicted_by)) and not found.inadmissible
            return QueueWait(reasons.QUOTA_WAIT, _line(message), no_room=no_room)
    return QueueWait(reasons.QUOTA_WAIT, "Kueue has not looked at it yet")


def _checks(workload: Workload, requests: Iterable[ProvisioningRequest]) -> str:
    check = next(each for each in workload.checks if each.state != "Ready")
    if (request := _last(workload, requests)) is not None:
        return f"admission check {check.name}: {request.describe()}"
    said = f", {_line(check.message)}" if check.message else ""
    return f"admission check {check.name} is {check.state}{said}"


def _gave_up(workload: Workload, requests: Iterable[ProvisioningRequest]) -> str:
    _, message = workload.conditions.get("Evicted", ("", ""))
    said = _line(message) if message else "its Workload is deactivated"
    return said if (request := _last(workload, requests)) is None else f"{said} ({request.describe()})"


def _no_nodes(request: ProvisioningRequest) -> NodeRefusal | None:
    """What it means for the class that the last request for a node has failed; None: it has not. Kueue gives up only
    after it has repeated the request. Words that nobody knows may be about this pod only."""
    status, message = request.conditions.get("Failed", ("", ""))
    if status != "True" or request.failed is None:
        return None
    if _LIMITS.search(message[:_LONGEST]):
        return NodeRefusal(reasons.LIMIT_REACHED, request.describe(), everyone=True, repeated=True)
    everyone = _STOCK.search(message[:_LONGEST]) is not None
    reason = reasons.STOCK_OUT if everyone else reasons.SCALE_UP_FAILED
    return NodeRefusal(reason, request.describe(), everyone, repeated=True)


def _last(workload: Workload, requests: Iterable[ProvisioningRequest]) -> ProvisioningRequest | None:
    own = [request for request in requests if workload.uid and request.workload == workload.uid]
    return max(own, key=lambda request: (request.created, request.key), default=None)


def _line(text: str) -> str:
    line = _BLANKS.sub(" ", text).strip()
    return line if len(line) <= _LONGEST_NOTE else f"{line[:_LONGEST_NOTE]}..."
