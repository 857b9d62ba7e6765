"""Usage and its cost as rows of FOCUS 1.2 (the FinOps Open Cost and Usage Specification).

One row per tenant, SKU and period. A SKU is a model, an adapter, a GPU class and a meter: input, cached input or output
tokens, documents, images or seconds of audio. Costs of rows are exact, so they differ from a bill by its rounding, less
than one smallest unit per line. For usage without a price, SkuPriceId, all prices and ConsumedQuantity are null, as the
specification requires; its quantity is in x_ConsumedQuantity, and its costs are 0 because the specification requires a
number.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from shoal.api.ledger import Rate
from shoal.core.rating import money
from shoal.core.rating.bill import Credit, Usage, rated
from shoal.core.rating.price import price_of
from shoal.core.rating.schedule import InForce, Schedule
from shoal.core.rating.units import UNITS, quantity

VERSION: Final = "1.2"
COLUMNS: Final = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency",
    "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription",
    "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost", "ListUnitPrice",
    "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId",
    "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags", "x_AcceptedTokens",
    "x_Adapter", "x_AudioTokens", "x_ConsumedQuantity", "x_ConsumedTokens", "x_ConsumedUnit", "x_ExternalId",
    "x_GpuClass", "x_ImageTokens", "x_Model", "x_Plan", "x_PriceList", "x_ReasoningTokens",
)  # fmt: skip
_TOKENS: Final = "Tokens"
_ZERO: Final = "0.0"
_NO_CURRENCY: Final = "XXX"
"""ISO 4217's code for no currency, used without a price list."""


@dataclass(frozen=True, slots=True)
class Account:
    """The billing account."""

    id: str
    issuer: str


@dataclass(frozen=True, slots=True)
class Period:
    """The time of a row, and the month of its bill; milliseconds since 1970."""

    start: int
    end: int
    month_start: int
    month_end: int


Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Meter:
    """One thing that was used, with its price."""

    name: str
    """As in the SKU."""
    unit: str
    quantity: str
    tokens: int | None
    price: int | None
    """10^-12 of the currency per unit; None: it has no price."""
    published: int | None
    """The price without a plan."""
    cost: int
    published_cost: int
    kinds: Mapping[str, int] = field(default_factory=dict[str, int])
    """By column: kinds of tokens without a price of their own."""

    @property
    def title(self) -> str:
        return f"{self.name} {self.unit}" if self.tokens is not None else self.name

    @property
    def description(self) -> str:
        return f"{self.name} tokens" if self.tokens is not None else self.name.capitalize()


def usage_rows(account: Account, tenant: str, usage: Usage, schedule: Schedule, period: Period) -> Iterator[Row]:
    """One row per meter with usage."""
    found = rated(usage, schedule)
    for meter in _meters(usage, found):
        yield _usage_row(account, tenant, usage, schedule, period, meter, found)


def _meters(usage: Usage, found: tuple[InForce, Rate] | None) -> Iterator[_Meter]:
    """What was used, token kinds first."""
    counts = usage.counts
    as_cached = found is not None and found[0].prices.unknown_cached == "Cached"
    cached = counts.cached + (counts.unknown_cached_input if as_cached else 0)
    rate = None if found is None else found[1]
    # The list price is the price without a plan; if there is none, the plan's own price.
    listed = None if found is None else found[0].book.find(None, usage.model, usage.adapter) or found[1]
    fresh = counts.input - cached
    # How many of them were cached is unknown: they stand in one row of the input.
    of_input = {"x_AudioTokens": counts.audio_tokens, "x_ImageTokens": counts.image_tokens}
    of_output = {"x_AcceptedTokens": counts.accepted, "x_ReasoningTokens": counts.reasoning}
    for name, of_rate, tokens, kinds in (
        ("Input", "input", fresh, of_input),
        ("Cached Input", "cached", cached, {} if fresh else of_input),
        ("Output", "output", counts.output, of_output),
    ):
        if tokens:
            price: int | None = None if rate is None else getattr(rate, of_rate)
            published: int | None = None if listed is None else getattr(listed, of_rate)
            costs = (price or 0) * tokens, (published or 0) * tokens
            yield _Meter(name, _TOKENS, _decimal(tokens * money.UNIT), tokens, price, published, *costs, kinds)
    for unit in UNITS:
        if count := getattr(counts, unit.count):
            price = None if rate is None else price_of(rate, unit)
            published = price if listed is None or price_of(listed, unit) is None else price_of(listed, unit)
            costs = (price or 0) * count, (published or 0) * count
            used = _pointed(quantity(unit, count))
            per = unit.per
            yield _Meter(
                unit.meter,
                unit.meter.rpartition(" ")[2],
                used,
                None,
                None if price is None else price * per,
                None if published is None else published * per,
                *costs,
            )


