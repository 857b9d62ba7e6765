"""`shoal top`: load of all Models, or of all ModelRoutes, live."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.api.decisions import Decisions, ModelScaling
from shoal.cli.client import Unreachable, run_command
from shoal.cli.options import Installation, ca_option, operator_options
from shoal.cli.output import console as make_console
from shoal.cli.output import emit, none_of, output_option
from shoal.cli.scaling import toproutes
from shoal.cli.scaling.toproutes import RouteStatsClient, RouteTop
from shoal.cli.scaling.totals import TopLine, line
from shoal.cli.services import OperatorClient
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError

T = TypeVar("T")
INTERVAL_SECONDS: Final = 1.0
_COLUMNS: Final = (
    "model", "readyReplicas", "wanted", "held", "inFlight", "arrivalsPerSecond", "hourlyCost", "currency", "reason",
    "layer", "message", "stale",
)  # fmt: skip
HEADINGS: Final = ("REPLICAS", "KV %", "QUEUE", "HELD", "IN FLIGHT", "REQ/S", "TOK/S", "COST/H")
BESIDE: Final = 130
"""Width from which the message is shown after the reason."""
SORTS: Final = ("name", "kv", "queue", "held", "rate", "cost")


@click.command()
@click.argument("kind", type=click.Choice(["models", "routes"]), default="models")
@click.option("-n", "--namespace", help="Default: the kubeconfig context's.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Models or routes of all namespaces.")
@click.option(
    "--sort", type=click.Choice(SORTS), default="name", show_default=True, help="Sort order. Routes: name or rate."
)
@click.option("--once", is_flag=True, help="Print once and exit; the default without a terminal.")
@click.option("--gateway-url", help="With routes: URL of a gateway's operations port.")
@ca_option
@output_option()
@operator_options
def command(
    kind: str,
    namespace: str | None,
    all_namespaces: bool,
    sort: str,
    once: bool,
    gateway_url: str | None,
    ca_file: str | None,
    output: str,
    installation: Installation,
) -> None:
    """Show Models live, every second: replicas, KV cache in use, queues, rates, cost per hour.

    `shoal top routes` shows ModelRoutes: the last minute of each target, as all gateways counted it, and
    the state of canaries. An unknown value is `?`; `12+?` is a sum with unknown parts. Needs the ClusterRole
    shoal-viewer in the namespace, or in Shoal's for all namespaces.
    """
    if kind == "routes" and sort not in toproutes.SORTS:
        raise click.UsageError(f"routes are sorted by {' or '.join(toproutes.SORTS)}")
    if all_namespaces and namespace:
        raise click.UsageError("--all-namespaces and --namespace exclude each other")
    console = make_console()
    live = console.is_terminal and not once and output == "table"

    async def work() -> None:
        async with await installation.connect() as client:
            where = None if all_namespaces else namespace or client.namespace or "default"
            if kind == "routes":
                gateways = RouteStatsClient(client, installation.namespace, gateway_url, ca_file=ca_file)
                await _routes(console if live else None, client, gateways, where, sort, output)
                return
            operator = OperatorClient(client, installation.namespace, installation.url)
            found = await operator.all(where)
            models = [m.model_dump(mode="json", by_alias=True) for m in ordered(found.models, sort)]
            if emit(output, models, models, _COLUMNS):
                return
            wide = where is None
            if not live and not models:
                console.print(none_of("Model", where))
                return
            if not live:
                console.print(render(found, wide=wide, sort=sort, width=console.width))
                return

            def shown(found: Decisions, width: int, height: int, note: str) -> RenderableType:
                return render(found, wide=wide, sort=sort, width=width, height=height, note=note, live=True)

            await _watch(console, found, lambda: operator.all(where), shown)

    try:
        run_command(work())
    except KeyboardInterrupt:
        return


async def _routes(
    live: Console | None, client: KubeClient, gateways: RouteStatsClient, where: str | None, sort: str, output: str
) -> None:
    found = await toproutes.read_routes(client, gateways, where)
    documents, rows = toproutes.documents(found, sort)
    if emit(output, documents, rows, toproutes.COLUMNS):
        return
    if live is None:
        make_console().print(toproutes.render(found, where, sort=sort))
        return

    def shown(found: RouteTop, _width: int, height: int, note: str) -> RenderableType:
        return toproutes.render(found, where, sort=sort, height=height, note=note)

    await _watch(live, found, lambda: toproutes.read_routes(client, gateways, where), shown)


async def _watch(
    console: Console,
    found: T,
    again: Callable[[], Awaitable[T]],
    shown: Callable[[T, int, int, str], RenderableType],
) -> None:
    """Shows what was found, and every second what `again` finds. `shown` gets the width and the height of the screen,
    and why the last one was not found."""
    note = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            size = console.size
            live.update(shown(found, size.width, size.height - 1, note), refresh=True)
            await asyncio.sleep(INTERVAL_SECONDS)
            try:
                found, note = await again(), ""
            except (Unreachable, KubeError) as error:  # a new leader, or an API server that restarts: keep going
                note = f"not up to date: {error}"


def render(
    found: Decisions,
    *,
    wide: bool,
    sort: str,
    width: int,
    height: int | None = None,
    note: str = "",
    live: bool = False,
) -> RenderableType:
    """The table of the first Models in sort order that fit `height` lines, and the totals of all Models."""
    beside = width >= BESIDE
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in (*(["NAMESPACE"] if wide else []), "MODEL"):
        table.add_column(heading, no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("REASON", no_wrap=True, overflow="ellipsis")
    models = ordered(found.models, sort)
    visible = len(models) if height is None else max(1, height - 5 - bool(note))
    for model in models[:visible]:
        namespace, _, name = model.model.partition("/")
        reason = f"{model.reason}: {model.message}" if beside and model.message else model.reason
        stale = f" ({len(model.stale)} stale)" if model.stale else ""
        driven = model.driven
        stuck = f" ({driven.reason})" if driven is not None and driven.status != "True" else ""
        status = Text(reason + stuck + stale)
        table.add_row(*([Text(namespace)] if wide else []), Text(name), *_cells(line([model])), status)
    more = len(models) - visible
    left_out = [Text(f"and {more} more Models", style="dim")] if more > 0 else []
    table.add_section()
    totals = line(models)
    end = Text(f"{len(models)} Models" + (f", cost in {totals.currency}" if totals.currency else ""))
    table.add_row(*([""] if wide else []), Text("in all", style="bold"), *_cells(totals), end)
    top = [Text(f"{found.time:%H:%M:%S}Z  operator {found.operator}", style="dim")] if live else []
    return Group(*top, *([Text(note, style="yellow")] if note else []), table, *left_out)


def ordered(models: Sequence[ModelScaling], sort: str) -> list[ModelScaling]:
    """Sorts by name, or with the largest value first; unknown values come before all others, because they need
    attention."""
    named = sorted(models, key=lambda m: m.model)
    if sort == "name":
        return named

    def largest(model: ModelScaling) -> float:
        of = line([model])
        kv = of.kv_percent
        value = {
            "kv": -1.0 if isinstance(kv, str) else kv,
            "queue": of.queue.known,
            "held": of.held.known,
            "rate": of.requests.known,
            "cost": of.cost.known,
        }[sort]
        return float("-inf") if value is None else -value

    return sorted(named, key=largest)


def _cells(of: TopLine) -> tuple[Text, ...]:
    kv = of.kv_percent
    whole = of.ready == of.wanted
    rate = _rate
    return (
        Text(f"{of.ready}/{of.wanted}", style="" if whole else "yellow"),
        _cell("?" if kv is None else kv if isinstance(kv, str) else f"{kv:.0f}"),
        _cell(of.queue.text()),
        _cell(of.held.text()),
        _cell(of.in_flight.text()),
        _cell(of.requests.text(rate)),
        _cell(of.tokens.text(rate)),
        _cell(of.cost.text(lambda value: f"{value:,.2f}")),
    )


def _cell(text: str) -> Text:
    return Text(text, style="yellow" if "?" in text else "")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
