"""Whether a request goes to a cheaper fallback of its route: because of what it may cost, or because its Tenant has
used much of its budget.

What a request may cost is what a budget reserves for it: the estimated prompt, and the longest answer that it allows,
at the price list in force and the Tenant's plan. The prompt counts as fresh input. A price that is not known is none:
such a request stays with its target, and no request goes to such a fallback.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.core.rating import money
from shoal.core.rating.price import RateTable, cost, unpriced

Trigger = Literal["cost", "budget"]
"""The condition that holds: `whenCostAbove` or `whenBudgetPercent`."""


@dataclass(frozen=True, slots=True)
class CostConditions:
    """When a request goes to a cheaper fallback. One that holds is enough."""

    above: int | None = None
    """In 10^-12 of the currency."""
    currency: str = ""
    budget_percent: int | None = None

    @property
    def amount(self) -> str:
        """`whenCostAbove`, for people."""
        return f"{money.exact(self.above or 0)} {self.currency}"


class PricedRequest(NamedTuple):
    """What a request may use at one target of its route."""

    model: str
    """`namespace/name` of the Model; of an external target `namespace/route/name`."""
    adapter: str | None
    """`namespace/name`; None: the Model itself answers."""
    prompt: int
    """Estimated tokens."""
    answer: int
    """Most tokens of all its answers."""
    documents: int = 0
    images: int = 0
    audio_ms: int = 0
    audio_known: bool = True
    """The length of all its sounds is known; otherwise `audio_ms` is 0."""

    @property
    def target(self) -> str:
        """Key of the target."""
        return self.model if self.adapter is None else self.adapter


class CostDecision(NamedTuple):
    """Whether a request leaves its target because of its cost."""

    cheaper: tuple[int, ...] = ()
    """Places of the fallbacks that are cheaper for it, in order; empty: it stays."""
    trigger: Trigger | None = None
    """The condition that holds; None: none does, or that is not known."""
    why: str = ""
    """Why it leaves, or why it stays although a condition holds or cannot be known; "": no condition holds."""


def decide_by_cost(
    conditions: CostConditions,
    prices: RateTable | None,
    plan: str | None,
    at_target: PricedRequest,
    at_fallbacks: Sequence[PricedRequest],
    budget_percent: int | None,
) -> CostDecision:
    """`prices`: the price list in force; None: it is not known. `budget_percent`: how much of its budget the Tenant has
    used this month; None: it has none, or that is not known."""
    most = may_cost(prices, plan, at_target)
    unknown = _unknown(conditions, prices, most)
    percent = conditions.budget_percent
    if conditions.above is not None and isinstance(most, int) and not unknown and most > conditions.above:
        trigger, reason = "cost", f"more than the {conditions.amount} of whenCostAbove"
    elif percent is not None and budget_percent is not None and budget_percent >= percent:
        trigger = "budget"
        reason = f"and its Tenant has used {budget_percent} % of its budget, at least the {percent} % of "
        reason += "whenBudgetPercent"
    else:
        return CostDecision(why=f"whenCostAbove has no effect: {unknown}" if unknown else "")
    if prices is None or isinstance(most, str):
        return CostDecision((), trigger, f"whenBudgetPercent has no effect: {most}")
    told = f"it may cost {money.exact(most)} {prices.currency} at {at_target.target}, {reason}"
    costs = [may_cost(prices, plan, each) for each in at_fallbacks]
    cheaper = tuple(place for place, each in enumerate(costs) if isinstance(each, int) and each < most)
    if cheaper:
        return CostDecision(cheaper, trigger, told)
    missing = [each for each in costs if isinstance(each, str)]
    return CostDecision((), trigger, f"{told}, but {'; '.join(('no fallback is known to be cheaper', *missing))}")


def may_cost(prices: RateTable | None, plan: str | None, request: PricedRequest) -> int | str:
    """Most that a request costs, in 10^-12 of the list's currency; or why that is not known."""
    if prices is None:
        return "this gateway knows no price list"
    rate = prices.find(plan, request.model, request.adapter)
    if rate is None:
        return f"{request.target} has no price"
    if missing := unpriced(rate, request):
        return f"{request.target} has no price for {', '.join(unit.price for unit in missing)}"
    if not request.audio_known and rate.audio_ms != 0:
        return f"the length of a sound for {request.target} is not known"
    return cost(
        rate,
        request.prompt,
        0,
        request.answer,
        documents=request.documents,
        images=request.images,
        audio_ms=request.audio_ms,
    )


def no_effect(conditions: CostConditions, currency: str | None, unpriced: Iterable[str]) -> str:
    """Why the conditions have no effect at a gateway, or not on all requests; "": they have. `currency`: that of the
    gateway's price list; None: it knows none. `unpriced`: targets of the rule without a price."""
    if currency is None:
        return "it knows no price list, so requests stay with their target"
    found: list[str] = []
    if conditions.above is not None and currency != conditions.currency:
        found.append(f"whenCostAbove is in {conditions.currency} and the price list in {currency}, so it has no effect")
    found += [f"{target} has no price, so no request leaves it or goes there for its cost" for target in unpriced]
    return "; ".join(found)


def without_price(prices: RateTable, targets: Iterable[tuple[str, str | None]]) -> list[str]:
    """Those of the targets, each a Model's key and an adapter's, that have no price for any plan."""
    plans = dict.fromkeys((None, *(plan for plan, _, _ in prices.rates)))
    return [
        model if adapter is None else adapter
        for model, adapter in targets
        if all(prices.find(plan, model, adapter) is None for plan in plans)
    ]


def _unknown(conditions: CostConditions, prices: RateTable | None, most: int | str) -> str:
    """Why `whenCostAbove` cannot be decided; "": it can, or is not set."""
    if conditions.above is None:
        return ""
    if isinstance(most, str):
        return most
    if prices is not None and prices.currency != conditions.currency:
        return f"it is in {conditions.currency}, and the price list in {prices.currency}"
    return ""
