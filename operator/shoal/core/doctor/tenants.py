"""Tenants that can use nothing."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from shoal.api import reasons
from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers import faults
from shoal.core.layers.faults import advice
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import ObjectView, Unread

_KEYS: Final = (reasons.NO_USABLE_KEY, reasons.KEY_CLAIMED)


def check(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Tenants without a grant, without a usable key, or whose grants lead to nothing."""
    name = "tenants"
    if isinstance(seen.tenants, Unread):
        yield unread(name, Layer.CLIENT, seen.tenants)
        return
    found: dict[str, list[str]] = {}
    there = None if isinstance(seen.models, Unread) else {view.key for view in seen.models}
    for tenant in seen.tenants:
        if (reason := _wrong(tenant, there)) is not None:
            found.setdefault(reason, []).append(tenant.name)
    for reason, hit in sorted(found.items()):
        row = advice(reason)
        text = f"{_TEXTS.get(reason, reason)}: {some(sorted(hit))}"
        yield result(name, "warning", reason, row.layer, text, row.do)
    if not found:
        yield ok(name, Layer.CLIENT, f"{len(seen.tenants)} tenants can use something")


_TEXTS: Final = {
    faults.NOTHING_GRANTED: "tenants that may use nothing",
    reasons.NO_USABLE_KEY: "tenants without a usable key",
    reasons.KEY_CLAIMED: "tenants with keys of another Tenant",
    reasons.MODEL_NOT_FOUND: "tenants whose grants name only Models that do not exist",
}


def _wrong(tenant: ObjectView, there: set[str] | None) -> str | None:
    """Why a tenant can use nothing; None: it can use something, or is suspended on purpose."""
    if tenant.spec.get("suspended") is True:
        return None
    ready = next((c for c in tenant.conditions if c.type == reasons.READY), None)
    if ready is not None and ready.status == "False" and ready.reason in _KEYS:
        return ready.reason
    granted: list[dict[str, Any]] = tenant.spec.get("models") or []
    if any(tenant.spec.get(field) for field in ("adapters", "routes")):
        return None
    if not granted:
        return faults.NOTHING_GRANTED
    if there is not None and not any(f"{g.get('namespace')}/{g.get('name')}" in there for g in granted):
        return reasons.MODEL_NOT_FOUND
    return None
