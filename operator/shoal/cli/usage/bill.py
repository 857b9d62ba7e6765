"""`shoal bill` and `shoal credits`: a tenant's monthly bill, also at other prices, and credits on it."""

import getpass
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import click

from shoal.api import names
from shoal.api.billing import (
    BillLine,
    BillStatement,
    CreditEntry,
    Credits,
    NewCredit,
    PriceText,
    RepriceAnswer,
    RepriceRequest,
    TokenCounts,
    UnpricedLine,
)
from shoal.cli.options import Installation, ledger_options
from shoal.cli.output import emit, output_option
from shoal.cli.services import LedgerClient, call_ledger
from shoal.cli.usage.prices import gathered
from shoal.cli.usage.show import NONE, console, count, seconds, table, warn_of_refused

_COLUMNS: Final = (
    "tenant", "month", "kind", "model", "adapter", "plan", "requests", "inputTokens", "cachedTokens", "outputTokens",
    "reasoningTokens", "inputPrice", "cachedPrice", "outputPrice", "amount", "currency", "lists", "note",
    "documents", "images", "audioMs", "imageTokens", "audioTokens", "acceptedTokens", "documentsPrice", "imagesPrice",
    "audioSecondsPrice", "unpricedUnits",
)  # fmt: skip
"""Columns of the CSV; one kind of line has only some of them."""
_WORDS: Final = ("MODEL", "ADAPTER", "PLAN")
_NUMBERS: Final = ("REQUESTS", "INPUT", "OF IT CACHED", "OUTPUT", "PRICES (IN / CACHED / OUT)", "AMOUNT")


@click.command()
@click.option("--tenant", required=True, help="Tenant of the bill.")
@click.option("--month", help="Such as 2026-11 (UTC). Default: this month, so far.")
@click.option(
    "--prices",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Also compute the bill with this price list (file or folder) and show the difference. Nothing is stored. A "
    "single file applies to the whole month, several files from their effective dates on.",
)
@output_option()
@ledger_options
def bill(tenant: str, month: str | None, prices: tuple[Path, ...], output: str, installation: Installation) -> None:
    """Show a tenant's bill for a month: a line per model, adapter, plan and price; credits; total.

    Amounts are exact except for one rounding: each line, half up, to the smallest unit of the currency. Usage without a
    price is shown and is part of no total.

    \b
    kubectl shoal bill --tenant acme --month 2026-10
    kubectl shoal bill --tenant acme --month 2026-10 --prices prices/next-year.yaml
    """
    month = month or datetime.now(UTC).strftime("%Y-%m")
    if not prices:
        query = {"tenant": tenant, "month": month}
        found = call_ledger(installation, lambda ledger: ledger.get(names.BILL_PATH, query, BillStatement))
        _known(found)
        warn_of_refused(found.refused)
        if not emit(output, found.model_dump(mode="json", by_alias=True), _lines(found), _COLUMNS):
            _print(found)
        return
    sent = tuple(PriceText(file=str(path)[-253:], text=text) for path, text in gathered(prices))
    reprice = RepriceRequest(tenant=tenant, month=month, prices=sent)
    both = call_ledger(installation, lambda ledger: ledger.post(names.BILL_PATH, reprice, RepriceAnswer))
    _known(both.bill)
    warn_of_refused(both.bill.refused)
    rows = [*(_lines(both.bill, "inForce")), *_lines(both.other, "given")]
    if emit(output, both.model_dump(mode="json", by_alias=True), rows, ["priceLists", *_COLUMNS]):
        return
    out = console()
    out.print("With the price lists in force", style="bold")
    _print(both.bill)
    out.print(f"\nWith {', '.join(one.file for one in sent)}", style="bold")
    _print(both.other)
    if both.difference is None:
        out.print("\nThe difference is unknown: the currencies differ, or one of the bills has no price list.")
    else:
        out.print(f"\nDifference: {both.difference} {both.bill.currency}")


