"""Bills, credits and margin out of the tables."""

from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.billing import MILLION, bill, books, credit, empty
from tests.support.ledger import server, url
from tests.support.queryapi import ADMIN, MID_NOVEMBER, OCTOBER, Ledger, gpu_hour, hour, ledger

__all__ = ["books", "empty", "server", "url"]


# --- bills ----------------------------------------------------------------------------------------------------------


async def test_a_bill_has_a_line_per_model_adapter_plan_and_price(books: Ledger) -> None:
    found = await bill(books)
    assert [
        (line["model"], line["adapter"], line["plan"], line["rate"]["input"], line["amount"], line["lists"])
        for line in found["lines"]
    ] == [
        # 1.6 M fresh at 3, 0.4 M cached at 0.30, 0.1 M output at 15; after the 15th input costs 6
        ("chat/llama", None, None, "3.00", "6.42", ["october"]),
        ("chat/llama", None, None, "6.00", "6.00", ["november"]),
        ("chat/llama", None, "gold", "2.00", "2.00", ["october"]),
        ("chat/llama", "chat/sql", None, "4.00", "4.00", ["october"]),
    ]
    assert (found["usage"], found["credit"], found["total"], found["currency"]) == ("18.42", "0.00", "18.42", "EUR")
    assert found["externalIDs"] == ["cus_acme", "cus_new"]
    assert (found["monthEnded"], found["openRequests"], found["known"]) == (False, 0, True)
    first = found["lines"][0]
    assert (first["requests"], first["inputTokens"], first["cachedTokens"], first["outputTokens"]) == (
        4,
        2 * MILLION,
        400_000,
        100_000,
    )
    assert first["exact"] == "6.42"


async def test_what_has_no_price_is_shown_as_such(books: Ledger) -> None:
    (unpriced,) = (await bill(books))["unpriced"]
    assert (unpriced["model"], unpriced["inputTokens"], unpriced["outputTokens"]) == ("chat/new", 42, 8)


async def test_the_lists_in_force_and_why_others_are_not(books: Ledger, tmp_path: Path) -> None:
    found = (await books.get("/v1/prices")).json
    assert (found["current"], found["currency"], found["refused"]) == (found["lists"][-1], "EUR", [])
    (tmp_path / "prices" / "x.yaml").write_text("currency: EUR\n" + "\n".join(f"k{n}: 1" for n in range(30)))
    await books.prices.refresh()
    again = (await books.get("/v1/prices")).json
    assert (again["lists"], again["current"]) == (found["lists"], found["current"])
    assert again["refused"][0].startswith("x.yaml:1: ")
    assert (len(again["refused"]), again["refused"][-1]) == (21, "and 12 more")


async def test_a_month_before_all_price_lists_is_unpriced(books: Ledger) -> None:
    await books.fill(hour("2026-09-01T00:00", input_tokens=5))
    found = await bill(books, month="2026-09")
    assert (found["lines"], found["total"], found["unpriced"][0]["inputTokens"]) == ([], "0.00", 5)
    assert found["monthEnded"]


async def test_requests_that_have_not_ended_are_told(books: Ledger) -> None:
    await books.open_request("2026-11-21T10:00")
    await books.open_request("2026-10-31T23:59", request="r2")
    await books.open_request("2026-11-21T10:00", tenant="globex", request="r3")
    assert (await bill(books))["openRequests"] == 1


async def test_the_same_month_makes_the_same_bill_again(books: Ledger) -> None:
    assert await bill(books) == await bill(books)


async def test_a_tenant_that_was_never_seen_is_not_known(books: Ledger) -> None:
    assert not (await bill(books, tenant="acmee"))["known"]
    assert (await bill(books, month="2026-01"))["known"], "it has usage, only not in that month"
    await books.post("/v1/credits", credit(tenant="newcomer"))
    assert (await bill(books, tenant="newcomer", month="2026-01"))["known"]


