"""`shoal export`: exports usage and cost to other systems."""

import contextlib
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

import click

from shoal.api import names
from shoal.api.billing import PricesInForce
from shoal.cli.client import ServiceError
from shoal.cli.options import Installation, ledger_options
from shoal.cli.services import LedgerClient, call_ledger
from shoal.cli.usage.show import warn_of_refused

_STEPS: Final = {"hour": timedelta(days=1), "day": timedelta(days=10)}
"""Period per query: a response through the API server's proxy should not be large."""
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 9999
_FORM: Final = "%Y-%m-%dT%H:%M:%SZ"


@click.group()
def export() -> None:
    """Export usage and cost in formats that other systems read."""


@export.command()
@click.option("--from", "start", help="2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC). Default: this month.")
@click.option("--to", "end", help="The same; exclusive. Default: the end of the month that --from is in.")
@click.option("--tenant", help="Only this tenant.")
@click.option("--grain", type=click.Choice(["hour", "day"]), default="day", show_default=True, help="Period of a row.")
@click.option("--issuer", help="Value of the provider and issuer columns. Default: the installation.")
@ledger_options
def focus(
    start: str | None, end: str | None, tenant: str | None, grain: str, issuer: str | None, installation: Installation
) -> None:
    """Write CSV in the format of FOCUS 1.2: a row per tenant, SKU and hour or day, and one per credit.

    Costs are exact, while bills round each line. Usage without a price has its tokens in x_ConsumedTokens, and no
    SkuPriceId and no prices.

    \b
    kubectl shoal export focus --from 2026-10 --to 2026-11 > focus-2026-10.csv
    """
    now = datetime.now(UTC)
    first = _moment(start) if start else now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    last = _moment(end) if end else (first.replace(day=1, hour=0) + timedelta(days=32)).replace(day=1)
    if last <= first:
        raise click.UsageError("--to is not after --from")
    more = {"tenant": tenant, "grain": grain, "issuer": issuer}

    async def work(ledger: LedgerClient) -> None:
        at = first
        while at < last:
            until = min(last, at.replace(hour=0) + _STEPS[grain])
            query = more | {
                "from": at.strftime(_FORM),
                "to": until.strftime(_FORM),
                "header": "true" if at == first else "false",
            }
            sys.stdout.buffer.write(await ledger.raw("GET", names.FOCUS_PATH, query))
            at = until
        sys.stdout.buffer.flush()
        # A caller who may read only some tenants' bills may not ask for this.
        with contextlib.suppress(ServiceError):
            warn_of_refused((await ledger.get(names.PRICES_PATH, {}, PricesInForce)).refused)

    call_ledger(installation, work)


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(f"{text}-01" if len(text) == len("2026-11") else text)
    except ValueError:
        raise click.UsageError(f"{text}: write 2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC)") from None
    if not _FIRST_YEAR <= found.year < _LAST_YEAR:
        raise click.UsageError(f"{text}: a year from {_FIRST_YEAR} on")
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    if (found.minute, found.second, found.microsecond) != (0, 0, 0):
        raise click.UsageError(f"{text} is not on the hour: usage is summed by the hour (UTC)")
    return found
