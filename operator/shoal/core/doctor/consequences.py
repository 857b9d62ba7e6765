"""What follows from something that is not installed: the cause comes first, and names the checks that need it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

from shoal.core.doctor import installation, kinds
from shoal.core.doctor.results import NOT_READ, some
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers import faults
from shoal.core.layers.types import Unread

_WITHOUT_PROCESSES: Final = (faults.OPERATOR_AWAY, installation.NO_VERSION)
CAUSES: Final = (installation.NOT_INSTALLED, kinds.MISSING)
"""Reasons from which others follow: they come first."""


def folded(found: Iterable[DoctorResult], seen: DoctorSnapshot) -> list[DoctorResult]:
    """The results without those that only say that something is not installed which another result names."""
    kept = list(found)
    missing = kinds.missing(seen)
    of_kinds = {"gpuclasses": seen.classes, "models": seen.models, "tenants": seen.tenants}
    unread = _texts(part for plural, part in of_kinds.items() if any(m.startswith(f"{plural}.") for m in missing))
    kept = _fold(kept, kinds.MISSING, lambda each: _not_read(each, unread))
    if installation.nothing(seen):
        settings = _texts((seen.cache, seen.proxies))
        kept = _fold(
            kept,
            installation.NOT_INSTALLED,
            lambda each: each.reason in _WITHOUT_PROCESSES or _not_read(each, settings),
        )
    return kept


def _fold(found: list[DoctorResult], cause: str, follows: Callable[[DoctorResult], bool]) -> list[DoctorResult]:
    hidden = list(dict.fromkeys(each.check for each in found if follows(each)))
    said = f"; not checked because of this: {some(hidden, 8)}" if hidden else ""
    return [
        replace(each, message=each.message + said) if each.reason == cause else each
        for each in found
        if not follows(each)
    ]


def _texts(parts: Iterable[object]) -> set[str]:
    return {f"{part.what}: {part.why}" for part in parts if isinstance(part, Unread)}


def _not_read(each: DoctorResult, texts: Collection[str]) -> bool:
    return each.reason == NOT_READ and each.message in texts
