"""A Tenant's `limits` and `budget`, and a ModelRoute's limits of each tenant, as numbers; and the refusal that names
the limit and when to retry."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from shoal.api.tenant import TenantBudget, TenantLimits
from shoal.core import quantity
from shoal.core.quota.month import PICO, MonthlyQuota

Limit = Literal["requests", "tokens", "concurrent", "budget"]
Why = Literal["over", "elsewhere", "reserved", "share", "never", "unknown", "currency"]
"""over: the limit. elsewhere: the limit on concurrent requests or tokens, or the budget, but the request would fit
without those that other gateways reported as running, which may have ended, with less use than they reserved; or any
limit per minute or on concurrent requests, but for what is assumed of a gateway whose first message is about to come.
reserved: the budget, but the request would fit if running requests used nothing of what they reserve. share: this
gateway's share of it, until the other gateways have reported. never: the request is larger than the limit. unknown: the
ledger's total, while the budget says Refuse. currency: the price list has another one."""

RETRY_AFTER_MAX_SECONDS: Final = 60
"""Clients ignore a longer Retry-After."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Over all gateways; None: no limit."""

    requests: int | None = None
    """In any 60 s."""
    tokens: int | None = None
    """In any 60 s, reservations included."""
    concurrent: int | None = None
    budget: MonthlyQuota | None = None
    route: str | None = None
    """`namespace/name` of the ModelRoute that has these limits of each tenant; None: they are the Tenant's own."""


class Cost(NamedTuple):
    """What is reserved for a request until it ends."""

    tokens: int
    """Estimated input plus the bound of its answers."""
    spend: int = 0
    """Price of `tokens`, in 10^-12 of the currency."""


@dataclass(frozen=True, slots=True)
class Over:
    """Why a request is refused."""

    limit: Limit
    why: Why
    most: int
    used: int
    """Known use of all gateways, reservations included."""
    requested: int
    retry_after: int
    """Seconds, 1 to 60."""
    route: str | None = None
    """The ModelRoute whose limit it is; None: it is the Tenant's own."""


class LimitState(NamedTuple):
    """What is left of a limit per minute. Each answer makes two of these: a tuple costs a quarter of a dataclass."""

    limit: Limit
    most: int
    left: int
    """After the known use of all gateways."""
    reset_seconds: float
    """Seconds until all current use has left the window."""


def limits_of(limits: TenantLimits | None, budget: TenantBudget | None) -> Limits:
    """Raises ValueError where the amount of the budget is no quantity."""
    spec = limits or TenantLimits()
    return Limits(spec.requests_per_minute, spec.tokens_per_minute, spec.concurrent_requests, _budget(budget))


def route_limits(route: str, limits: TenantLimits) -> Limits:
    """The limits that a ModelRoute sets for each tenant."""
    return Limits(limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests, route=route)


def _budget(budget: TenantBudget | None) -> MonthlyQuota | None:
    if budget is None:
        return None
    refuse = budget.when_unknown == "Refuse"
    if budget.tokens is not None:
        return MonthlyQuota("tokens", budget.tokens, None, refuse)
    return MonthlyQuota("money", int(quantity.parse(budget.amount or "0") * PICO), budget.currency, refuse)
