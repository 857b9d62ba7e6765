"""What a Tenant's `limits` and `budget` mean, and how a refusal says which of them and when to come back."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from shoal.api.tenant import TenantBudget, TenantLimits
from shoal.core import quantity
from shoal.core.quota.month import PICO, MonthlyQuota

Limit = Literal["requests", "tokens", "concurrent", "budget"]
Why = Literal["over", "share", "never", "unknown", "currency"]
"""over: the limit. share: this gateway's share of it, until it has heard the others. never: the request is larger than
the limit. unknown: the ledger's total, while the budget says Refuse. currency: the price list has another one."""

RETRY_AFTER_MAX_SECONDS: Final = 60
"""Clients ignore a longer Retry-After."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Over all gateways; None: no limit."""

    requests: int | None = None
    """In any 60 s."""
    tokens: int | None = None
    """In any 60 s, and reserved."""
    concurrent: int | None = None
    budget: MonthlyQuota | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What is reserved for a request, and given back when it ends."""

    tokens: int
    """Input, estimated, and its answers, bounded."""
    spend: int = 0
    """The same in money, 10^-12 of the currency."""


@dataclass(frozen=True, slots=True)
class Over:
    """Why a request is refused."""

    limit: Limit
    why: Why
    most: int
    used: int
    """By all gateways, as far as is known; reservations included."""
    requested: int
    retry_after: int
    """Seconds, 1 to 60."""


class LimitState(NamedTuple):
    """What is left of a limit per minute. Two are made for each answer: a tuple costs a quarter of a dataclass."""

    limit: Limit
    most: int
    left: int
    """By all gateways, as far as is known."""
    reset_seconds: float
    """Until all that was used has left the window, if nothing more comes."""


def limits_of(limits: TenantLimits | None, budget: TenantBudget | None) -> Limits:
    """Raises ValueError where the amount of the budget is no quantity."""
    said = limits or TenantLimits()
    return Limits(said.requests_per_minute, said.tokens_per_minute, said.concurrent_requests, _budget(budget))


def _budget(budget: TenantBudget | None) -> MonthlyQuota | None:
    if budget is None:
        return None
    refuse = budget.when_unknown == "Refuse"
    if budget.tokens is not None:
        return MonthlyQuota("tokens", budget.tokens, None, refuse)
    return MonthlyQuota("money", int(quantity.parse(budget.amount or "0") * PICO), budget.currency, refuse)
