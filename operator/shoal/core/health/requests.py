"""What people ask for: annotations of a GPUClass, written by `shoal cordon` and `shoal uncordon`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

from shoal.api import names
from shoal.core.health.types import Unit

MOST: Final = 64
"""Entries of one annotation that count."""
LONGEST: Final = 65_536
"""Characters of an annotation that are read."""
_LONGEST_NAME: Final = 253
_LONGEST_DEVICE: Final = 512
_LONGEST_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class CordonRequest:
    """An entry of one of the annotations."""

    unit: Unit
    at: datetime
    reason: str = ""
    until: datetime | None = None


def parse(text: str | None) -> tuple[tuple[CordonRequest, ...], str | None]:
    """The entries, and what is wrong with the others; people may write the annotation by hand."""
    if not text:
        return (), None
    if len(text) > LONGEST:
        return (), f"has more than {LONGEST} characters"
    try:
        entries: Any = json.loads(text)
    except (ValueError, RecursionError):
        return (), "is not JSON"
    if not isinstance(entries, list):
        return (), "is not a list"
    found: list[CordonRequest] = []
    problem: str | None = None
    listed = cast("list[Any]", entries)
    for entry in listed[:MOST]:
        request = _request(cast("Mapping[str, Any]", entry)) if isinstance(entry, dict) else None
        if request is None:
            problem = "has an entry without `node` and `at`"
        else:
            found.append(request)
    if len(listed) > MOST:
        problem = f"has more than {MOST} entries"
    return tuple(found), problem


def write(requests: Iterable[CordonRequest]) -> str:
    """The annotation's text. The newest entries stay where there are too many."""
    kept = sorted(requests, key=lambda each: each.at)[-MOST:]
    return json.dumps([_entry(each) for each in kept], separators=(",", ":"))


def _entry(request: CordonRequest) -> dict[str, str]:
    found = {"node": request.unit.node, "device": request.unit.device, "at": _text(request.at)}
    found |= {"reason": request.reason}
    if request.until is not None:
        found["until"] = _text(request.until)
    return {key: value for key, value in found.items() if value}


def _request(entry: Mapping[str, Any]) -> CordonRequest | None:
    node, device, reason = entry.get("node"), entry.get("device", ""), entry.get("reason", "")
    at, until = _time(entry.get("at")), _time(entry.get("until"))
    if not isinstance(node, str) or not isinstance(device, str) or not isinstance(reason, str):
        return None
    if not 0 < len(node) <= _LONGEST_NAME or len(device) > _LONGEST_DEVICE or at is None:
        return None
    if until is None and entry.get("until") is not None:
        return None
    return CordonRequest(Unit(node, device), at, reason[:_LONGEST_REASON], until)


def _time(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
        return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)
    except ValueError:
        return None


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def cordoned(annotations: Mapping[str, str], request: CordonRequest) -> dict[str, str | None]:
    """The annotations after a unit is taken out of use; None: absent."""
    cordons = [each for each in parse(annotations.get(names.ANNOTATION_CORDON))[0] if each.unit != request.unit]
    uncordons = [each for each in parse(annotations.get(names.ANNOTATION_UNCORDON))[0] if each.unit != request.unit]
    return _annotations([*cordons, request], uncordons)


def uncordoned(annotations: Mapping[str, str], units: Iterable[Unit], at: datetime) -> dict[str, str | None]:
    """The annotations after these units are put back into use."""
    back = frozenset(units)
    cordons = [each for each in parse(annotations.get(names.ANNOTATION_CORDON))[0] if each.unit not in back]
    uncordons = [each for each in parse(annotations.get(names.ANNOTATION_UNCORDON))[0] if each.unit not in back]
    return _annotations(cordons, [*uncordons, *(CordonRequest(unit, at) for unit in sorted(back))])


def _annotations(cordons: list[CordonRequest], uncordons: list[CordonRequest]) -> dict[str, str | None]:
    return {
        names.ANNOTATION_CORDON: write(cordons) if cordons else None,
        names.ANNOTATION_UNCORDON: write(uncordons) if uncordons else None,
    }
