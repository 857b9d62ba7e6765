"""What an autoscaler says of a pending pod, in events: which node it brings, or why none.

Karpenter says at the pod which NodeClaim is to take it (`Nominated`), also where the cloud then has no such machine. It
says that of the NodeClaim (`InsufficientCapacityError`), deletes that at once, and makes the next one. At the pod it
repeats `FailedScheduling` only after five minutes, so the newest event alone would hide a stock-out.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

_MOST_CHARACTERS: Final = 300
_BLANKS: Final = re.compile(r"[\x00-\x20\x7f]+")
_CONTROLLERS: Final = ("karpenter", "eks-auto-mode/compute", "cluster-autoscaler", "gke.io/cluster-autoscaler")
"""Reporting controllers of Karpenter, of EKS Auto Mode (AWS runs Karpenter there), and of Cluster Autoscaler, GKE's
among them."""
_ANNOUNCES: Final = ("Nominated", "TriggeredScaleUp")
"""Reasons of events that announce a node. All others of an autoscaler say why none comes."""
_FAILED_CLAIMS: Final = ("InsufficientCapacityError", "NodeClassNotReady")
"""Reasons of events that say of a NodeClaim why its node does not come."""
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
    last, failure = newest(said), newest(event for event in said if event.reason not in _ANNOUNCES)
    if last is None:
        return None
    if last is failure:
        return _line(last)
    failed = failure.at or _NEVER if failure is not None else _NEVER
    since = max(failed, min(event.first or event.at or failed for event in said if (event.at or _NEVER) >= failed))
    late = (
        now is not None
        and provision_seconds is not None
        and since > _NEVER
        and (now - since).total_seconds() >= provision_seconds
    )
    what = f"{_line(last)}; that node did not come within {provision_seconds:.0f} s" if late else _line(last)
    if failure is None:
        return what
    return f"{_line(failure)}; after that: {what}" if late else f"{what}; before that: {_line(failure)}"


def _line(event: PodEvent) -> str:
    message = _BLANKS.sub(" ", event.message).strip()
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[:_MOST_CHARACTERS]}..."
    return f"{event.controller}: {message}"
