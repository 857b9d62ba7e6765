"""Which price applies, and the cost of tokens and other units at it.

Amounts are whole 10^-12 of the price list's currency. A price in millionths of the currency per million tokens is the
same number per token, so an amount is tokens times rate, and sums are exact. The same holds for documents and images.
Prices of audio have three decimals less and are per millisecond.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.api.ledger import Prices, Rate, UnknownCached
from shoal.core.rating.units import UNITS, Unit

EVERY: Final = "*"
"""In a price: applies to every model, or to every adapter."""


@dataclass(frozen=True, slots=True)
class RateTable:
    """A price list prepared for many look-ups."""

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
        """The most specific price; None: there is none, which is different from a price of 0.

        A price for the plan precedes one for all plans, then a price for the model one for every model, then a price
        for the adapter one for every adapter. A model's own price never applies to its adapters. `model` and `adapter`
        are namespace/name.
        """
        for key in _keys(plan, model, adapter):
            if (rate := self.rates.get(key)) is not None:
                return rate
        return None


def cost(
    rate: Rate,
    input: int,
    cached: int,
    output: int,
    unknown_cached_input: int = 0,
    *,
    documents: int = 0,
    images: int = 0,
    audio_ms: int = 0,
    unknown_cached: UnknownCached = "Fresh",
) -> int:
    """The cost of this usage, in 10^-12 of the currency. Units without a price add nothing: `unpriced` tells them.

    `input` includes `cached` and `unknown_cached_input`, the input of requests without a known cached part: it is
    charged as fresh, or as cached where the price list says so. `output` includes reasoning tokens.
    """
    cheap = cached + unknown_cached_input if unknown_cached == "Cached" else cached
    tokens = (input - cheap) * rate.input + cheap * rate.cached + output * rate.output
    return tokens + documents * (rate.documents or 0) + images * (rate.images or 0) + audio_ms * (rate.audio_ms or 0)


def price_of(rate: Rate, unit: Unit) -> int | None:
    """10^-12 of the currency for one count of the unit; None: it has no price."""
    return getattr(rate, unit.count)


def unpriced(rate: Rate, counts: object) -> tuple[Unit, ...]:
    """Units that were used and have no price. `counts` has them as attributes."""
    return tuple(unit for unit in UNITS if getattr(counts, unit.count) and price_of(rate, unit) is None)


def _keys(plan: str | None, model: str, adapter: str | None) -> Iterator[tuple[str | None, str, str | None]]:
    adapters = (None,) if adapter is None else (adapter, EVERY)
    for of_plan in (None,) if plan is None else (plan, None):
        for of_model in (model, EVERY):
            for of_adapter in adapters:
                yield of_plan, of_model, of_adapter
