"""CustomResourceDefinitions: there, established, and with the fields of this version."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, cast

from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread

MISSING: Final = "KindMissing"
TOO_OLD: Final = "KindTooOld"
NEWER: Final = "KindNewer"
NOT_ESTABLISHED: Final = "KindNotEstablished"
_DEEPEST: Final = 32


def check(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Each kind of Shoal."""
    name, upgrade = "kinds", "Upgrade the chart shoal-crds to the version of the chart shoal, before it."
    if isinstance(seen.kinds, Unread):
        yield unread(name, Layer.CONTROL, seen.kinds)
        return
    absent = missing(seen)
    if absent:
        text = f"{some(absent, len(absent))} {'is' if len(absent) == 1 else 'are'} not installed"
        yield result(name, "error", MISSING, Layer.CONTROL, text, "Install the chart shoal-crds.")
    well = not absent
    for kind in seen.kinds:
        if not kind.there:
            continue
        if not kind.established or not kind.served:
            outcome, reason, do = "error", NOT_ESTABLISHED, upgrade
            text = f"{kind.name} is not served in this version: kubectl get crd {kind.name} -o yaml says why"
        elif kind.missing:
            outcome, reason, do = "error", TOO_OLD, upgrade
            text = f"{kind.name} is of an older version: it has no {some(kind.missing)}"
        elif kind.further:
            outcome, reason = "warning", NEWER
            text = f"{kind.name} is of a newer version: it also has {some(kind.further)}"
            do = "Use a command and a chart as new as the CustomResourceDefinitions."
        else:
            continue
        well = False
        yield result(name, "error" if outcome == "error" else "warning", reason, Layer.CONTROL, text, do)
    if well:
        yield ok(name, Layer.CONTROL, f"{len(seen.kinds)} kinds are installed, with all fields of {seen.version}")


def missing(seen: DoctorSnapshot) -> list[str]:
    """Kinds that are known not to be installed."""
    return [] if isinstance(seen.kinds, Unread) else [kind.name for kind in seen.kinds if not kind.there]


def fields(schema: Mapping[str, Any]) -> frozenset[str]:
    """Paths of all fields of an OpenAPI schema, such as `spec.source.uri`."""
    return frozenset(_fields(schema, "", 0))


def _fields(node: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        return
    properties: object = node.get("properties")
    if isinstance(properties, dict):
        for name, child in cast("dict[str, Any]", properties).items():
            inner = f"{path}.{name}" if path else name
            yield inner
            if isinstance(child, dict):
                yield from _fields(cast("dict[str, Any]", child), inner, depth + 1)
    for wrapper in ("items", "additionalProperties"):
        child = node.get(wrapper)
        if isinstance(child, dict):
            yield from _fields(cast("dict[str, Any]", child), path, depth + 1)
