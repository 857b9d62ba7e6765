"""`shoal margin`: revenue and cost of GPU classes."""

from decimal import Decimal
from typing import Final

import click

from shoal.api import names
from shoal.api.billing import Margin, MarginRow
from shoal.cli.options import Installation, ledger_options
from shoal.cli.output import emit, output_option
from shoal.cli.services import call_ledger
from shoal.cli.usage.show import NONE, console, count, dimensions, fields, seconds, table, warn_of_refused

_UNKNOWN: Final = "?"
_FIELDS: Final = (
    "tokens", "unpricedTokens", "revenue", "gpuHours", "unpricedGpuHours", "cost", "costCurrency", "margin",
    "marginPercent", "audioMs", "unpricedAudioMs",
)  # fmt: skip


@click.command()
@click.option("--by", default="class", show_default=True, help="Dimensions of a row, from class, model, day, month.")
@click.option("--from", "start", help="2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC). Default: this month.")
@click.option("--to", "end", help="The same; exclusive. Default: the end of this month.")
@output_option()
@ledger_options
def margin(by: str, start: str | None, end: str | None, output: str, installation: Installation) -> None:
    """Show revenue, cost and margin of GPU classes.

    Revenue is billed usage at the tenants' prices, before credits. Cost is the time for which engines held GPUs, at the
    hourlyCost of their GPUClass at that time. An unknown value is `?`.
    """
    query = {"by": dimensions(by), "from": start, "to": end}
    found = call_ledger(installation, lambda ledger: ledger.get(names.MARGIN_PATH, query, Margin))
    warn_of_refused(found.refused)
    page = found.model_dump(mode="json", by_alias=True)
    shown, rows = fields(page), page["rows"]
    if emit(output, shown, shown["rows"], [*shown["by"], *_FIELDS]):
        return
    if not rows:
        click.echo(f"Nothing was used and no GPU was held from {found.start} to {found.end}.", err=True)
    else:
        _print(found, [[row[name] or NONE for name in found.by] for row in rows])


def _print(found: Margin, words: list[list[str]]) -> None:
    money = found.currency or ""
    out = console()
    out.print(f"from {found.start} to {found.end} (UTC)")
    numbers = ("TOKENS", f"REVENUE {money}", "GPU HOURS", "COST", f"MARGIN {money}", "%")
    lines = [[*first, *_numbers(row, money)] for first, row in zip(words, found.rows, strict=True)]
    out.print(table([name.upper() for name in found.by], numbers, lines))
    if unpriced := sum(row.unpriced_tokens for row in found.rows):
        out.print(f"{count(unpriced)} tokens have no price: they are not in the revenue.")
    if unpriced := sum(row.unpriced_audio_ms for row in found.rows):
        out.print(f"{seconds(unpriced)} seconds of audio have no price: they are not in the revenue.")
    if unpriced := sum(row.unpriced_gpu_hours for row in found.rows):
        out.print(f"{unpriced:,.1f} GPU hours are of classes without an hourlyCost: they are not in the cost.")


def _numbers(row: MarginRow, currency: str) -> list[str]:
    cost = _UNKNOWN if row.cost is None else _amount(row.cost)
    if row.cost_currency and row.cost_currency != currency:
        cost += f" {row.cost_currency}"
    return [
        count(row.tokens),
        _UNKNOWN if row.revenue is None else _amount(row.revenue),
        _UNKNOWN if row.gpu_hours is None else f"{row.gpu_hours:,.1f}",
        cost,
        _UNKNOWN if row.margin is None else _amount(row.margin),
        row.margin_percent or _UNKNOWN,
    ]


def _amount(exact: str) -> str:
    return f"{Decimal(exact):,.2f}"
