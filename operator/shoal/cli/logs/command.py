"""The commands: `shoal logs --tenant T` shows, `shoal logs delete --tenant T` deletes."""

import asyncio
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import click
import orjson

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.client import run_command
from shoal.cli.logs.view import HEADER, line
from shoal.cli.logs.volumes import left_behind
from shoal.cli.options import Installation, gateway_options
from shoal.cli.services import GatewayClient

FOLLOW_SECONDS: Final = 2.0
_LOOK_BACK: Final = timedelta(minutes=45)
"""An entry comes when its request ends, at the place where the request began."""
_PAGE: Final = 1000
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIMES: Final = "give how long ago (90s, 30m, 12h, 7d), a date (2026-11-22), or a time (2026-11-22T06:00:00Z)"


@click.group(name="logs", invoke_without_command=True)
@click.option("--tenant", help="Whose request log.")
@click.option("--user", help="Only requests with this `user`.")
@click.option("--model", help="Only this Model or adapter: namespace/name, or the name that clients use.")
@click.option("--since", help="Only requests since then: 1h, 2026-11-22, 2026-11-22T06:00:00Z.")
@click.option("--until", help="Only requests before then.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="The newest so many.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new entries as they come.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@gateway_options
@click.pass_context
def command(
    ctx: click.Context,
    tenant: str | None,
    user: str | None,
    model: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    follow: bool,
    output: str,
    installation: Installation,
) -> None:
    """Show a tenant's request log, from all gateways; `-o json` prints one entry per line, whole.

    What is logged is the Tenant's `spec.logging`. Needs the right to read the Secret shoal-key-logs and to proxy to
    pods in Shoal's namespace.
    """
    if ctx.invoked_subcommand is not None:
        if tenant or user:
            raise click.UsageError("the options of `logs delete` stand behind it")
        return
    if not tenant:
        raise click.UsageError("--tenant is needed")
    now = datetime.now(UTC)
    wanted = {
        "tenant": tenant,
        "user": user,
        "model": model,
        "from": None if since is None else _moment("--since", since, now),
        "to": None if until is None else _moment("--until", until, now),
    }

    def show(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            click.echo(orjson.dumps(entry).decode() if output == "json" else line(entry))

    async def work() -> None:
        async with await installation.connect() as client:
            gateways = GatewayClient(client, installation.namespace, installation.url)
            entries = await _newest(gateways, wanted, limit)
            for warning in await left_behind(client, installation.namespace):
                click.echo(f"missing: {warning}", err=True)
            if output == "table":
                click.echo(HEADER)
            show(entries[::-1])
            if follow:
                await _follow(gateways, wanted, {str(entry.get("id")) for entry in entries}, show)

    try:
        run_command(work())
    except KeyboardInterrupt:
        return


@command.command("delete")
@click.option("--tenant", required=True, help="Whose request log.")
@click.option("--user", help="Only entries with this `user`. Without it: all of the tenant's.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@gateway_options
def delete(
    tenant: str,
    user: str | None,
    yes: bool,
    installation: Installation,
) -> None:
    """Delete a tenant's request log, or one user's entries, on all gateways and in the bucket.

    Entries of requests that still run come later and stay: do it again then. Fails when a gateway was not reached, one
    that was scaled away left its volume, or a file could not be read, and says which; it may be repeated.
    """
    whose = f"the request log of tenant {tenant}" if user is None else f"what user {user} of tenant {tenant} asked"
    if not yes:
        click.confirm(f"Delete {whose}? It cannot be brought back", abort=True)

    async def work() -> tuple[JsonObject, list[str]]:
        async with await installation.connect() as client:
            gateways = GatewayClient(client, installation.namespace, installation.url)
            answer = await gateways.json("DELETE", names.LOGS_PATH, {"tenant": tenant, "user": user})
            return answer, [*_warnings(answer), *await left_behind(client, installation.namespace)]

    answer, left = run_command(work())
    entries, files = answer.get("entries"), answer.get("files")
    click.echo(f"Deleted: {files} files." if entries is None else f"Deleted: {entries} entries in {files} files.")
    if left:
        raise click.ClickException("not everything was reached:\n  " + "\n  ".join(left) + "\nRepeat it then.")


async def _newest(gateways: GatewayClient, wanted: Mapping[str, str | None], limit: int) -> list[dict[str, Any]]:
    """The latest first. What a page does not have is said on the error output."""
    entries: list[dict[str, Any]] = []
    cursor: str | None = None
    said: set[str] = set()
    while True:
        count = str(min(_PAGE, limit - len(entries)))
        page = await gateways.json("GET", names.LOGS_PATH, {**wanted, "limit": count, "cursor": cursor})
        entries += cast(list[dict[str, Any]], page.get("data") or [])
        for warning in _warnings(page):
            if warning not in said:
                said.add(warning)
                click.echo(f"missing: {warning}", err=True)
        cursor = page.get("next_cursor")
        if cursor is None or len(entries) >= limit:
            return entries


async def _follow(
    gateways: GatewayClient,
    wanted: Mapping[str, str | None],
    seen: set[str],
    show: Callable[[list[dict[str, Any]]], None],
) -> None:
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        since = (datetime.now(UTC) - _LOOK_BACK).isoformat()
        page = await gateways.json(
            "GET", names.LOGS_PATH, {**wanted, "from": max(since, wanted["from"] or ""), "limit": str(_PAGE)}
        )
        entries = cast(list[dict[str, Any]], page.get("data") or [])
        show([entry for entry in entries[::-1] if str(entry.get("id")) not in seen])
        seen |= {str(entry.get("id")) for entry in entries}


def _warnings(page: JsonObject) -> list[str]:
    missing = cast(list[dict[str, str]], page.get("missing") or [])
    found = [f"gateway {each.get('gateway')}: {each.get('reason')}" for each in missing]
    found += [f"file {each}" for each in cast(list[str], page.get("unreadable") or [])]
    return found + ([str(page["incomplete"])] if page.get("incomplete") else [])


def _moment(option: str, text: str, now: datetime) -> str:
    if found := re.fullmatch(r"([0-9]{1,7})([smhdw])", text):
        return (now - timedelta(seconds=int(found[1]) * _UNITS[found[2]])).isoformat()
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"{option} {text!r} is no time: {_TIMES}") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
