"""The status of a Tenant."""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from datetime import datetime

from shoal.api import reasons
from shoal.api.tenant import Tenant, TenantKey, TenantStatus
from shoal.core.claimants import age, why_first
from shoal.core.redaction.rules import refusals
from shoal.core.routing.consent import some, unmatched
from shoal.core.status.conditions import ConditionUpdate, find, merge


@dataclass(frozen=True, slots=True)
class TenantDecision:
    status: TenantStatus
    again_at: datetime | None
    """When the next key expires and the status must be computed again; None: no key will."""


def usable(key: TenantKey, now: datetime) -> bool:
    return not key.disabled and (key.expires is None or key.expires > now)


def decide(
    tenant: Tenant,
    *,
    contenders: Iterable[Tenant],
    models: Collection[str],
    adapters: Set[str] = frozenset(),
    now: datetime,
    currency: str | None = None,
    prices_refused: str | None = None,
    gateways_live: bool = True,
) -> TenantDecision:
    """The status of a Tenant. `contenders`: Tenants that list one of the same hashes; `models`: keys of all Models;
    `adapters`: keys of adapters that list the tenant, or everyone, in namespaces that it grants; `currency`: that of
    the price list in force, None: unknown; `prices_refused`: why the ledger refuses price lists. With `gateways_live`
    False the condition of the budget is left out.

    A hash belongs to the oldest Tenant that lists it (creation time, then uid), which is how gateways resolve it.
    """
    before = [t for t in contenders if t.metadata.uid != tenant.metadata.uid and age(t) < age(tenant)]
    taken = {
        k.sha256: why_first(t, tenant, f"Tenant '{t.metadata.name}'")
        for t in sorted(before, key=age, reverse=True)
        for k in t.spec.keys
    }
    claimed = [(k.name, taken[k.sha256]) for k in tenant.spec.keys if k.sha256 in taken]
    active = [k for k in tenant.spec.keys if usable(k, now) and k.sha256 not in taken]
    missing = [f"{m.namespace}/{m.name}" for m in tenant.spec.models if f"{m.namespace}/{m.name}" not in models]
    findings = [
        _ready(tenant, active, claimed, missing, now),
        *(_budget(tenant, currency, prices_refused) if gateways_live else ()),
        *_logging(tenant),
        *_adapters(tenant, adapters),
    ]
    expiries = [k.expires for k in tenant.spec.keys if usable(k, now) and k.expires is not None]
    old = tenant.status.conditions if tenant.status else ()
    generation = tenant.metadata.generation
    return TenantDecision(
        TenantStatus(
            conditions=merge(old, findings, generation=generation, now=now),
            observed_generation=generation,
            active_keys=len(active),
        ),
        min(expiries, default=None),
    )


def _ready(
    tenant: Tenant, active: list[TenantKey], claimed: list[tuple[str, str]], missing: list[str], now: datetime
) -> ConditionUpdate:
    if tenant.spec.suspended:
        return ConditionUpdate(reasons.READY, "False", reasons.SUSPENDED, "suspended: every request is refused")
    besides = f"; {reasons.MODEL_NOT_FOUND}: there is no Model {', '.join(missing)}" if missing else ""
    if not active and not (claimed and len(claimed) == len(tenant.spec.keys)):
        disabled = sum(k.disabled for k in tenant.spec.keys)
        expired = sum(not k.disabled and not usable(k, now) for k in tenant.spec.keys)
        text = f"none of {len(tenant.spec.keys)} keys can be used: {disabled} disabled, {expired} expired"
        if claimed:
            text += f", {len(claimed)} listed by another Tenant"
        text = text if tenant.spec.keys else "no key is listed"
        return ConditionUpdate(reasons.READY, "False", reasons.NO_USABLE_KEY, text + besides)
    if claimed:
        text = "; ".join(f"key '{name}' belongs to {owner}" for name, owner in claimed)
        return ConditionUpdate(reasons.READY, "False", reasons.KEY_CLAIMED, text + besides)
    if missing:
        text = f"there is no Model {', '.join(missing)}; the others can be used"
        return ConditionUpdate(reasons.READY, "False", reasons.MODEL_NOT_FOUND, text)
    count = f"{len(active)} key" + ("" if len(active) == 1 else "s")
    text = f"{count}, {len(tenant.spec.models)} models"
    if not tenant.spec.models and not tenant.spec.adapters:
        text += ": it may use nothing, so every request gets 404; grant Models in spec.models"
    return ConditionUpdate(reasons.READY, "True", reasons.ACTIVE, text)


