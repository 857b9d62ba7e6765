"""What an autoscaler says of a pending pod, in events: which node it brings, or why none."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

_MOST_CHARACTERS: Final = 300
_BLANKS: Final = re.compile(r"[\x00-\x20\x7f]+")
_CONTROLLERS: Final = ("karpenter", "eks-auto-mode/compute", "cluster-autoscaler", "gke.io/cluster-autoscaler")
"""Reporting controllers of Karpenter, of EKS Auto Mode (AWS runs Karpenter there), and of Cluster Autoscaler, GKE's
among them."""


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One event about a pod."""

    controller: str
    """What reported it."""
    message: str
    at: datetime | None
    """When it was seen last."""
    reason: str = ""


def newest(events: Iterable[PodEvent]) -> PodEvent | None:
    """The one that was seen last; None: there is none."""
    return max(events, key=lambda event: event.at.timestamp() if event.at is not None else 0.0, default=None)


def last_event(events: Iterable[PodEvent]) -> str | None:
    """The newest event of an autoscaler as one line, with the autoscaler's name; None: there is none."""
    last = newest(event for event in events if event.controller in _CONTROLLERS and event.message)
    if last is None:
        return None
    message = _BLANKS.sub(" ", last.message).strip()
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[:_MOST_CHARACTERS]}..."
    return f"{last.controller}: {message}"