def credit_row(account: Account, tenant: str, credit: Credit, period: Period, external_id: str | None = None) -> Row:
    """A credit is a negative charge of its own, in the month from which it is deducted. `external_id`: the tenant's, as
    in its usage."""
    amount = _decimal(-credit.amount)
    return _row(account, tenant, period, credit.currency) | {
        "BilledCost": amount,
        "ChargeCategory": "Credit",
        "ChargeDescription": credit.note or "Credit",
        "ChargeFrequency": "One-Time",
        "ContractedCost": amount,
        "EffectiveCost": amount,
        "ListCost": amount,
        "Tags": json.dumps({"externalID": external_id} if external_id else {}),
        "x_ExternalId": external_id or "",
    }


def _usage_row(
    account: Account,
    tenant: str,
    usage: Usage,
    schedule: Schedule,
    period: Period,
    meter: _Meter,
    found: tuple[InForce, Rate] | None,
) -> Row:
    sku = "/".join((usage.model, usage.adapter or "-", usage.gpu_class or "-", meter.name.replace(" ", "")))
    served = usage.adapter or usage.model
    tags = {"externalID": usage.external_id, "plan": usage.plan}
    row = _row(account, tenant, period, schedule.currency or _NO_CURRENCY) | {
        "BilledCost": _ZERO,
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{meter.description} of {served}",
        "ChargeFrequency": "Usage-Based",
        "ContractedCost": _ZERO,
        "EffectiveCost": _ZERO,
        "ListCost": _ZERO,
        "ResourceId": served,
        "ResourceName": served.rpartition("/")[2],
        "ResourceType": "Adapter" if usage.adapter else "Model",
        "SkuId": sku,
        "SkuMeter": meter.title,
        "Tags": json.dumps({name: value for name, value in tags.items() if value}),
        "x_Adapter": usage.adapter or "",
        "x_ConsumedQuantity": meter.quantity,
        "x_ConsumedTokens": "" if meter.tokens is None else str(meter.tokens),
        "x_ConsumedUnit": meter.unit,
        "x_ExternalId": usage.external_id or "",
        "x_GpuClass": usage.gpu_class or "",
        "x_Model": usage.model,
        "x_Plan": usage.plan or "",
        **{column: str(tokens) for column, tokens in meter.kinds.items() if tokens},
    }
    if found is None or meter.price is None or meter.published is None:
        return row
    cost = _decimal(meter.cost)
    return row | {
        "BilledCost": cost,
        "ConsumedQuantity": meter.quantity,
        "ConsumedUnit": meter.unit,
        "ContractedCost": cost,
        "ContractedUnitPrice": _decimal(meter.price),
        "EffectiveCost": cost,
        "ListCost": _decimal(meter.published_cost),
        "ListUnitPrice": _decimal(meter.published),
        "PricingCategory": "Standard",
        "PricingQuantity": meter.quantity,
        "PricingUnit": meter.unit,
        "SkuPriceDetails": _details(usage, meter.name),
        "SkuPriceId": sku,
        "x_PriceList": found[0].prices.list,
    }


def _details(usage: Usage, meter: str) -> str:
    found = {"x_Adapter": usage.adapter, "x_GpuClass": usage.gpu_class, "x_Meter": meter, "x_Model": usage.model}
    return json.dumps({name: value for name, value in found.items() if value})


def _row(account: Account, tenant: str, period: Period, currency: str) -> Row:
    return dict.fromkeys(COLUMNS, "") | {
        "BillingAccountId": account.id,
        "BillingAccountName": account.id,
        "BillingAccountType": "Installation",
        "BillingCurrency": currency,
        "BillingPeriodEnd": _time(period.month_end),
        "BillingPeriodStart": _time(period.month_start),
        "ChargePeriodEnd": _time(period.end),
        "ChargePeriodStart": _time(period.start),
        # The bill of this tenant and month, available at any time: `shoal bill`.
        "InvoiceId": f"{tenant}/{_time(period.month_start)[:7]}",
        "InvoiceIssuerName": account.issuer,
        "ProviderName": account.issuer,
        "PublisherName": account.issuer,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM Inference",
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": tenant,
        "SubAccountName": tenant,
        "SubAccountType": "Tenant",
    }


def _decimal(amount: int) -> str:
    # Always with a point: a column of whole numbers would be read as integers, which is another type.
    return _pointed(money.exact(amount))


def _pointed(text: str) -> str:
    return text if "." in text else f"{text}.0"


def _time(moment: int) -> str:
    return datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