def _budget(tenant: Tenant, currency: str | None, refused: str | None) -> list[ConditionUpdate]:
    """Nothing for a Tenant without a budget in money."""
    budget = tenant.spec.budget
    if budget is None or budget.amount is None:
        return []
    if currency == budget.currency:
        text = f"{budget.amount} {currency} per calendar month, at the price list in force"
        if refused is not None:
            text += f". The ledger refuses other price lists: {refused}"
        return [ConditionUpdate(reasons.BUDGET_READY, "True", reasons.ACTIVE, text)]
    then = (
        "whenUnknown is Refuse: every request is refused"
        if budget.when_unknown == "Refuse"
        else "whenUnknown is Serve: requests are served, and nothing is cut off"
    )
    if currency is not None:
        text = (
            f"the budget is in {budget.currency} and the price list in {currency}, so what is left is not known; "
            f"{then}. Write the budget in {currency}"
        )
        return [ConditionUpdate(reasons.BUDGET_READY, "False", reasons.OTHER_CURRENCY, text)]
    if refused is not None:
        text = (
            f"no price list is in force, so no money is counted: the ledger refuses those that it has: {refused}. "
            f"{then[0].upper()}{then[1:]}. Correct the named lines"
        )
        return [ConditionUpdate(reasons.BUDGET_READY, "Unknown", reasons.PRICES_UNKNOWN, text)]
    known = find(tenant.status.conditions, reasons.BUDGET_READY) if tenant.status else None
    if known is not None and known.observed_generation == tenant.metadata.generation:
        # A new leader has no gateway's report yet: the former finding stays, and nothing is written.
        return [ConditionUpdate(known.type, known.status, known.reason, known.message)]
    text = (
        f"no gateway has heard of a price list: without one no money is counted. {then[0].upper()}{then[1:]}. Give the "
        "ledger a price list, or the budget in tokens"
    )
    return [ConditionUpdate(reasons.BUDGET_READY, "Unknown", reasons.PRICES_UNKNOWN, text)]


def _logging(tenant: Tenant) -> list[ConditionUpdate]:
    """Nothing for a Tenant without a request log. Requests are served either way."""
    logging = tenant.spec.logging
    if logging.mode == "Off":
        return []
    kept = f"kept for {logging.retention_days} days"
    # Checked for metadata only, too: otherwise a later change to prompts and answers would fail unexpectedly.
    if refused := refusals(logging):
        text = f"{'; '.join(refused)}. Until that is mended no prompt and no answer is logged, only metadata, {kept}"
        return [ConditionUpdate(reasons.LOGGING_READY, "False", reasons.RULE_REFUSED, text)]
    if logging.mode == "Metadata":
        return [ConditionUpdate(reasons.LOGGING_READY, "True", reasons.ACTIVE, f"metadata only, {kept}")]
    count = len(logging.redact)
    rules = f"{count} rule{'' if count == 1 else 's'} of your own" if count else "no rule of your own"
    text = f"prompts and answers, {kept}; {rules} and the one for secrets take out what they match"
    return [ConditionUpdate(reasons.LOGGING_READY, "True", reasons.ACTIVE, text)]


def _adapters(tenant: Tenant, listing: Set[str]) -> list[ConditionUpdate]:
    """Nothing for a Tenant that grants only adapters of its Models. Serving does not depend on it."""
    if not tenant.spec.adapters:
        return []
    if missing := unmatched(tenant.spec, listing):
        text = f"no adapter that lists this tenant: {some(missing)}; the others can be used"
        return [ConditionUpdate(reasons.ADAPTERS_READY, "False", reasons.ADAPTER_NOT_FOUND, text)]
    text = "each grant of adapters matches one that lists this tenant"
    return [ConditionUpdate(reasons.ADAPTERS_READY, "True", reasons.ACTIVE, text)]
