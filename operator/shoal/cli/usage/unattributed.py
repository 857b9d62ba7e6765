"""`shoal unattributed`: tokens that engines counted and that were not billed."""

from typing import Final

import click

from shoal.api import names
from shoal.api.reconciliation import UNATTRIBUTED_BY, UnattributedPage, UnattributedRow
from shoal.cli.options import Installation, ledger_options
from shoal.cli.output import emit, output_option
from shoal.cli.services import call_ledger
from shoal.cli.usage.show import NONE, console, count, dimensions, fields, table

_UNKNOWN: Final = "?"
_FIELDS: Final = (
    "engineInput", "engineOutput", "billedInput", "billedOutput", "notBilledInput", "notBilledOutput",
    "estimatedInput", "unattributedInput", "unattributedOutput", "share",
)  # fmt: skip
_NUMBERS: Final = (
    "ENGINES IN", "OUT", "BILLED IN", "OUT", "NOT BILLED IN", "OUT", "UNATTRIBUTED IN", "OUT", "SHARE",
)  # fmt: skip


@click.command()
@click.option(
    "--by", default="model", show_default=True, help=f"Dimensions of a row, from {', '.join(UNATTRIBUTED_BY)}."
)
@click.option("--from", "start", help="2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC). Default: this month.")
@click.option("--to", "end", help="The same; exclusive. Default: the end of this month.")
@click.option("--model", multiple=True, help="namespace/name. Can be repeated.")
@output_option()
@ledger_options
def unattributed(
    by: str, start: str | None, end: str | None, model: tuple[str, ...], output: str, installation: Installation
) -> None:
    """Show the tokens that engines counted and that were not billed.

    Both sides come from the engines' counters, so a negative difference is shown too. NOT BILLED is the part of
    unattributed tokens that the ledger has records of: attempts whose response reached no client, and estimates. With
    --by engine, a row is one engine process over its whole lifetime. An unknown value is `?`.

    \b
    kubectl shoal unattributed --by model,day
    kubectl shoal unattributed --by engine --model chat/llama
    """
    query = {"by": dimensions(by), "from": start, "to": end, "model": model}
    found = call_ledger(installation, lambda ledger: ledger.get(names.UNATTRIBUTED_PATH, query, UnattributedPage))
    page = found.model_dump(mode="json", by_alias=True)
    shown, rows = fields(page), page["rows"]
    more = ["replica", "lastReport"] if "engine" in found.by else []
    if emit(output, shown, shown["rows"], [*shown["by"], *more, *_FIELDS]):
        return
    words = [*found.by, *more]
    if not rows:
        click.echo(f"Nothing was billed and no engine reported from {found.start} to {found.end}.", err=True)
    else:
        out = console()
        out.print(f"from {found.start} to {found.end} (UTC)")
        lines = [
            [*(row[name] or NONE for name in words), *_numbers(line)]
            for row, line in zip(rows, found.rows, strict=True)
        ]
        total = ["total", *[""] * (len(words) - 1), *_numbers(found.total)]
        out.print(table([_title(name) for name in words], _NUMBERS, lines, total))
        if estimated := found.total.estimated_input:
            out.print(
                f"Of the tokens not billed, {count(estimated)} input tokens are estimates: prompts without usage data."
            )
        if stale := _stale(found):
            out.print(stale)


def _stale(found: UnattributedPage) -> str | None:
    if not found.watching:
        return "The ledger has no list of engines: the API server does not respond, or is not configured."
    if not found.stale:
        return None
    some = ", ".join(found.stale[:5])
    more = f" and {len(found.stale) - 5} more" if len(found.stale) > 5 else ""
    return f"{found.live} engines report; stale: {some}{more}: their counters are as old as their last report."


def _numbers(row: UnattributedRow) -> list[str]:
    return [
        _count(row.engine_input),
        _count(row.engine_output),
        count(row.billed_input),
        count(row.billed_output),
        count(row.not_billed_input),
        count(row.not_billed_output),
        _count(row.unattributed_input),
        _count(row.unattributed_output),
        _UNKNOWN if row.share is None else f"{row.share * 100:.2f} %",
    ]


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else count(number)


def _title(name: str) -> str:
    return "LAST REPORT" if name == "lastReport" else name.upper()
