"""What the status of a GPUClass says of GPUs that are out of use."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, cast

from shoal.api import reasons
from shoal.core.layers import faults, texts
from shoal.core.layers.candidates import Candidate, Level, age
from shoal.core.layers.types import Evidence, ObjectView, WhyPod

_MOST: Final = 64
_REPLACED: Final = "Shoal starts a replacement for {pods}, and drains it once that is ready"


@dataclass(frozen=True, slots=True)
class QuarantineView:
    """An entry of `status.quarantined`."""

    node: str
    device: str
    state: str
    reason: str
    message: str
    since: datetime | None
    until: str

    @property
    def what(self) -> str:
        return f"GPU {self.device} of node {self.node}" if self.device else f"the GPUs of node {self.node}"


def of_class(view: ObjectView) -> Iterator[QuarantineView]:
    listed: Any = view.status.get("quarantined")
    entries = cast("list[Any]", listed) if isinstance(listed, list) else []
    for entry in islice(entries, _MOST):
        if not isinstance(entry, dict):
            continue
        given = cast("Mapping[str, Any]", entry)
        node, device, state, reason, message, until = (
            str(given.get(name) or "") for name in ("node", "device", "state", "reason", "message", "until")
        )
        yield QuarantineView(node, device, state, reason, message, _time(given.get("since")), until)


def has_devices(views: Iterable[ObjectView]) -> bool:
    """Whether single devices of these classes are out of use, on probation, or should be out of use."""
    return any(each.device for view in views for each in of_class(view)) or any(
        c.reason == reasons.QUARANTINE_WITHHELD for view in views for c in view.conditions
    )


def having(device: str, pods: Iterable[WhyPod]) -> tuple[frozenset[str], frozenset[str]]:
    """(those of these pods of one node that have a device, those of which it is not known); "": all of the node's."""
    found = [pod for pod in pods if not device or pod.devices is None or device in pod.devices]
    known = frozenset(pod.key for pod in found if not device or pod.devices is not None)
    return known, frozenset(pod.key for pod in found) - known


def candidate(
    view: ObjectView,
    each: QuarantineView,
    pods: frozenset[str],
    now: datetime,
    *,
    perhaps: frozenset[str] = frozenset(),
) -> Candidate:
    """`pods`: replicas that are still there; `perhaps`: those of which it is not known whether they have the device."""
    known = faults.layer_of(each.reason) is not None
    reason = each.reason if known and pods else reasons.GPUS_QUARANTINED
    where = "on probation" if each.state == "Probation" else f"out of use until {each.until}" if each.until else (
        "out of use"
    )  # fmt: skip
    said = texts.shorten(each.message)
    unknown = f"; whether {_list(perhaps)} had it is not known" if perhaps and not pods else ""
    tried = [f"Shoal places no replica there: {each.what} {_are(each)} {where}"]
    if each.state == "Probation":
        tried = [f"Shoal places replicas there again: {each.what} {_are(each)} on probation until one passed a test"]
    elif pods:
        tried.append(_REPLACED.format(pods=_list(pods)))
    return Candidate(
        reason,
        f"{each.what} {_are(each)} {where} ({each.reason}): {said}{unknown}",
        Level.NODE,
        (Evidence(f"{each.what}: {each.reason}: {said}", f"status.quarantined of {view.text}", age(now, each.since)),),
        pods,
        tuple(tried),
        # It serves, and is tested.
        reached="note" if each.state == "Probation" else None,
    )


def _list(pods: frozenset[str]) -> str:
    return ", ".join(sorted(pods)[:4])


def _are(each: QuarantineView) -> str:
    return "is" if each.device else "are"


def _time(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)
