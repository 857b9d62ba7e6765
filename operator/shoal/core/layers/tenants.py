"""What a Tenant's own spec and its use of the month show, beside its conditions."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, cast

from shoal.api import reasons
from shoal.core import quantity
from shoal.core.layers import faults
from shoal.core.layers.candidates import Candidate, Level, age
from shoal.core.layers.types import BudgetView, Evidence, ObjectView

_NEARLY: Final = Decimal("0.9")
"""Requests reserve what they may use at most, so a budget refuses some before all of it is used."""


def candidates(
    tenant: ObjectView, budget: BudgetView | None, absent: Sequence[str], now: datetime
) -> Iterator[Candidate]:
    """A budget that is used up, keys that have expired, and grants of Models that do not exist (`absent`)."""
    if absent:
        more = f" and {len(absent) - 4} more" if len(absent) > 4 else ""
        text = f"{tenant.text} grants Models that do not exist: {', '.join(absent[:4])}{more}"
        proof = Evidence("the API server has no such Model", f"spec.models of {tenant.text}", None)
        yield Candidate(reasons.MODEL_NOT_FOUND, text, Level.OBJECT, (proof,))
    if budget is not None and budget.used >= _NEARLY * budget.most:
        yield _budget(tenant, budget)
    expired = [(name, at) for name, at in _expiries(tenant) if at <= now]
    if expired:
        listed = ", ".join(f"{name} on {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" for name, at in expired[:4])
        more = f", and {len(expired) - 4} more" if len(expired) > 4 else ""
        yield Candidate(
            faults.KEY_EXPIRED,
            f"{len(expired)} keys of {tenant.text} have expired: {listed}{more}",
            Level.OBJECT,
            tuple(Evidence(f"expires {at}", f"key {name} of {tenant.text}", age(now, at)) for name, at in expired[:4]),
            aside=True,
        )


def _budget(tenant: ObjectView, budget: BudgetView) -> Candidate:
    used, most = (quantity.money(each) for each in (budget.used, budget.most))
    text = f"{used} of {most} {budget.unit} of {budget.month}"
    over = budget.used >= budget.most
    return Candidate(
        faults.BUDGET_USED if over else faults.BUDGET_LOW,
        f"{tenant.text} has used {text}"
        + (": its requests are refused with 429 insufficient_quota" if over else ": large requests may be refused"),
        Level.OBJECT,
        (Evidence(f"used {text}", "the ledger's bill of the month, and spec.budget", None),),
        aside=True,
    )


def _expiries(tenant: ObjectView) -> Iterator[tuple[str, datetime]]:
    """Name and time of keys that are enabled and expire."""
    given = tenant.spec.get("keys")
    for each in cast("list[Any]", given) if isinstance(given, list) else []:
        if not isinstance(each, dict):
            continue
        key = cast("dict[str, Any]", each)
        try:
            at = datetime.fromisoformat(str(key.get("expires") or ""))
        except ValueError:
            continue
        if key.get("disabled") is not True:
            yield str(key.get("name")), at if at.tzinfo is not None else at.replace(tzinfo=UTC)
