"""`shoal keys list`: names, states and expiry dates of keys."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

import click
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from shoal.api import names
from shoal.api.billing import UsagePage
from shoal.api.meta import JsonObject
from shoal.api.tenant import Tenant
from shoal.cli.client import run_command
from shoal.cli.keys import edit, source, when
from shoal.cli.options import Installation, ledger_options
from shoal.cli.output import camel, console, emit, output_option
from shoal.cli.services import open_ledger
from shoal.core.claimants import age
from shoal.kube.resources import TENANTS

_COLUMNS: Final = ("tenant", "keyName", "state", "expires", "note", "used")
USED_DAYS = 31
"""Period of the query for the last use of keys, in days."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    tenant: str
    key_name: str
    state: Literal["active", "expired", "disabled", "suspended", "claimed"]
    expires: str | None
    note: str = ""
    used: str | None = None
    """Last day of use in the queried period; None: unused, or not queried."""


@click.command("list")
@click.option("--tenant", help="Only this Tenant.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="File with the Tenant; no cluster is used.")
@click.option("--used", is_flag=True, help=f"Show the last use of each key, from the ledger, within {USED_DAYS} days.")
@output_option()
@ledger_options
def listing(tenant: str | None, file: Path | None, used: bool, output: str, installation: Installation) -> None:
    """Show the keys of a Tenant, or of all: state, expiry and last use."""

    async def work() -> None:
        now = datetime.now(UTC)
        last: Mapping[tuple[str, str], str] = await _last_used(installation, tenant, now) if used else {}
        if file is not None:
            found = [source.in_file(file, tenant)]
        else:
            async with await installation.connect() as client:
                if tenant is not None:
                    await source.in_cluster(client, tenant)  # raises an error if it does not exist
                found = [o async for o in client.list(TENANTS)]
        own = [row for row in states(found, now) if tenant in (None, row.tenant)]
        rows = [replace(row, used=last.get((row.tenant, row.key_name))) for row in own]
        data = [camel(asdict(row)) for row in rows]
        if not emit(output, data, data, _COLUMNS):
            console().print(render(rows, used=used) if rows else "there is no key")

    try:
        run_command(work())
    except edit.KeysError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        return


async def _last_used(installation: Installation, tenant: str | None, now: datetime) -> dict[tuple[str, str], str]:
    """Last day with a request, by (tenant, key). Raises ServiceError."""
    since = now - timedelta(days=USED_DAYS)
    query: dict[str, str | None] = {"by": "tenant,key,day", "from": f"{since:%Y-%m-%d}", "tenant": tenant}
    found: dict[tuple[str, str], str] = {}
    async with open_ledger(installation) as ledger:
        after: str | None = None
        while True:
            page = await ledger.get(names.USAGE_PATH, query | {"after": after}, UsagePage)
            for row in page.rows:
                if row.tenant is not None and row.key is not None and row.day is not None:
                    at = (row.tenant, row.key)
                    found[at] = max(row.day, found.get(at, ""))
            after = page.next
            if after is None:
                return found


def states(tenants: Iterable[JsonObject], now: datetime) -> list[KeyRow]:
    """One row per key of each Tenant. A hash belongs to the oldest Tenant that lists it, as at the gateways."""
    found = list(tenants)
    owner: dict[str, str] = {}
    for raw in sorted(found, key=_age):
        for entry in edit.entries(raw):
            owner.setdefault(entry.sha256, raw["metadata"]["name"])
    rows: list[KeyRow] = []
    for raw in sorted(found, key=lambda raw: raw["metadata"]["name"]):
        name, suspended = raw["metadata"]["name"], bool(edit.spec_of(raw).get("suspended"))
        rows += [_row(name, suspended, entry, owner[entry.sha256], now) for entry in edit.entries(raw)]
    return rows


def _row(tenant: str, suspended: bool, entry: edit.KeyEntry, owner: str, now: datetime) -> KeyRow:
    expires = edit.stamp(entry.expires) if entry.expires else None
    if suspended:
        return KeyRow(tenant, entry.name, "suspended", expires, "the whole Tenant is refused")
    if entry.disabled:
        return KeyRow(tenant, entry.name, "disabled", expires)
    if entry.expires is not None and entry.expires <= now:
        past = when.span((now - entry.expires).total_seconds())
        return KeyRow(tenant, entry.name, "expired", expires, f"{past} ago: remove it")
    if owner != tenant:
        return KeyRow(tenant, entry.name, "claimed", expires, f"it is a key of Tenant {owner}, which comes first")
    note = f"in {when.span((entry.expires - now).total_seconds())}" if entry.expires else ""
    return KeyRow(tenant, entry.name, "active", expires, note)


def _age(raw: JsonObject) -> tuple[datetime, str]:
    try:
        return age(Tenant.model_validate(raw))
    except ValidationError:
        return (datetime.max.replace(tzinfo=UTC), str(raw["metadata"].get("uid", "")))


def render(rows: Iterable[KeyRow], *, used: bool) -> Table:
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("TENANT", "KEY", "STATE", "EXPIRES", *((f"LAST USED ({USED_DAYS} DAYS)",) if used else ()), ""):
        table.add_column(heading, no_wrap=bool(heading))
    for row in rows:
        color = "green" if row.state == "active" else "yellow"
        cells = [escape(row.tenant), escape(row.key_name), f"[{color}]{row.state}[/]", row.expires or "never"]
        if used:
            cells.append(row.used or "-")
        table.add_row(*cells, escape(row.note))
    return table
