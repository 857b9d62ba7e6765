"""The table of checks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from shoal.api import reasons
from shoal.core.doctor import (
    certificates,
    clocks,
    consequences,
    fleet,
    installation,
    kinds,
    permissions,
    prices,
    proxies,
    tenants,
)
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers.layer import Layer
from shoal.core.layers.texts import shorten

CHECKS: Final[Sequence[tuple[str, Callable[[DoctorSnapshot, datetime], Iterator[DoctorResult]]]]] = (
    ("clocks", clocks.check),
    ("name service", installation.name_service),
    ("kinds", kinds.check),
    ("permissions", permissions.check),
    ("certificates", certificates.check),
    ("leader", installation.leader),
    ("processes", installation.processes),
    ("versions", installation.versions),
    ("services", installation.addresses),
    ("proxies", proxies.check),
    ("price lists", prices.check),
    ("GPU classes", fleet.classes),
    ("node cache", fleet.cache),
    ("signals", fleet.signals),
    ("KEDA", fleet.keda),
    ("Models", fleet.models),
    ("tenants", tenants.check),
)
_LONGEST: Final = 1000
"""Characters of a message."""
_ORDER: Final = {"error": 0, "warning": 1, "unknown": 2, "ok": 3}


def examine(seen: DoctorSnapshot, now: datetime) -> tuple[DoctorResult, ...]:
    """All results: errors first, then warnings, of equals the most upstream layer; what is not installed before all,
    and what follows from it is folded. A check that fails is a result of its own; the others are not affected."""
    found: list[DoctorResult] = []
    for name, check in CHECKS:
        try:
            found += list(check(seen, now))
        except Exception as error:
            text = f"the check {name} failed: {type(error).__name__}: {error}"
            do = "Report it: it is an error of this command."
            found.append(DoctorResult(name, "unknown", reasons.INTERNAL_ERROR, Layer.CONTROL, text, do))
    found = [replace(each, message=shorten(each.message, _LONGEST)) for each in consequences.folded(found, seen)]
    return tuple(sorted(found, key=_place))


def _place(each: DoctorResult) -> tuple[int, bool, int]:
    return _ORDER[each.outcome], each.reason not in consequences.CAUSES, each.layer.order