async def test_of_a_month_that_is_deleted_in_part_there_is_no_bill(empty: Ledger) -> None:
    answer = await empty.get("/v1/bill", tenant="acme", month="2023-11")  # 1,100 days before are the 18th of it
    assert (answer.status, answer.message) == (
        410,
        "hourly sums of before 2023-11-18T12:00:00Z are deleted: a bill for 2023-11 would be incomplete",
    )
    lists = [{"file": "a.yaml", "text": OCTOBER}]
    assert (await empty.post("/v1/bill", {"tenant": "acme", "month": "2023-11", "prices": lists})).status == 410
    assert (await empty.get("/v1/bill", tenant="acme", month="2023-12")).status == 200


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"tenant": ""}, "tenant is missing: name the tenant to bill"),
        ({"month": "November"}, "month=November: write one such as 2026-11"),
        ({"month": "2026-1"}, "month=2026-1: write one such as 2026-11"),
        ({"from": "2026-11"}, "unknown parameter from: there are month, tenant"),
        ({"tenant": "a\0"}, "tenant has a NUL in it"),
    ],
)
async def test_a_wrong_question_for_a_bill(empty: Ledger, query: dict[str, str], message: str) -> None:
    answer = await empty.get("/v1/bill", **{"tenant": "acme", "month": "2026-11"} | query)
    assert (answer.status, message in answer.message) == (400, True), answer.message


async def test_a_tenant_with_a_nul_has_no_bill_at_other_prices(empty: Ledger) -> None:
    lists = [{"file": "a.yaml", "text": OCTOBER}]
    answer = await empty.post("/v1/bill", {"tenant": "a\0", "month": "2026-11", "prices": lists})
    expected = "the body: tenant: it has a NUL in it, which the database cannot hold: leave it out"
    assert (answer.status, answer.message) == (400, expected)
    lists = [{"file": "a.yaml", "text": f"{OCTOBER}\0"}]
    answer = await empty.post("/v1/bill", {"tenant": "acme", "month": "2026-11", "prices": lists})
    assert answer.status == 422  # YAML has no such character, so no price list can have it


# --- the same month at other prices ---------------------------------------------------------------------------------


async def test_another_price_list_makes_another_bill_and_changes_nothing(books: Ledger) -> None:
    before = await bill(books)
    dearer = OCTOBER.replace("2026-10-01", "2027-01-01").replace('output: "15"', 'output: "25"')
    answer = await books.post(
        "/v1/bill", {"tenant": "acme", "month": "2026-11", "prices": [{"file": "next.yaml", "text": dearer}]}
    )
    assert answer.status == 200
    # One file counts for the whole month, so the 6.00 of the 15th is 3.00 again; 0.1 M output costs 1.00 more.
    assert answer.json["bill"] == before
    assert (answer.json["other"]["total"], answer.json["difference"]) == ("16.42", "-2.00")
    assert answer.json["other"]["lines"][0]["lists"] == ["next"]
    assert await bill(books) == before


async def test_several_lists_count_from_their_own_moments_on(books: Ledger) -> None:
    lists = [{"file": "a.yaml", "text": OCTOBER}, {"file": "b.yaml", "text": MID_NOVEMBER}]
    answer = await books.post("/v1/bill", {"tenant": "acme", "month": "2026-11", "prices": lists})
    assert (answer.json["other"]["total"], answer.json["difference"]) == ("18.42", "0.00")


async def test_of_different_currencies_there_is_no_difference(books: Ledger) -> None:
    lists = [{"file": "a.yaml", "text": OCTOBER.replace("EUR", "USD")}]
    answer = await books.post("/v1/bill", {"tenant": "acme", "month": "2026-11", "prices": lists})
    assert (answer.json["other"]["currency"], answer.json["difference"]) == ("USD", None)


