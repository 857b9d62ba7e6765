"""What an autoscaler says of a pending pod, in events: which node it brings, or why none.

Karpenter says at the pod which NodeClaim is to take it (`Nominated`), also where the cloud then has no such machine. It
says that of the NodeClaim (`InsufficientCapacityError`), deletes that at once, and makes the next one. At the pod it
repeats `FailedScheduling` only after five minutes, so the newest event alone would hide a stock-out.

A refusal is what an autoscaler says when it adds no node for the pod, and is not about to. States of a pending pod:

| state | what was said last | what follows |
|---|---|---|
| silent | nothing | the wait for twice the class's provision time |
| announced | a node is coming | the same wait; it keeps its place while the class gets no further nodes |
| refused | a known text that is final for the pod, from each autoscaler that speaks of it | another look |
| refused again | the same at the next look, half a minute later, and no announcement between | the wait is over |
| unclear | any other text | as silent |
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from shoal.api.reasons import LIMIT_REACHED, SCALE_UP_FAILED, STOCK_OUT
from shoal.core.facts import AutoscalerNews, NodeRefusal

NO_INSTANCE_TYPE: Final = "NoInstanceType"
REFUSALS: Final = (STOCK_OUT, LIMIT_REACHED, SCALE_UP_FAILED, NO_INSTANCE_TYPE)
"""Reasons of a refusal: the cloud has no such machine, a limit or a quota is reached, the autoscaler tries no more for
a while after a failure, or no machine of the pool would take this pod."""

_MOST_CHARACTERS: Final = 300
_BLANKS: Final = re.compile(r"[\x00-\x20\x7f]+")
_CONTROLLERS: Final = ("karpenter", "eks-auto-mode/compute", "cluster-autoscaler", "gke.io/cluster-autoscaler")
"""Reporting controllers of Karpenter, of EKS Auto Mode (AWS runs Karpenter there), and of Cluster Autoscaler, GKE's
among them."""
_ANNOUNCES: Final = ("Nominated", "TriggeredScaleUp")
"""Reasons of events that announce a node. All others of an autoscaler say why none comes."""
_FAILED_CLAIMS: Final = ("InsufficientCapacityError", "NodeClassNotReady")
"""Reasons of events that say of a NodeClaim why its node does not come."""
_NO_CAPACITY: Final = "InsufficientCapacityError"
_REJECTED: Final = "FailedScheduling"
_REJECTION: Final = "Failed to schedule pod, "
"""Begin of Karpenter's text at a pod that no NodePool takes; one part for each NodePool, separated by `; `. Texts:
kubernetes-sigs/karpenter, pkg/controllers/provisioning/scheduling/{events,scheduler,nodeclaim}.go and
pkg/scheduling/{taints,requirements}.go."""
_POOL_LIMITS: Final = ("all available instance types exceed limits for nodepool", "node limits have been exhausted for")
_NO_TYPE: Final = "no instance type "
_OFFERING: Final = "offering"
"""In `no instance type has the required offering`: the types of the NodePool are out of stock, or it wants another zone
or capacity type than there is."""
_OTHER_POOLS: Final = ("did not tolerate", "incompatible requirements")
"""Parts about NodePools that are not for the class."""
_NOT_TRIGGERED: Final = "NotTriggerScaleUp"
_NO_SCALE_UP: Final = "pod didn't trigger scale-up: "
"""Begin of Cluster Autoscaler's text at a pod for which it adds no node. It says so only of pods that fit on no node
that is coming, with a count of node groups for each reason. Texts: kubernetes/autoscaler,
cluster-autoscaler/processors/status/eventing_scale_up_processor.go and core/scaleup/orchestrator/skippedreasons.go."""
_COUNTED: Final = re.compile(r"(?:^|, )\d+ ")
_GROUP_LIMITS: Final = ("max node group size reached", "max cluster ", "exceeded quota: ")
_MOST_NODES: Final = "max total nodes in cluster reached"
_GROUP_FAILED: Final = "in backoff after failed scale-up"
_OTHER_GROUPS: Final = ("node(s) didn't match Pod's node affinity/selector", "node(s) had untolerated taint")
"""The scheduler's words for node groups that are not for the class."""
_TOO_SMALL: Final = "Insufficient "
"""The scheduler's word for a node group whose nodes are too small for the pod."""
_FAILED_SCALE_UP: Final = "FailedScaleUp"
"""GKE's event at a pod whose node could not be made. Its error may also be one that passes, such as an internal one.
Texts: GKE's documentation, "Troubleshoot cluster autoscaler not scaling up"."""
_NODE_CLAIM: Final = re.compile(r"\bnodeclaim/([a-z0-9][a-z0-9.-]{0,252})")
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One event about a pod, or about the NodeClaim that is to take it."""

    controller: str
    """What reported it."""
    message: str
    at: datetime | None
    """When it was seen last."""
    reason: str = ""
    first: datetime | None = None
    """When it was seen first; None: unknown."""
    about: str = ""
    """Name of the object that it is about."""


def newest(events: Iterable[PodEvent]) -> PodEvent | None:
    """The one that was seen last; None: there is none."""
    return max(events, key=lambda event: event.at.timestamp() if event.at is not None else 0.0, default=None)


def node_claims(events: Iterable[PodEvent]) -> frozenset[str]:
    """Names of the NodeClaims that are to take the pod, or were."""
    return frozenset(
        name
        for event in events
        if event.controller in _CONTROLLERS and event.reason in _ANNOUNCES
        for name in _NODE_CLAIM.findall(event.message)
    )


def of_node_claims(events: Iterable[PodEvent], claims: Collection[str]) -> list[PodEvent]:
    """Why the nodes of these NodeClaims do not come, of the events of all NodeClaims."""
    return [event for event in events if event.about in claims and event.reason in _FAILED_CLAIMS]


def last_event(
    events: Iterable[PodEvent], *, now: datetime | None = None, provision_seconds: float | None = None
) -> str | None:
    """What an autoscaler said last as one line, with its name; None: it said nothing.

    `events`: of the pod, and those about its NodeClaims. After a failure, the announcement of a node is not the whole
    news: the failure is shown beside it. An announced node that did not come within `provision_seconds` is shown as
    such.
    """
    said = [event for event in events if event.controller in _CONTROLLERS and event.message]
    last, failure = newest(said), _failure(said)
    if last is None:
        return None
    if last is failure:
        return _line(last)
    late = _late(said, now, provision_seconds)
    what = f"{_line(last)}; that node did not come within {provision_seconds:.0f} s" if late else _line(last)
    if failure is None:
        return what
    return f"{_line(failure)}; after that: {what}" if late else f"{what}; before that: {_line(failure)}"


def news(
    events: Iterable[PodEvent], before: AutoscalerNews, *, now: datetime, provision_seconds: float | None
) -> AutoscalerNews:
    """What an autoscaler says of a pod at this look. `before`: at the last one; the same refusal twice is believed.

    An autoscaler that announced a node between the two looks, and then failed, still tries: the count begins anew.

    `events`: as of `last_event`.
    """
    said = [event for event in events if event.controller in _CONTROLLERS and event.message]
    refused = refusal(said)
    last_announced = max((event.at or _NEVER for event in said if event.reason in _ANNOUNCES), default=None)
    tried = last_announced is not None and last_announced > (before.last_announced or _NEVER)
    if refused is not None and before.refusal is not None and not tried:
        refused = replace(refused, repeated=True)
    announced = refused is None and any(_announces(of) for of in _by_controller(said))
    return AutoscalerNews(
        last_event(said, now=now, provision_seconds=provision_seconds) or before.event,
        refused,
        announced,
        announced and _late(said, now, provision_seconds),
        last_announced,
    )


def refusal(events: Iterable[PodEvent]) -> NodeRefusal | None:
    """Why no node comes for the pod, where each autoscaler that speaks of the pod says so in words that are known to be
    final; None: one of them may bring a node. Of two autoscalers, each speaks of the other's node groups too.

    `events`: as of `last_event`.
    """
    said = [event for event in events if event.controller in _CONTROLLERS and event.message]
    found: list[tuple[PodEvent, NodeRefusal]] = []
    for of in _by_controller(said):
        last = newest(of)
        if last is None or _announces(of) or (refused := _refusal(last, of)) is None:
            return None
        found.append((last, refused))
    return max(found, key=lambda each: each[0].at or _NEVER)[1] if found else None


def _by_controller(said: Iterable[PodEvent]) -> Iterable[list[PodEvent]]:
    found: dict[str, list[PodEvent]] = {}
    for event in said:
        found.setdefault(event.controller, []).append(event)
    return found.values()


def _announces(said: Iterable[PodEvent]) -> bool:
    """Whether the last word of one autoscaler is a node. Times have seconds: in the same one, the node counts."""
    events = list(said)
    last = max((event.at or _NEVER for event in events), default=_NEVER)
    return any(event.reason in _ANNOUNCES and (event.at or _NEVER) == last for event in events)


def _failure(said: Iterable[PodEvent]) -> PodEvent | None:
    return newest(event for event in said if event.reason not in _ANNOUNCES)


def _late(said: Sequence[PodEvent], now: datetime | None, provision_seconds: float | None) -> bool:
    """Whether a node that was announced after the last failure should be there by now."""
    failure = _failure(said)
    failed = failure.at or _NEVER if failure is not None else _NEVER
    announced = [event for event in said if event.reason in _ANNOUNCES and (event.at or _NEVER) >= failed]
    first = (event.first or event.at or failed for event in announced)
    since = max(failed, min(first, default=failed))
    if now is None or provision_seconds is None or since <= _NEVER:
        return False
    return (now - since).total_seconds() >= provision_seconds


def _refusal(last: PodEvent, said: Iterable[PodEvent]) -> NodeRefusal | None:
    """Of the last event of one autoscaler. `said`: all events of it."""
    text = _BLANKS.sub(" ", last.message)
    found: tuple[str, bool] | None = None
    if last.reason == _NO_CAPACITY:
        found = STOCK_OUT, True
    elif last.reason == _REJECTED and text.startswith(_REJECTION):
        found = _of_pools(text, out_of_stock=any(event.reason == _NO_CAPACITY for event in said))
    elif last.reason == _NOT_TRIGGERED and text.startswith(_NO_SCALE_UP):
        found = _of_groups(text.removeprefix(_NO_SCALE_UP))
    elif last.reason == _FAILED_SCALE_UP and "GCE out of resources" in text:
        found = STOCK_OUT, True
    elif last.reason == _FAILED_SCALE_UP and "GCE quota exceeded" in text:
        found = LIMIT_REACHED, True
    return NodeRefusal(found[0], _line(last), found[1]) if found is not None else None


def _of_pools(text: str, *, out_of_stock: bool) -> tuple[str, bool] | None:
    """(reason, whether it holds for other pods of the class) of Karpenter's text at a pod.

    `out_of_stock`: a NodeClaim for the pod had no capacity. Without that, an offering may be missing for this pod only,
    such as in the zone of its volume.
    """
    found: set[tuple[str, bool]] = set()
    for part in text.removeprefix(_REJECTION).split("; "):
        if any(limit in part for limit in _POOL_LIMITS):
            found.add((LIMIT_REACHED, True))
        elif _NO_TYPE in part and _OFFERING in part.partition(", requirements=")[0]:
            found.add((STOCK_OUT, True) if out_of_stock else (NO_INSTANCE_TYPE, False))
        elif _NO_TYPE in part:
            found.add((NO_INSTANCE_TYPE, False))
        elif not any(other in part for other in _OTHER_POOLS):
            return None
    return min(found, key=lambda each: each[1], default=None)


def _of_groups(text: str) -> tuple[str, bool] | None:
    """The same of Cluster Autoscaler's text at a pod."""
    if text.strip() == _MOST_NODES:
        return LIMIT_REACHED, True
    found: set[str] = set()
    for part in _COUNTED.split(text.strip())[1:]:
        if part.startswith(_GROUP_LIMITS):
            found.add(LIMIT_REACHED)
        elif part.startswith(_GROUP_FAILED):
            found.add(SCALE_UP_FAILED)
        elif part.startswith(_TOO_SMALL):
            found.add(NO_INSTANCE_TYPE)
        elif not part.startswith(_OTHER_GROUPS):
            return None
    # A group that is full is named whether or not it is for the class. One that is too small is the class's.
    if NO_INSTANCE_TYPE in found:
        return (NO_INSTANCE_TYPE, False) if len(found) > 1 else None
    return (SCALE_UP_FAILED if SCALE_UP_FAILED in found else LIMIT_REACHED, True) if found else None


def _line(event: PodEvent) -> str:
    message = _BLANKS.sub(" ", event.message).strip()
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[:_MOST_CHARACTERS]}..."
    return f"{event.controller}: {message}"
