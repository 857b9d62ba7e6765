"""Usage and its cost as rows of FOCUS 1.2 (the FinOps Open Cost and Usage Specification).

One row per tenant, SKU and period. A SKU is a model, an adapter, a GPU class and a meter: input, cached input or
output. Costs of rows are exact, so they differ from a bill by its rounding, less than one smallest unit per line. For
usage without a price, SkuPriceId, all prices and ConsumedQuantity are null, as the specification requires; its tokens
are in x_ConsumedTokens, and its costs are 0 because the specification requires a number.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from shoal.api.ledger import Rate
from shoal.core.rating import money
from shoal.core.rating.bill import Credit, Usage, rated
from shoal.core.rating.schedule import InForce, Schedule

VERSION: Final = "1.2"
COLUMNS: Final = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency",
    "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription",
    "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost", "ListUnitPrice",
    "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId",
    "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags", "x_Adapter",
    "x_ConsumedTokens", "x_ExternalId", "x_GpuClass", "x_Model", "x_Plan", "x_PriceList",
)  # fmt: skip
UNIT: Final = "Tokens"
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


def usage_rows(account: Account, tenant: str, usage: Usage, schedule: Schedule, period: Period) -> Iterator[Row]:
    """One row per meter with usage."""
    found = rated(usage, schedule)
    counts = usage.counts
    as_cached = found is not None and found[0].prices.unknown_cached == "Cached"
    cached = counts.cached + (counts.unknown_cached_input if as_cached else 0)
    for meter, quantity in (("Input", counts.input - cached), ("Cached Input", cached), ("Output", counts.output)):
        if quantity:
            yield _usage_row(account, tenant, usage, schedule, period, meter, quantity, found)


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
    meter: str,
    quantity: int,
    found: tuple[InForce, Rate] | None,
) -> Row:
    sku = "/".join((usage.model, usage.adapter or "-", usage.gpu_class or "-", meter.replace(" ", "")))
    served = usage.adapter or usage.model
    tags = {"externalID": usage.external_id, "plan": usage.plan}
    row = _row(account, tenant, period, schedule.currency or _NO_CURRENCY) | {
        "BilledCost": _ZERO,
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{meter} tokens of {served}",
        "ChargeFrequency": "Usage-Based",
        "ContractedCost": _ZERO,
        "EffectiveCost": _ZERO,
        "ListCost": _ZERO,
        "ResourceId": served,
        "ResourceName": served.rpartition("/")[2],
        "ResourceType": "Adapter" if usage.adapter else "Model",
        "SkuId": sku,
        "SkuMeter": f"{meter} Tokens",
        "Tags": json.dumps({name: value for name, value in tags.items() if value}),
        "x_Adapter": usage.adapter or "",
        "x_ConsumedTokens": str(quantity),
        "x_ExternalId": usage.external_id or "",
        "x_GpuClass": usage.gpu_class or "",
        "x_Model": usage.model,
        "x_Plan": usage.plan or "",
    }
    if found is None:
        return row
    in_force, rate = found
    price = _of(rate, meter)
    # The list price is the price without a plan; if there is none, the plan's own price.
    published = in_force.book.find(None, usage.model, usage.adapter) or rate
    listed = _of(published, meter)
    cost = _decimal(price * quantity)
    return row | {
        "BilledCost": cost,
        "ConsumedQuantity": _decimal(quantity * money.UNIT),
        "ConsumedUnit": UNIT,
        "ContractedCost": cost,
        "ContractedUnitPrice": _decimal(price),
        "EffectiveCost": cost,
        "ListCost": _decimal(listed * quantity),
        "ListUnitPrice": _decimal(listed),
        "PricingCategory": "Standard",
        "PricingQuantity": _decimal(quantity * money.UNIT),
        "PricingUnit": UNIT,
        "SkuPriceDetails": _details(usage, meter),
        "SkuPriceId": sku,
        "x_PriceList": in_force.prices.list,
    }


def _details(usage: Usage, meter: str) -> str:
    found = {"x_Adapter": usage.adapter, "x_GpuClass": usage.gpu_class, "x_Meter": meter, "x_Model": usage.model}
    return json.dumps({name: value for name, value in found.items() if value})


def _of(rate: Rate, meter: str) -> int:
    return {"Input": rate.input, "Cached Input": rate.cached, "Output": rate.output}[meter]


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
    text = money.exact(amount)
    return text if "." in text else f"{text}.0"


def _time(moment: int) -> str:
    return datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