async def test_a_price_list_that_is_wrong_is_refused_with_its_line(empty: Ledger) -> None:
    lists = [{"file": "bad.yaml", "text": OCTOBER.replace('"15"', '"fifteen"')}]
    answer = await empty.post("/v1/bill", {"tenant": "acme", "month": "2026-11", "prices": lists})
    assert (answer.status, answer.message.splitlines()[1]) == (
        422,
        "bad.yaml:4: `prices.output`: 'fifteen' is not a price: write a decimal number such as \"0.25\", without sign "
        "or exponent",
    )


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tenant": "acme", "month": "2026-11", "prices": []}'])
async def test_a_body_that_is_no_question_is_refused(empty: Ledger, body: bytes) -> None:
    answer = await empty.call("POST", "/v1/bill", key=ADMIN, body=body)
    assert (answer.status, answer.message.startswith("the body: ")) == (400, True)


# --- credits --------------------------------------------------------------------------------------------------------


async def test_a_credit_is_taken_off_the_bill_of_its_month(books: Ledger) -> None:
    made = await books.post("/v1/credits", credit(madeBy="ann"))
    assert (made.status, made.json["amount"], made.json["currency"]) == (201, "1.50", "EUR")
    assert made.json["madeAt"] == "2026-11-22T12:00:00Z"
    await books.post("/v1/credits", credit(id="c2", amount="-0.50", note="too much"))
    found = await bill(books)
    assert (found["usage"], found["credit"], found["total"]) == ("18.42", "1.00", "17.42")
    assert [(one["id"], one["note"]) for one in found["credits"]] == [("c1", "outage"), ("c2", "too much")]
    assert (await bill(books, month="2026-10"))["credits"] == []
    assert (await bill(books, tenant="globex"))["credits"] == []
    assert books.credited == 2, "budgets hear of it"


async def test_the_same_credit_twice_is_one(books: Ledger) -> None:
    assert (await books.post("/v1/credits", credit())).status == 201
    again = await books.post("/v1/credits", credit())
    assert (again.status, books.credited) == (200, 1)
    other = await books.post("/v1/credits", credit(amount="2"))
    assert (other.status, other.message) == (
        409,
        "there is another credit with the id c1: give this one an id of its own",
    )
    assert (await bill(books))["credit"] == "1.50"


async def test_a_credit_with_a_nul_is_refused_by_both_databases_alike(books: Ledger) -> None:
    answer = await books.post("/v1/credits", credit(note="out\0age"))
    expected = "the body: note: it has a NUL in it, which the database cannot hold: leave it out"
    assert (answer.status, answer.message) == (400, expected)
    assert (await books.post("/v1/credits", credit(note="outage"))).status == 201


async def test_credits_are_listed(books: Ledger) -> None:
    for number, tenant, month in ((1, "acme", "2026-11"), (2, "acme", "2026-10"), (3, "globex", "2026-11")):
        await books.post("/v1/credits", credit(id=f"c{number}", tenant=tenant, month=month))
    for query, ids in (
        ({}, {"c1", "c2", "c3"}),
        ({"tenant": "acme"}, {"c1", "c2"}),
        ({"month": "2026-11"}, {"c1", "c3"}),
        ({"tenant": "globex", "month": "2026-10"}, set()),
    ):
        answer = await books.get("/v1/credits", **query)
        assert {one["id"] for one in answer.json["credits"]} == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"amount": "lots"}, "amount: 'lots' is not an amount"),
        ({"amount": "0.001"}, "amount: 0.001 has more decimals than EUR has (2)"),
        ({"amount": "0"}, "amount: must not be zero"),
        ({"currency": "USD"}, "the price lists are in EUR: a credit in USD could not be deducted from any bill"),
        ({"month": "2026"}, "month=2026: write one such as 2026-11"),
        ({"tenant": ""}, "the body: tenant: String should have at least 1 character"),
        ({"note": "x" * 1001}, "the body: note: String should have at most 1000 characters"),
        *(
            ({field: "a\0b"}, f"the body: {field}: it has a NUL in it, which the database cannot hold: leave it out")
            for field in ("id", "tenant", "note", "madeBy")
        ),
    ],
)
async def test_a_credit_that_is_wrong_is_refused(empty: Ledger, changes: dict[str, str], message: str) -> None:
    answer = await empty.post("/v1/credits", credit(**changes))
    assert (answer.status, message in answer.message) == (400, True), answer.message
    assert (await empty.get("/v1/credits")).json["credits"] == []


