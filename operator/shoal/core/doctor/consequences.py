"""What follows from something that is not installed: the cause comes first, and names the checks that need it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

from shoal.api import names
from shoal.core.doctor import installation, kinds
from shoal.core.doctor.results import NOT_READ, some
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers import faults
from shoal.core.layers.layer import Layer
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
    if _gateways_wait(seen, missing):
        kept = _fold(kept, kinds.MISSING, _of_gateways, "not ready because of this")
    if installation.nothing(seen):
        settings = _texts((seen.cache, seen.proxies))
        kept = _fold(
            kept,
            installation.NOT_INSTALLED,
            lambda each: each.reason in _WITHOUT_PROCESSES or _not_read(each, settings),
        )
    return kept


def _gateways_wait(seen: DoctorSnapshot, missing: Collection[str]) -> bool:
    """Whether kinds that are missing are all that gateways lack. They name them by their plural."""
    pods = () if isinstance(seen.pods, Unread) else seen.pods
    gateways = [pod for pod in pods if pod.component == names.COMPONENT_GATEWAY and not pod.deleting]
    plurals = {kind.partition(".")[0] for kind in missing}
    return bool(gateways) and all(pod.not_ready and plurals.issuperset(pod.not_ready) for pod in gateways)


def _of_gateways(each: DoctorResult) -> bool:
    no_address = each.reason == installation.NO_ADDRESS and each.layer is Layer.GATEWAY
    return no_address or each.reason == faults.GATEWAYS_NOT_READY


def _fold(
    found: list[DoctorResult],
    cause: str,
    follows: Callable[[DoctorResult], bool],
    words: str = "not checked because of this",
) -> list[DoctorResult]:
    hidden = list(dict.fromkeys(each.check for each in found if follows(each)))
    said = f"; {words}: {some(hidden, 8)}" if hidden else ""
    return [
        replace(each, message=each.message + said) if each.reason == cause else each
        for each in found
        if not follows(each)
    ]


def _texts(parts: Iterable[object]) -> set[str]:
    return {f"{part.what}: {part.why}" for part in parts if isinstance(part, Unread)}


def _not_read(each: DoctorResult, texts: Collection[str]) -> bool:
    return each.reason == NOT_READ and each.message in texts
