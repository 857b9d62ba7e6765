"""`shoal logs --tenant T` shows a tenant's request log, `shoal logs delete --tenant T` deletes from it."""

import asyncio
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

import click

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.client import run_command
from shoal.cli.options import Installation, gateway_options
from shoal.cli.output import emit, emit_each, output_option, write_csv
from shoal.cli.services import GATEWAY_PODS, GatewayClient
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.resources import PERSISTENTVOLUMECLAIMS, PODS, TENANTS

_CLAIM: Final = "logs-"
"""Prefix of the claims that a StatefulSet makes from its template `logs`; the pod's name follows."""


async def left_behind(client: KubeClient, namespace: str) -> list[str]:
    """A message for each volume whose gateway was scaled down: no gateway can reach its request log. Raises
    KubeError."""
    try:
        claims = [
            str(raw["metadata"]["name"])
            async for raw in client.list(PERSISTENTVOLUMECLAIMS, namespace=namespace, label_selector=GATEWAY_PODS)
        ]
        pods = {
            str(raw["metadata"]["name"])
            async for raw in client.list(PODS, namespace=namespace, label_selector=GATEWAY_PODS)
        }
    except Forbidden as error:
        return [f"volumes of gateways that were scaled down are unknown: {error.message}"]
    gone = sorted((claim, claim.removeprefix(_CLAIM)) for claim in claims if claim.startswith(_CLAIM))
    return [
        f"gateway {pod}: it was scaled down, and its log is still on its volume. Scale up again to reach "
        f"it, or delete it: kubectl -n {namespace} delete persistentvolumeclaim {claim}"
        for claim, pod in gone
        if pod not in pods
    ]


HEADER: Final = (
    f"{'TIME':<20} {'USER':<16} {'KEY':<12} {'MODEL':<28} {'OUTCOME':<9} {'STATUS':>6} {'INPUT':>7} {'OUTPUT':>7} "
    f"{'MS':>9} TEXT"
)
_TEXT: Final = 60
_COLUMNS: Final = (
    "time", "id", "user", "keyName", "model", "adapter", "route", "outcome", "status", "inputTokens", "outputTokens",
    "durationMs", "error",
)  # fmt: skip
"""Columns of the CSV: without the bodies of requests and answers."""
_DELETED_COLUMNS: Final = ("tenant", "user", "entries", "files", "left")


def line(entry: dict[str, Any]) -> str:
    """One entry; an unknown value is `-`."""
    moment = str(entry.get("time") or "-")

    def number(name: str, width: int) -> str:
        value = entry.get(name)
        return f"{'-' if value is None else round(value):>{width}}"

    return (
        f"{moment[:19] + 'Z' if len(moment) > 19 else moment:<20} {_cell(entry.get('user')):<16} "
        f"{_cell(entry.get('keyName')):<12} {_cell(entry.get('adapter') or entry.get('model')):<28} "
        f"{_cell(entry.get('outcome')):<9} {number('status', 6)} {number('inputTokens', 7)} "
        f"{number('outputTokens', 7)} {number('durationMs', 9)} {_text(entry)}"
    ).rstrip()


def _text(entry: dict[str, Any]) -> str:
    request = cast(dict[str, Any], entry.get("request") or {})
    prompt: Any = request.get("prompt") or request.get("input")
    messages: Any = request.get("messages")
    if isinstance(messages, list) and messages:
        last: Any = cast(list[Any], messages)[-1]
        prompt = cast(dict[str, Any], last).get("content") if isinstance(last, dict) else last
    if prompt is None:
        return str(entry.get("error") or "")
    shown = " ".join(_plain(prompt).split())
    return shown if len(shown) <= _TEXT else shown[: _TEXT - 1] + "…"


def _plain(value: Any) -> str:
    """The texts in a content, joined, without control characters that a terminal would interpret."""
    match value:
        case str():
            return "".join(c for c in value[: 4 * _TEXT] if c.isprintable() or c.isspace())
        case list():
            return " ".join(_plain(item) for item in cast(list[Any], value)[:8])
        case dict():
            found = cast(dict[str, Any], value)
            return _plain(found.get("text") or found.get("content") or "")
        case _:
            return ""


def _cell(value: Any) -> str:
    return "".join(c for c in str(value) if c.isprintable()) if value else "-"


FOLLOW_SECONDS: Final = 2.0
_LOOK_BACK: Final = timedelta(minutes=45)
"""An entry is written when its request ends, and sorted by the time when the request began."""
_PAGE: Final = 1000
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIMES: Final = "give how long ago (90s, 30m, 12h, 7d), a date (2026-11-22), or a time (2026-11-22T06:00:00Z)"