def _lines(found: BillStatement, prices: str = "") -> list[dict[str, Any]]:
    """The bill as rows that add up to its total: usage, unpriced usage, and credits of its currency. `prices`: which
    price lists, for a bill with several."""
    common = {"priceLists": prices, "tenant": found.tenant, "month": found.month}
    rows = [
        common
        | {"kind": "usage", "currency": found.currency}
        | line.model_dump(mode="json", by_alias=True)
        | {f"{name}Price": price for name, price in line.rate.model_dump(by_alias=True).items()}
        for line in found.lines
    ]
    rows += [common | {"kind": "unpriced"} | line.model_dump(mode="json", by_alias=True) for line in found.unpriced]
    # A credit is in the tenant's favour, so it lowers the sum of the column `amount`.
    return rows + [
        common | {"kind": "credit", "amount": str(-Decimal(one.amount)), "currency": one.currency, "note": one.note}
        for one in found.credits
    ]


def _known(found: BillStatement) -> None:
    if not found.known:
        raise click.ClickException(
            f"the ledger has never seen usage of {found.tenant}: is it spelt right? `kubectl get tenants` lists them"
        )


def _print(found: BillStatement) -> None:
    out = console()
    external = f" ({', '.join(found.external_ids)})" if found.external_ids else ""
    out.print(f"{found.tenant}{external}, {found.month}" + ("" if found.month_ended else ", so far"))
    currency = found.currency
    if currency is None:
        none = "was accepted" if found.refused else "is in force"
        out.print(f"No price list {none}: nothing has a price.")
    elif found.lines:
        total = ["lines", "", "", *[""] * 5, f"{found.usage} {currency}"]
        out.print(table(_WORDS, _NUMBERS, (_line(line, currency) for line in found.lines), total))
        lists = sorted({name for line in found.lines for name in line.lists})
        out.print(f"Prices per million tokens in {currency}, by {', '.join(lists)}.")
        for line in found.lines:
            for text in _units(line, currency):
                out.print(text)
    else:
        out.print("Nothing that has a price was used.")
    for one in found.credits:
        out.print(f"Credit {one.id}: {one.amount} {one.currency} {one.note}")
    for one in found.foreign_credits:
        out.print(f"Credit {one.id}: {one.amount} {one.currency} {one.note} (another currency: not taken off)")
    if currency is not None:
        out.print(f"Total: {found.total} {currency}", style="bold")
    for one in found.unpriced:
        used = [f"{count(one.input_tokens + one.output_tokens)} tokens", *(text for _, text in _used(one))]
        lists = "accepted price list" if found.refused else "price list"
        out.print(f"Not priced: {', '.join(used)} of {_what(one)}: no {lists} has a price for it; it is in no total.")
    if unknown := sum(one.unknown_cached_input_tokens for one in found.lines):
        out.print(f"Of {count(unknown)} input tokens it is not known how many were cached: rated as the list says.")
    if unknown := sum(one.unknown_requests for one in (*found.lines, *found.unpriced)):
        out.print(f"Of {count(unknown)} requests the tokens are not known: they are not billed.")
    if found.open_requests:
        out.print(f"{count(found.open_requests)} requests of this month have not ended: they are not on it yet.")


def _what(one: BillLine | UnpricedLine) -> str:
    return f"{one.model}{f', adapter {one.adapter}' if one.adapter else ''}{f', plan {one.plan}' if one.plan else ''}"


def _used(one: TokenCounts) -> list[tuple[str, str]]:
    """The units beside tokens, by their names in price lists."""
    found = (
        ("documents", one.documents, f"{count(one.documents)} documents"),
        ("images", one.images, f"{count(one.images)} images"),
        ("audioSeconds", one.audio_ms, f"{seconds(one.audio_ms)} seconds of audio"),
    )
    return [(name, text) for name, used, text in found if used]