async def test_without_price_lists_a_credit_says_its_currency(tmp_path: Path) -> None:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as books:
        answer = await books.post("/v1/credits", credit())
        assert (answer.status, answer.message) == (400, "there is no price list: set the currency of the credit")
        assert (await books.post("/v1/credits", credit(currency="eur"))).status == 400
        assert (await books.post("/v1/credits", credit(currency="EUR"))).status == 201
        found = await bill(books)
        assert (found["currency"], found["total"]) == (None, None)
        assert [one["id"] for one in found["foreignCredits"]] == ["c1"]


# --- margin ---------------------------------------------------------------------------------------------------------


async def test_margin_by_gpu_class(books: Ledger) -> None:
    answer = await books.get("/v1/margin")
    rows = {row["class"]: row for row in answer.json["rows"]}
    assert answer.json["currency"] == "EUR"
    # acme 3.42 + 6 + 2 + 4, globex 6; 50 tokens of chat/new have no price
    h100 = rows["h100"]
    assert (h100["revenue"], h100["cost"], h100["gpuHours"], h100["unpricedTokens"]) == ("21.42", "3.75", 1.5, 50)
    assert (h100["margin"], h100["marginPercent"]) == (None, None), "of some tokens nobody knows what they brought in"
    assert (rows["l4"]["revenue"], rows["l4"]["cost"], rows["l4"]["costCurrency"]) == ("3", "2.5", "USD")
    assert rows["l4"]["margin"] is None, "another currency"
    assert (rows["a100"]["cost"], rows["a100"]["unpricedGpuHours"], rows["a100"]["margin"]) == (None, 2.0, None)
    assert (rows["idle"]["revenue"], rows["idle"]["margin"]) == ("0", "-2.5"), (
        "GPUs that earned nothing cost all the same"
    )
    assert "counted" not in rows


async def test_margin_by_model_and_day(books: Ledger) -> None:
    rows = (await books.get("/v1/margin", by="model,day", to="2026-11-03")).json["rows"]
    second = next(row for row in rows if row["day"] == "2026-11-02")
    assert (second["model"], second["revenue"], second["cost"], second["margin"]) == ("chat/llama", "6", "1.25", "4.75")
    assert second["marginPercent"] == "79.2"


async def test_usage_without_known_cost_has_no_margin(books: Ledger) -> None:
    (row,) = (await books.get("/v1/margin", from_="2026-10", to="2026-11")).json["rows"]
    assert (row["revenue"], row["cost"], row["gpuHours"], row["margin"]) == ("3", None, None, None)


async def test_margin_over_everything_and_by_month(books: Ledger) -> None:
    (row,) = (await books.get("/v1/margin", by="", from_="2026-10", to="2027-01")).json["rows"]
    assert row["tokens"] == 9_100_050
    months = (await books.get("/v1/margin", by="month", from_="2026-10", to="2027-01")).json["rows"]
    assert [(one["month"], one["tokens"]) for one in months] == [
        ("2026-10", MILLION),
        ("2026-11", 7_100_050),
        ("2026-12", MILLION),
    ]
    assert (await books.get("/v1/margin", by="tenant")).status == 400


async def test_the_cost_of_a_fleet_may_be_more_than_64_bits_hold(books: Ledger) -> None:
    most = 2**62 - 1
    await books.fill(
        engines=tuple(gpu_hour(f"2026-11-0{day}T00:00", "h900", cost=most, currency="IDR") for day in range(1, 5))
    )
    rows = (await books.get("/v1/margin", by="class")).json["rows"]
    (row,) = [row for row in rows if row["class"] == "h900"]
    assert (row["costCurrency"], Decimal(row["cost"])) == ("IDR", Decimal(4 * most) / 10**9)