@click.group(name="logs", invoke_without_command=True)
@click.option("--tenant", help="Tenant of the request log.")
@click.option("--user", help="Only requests with this `user`.")
@click.option("--model", help="Only this Model or adapter: namespace/name, or a served name.")
@click.option("--route", help="Only requests to this ModelRoute: namespace/name.")
@click.option("--since", help="Only requests after this time: 1h, 2026-11-22, 2026-11-22T06:00:00Z.")
@click.option("--until", help="Only requests before this time.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Number of newest entries to show."
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new entries.")
@output_option()
@gateway_options
@click.pass_context
def command(
    ctx: click.Context,
    tenant: str | None,
    user: str | None,
    model: str | None,
    route: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    follow: bool,
    output: str,
    installation: Installation,
) -> None:
    """Show a tenant's request log, from all gateways; `-o json` prints one complete entry per line, csv no bodies.

    The Tenant's `spec.logging` decides what is logged. Needs the ClusterRole shoal-logs in Shoal's namespace.
    """
    if ctx.invoked_subcommand is not None:
        if tenant or user or output != "table":
            raise click.UsageError("put the options of `logs delete` after `delete`")
        return
    if not tenant:
        raise click.UsageError("--tenant is required")
    now = datetime.now(UTC)
    wanted = {
        "tenant": tenant,
        "user": user,
        "model": model,
        "route": route,
        "from": None if since is None else _moment("--since", since, now),
        "to": None if until is None else _moment("--until", until, now),
    }

    def show(entries: list[dict[str, Any]]) -> None:
        if not emit_each(output, entries, _COLUMNS):
            for entry in entries:
                click.echo(line(entry))

    async def work() -> None:
        async with await installation.connect() as client:
            gateways = GatewayClient(client, installation.namespace, installation.url, ca_file=installation.ca_file)
            entries, logging = await _newest(gateways, wanted, limit)
            for warning in await left_behind(client, installation.namespace):
                click.echo(f"missing: {warning}", err=True)
            if not entries:
                await _explain_empty(client, tenant, logging)
            if output == "table":
                click.echo(HEADER)
            elif output == "csv":
                write_csv(_COLUMNS, ())
            show(entries[::-1])
            if follow:
                await _follow(gateways, wanted, {str(entry.get("id")) for entry in entries}, show)

    try:
        run_command(work())
    except KeyboardInterrupt:
        return


@command.command("delete")
@click.option("--tenant", required=True, help="Tenant of the request log.")
@click.option("--user", help="Only entries with this `user`. Default: all entries of the tenant.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option()
@gateway_options
def delete(
    tenant: str,
    user: str | None,
    yes: bool,
    output: str,
    installation: Installation,
) -> None:
    """Delete a tenant's request log, or one user's entries, on all gateways and in the bucket.

    Entries of requests in progress are written later and stay: repeat the command then. It fails, and names the cause,
    if a gateway was not reached, a gateway that was scaled down left its volume, or a file could not be read. It can be
    repeated.
    """
    target = f"the request log of tenant {tenant}" if user is None else f"the entries of user {user} of tenant {tenant}"
    if not yes:
        click.confirm(f"Delete {target}? This cannot be undone", abort=True, err=True)

    async def work() -> tuple[JsonObject, list[str]]:
        async with await installation.connect() as client:
            gateways = GatewayClient(client, installation.namespace, installation.url, ca_file=installation.ca_file)
            answer = await gateways.json("DELETE", names.LOGS_PATH, {"tenant": tenant, "user": user})
            return answer, [*_warnings(answer), *await left_behind(client, installation.namespace)]

    answer, left = run_command(work())
    entries, files = answer.get("entries"), answer.get("files")
    row = {"tenant": tenant, "user": user, "entries": entries, "files": files, "left": left}
    if not emit(output, row, [row | {"left": "; ".join(left)}], _DELETED_COLUMNS):
        click.echo(f"Deleted: {files} files." if entries is None else f"Deleted: {entries} entries in {files} files.")
    if left:
        raise click.ClickException(
            "not everything was deleted:\n  " + "\n  ".join(left) + "\nFix this and repeat the command."
        )


async def _explain_empty(client: KubeClient, tenant: str, logging: str | None) -> None:
    """Says why a request log may be empty. `logging` is what the gateway knows: a person with the ClusterRole
    shoal-logs may not have the right to read Tenants. Raises ClickException for a Tenant that does not exist."""
    # A gateway knows only Tenants that are valid.
    unknown = f"gateways know no valid Tenant {tenant}, and there is no request log of it"
    try:
        found = await client.get(TENANTS, tenant)
    except NotFound:
        logging = "NoTenant"
        unknown = f"there is no Tenant {tenant} and no request log of it"
    except KubeError as error:
        if logging is None:
            click.echo(f"whether there is a Tenant {tenant} and its request log is on is unknown: {error}", err=True)
    else:
        spec: JsonObject = found.get("spec") or {}
        settings: JsonObject = spec.get("logging") or {}
        logging = "Off" if settings.get("mode", "Off") == "Off" else "On"
    if logging == "NoTenant":
        raise click.ClickException(f"{unknown}: is it spelt right? `kubectl get tenants` lists them")
    if logging == "Off":
        click.echo(f"the request log of Tenant {tenant} is off: set its spec.logging (docs/requestlog.md)", err=True)


async def _newest(
    gateways: GatewayClient, wanted: Mapping[str, str | None], limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """The newest entries, latest first, and what the gateway knows of the tenant's logging. Missing parts are reported
    on standard error."""
    entries: list[dict[str, Any]] = []
    cursor: str | None = None
    reported: set[str] = set()
    while True:
        count = str(min(_PAGE, limit - len(entries)))
        page = await gateways.json("GET", names.LOGS_PATH, {**wanted, "limit": count, "cursor": cursor})
        entries += cast(list[dict[str, Any]], page.get("data") or [])
        for warning in _warnings(page):
            if warning not in reported:
                reported.add(warning)
                click.echo(f"missing: {warning}", err=True)
        cursor = page.get("next_cursor")
        if cursor is None or len(entries) >= limit:
            return entries, page.get("logging")


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
        raise click.UsageError(f"{option} {text!r} is not a time: {_TIMES}") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
