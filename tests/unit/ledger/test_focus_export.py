"""`GET /v1/focus`: rows of FOCUS 1.2."""

import csv
import io
from decimal import Decimal
from typing import Any

from tests.support.billing import bill, books, credit, empty
from tests.support.ledger import server, url
from tests.support.queryapi import Ledger

__all__ = ["books", "empty", "server", "url"]


async def focus(books: Ledger, **query: Any) -> list[dict[str, str]]:
    answer = await books.get("/v1/focus", **query)
    assert answer.status == 200, answer.body
    return list(csv.DictReader(io.StringIO(answer.body.decode())))


async def test_focus_rows_per_tenant_sku_and_day(books: Ledger) -> None:
    rows = await focus(books, tenant="acme", from_="2026-11-01", to="2026-11-02")
    assert [(r["SkuMeter"], r["PricingQuantity"], r["ContractedUnitPrice"], r["BilledCost"]) for r in rows] == [
        ("Input Tokens", "600000.0", "0.000003", "1.8"),
        ("Cached Input Tokens", "400000.0", "0.0000003", "0.12"),
        ("Output Tokens", "100000.0", "0.000015", "1.5"),
    ]
    first = rows[0]
    assert first["SubAccountId"] == "acme"
    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z")
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert (first["SkuId"], first["SkuPriceId"]) == ("chat/llama/-/h100/Input",) * 2
    assert (first["ServiceCategory"], first["BillingCurrency"], first["Tags"]) == (
        "AI and Machine Learning",
        "EUR",
        '{"externalID": "cus_acme"}',
    )


async def test_focus_adds_up_to_the_bill(books: Ledger) -> None:
    await books.post("/v1/credits", credit())
    rows = await focus(books, tenant="acme")
    total = sum(Decimal(row["BilledCost"]) for row in rows)
    assert f"{total:.2f}" == (await bill(books))["total"] == "16.92"
    for row in rows:
        if row["SkuPriceId"]:
            assert Decimal(row["PricingQuantity"]) * Decimal(row["ContractedUnitPrice"]) == Decimal(
                row["ContractedCost"]
            )
            assert Decimal(row["PricingQuantity"]) * Decimal(row["ListUnitPrice"]) == Decimal(row["ListCost"])


async def test_in_focus_a_plan_is_a_contract_beside_the_list_price(books: Ledger) -> None:
    (row,) = [r for r in await focus(books) if r["x_Plan"] == "gold"]
    assert (row["ListCost"], row["ContractedCost"], row["BilledCost"], row["x_ExternalId"]) == (
        "3.0",
        "2.0",
        "2.0",
        "cus_new",
    )


async def test_in_focus_usage_without_a_price_has_no_prices(books: Ledger) -> None:
    rows = [row for row in await focus(books) if row["x_Model"] == "chat/new"]
    assert [(r["SkuMeter"], r["x_ConsumedTokens"], r["BilledCost"]) for r in rows] == [
        ("Input Tokens", "42", "0.0"),
        ("Output Tokens", "8", "0.0"),
    ]
    for name in (
        "SkuPriceId",
        "PricingQuantity",
        "PricingUnit",
        "PricingCategory",
        "ListUnitPrice",
        "ConsumedQuantity",
    ):
        assert {row[name] for row in rows} == {""}


async def test_in_focus_a_credit_is_a_row_of_its_own(books: Ledger) -> None:
    await books.post("/v1/credits", credit())
    (row,) = [r for r in await focus(books) if r["ChargeCategory"] == "Credit"]
    assert (row["BilledCost"], row["ChargeDescription"], row["SubAccountId"]) == ("-1.5", "outage", "acme")
    assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert (row["x_ExternalId"], row["Tags"]) == ("cus_acme", '{"externalID": "cus_acme"}')
    later = await focus(books, from_="2026-11-02")
    assert not [r for r in later if r["ChargeCategory"] == "Credit"], "parts of a month have it once"


async def test_focus_by_the_hour_and_of_everybody(books: Ledger) -> None:
    rows = await focus(books, grain="hour", from_="2026-11-14T23:00:00Z", to="2026-11-15T01:00:00Z")
    assert [(r["ChargePeriodStart"], r["ListUnitPrice"], r["x_PriceList"]) for r in rows] == [
        ("2026-11-14T23:00:00Z", "0.000003", "october"),
        ("2026-11-15T00:00:00Z", "0.000006", "november"),
    ]
    assert {row["SubAccountId"] for row in await focus(books)} == {"acme", "globex"}
    (row,) = await focus(books, tenant="globex", issuer="Acme Cloud")
    assert (row["InvoiceIssuerName"], row["BillingAccountId"]) == ("Acme Cloud", "shoal-test")


async def test_focus_of_a_time_without_usage_is_its_header(books: Ledger) -> None:
    answer = await books.get("/v1/focus", from_="2020-01", to="2020-02")
    assert answer.body.decode().startswith("BilledCost,BillingAccountId,")
    assert len(answer.body.decode().splitlines()) == 1
    assert (await books.get("/v1/focus", from_="2020-01", to="2020-02", header="false")).body == b""


async def test_a_wrong_question_for_focus(empty: Ledger) -> None:
    answer = await empty.get("/v1/focus", grain="week")
    assert (answer.status, answer.message) == (400, "grain is hour or day")
    answer = await empty.get("/v1/focus", from_="2020-01")
    assert (answer.status, "more than 400 days" in answer.message) == (400, True)
