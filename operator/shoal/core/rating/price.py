"""Which price counts, and what tokens cost at it.

Amounts are whole 10^-12 of the price list's currency: a price in millionths of it per million tokens is exactly that
per token, so an amount is tokens times rate, and a sum of amounts is the amount of the sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.api.ledger import Prices, Rate, UnknownCached

EVERY: Final = "*"
"""In a price: every model, or every adapter."""


@dataclass(frozen=True, slots=True)
class RateTable:
    """A price list, made ready for many questions."""

    currency: str
    unknown_cached: UnknownCached
    rates: dict[tuple[str | None, str, str | None], Rate]

    @classmethod
    def of(cls, prices: Prices) -> "RateTable":
        return cls(
            prices.currency,
            prices.unknown_cached,
            {(rate.plan, rate.model, rate.adapter): rate for rate in prices.rates},
        )

    def find(self, plan: str | None, model: str, adapter: str | None) -> Rate | None:
        """The most specific price; None: there is none, which is not a price of 0.

        Of several that apply, one for the plan comes before one for all plans, then one for the model before one for
        every model, then one for the adapter before one for every adapter. The price of a model itself is never that
        of its adapters. `model` and `adapter` are namespace/name.
        """
        for key in _keys(plan, model, adapter):
            if (rate := self.rates.get(key)) is not None:
                return rate
        return None


def find(prices: Prices, plan: str | None, model: str, adapter: str | None) -> Rate | None:
    """`Book.find`, for a single question."""
    rates = {(rate.plan, rate.model, rate.adapter): rate for rate in prices.rates}
    return RateTable(prices.currency, prices.unknown_cached, rates).find(plan, model, adapter)


def cost(
    rate: Rate,
    input: int,
    cached: int,
    output: int,
    unknown_cached_input: int = 0,
    *,
    unknown_cached: UnknownCached = "Fresh",
) -> int:
    """What these tokens cost, in 10^-12 of the currency.

    `input` includes `cached` and `unknown_cached_input`, the input of requests of which it is not known how much was
    cached: it counts as fresh, or, where the price list says so, as cached. `output` includes reasoning tokens.
    """
    cheap = cached + unknown_cached_input if unknown_cached == "Cached" else cached
    return (input - cheap) * rate.input + cheap * rate.cached + output * rate.output


def _keys(plan: str | None, model: str, adapter: str | None) -> Iterator[tuple[str | None, str, str | None]]:
    adapters = (None,) if adapter is None else (adapter, EVERY)
    for of_plan in (None,) if plan is None else (plan, None):
        for of_model in (model, EVERY):
            for of_adapter in adapters:
                yield of_plan, of_model, of_adapter
