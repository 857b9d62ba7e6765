"""The command `shoal status`: prints a table once, or refreshes it until interrupted."""

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.cli.client import not_found
from shoal.cli.options import kubeconfig_options
from shoal.cli.output import camel, emit, none_of, output_option
from shoal.cli.output import console as make_console
from shoal.cli.status.read import StatusSnapshot, read, read_route
from shoal.cli.status.view import ModelRow, RouteRow, VariantRow
from shoal.cli.viewing import explaining_refusals
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, KubeError, NotFound

INTERVAL_SECONDS: Final = 2.0
_COLUMNS: Final = (
    "model", "ready", "gpuClass", "desired", "readyReplicas", "waiting", "gpus", "step", "coldStartSeconds",
    "kvTokensPerReplica", "hourlyCost", "reason", "message", "capabilities",
)  # fmt: skip
_ROUTE_COLUMNS: Final = ("route", "ready", "servedNames", "canaries", "reason", "message")
BESIDE: Final = 130
"""Width from which messages are a column; below it, they follow the table."""
LISTED: Final = 160
"""Width from which capabilities are a column."""


@click.command()
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("-n", "--namespace", help="Default: the kubeconfig context's.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Models and routes of all namespaces.")
@click.option("-w", "--watch", is_flag=True, help="Refresh every two seconds until interrupted.")
@output_option()
@kubeconfig_options
def command(
    name: str | None,
    namespace: str | None,
    all_namespaces: bool,
    watch: bool,
    output: str,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Show Models: the progress of each replica, its GPUs, cold start times, and errors. Routes follow.

    MODEL is a name, or model/name as kubectl writes it; route/name is a ModelRoute. Needs the right to view Models,
    routes and pods, and to read pod logs for the progress of fetches; the cluster's `view` role includes these rights.
    """
    if all_namespaces and (namespace or name):
        raise click.UsageError("--all-namespaces excludes --namespace and a name")
    if watch and output != "table":
        raise click.UsageError("--watch shows a table: leave out --output")
    try:
        asyncio.run(_run(name, namespace, all_namespaces, watch, output, kubeconfig, context))
    except KeyboardInterrupt:
        return
    except NotFound as error:
        missing = "this cluster does not have the kind: is Shoal's chart `shoal-crds` installed?"
        raise click.ClickException(missing if error.kind_missing else not_found(error)) from None
    except KubeError as error:
        raise click.ClickException(error.message) from None
    except (ValueError, OSError, TimeoutError) as error:
        raise click.ClickException(f"cannot connect to a cluster: {error}") from None


async def _run(
    name: str | None,
    namespace: str | None,
    everywhere: bool,
    watch: bool,
    output: str,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    console = make_console()
    kind, _, bare = (name or "").rpartition("/")
    if kind not in ("", "model", "route"):
        raise click.UsageError(f"{name}: give a name, model/name or route/name")
    async with await KubeClient.from_environment(kubeconfig=kubeconfig, context=context) as client:
        where = None if everywhere else namespace or client.namespace or "default"

        async def look() -> StatusSnapshot:
            return await (read_route(client, where, bare) if kind == "route" else read(client, where, bare or None))

        async with explaining_refusals(client, where):
            found = await look()
        if not watch:
            _print(console, found, output, where)
            return
        show = partial(render, wide=everywhere, width=console.width)
        if not console.is_terminal:  # a file or a pipe: Live would write once, at the end
            console.print(show(found))
        live_table = Live(show(found), console=console, refresh_per_second=4) if console.is_terminal else nullcontext()
        with live_table as live:
            while True:
                await asyncio.sleep(INTERVAL_SECONDS)
                before = found
                try:
                    found = await look()
                except APIServerUnavailable as error:  # a watch outlives an API server that restarts
                    found = dataclasses.replace(found, notes=(f"not up to date: {error.message}",))
                if live is not None:
                    live.update(show(found))
                elif found != before:
                    console.print()
                    console.print(show(found))


def _print(console: Console, found: StatusSnapshot, output: str, namespace: str | None) -> None:
    if output == "table":
        if not found.rows and not found.routes:
            console.print(none_of("Model", namespace))
        else:
            console.print(render(found, wide=namespace is None, width=console.width))
        return
    models = [
        _fields("model", row) | {"variants": [camel(dataclasses.asdict(v)) for v in row.variants]} for row in found.rows
    ]
    lines = (
        {**variant, **model, "capabilities": " ".join(row.capabilities)}
        for row, model in zip(found.rows, models, strict=True)
        for variant in model["variants"] or [{}]
    )
    routes = [
        _fields("route", row) | {"canaries": [camel(dataclasses.asdict(one)) for one in row.canaries]}
        for row in found.routes
    ]
    if output == "csv" and routes and not models:
        # CSV has the columns of one kind: routes are printed where there is nothing but routes.
        states = ([f"{one.rule}:{one.state}" for one in row.canaries] for row in found.routes)
        lines = (route | {"canaries": each} for route, each in zip(routes, states, strict=True))
        emit(output, {}, lines, _ROUTE_COLUMNS)
        return
    emit(output, {"models": models, "routes": routes, "notes": list(found.notes)}, lines, _COLUMNS)


def _fields(kind: str, row: ModelRow | RouteRow) -> dict[str, Any]:
    """A row for programs; as every command, it names an object by its kind: `model` is namespace/name."""
    found = camel(dataclasses.asdict(row))
    return {kind: f"{found.pop('namespace')}/{found.pop('name')}", **found}


def render(found: StatusSnapshot, *, wide: bool, width: int) -> RenderableType:
    """The tables: one line per Model and used class, then one per route."""
    tables = [_models(found, wide=wide, width=width)] if found.rows or not found.routes else []
    if found.routes:
        tables += [*([Text("")] if tables else []), _routes(found.routes, wide=wide, width=width)]
    return Group(*tables, *(Text(note, style="yellow") for note in found.notes))


def _models(found: StatusSnapshot, *, wide: bool, width: int) -> RenderableType:
    beside, lists = width >= BESIDE, width >= LISTED
    table = Table(show_edge=False, box=None, pad_edge=False)
    headings = (*(["NAMESPACE"] if wide else []), "MODEL", "READY", "CLASS", "UP", "GPUS", "STEP", "KV TOKENS")
    for heading in (*headings, "COLD START", "COST/H"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("GPUS", "KV TOKENS") else "left")
    if lists:
        table.add_column("CAPABILITIES", overflow="fold")
    if beside:
        table.add_column("MESSAGE", overflow="fold")
    below: list[Text] = []
    for row in found.rows:
        message = _message(row)
        if message and not beside:
            below.append(Text(f"{row.namespace}/{row.name}: {message}" if wide else f"{row.name}: {message}"))
        for i, line in enumerate(_lines(row)):
            able_cell = [escape(" ".join(row.capabilities)) if i == 0 else ""] if lists else []
            message_cell = [*able_cell, *([escape(message) if i == 0 else ""] if beside else [])]
            table.add_row(*([escape(row.namespace)] if wide else []), *line, *message_cell)
    return Group(table, *([Text("")] if below else []), *below)


def _routes(routes: Sequence[RouteRow], *, wide: bool, width: int) -> RenderableType:
    beside = width >= BESIDE
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in (*(["NAMESPACE"] if wide else []), "ROUTE", "READY"):
        table.add_column(heading, no_wrap=True)
    table.add_column("NAMES", overflow="fold")
    table.add_column("CANARY", overflow="fold")
    if beside:
        table.add_column("MESSAGE", overflow="fold")
    below: list[Text] = []
    for row in routes:
        if row.noteworthy and not beside:
            below.append(
                Text(f"{row.namespace}/{row.name}: {row.noteworthy}" if wide else f"{row.name}: {row.noteworthy}")
            )
        table.add_row(
            *([Text(row.namespace)] if wide else []),
            Text(row.name),
            Text(row.ready, style=_color(row.ready)),
            Text(", ".join(row.served_names) or "-"),
            Text(_canaries(row), style="yellow" if any(one.state == "Halted" for one in row.canaries) else ""),
            *([Text(row.noteworthy)] if beside else []),
        )
    return Group(table, *([Text("")] if below else []), *below)


def _canaries(row: RouteRow) -> str:
    """The state of the canary; with the rules' names, if there are several."""
    if len(row.canaries) == 1:
        return row.canaries[0].state
    return ", ".join(f"{one.rule}: {one.state}" for one in row.canaries) or "-"


def _color(ready: str) -> str:
    return {"True": "green", "False": "red"}.get(ready, "yellow")


def _message(row: ModelRow) -> str:
    return "" if row.ready == "True" else f"{row.reason}: {row.message}"


def _lines(row: ModelRow) -> Sequence[tuple[str, ...]]:
    first = (escape(row.name), f"[{_color(row.ready)}]{row.ready}[/]")
    if not row.variants:
        return [(*first, "-", "-", "-", "-", "-", "-", "-")]
    return [(*first, *_cells(row.variants[0])), *(("", "", *_cells(variant)) for variant in row.variants[1:])]


def _cells(variant: VariantRow) -> tuple[str, ...]:
    waiting = f" ({variant.waiting} waiting)" if variant.waiting else ""
    return (
        escape(variant.gpu_class),
        f"{variant.ready_replicas}/{variant.desired}{waiting}",
        "-" if variant.gpus is None else str(variant.gpus),
        variant.step,
        "-" if variant.kv_tokens_per_replica is None else f"{variant.kv_tokens_per_replica:,}",
        "-" if variant.cold_start_seconds is None else f"{variant.cold_start_seconds} s",
        variant.hourly_cost or "-",
    )
