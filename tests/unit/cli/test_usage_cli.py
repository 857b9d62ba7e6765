"""`shoal usage`, `bill`, `credits`, `margin`, `export`, `unattributed`: what a person sees."""

import csv
import io
import json
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import Result

from shoal.ledger.reconcile.watch import EngineCoverage
from tests.support.ledgerworld import World, world
from tests.support.queryapi import OCTOBER, gpu_hour, hour

__all__ = ["world"]


def text(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


# --- usage ----------------------------------------------------------------------------------------------------------


async def test_usage_as_a_table(world: World) -> None:
    told = await world.shoal(
        "usage", "--tenant", "acme", "--by", "model,adapter,day", "--from", "2026-11", "--to", "2026-12"
    )
    assert text(told) == [
        "from 2026-11-01T00:00:00Z to 2026-12-01T00:00:00Z (UTC)",
        "MODEL ADAPTER DAY REQUESTS INPUT OF IT CACHED OUTPUT OF IT REASONING",
        "chat/llama - 2026-11-01 1,200 2,000,000 1,000,000 5 0",
        "chat/llama chat/sql 2026-11-02 1 7 0 0 0",
        "chat/new - 2026-11-02 1 42 0 0 0",
        "total 1,202 2,000,049 1,000,000 5 0",
        "For 7 input tokens the cached part is unknown (cut streams).",
        "For 1 requests the tokens are unknown: no engine reported them.",
    ]


async def test_usage_without_words_is_this_month_by_tenant_model_and_adapter(world: World) -> None:
    told = text(await world.shoal("usage"))
    assert told[1].startswith("TENANT MODEL ADAPTER REQUESTS")
    assert "globex chat/llama - 2 30 0 0 0" in told
    assert text(await world.shoal("usage", "-A")) == told
    both = await world.shoal("usage", "-A", "-n", "chat")
    assert (both.exit_code, "exclude each other" in both.stderr) == (2, True)


async def test_usage_for_programs(world: World) -> None:
    found = json.loads((await world.shoal("usage", "--by", "tenant", "-o", "json")).stdout)
    assert found["by"] == ["tenant"]
    assert [(row["tenant"], row["inputTokens"]) for row in found["rows"]] == [("acme", 2_000_049), ("globex", 30)]
    assert "model" not in found["rows"][0]
    told = await world.shoal("usage", "--by", "tenant,adapter", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    assert [(row["tenant"], row["adapter"], row["requests"]) for row in rows] == [
        ("acme", "", "1201"),
        ("acme", "chat/sql", "1"),
        ("globex", "", "2"),
    ]


async def test_usage_of_many_pages_is_one_table(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.usage.usage._PAGE", "1")
    found = json.loads((await world.shoal("usage", "--by", "tenant,model,adapter", "-o", "json")).stdout)
    assert len(found["rows"]) == 4


async def test_no_usage_in_a_time_is_said(world: World) -> None:
    told = await world.shoal("usage", "--tenant", "acme", "--from", "2026-01", "--to", "2026-02")
    assert (told.exit_code, told.stdout) == (0, "")
    assert "No matching usage of acme from 2026-01-01T00:00:00Z to 2026-02-01T00:00:00Z." in told.stderr


@pytest.mark.parametrize("command", [("usage",), ("bill", "--month", "2026-11")])
async def test_a_tenant_that_was_never_seen_is_told(world: World, command: tuple[str, ...]) -> None:
    told = await world.shoal(*command, "--tenant", "acmee")
    assert told.exit_code == 1
    assert (
        "the ledger has never seen usage of acmee: is it spelt right? `kubectl get tenants` lists them" in told.stderr
    )


async def test_a_wrong_word_is_the_ledger_s_own_sentence(world: World) -> None:
    told = await world.shoal("usage", "--by", "colour")
    assert told.exit_code == 1
    assert "by=colour: it is one of tenant, key, externalID, model" in told.stderr


# --- bills ----------------------------------------------------------------------------------------------------------


async def test_a_bill_as_a_table(world: World) -> None:
    await world.shoal(
        "credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "1.25", "--note", "outage", "--id", "c1"
    )
    await world.books.open_request("2026-11-21T00:00")
    assert text(await world.shoal("bill", "--tenant", "acme", "--month", "2026-11")) == [
        "acme (cus_acme), 2026-11, so far",
        "MODEL ADAPTER PLAN REQUESTS INPUT OF IT CACHED OUTPUT PRICES (IN / CACHED / OUT) AMOUNT",
        "chat/llama - - 1,200 2,000,000 1,000,000 5 3.00 / 0.30 / 15.00 3.30 EUR",
        "chat/llama chat/sql - 1 7 0 0 4.00 / 0.40 / 20.00 0.00 EUR",
        "lines 3.30 EUR",
        "Prices per million tokens in EUR, by october.",
        "Credit c1: 1.25 EUR outage",
        "Total: 2.05 EUR",
        "Not priced: 42 tokens of chat/new: no price list has a price for it; it is in no total.",
        "Of 7 input tokens it is not known how many were cached: rated as the list says.",
        "Of 1 requests the tokens are not known: they are not billed.",
        "1 requests of this month have not ended: they are not on it yet.",
    ]


async def test_refused_price_lists_are_told_beside_a_bill(world: World, tmp_path: Path) -> None:
    mistake = "october.yaml:2: begins when mine.yaml does, 2026-10-01T00:00Z"
    (tmp_path / "prices" / "mine.yaml").write_text(OCTOBER)
    await world.books.prices.refresh()
    for query in (("bill", "--tenant", "acme", "--month", "2026-11"), ("margin",), ("export", "focus")):
        told = await world.shoal(*query)
        assert "the ledger refuses its price lists" in told.stderr
        assert mistake in told.stderr
        assert mistake not in told.stdout
    told = await world.shoal("bill", "--tenant", "acme", "--month", "2026-11")
    assert "Not priced: 42 tokens of chat/new: no accepted price list has a price for it" in told.stdout
    told = await world.shoal("bill", "--tenant", "acme", "--month", "2026-11", "-o", "json")
    assert json.loads(told.stdout)["refused"] == [mistake]
    again = await world.shoal(
        "bill", "--tenant", "acme", "--month", "2026-11", "--prices", str(tmp_path / "prices" / "mine.yaml")
    )
    assert again.stderr.count(mistake) == 1


@pytest.mark.parametrize("note", ["[ticket 7] of the 3rd", "see [/docs] :smile:"])
async def test_a_note_is_shown_as_it_was_written(world: World, note: str) -> None:
    about = ("--tenant", "acme", "--month", "2026-11")
    made = await world.shoal("credits", "add", *about, "--amount", "1", "--note", note, "--id", "c1")
    assert made.exit_code == 0
    assert f"Credit c1: 1.00 EUR {note}" in text(await world.shoal("bill", *about))
    assert note in text(await world.shoal("credits", "list"))[1]


async def test_a_month_at_other_prices(world: World, tmp_path: Path) -> None:
    (tmp_path / "next.yaml").write_text(OCTOBER.replace("2026-10-01", "2027-01-01").replace('"3"', '"5"'))
    told = text(
        await world.shoal("bill", "--tenant", "acme", "--month", "2026-11", "--prices", str(tmp_path / "next.yaml"))
    )
    assert "Total: 3.30 EUR" in told
    assert "Total: 5.30 EUR" in told
    assert told[-1] == "Difference: 2.00 EUR"
    assert "Prices per million tokens in EUR, by next." in told
    (tmp_path / "next.yaml").write_text("currency: EUR\n")
    refused = await world.shoal(
        "bill", "--tenant", "acme", "--month", "2026-11", "--prices", str(tmp_path / "next.yaml")
    )
    assert refused.exit_code == 1
    assert "next.yaml:1: `effectiveFrom` is missing" in refused.stderr


async def test_a_bill_for_programs(world: World) -> None:
    found = json.loads((await world.shoal("bill", "--tenant", "acme", "--month", "2026-11", "-o", "json")).stdout)
    assert (found["total"], found["lines"][0]["exact"]) == ("3.30", "3.300075")


async def test_credits_are_made_and_listed(world: World) -> None:
    add = ("credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "2", "--id", "c1")
    assert text(await world.shoal(*add)) == ["Credit c1: 2.00 EUR for acme in 2026-11"]
    assert text(await world.shoal(*add)) == ["Credit c1: 2.00 EUR for acme in 2026-11"], "repeating it makes no second"
    told = json.loads((await world.shoal(*add, "-o", "json")).stdout)
    assert (told["id"], told["amount"], told["month"]) == ("c1", "2.00", "2026-11")
    listed = text(await world.shoal("credits", "list"))
    assert len(listed) == 2
    assert listed[1].startswith("c1 acme 2026-11 2026-11-22T12:00:00Z")
    (made,) = json.loads((await world.shoal("credits", "list", "-o", "json")).stdout)["credits"]
    assert made["madeBy"].endswith("(local user)"), "without a cluster nothing better is known"
    assert "No credits." in (await world.shoal("credits", "list", "--tenant", "globex")).stderr
    refused = await world.shoal("credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "0.001")
    assert (refused.exit_code, "0.001 has more decimals than EUR has (2)" in refused.stderr) == (1, True)


async def test_a_credit_names_the_user_of_the_cluster(world: World) -> None:
    about = ("--tenant", "acme", "--month", "2026-11", "--amount", "2", "--id", "c2")
    assert (await world.shoal("credits", "add", *about, direct=False)).exit_code == 0
    (made,) = json.loads((await world.shoal("credits", "list", "-o", "json")).stdout)["credits"]
    assert made["madeBy"] == "finance@example.com"


async def test_the_lines_of_a_bill_as_csv_add_up_to_its_total(world: World) -> None:
    await world.shoal("credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "1.25", "--id", "c1")
    about = ("bill", "--tenant", "acme", "--month", "2026-11")
    total = json.loads((await world.shoal(*about, "-o", "json")).stdout)["total"]
    rows = list(csv.DictReader(io.StringIO((await world.shoal(*about, "-o", "csv")).stdout)))
    assert sum(Decimal(row["amount"] or 0) for row in rows) == Decimal(total)
    assert {row["kind"] for row in rows} == {"usage", "unpriced", "credit"}
    assert [row["model"] for row in rows if row["kind"] == "unpriced"] == ["chat/new"]


# --- margin and FOCUS -----------------------------------------------------------------------------------------------


async def test_margin_as_a_table(world: World) -> None:
    told = text(await world.shoal("margin", "--from", "2026-11", "--to", "2026-12", "--by", "class,day"))
    assert told[1:] == [
        "CLASS DAY TOKENS REVENUE EUR GPU HOURS COST MARGIN EUR %",
        "h100 2026-11-01 2,000,005 3.30 1.0 2.50 0.80 24.2",
        "h100 2026-11-02 49 0.00 ? ? ? ?",
        "h100 2026-11-03 30 0.00 ? ? ? ?",
        "42 tokens have no price: they are not in the revenue.",
    ]
    told = await world.shoal("margin", "-o", "csv")
    assert told.stdout.splitlines()[0].startswith("gpuClass,tokens,unpricedTokens,revenue,gpuHours")
    assert "no GPU was held" in (await world.shoal("margin", "--from", "2026-01", "--to", "2026-02")).stderr


@pytest.mark.parametrize("grain", ["day", "hour"])
async def test_focus_is_one_table_however_it_is_asked_for(world: World, grain: str) -> None:
    await world.shoal("credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "2")
    told = await world.shoal("export", "focus", "--from", "2026-11", "--grain", grain)
    assert told.exit_code == 0, told.output
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    assert [row["ChargeCategory"] for row in rows].count("Credit") == 1
    assert sum(int(row["x_ConsumedTokens"] or 0) for row in rows) == 2_000_084
    whole = await world.books.get("/v1/focus", from_="2026-11", to="2026-12", grain=grain)
    assert rows == list(csv.DictReader(io.StringIO(whole.body.decode())))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--from", "soon"), "soon: write 2026-11, 2026-11-01 or"),
        (("--from", "2026-11-01T06:30:00Z"), "is not on the hour"),
        (("--from", "2026-11", "--to", "2026-10"), "--to is not after --from"),
    ],
)
async def test_a_wrong_time_of_an_export(world: World, args: tuple[str, ...], message: str) -> None:
    told = await world.shoal("export", "focus", *args)
    assert told.exit_code == 2
    assert message in told.stderr


# --- what engines counted -------------------------------------------------------------------------------------------


async def test_what_engines_counted_is_shown_beside_what_was_billed(world: World) -> None:
    await world.books.fill(
        engines=(gpu_hour("2026-11-03T00:00", prompt_tokens=2_000_137, generation_tokens=105),),
    )
    told = text(await world.shoal("unattributed", "--from", "2026-11", "--model", "chat/llama"))
    assert told == [
        "from 2026-11-01T00:00:00Z to 2026-12-01T00:00:00Z (UTC)",
        "MODEL ENGINES IN OUT BILLED IN OUT NOT BILLED IN OUT UNATTRIBUTED IN OUT SHARE",
        "chat/llama 2,000,137 105 2,000,037 5 0 0 100 100 0.01 %",
        "The ledger has no list of engines: the API server does not respond, or is not configured.",
    ]
    world.books.standing = EngineCoverage(watching=True, live=2, stale=("chat/llama-7",))
    told = text(await world.shoal("unattributed", "--by", "model,day"))
    assert "chat/new 2026-11-02 ? ? 42 0 0 0 ? ? ?" in told, "no engine of it was heard"
    assert told[-2].startswith("total 2,000,137 105 2,000,079 5")
    assert told[-1] == ("2 engines report; stale: chat/llama-7: their counters are as old as their last report.")


async def test_estimates_are_told_beside_what_is_not_billed(world: World) -> None:
    await world.books.fill(hour("2026-11-03T00:00", billed=False, input_tokens=1_250, estimated_input=1_200))
    told = text(await world.shoal("unattributed", "--model", "chat/llama"))
    assert told[-2] == "Of the tokens not billed, 1,200 input tokens are estimates: prompts without usage data."
    rows = csv.DictReader(io.StringIO((await world.shoal("unattributed", "-o", "csv")).stdout))
    assert [row["estimatedInput"] for row in rows if row["model"] == "chat/llama"] == ["1200"]


async def test_what_engines_counted_for_programs(world: World) -> None:
    found = json.loads((await world.shoal("unattributed", "-o", "json")).stdout)
    assert (found["by"], found["rows"][0]["billedInput"]) == (["model"], 2_000_037)
    told = await world.shoal("unattributed", "--by", "class", "-o", "csv")
    assert told.stdout.splitlines()[0].startswith("gpuClass,engineInput,engineOutput,billedInput")
    assert (await world.shoal("unattributed", "--by", "gpuClass", "-o", "csv")).stdout == told.stdout
    refused = await world.shoal("unattributed", "--by", "engine,day")
    assert "by=engine is over the whole life of an engine" in refused.stderr
