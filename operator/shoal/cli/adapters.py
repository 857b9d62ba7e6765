"""`shoal adapters`: shows pools, replicas and adapters, from the leading operator."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.api.adapterstats import AdapterStats, AdapterStatsAnswer, PoolStats, ReplicaAdapters
from shoal.cli.client import run_command
from shoal.cli.options import Installation, operator_options
from shoal.cli.output import console, emit, none_of, output_option
from shoal.cli.scaling.why import ago
from shoal.cli.services import OperatorClient

SORTS: Final = ("name", "used", "requests", "misses")
MOST_SHOWN: Final = 50
"""Adapters of a pool in a table, unless a person names another limit. Programs get all."""
_UNREMARKABLE: Final = ("Resident", "OnDemand")


def render(
    answer: AdapterStatsAnswer, *, sort: str = "name", limit: int = MOST_SHOWN, wide: bool = False
) -> RenderableType:
    """Renders all pools of an answer; `wide`: with the replicas of each adapter."""
    parts: list[RenderableType] = []
    for pool in answer.pools:
        parts += [*([Text("")] if parts else []), *_pool(pool, answer.time, sort, limit, wide)]
    return Group(*parts)


def hit_rate(adapters: Iterable[AdapterStats]) -> str:
    """Share of requests that found their adapter on a replica, in percent; `-` without requests, `?` if unknown."""
    arrivals = misses = 0
    for one in adapters:
        if one.arrivals is None or one.misses is None:
            return "?"
        arrivals, misses = arrivals + one.arrivals, misses + one.misses
    return f"{100 * max(0, arrivals - misses) / arrivals:.1f}%" if arrivals else "-"


def ordered(adapters: Sequence[AdapterStats], sort: str) -> list[AdapterStats]:
    """Sorts by name, or with the largest value first."""
    if sort == "name":
        return sorted(adapters, key=lambda a: a.adapter)
    if sort == "used":
        used = [a for a in adapters if a.last_used is not None]
        return sorted(used, key=lambda a: (a.last_used, a.adapter), reverse=True) + [
            a for a in adapters if a.last_used is None
        ]
    return sorted(adapters, key=lambda a: (-((a.arrivals if sort == "requests" else a.misses) or 0), a.adapter))


def _pool(pool: PoolStats, now: datetime, sort: str, limit: int, wide: bool) -> Iterable[RenderableType]:
    yield Text.assemble(
        (pool.pool, "bold"),
        f" on Model {pool.model}: {pool.slots} adapters at a time and {pool.cached} in memory on each replica, "
        f"{len(pool.adapters)} adapters, hits {hit_rate(pool.adapters)}",
    )
    if pool.ready != "True":
        yield Text(f"{pool.reason}: {pool.message}" if pool.reason else "not reconciled yet", style="yellow")
    if pool.stale:
        yield Text(f"stale gateways, not included in these numbers: {', '.join(pool.stale)}", style="yellow")
    yield Padding(_replicas(pool.replicas), (0, 0, 0, 2), expand=False)
    if pool.adapters:
        shown = ordered(pool.adapters, sort)[:limit]
        yield Padding(_adapters(shown, len(pool.replicas), now, wide), (0, 0, 0, 2), expand=False)
        if len(pool.adapters) > len(shown):
            yield Text(f"  and {len(pool.adapters) - len(shown)} more; --limit shows them", style="dim")


def _replicas(replicas: Sequence[ReplicaAdapters]) -> RenderableType:
    if not replicas:
        return Text("no replica: a request for an adapter wakes one")
    table = _table("REPLICA", "SLOTS", "LOADED", "FAILED", "WAITING", "LOADS", "EVICTED")
    for one in replicas:
        if not one.live:
            cells = ("?", "?", "?", "?", "?", "?")
        else:
            slots = "-" if one.slots is None else f"{_count(one.leased)}/{one.slots}"
            counts = (one.loaded, one.failed, one.waiting, one.loads, one.evictions)
            cells = (slots, *map(_count, counts))
        table.add_row(Text(one.pod, style="" if one.ready else "yellow"), *(_cell(c) for c in cells))
    return table


def _adapters(adapters: Sequence[AdapterStats], replicas: int, now: datetime, wide: bool) -> RenderableType:
    table = _table("ADAPTER", "REVISION", "RANK", "RESIDENT", "KEPT", "IN FLIGHT", "HELD", "REQUESTS", "HITS")
    table.add_column("LAST USED", no_wrap=True, justify="right")
    table.add_column("STATE", overflow="fold")
    if wide:
        table.add_column("REPLICAS", overflow="fold")
    for one in adapters:
        revision = f"{one.revision or '-'}{f' -> {one.next}' if one.next else ''}"
        resident = "?" if one.resident is None else f"{len(one.resident)}/{replicas}"
        used = ago(now - one.last_used) if one.last_used is not None else "-"
        state = one.reason if one.reason in _UNREMARKABLE else f"{one.reason}: {one.message}" if one.reason else "-"
        cells = (
            revision,
            "-" if one.rank is None else str(one.rank),
            resident,
            "-" if one.wanted is None else f"{len(one.desired)}/{one.wanted}",
            _count(one.in_flight),
            _count(one.held),
            _count(one.arrivals),
            hit_rate([one]),
            used,
        )
        style = "" if one.ready == "True" and one.reason != "NoRoom" else "yellow"
        where = [_cell(_where(one))] if wide else []
        table.add_row(Text(one.adapter), *(_cell(c) for c in cells), Text(state, style=style), *where)
    return table


def _where(one: AdapterStats) -> str:
    """The replicas that have the adapter, then the replicas that are to load it."""
    if one.resident is None:
        return "?"
    coming = [f"{pod} (to load)" for pod in one.desired if pod not in one.resident]
    return ", ".join([*one.resident, *coming]) or "-"


def _table(first: str, *others: str) -> Table:
    table = Table(show_edge=False, box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, no_wrap=True, justify="right")
    return table


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _cell(text: str) -> Text:
    return Text(text, style="yellow" if "?" in text else "")


_COLUMNS: Final = (
    "pool", "adapter", "residency", "revision", "next", "rank", "sizeBytes", "ready", "reason", "message", "wanted",
    "resident", "desired", "inFlight", "held", "arrivals", "misses", "lastUsed",
)  # fmt: skip


@click.command()
@click.option("--pool", help="Only this LoRAPool.")
@click.option("-n", "--namespace", help="Namespace of the pools. Default: the kubeconfig context's.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Pools of all namespaces.")
@click.option("--sort", type=click.Choice(SORTS), default="name", show_default=True, help="Sort order.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"Adapters to show per pool. Default: {MOST_SHOWN} in tables, all in json, yaml and csv.",
)
@output_option("wide", help="wide: a table with the replicas of each adapter.")
@operator_options
def command(
    pool: str | None,
    namespace: str | None,
    all_namespaces: bool,
    sort: str,
    limit: int | None,
    output: str,
    installation: Installation,
) -> None:
    """Show the adapters of LoRA pools: residency, hit rate, loads and last use.

    An unknown value is `?`. An adapter without a slot shows the reason. Needs the ClusterRole
    shoal-viewer in the namespace, or in Shoal's for all namespaces.
    """
    if all_namespaces and namespace:
        raise click.UsageError("--all-namespaces and --namespace exclude each other")

    async def work() -> tuple[str | None, AdapterStatsAnswer]:
        async with await installation.connect() as client:
            where = None if all_namespaces else namespace or client.namespace or "default"
            operator = OperatorClient(client, installation.namespace, installation.url)
            return where, await operator.adapters(where, pool)

    where, answer = run_command(work())
    pools = tuple(
        each.model_copy(update={"adapters": tuple(ordered(each.adapters, sort)[:limit])}) for each in answer.pools
    )
    data = answer.model_copy(update={"pools": pools}).model_dump(mode="json", by_alias=True)
    rows = ({"pool": pool["pool"], **each} for pool in data["pools"] for each in pool["adapters"])
    if emit(output, data, rows, _COLUMNS):
        return
    if not pools:
        console().print(none_of("LoRAPool", where))
    else:
        console().print(render(answer, sort=sort, limit=limit or MOST_SHOWN, wide=output == "wide"))