def _units(line: BillLine, currency: str) -> Iterator[str]:
    prices = line.rate.model_dump(by_alias=True)
    for name, used in _used(line):
        if name not in line.unpriced_units:
            yield f"Included: {used} of {_what(line)} at {prices[name]} {currency} per million."
        elif name == "audioSeconds" and not (line.input_tokens or line.output_tokens):
            yield f"Not priced: {used} of {_what(line)}: the price list has no `{name}` for it; it is in no total."
        else:
            yield f"Not priced: {used} of {_what(line)}: the price list has no `{name}` for it; only tokens are billed."


def _line(line: BillLine, currency: str) -> list[str]:
    return [
        line.model,
        line.adapter or NONE,
        line.plan or NONE,
        count(line.requests),
        count(line.input_tokens),
        count(line.cached_tokens),
        count(line.output_tokens),
        f"{line.rate.input} / {line.rate.cached} / {line.rate.output}",
        f"{line.amount} {currency}",
    ]


_LONGEST_USER: Final = 253
_CREDIT_COLUMNS: Final = ("id", "tenant", "month", "amount", "currency", "note", "madeAt", "madeBy")


@click.group(name="credits")
def credits() -> None:
    """Create and list credits, which are deducted from bills. Usage records and prices never change."""


@credits.command()
@click.option("--tenant", required=True, help="Tenant of the credit.")
@click.option("--amount", required=True, help="Such as 12.50. A negative amount revokes an earlier credit.")
@click.option("--month", help="Month of the bill, such as 2026-11. Default: this month.")
@click.option("--note", default="", help="Note on the bill.")
@click.option("--currency", help="ISO 4217 code. Default: currency of the price lists.")
@click.option("--id", "name", help="Idempotency key: the same id creates one credit. Default: random.")
@output_option()
@ledger_options
def add(
    tenant: str,
    amount: str,
    month: str | None,
    note: str,
    currency: str | None,
    name: str | None,
    output: str,
    installation: Installation,
) -> None:
    """Create a credit. A credit cannot be changed or deleted: create another one with a negative amount."""
    new = NewCredit(
        id=name or str(uuid.uuid4()),
        tenant=tenant,
        month=month or datetime.now(UTC).strftime("%Y-%m"),
        amount=amount,
        currency=currency,
        note=note,
        made_by="",
    )

    async def work(ledger: LedgerClient) -> CreditEntry:
        who = (await ledger.caller() or _local_user())[:_LONGEST_USER]
        return await ledger.post(names.CREDITS_PATH, new.model_copy(update={"made_by": who}), CreditEntry)

    kept = call_ledger(installation, work)
    row = kept.model_dump(mode="json", by_alias=True)
    if not emit(output, row, [row], _CREDIT_COLUMNS):
        click.echo(f"Credit {kept.id}: {kept.amount} {kept.currency} for {kept.tenant} in {kept.month}")


def _local_user() -> str:
    """The user of this machine, for a command without a cluster."""
    try:
        return f"{getpass.getuser()} (local user)"
    except (KeyError, OSError):  # a user without a name, as in a container
        return ""


@credits.command(name="list")
@click.option("--tenant", multiple=True, help="Only this tenant.")
@click.option("--month", multiple=True, help="Such as 2026-11.")
@output_option()
@ledger_options
def list_(tenant: tuple[str, ...], month: tuple[str, ...], output: str, installation: Installation) -> None:
    """List credits, the latest first."""
    query = {"tenant": tenant, "month": month}
    found = call_ledger(installation, lambda ledger: ledger.get(names.CREDITS_PATH, query, Credits))
    data = found.model_dump(mode="json", by_alias=True)
    if emit(output, data, data["credits"], _CREDIT_COLUMNS):
        return
    if not found.credits:
        click.echo("No credits.", err=True)
    else:
        rows = [
            [one.id, one.tenant, one.month, one.made_at, one.made_by, one.note, f"{one.amount} {one.currency}"]
            for one in found.credits
        ]
        console().print(table(("ID", "TENANT", "MONTH", "MADE", "BY", "NOTE"), ("AMOUNT",), rows))
