"""How checks make their results."""

from collections.abc import Sequence
from typing import TypeGuard, TypeVar

from shoal.core.doctor.types import DoctorResult, Outcome
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread

T = TypeVar("T")

NOT_READ = "NotRead"


def ok(check: str, layer: Layer, message: str) -> DoctorResult:
    return DoctorResult(check, "ok", "OK", layer, message, "")


def result(check: str, outcome: Outcome, reason: str, layer: Layer, message: str, do: str) -> DoctorResult:
    return DoctorResult(check, outcome, reason, layer, message, do)


def unread(check: str, layer: Layer, part: Unread) -> DoctorResult:
    do = "Run it with the right to read this, as an administrator of the cluster has it."
    return DoctorResult(check, "unknown", NOT_READ, layer, f"{part.what}: {part.why}", do)


def known(part: T | Unread) -> TypeGuard[T]:
    return not isinstance(part, Unread)


def some(names: Sequence[str], most: int = 5) -> str:
    """`a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
