"""`shoal credits`: creates and lists credits."""

import getpass
import uuid
from datetime import UTC, datetime

import click

from shoal.api import names
from shoal.api.billing import CreditEntry, Credits, NewCredit
from shoal.cli.options import Installation, ledger_options
from shoal.cli.services import call_ledger
from shoal.cli.usage.show import console, table


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
@ledger_options
def add(
    tenant: str,
    amount: str,
    month: str | None,
    note: str,
    currency: str | None,
    name: str | None,
    installation: Installation,
) -> None:
    """Create a credit. A credit cannot be changed or deleted: create another one with a negative amount."""
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        who = ""
    new = NewCredit(
        id=name or str(uuid.uuid4()),
        tenant=tenant,
        month=month or datetime.now(UTC).strftime("%Y-%m"),
        amount=amount,
        currency=currency,
        note=note,
        made_by=who,
    )
    kept = call_ledger(installation, lambda ledger: ledger.post(names.CREDITS_PATH, new, CreditEntry))
    click.echo(f"Credit {kept.id}: {kept.amount} {kept.currency} for {kept.tenant} in {kept.month}")


@credits.command(name="list")
@click.option("--tenant", multiple=True, help="Only this tenant.")
@click.option("--month", multiple=True, help="Such as 2026-11.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@ledger_options
def list_(tenant: tuple[str, ...], month: tuple[str, ...], output: str, installation: Installation) -> None:
    """List credits, the latest first."""
    query = {"tenant": tenant, "month": month}
    found = call_ledger(installation, lambda ledger: ledger.get(names.CREDITS_PATH, query, Credits))
    if output == "json":
        click.echo(found.model_dump_json(by_alias=True, indent=2))
    elif not found.credits:
        click.echo("No credits.", err=True)
    else:
        rows = [
            [one.id, one.tenant, one.month, one.made_at, one.made_by, one.note, f"{one.amount} {one.currency}"]
            for one in found.credits
        ]
        console().print(table(("ID", "TENANT", "MONTH", "MADE", "BY", "NOTE"), ("AMOUNT",), rows))
