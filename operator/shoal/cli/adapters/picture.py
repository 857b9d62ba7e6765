"""Pools as tables: a line about the pool, its replicas, its adapters."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.api.adapterstats import AdapterStats, AdapterStatsAnswer, PoolStats, ReplicaAdapters
from shoal.cli.scaling.why import ago

SORTS: Final = ("name", "used", "requests", "misses")
_UNREMARKABLE: Final = ("Resident", "OnDemand")


def picture(answer: AdapterStatsAnswer, *, sort: str = "name", limit: int = 50, wide: bool = False) -> RenderableType:
    """All pools of an answer; `wide`: with the replicas that have each adapter."""
    if not answer.pools:
        return Text("there is no LoRAPool")
    parts: list[RenderableType] = []
    for pool in answer.pools:
        parts += [*([Text("")] if parts else []), *_pool(pool, answer.time, sort, limit, wide)]
    return Group(*parts)


def hit_rate(adapters: Iterable[AdapterStats]) -> str:
    """Requests that found their adapter at a replica, in per cent; `-` without a request, `?` where not known."""
    arrivals = misses = 0
    for one in adapters:
        if one.arrivals is None or one.misses is None:
            return "?"
        arrivals, misses = arrivals + one.arrivals, misses + one.misses
    return f"{100 * max(0, arrivals - misses) / arrivals:.1f}%" if arrivals else "-"


def ordered(adapters: Sequence[AdapterStats], sort: str) -> list[AdapterStats]:
    """By name, or what is most first."""
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
        yield Text(f"{pool.reason}: {pool.message}" if pool.reason else "not worked on yet", style="yellow")
    if pool.stale:
        yield Text(f"not heard, so the figures lack what they have: {', '.join(pool.stale)}", style="yellow")
    yield Padding(_replicas(pool.replicas), (0, 0, 0, 2), expand=False)
    if pool.adapters:
        shown = ordered(pool.adapters, sort)[:limit]
        yield Padding(_adapters(shown, len(pool.replicas), now, wide), (0, 0, 0, 2), expand=False)
        if len(pool.adapters) > len(shown):
            yield Text(f"  and {len(pool.adapters) - len(shown)} more; --limit shows them", style="dim")


def _replicas(replicas: Sequence[ReplicaAdapters]) -> RenderableType:
    if not replicas:
        return Text("no replica now: a request for an adapter wakes one")
    table = _table("REPLICA", "SLOTS", "LOADED", "FAILED", "WAITING", "LOADS", "EVICTED")
    for one in replicas:
        if not one.live:
            cells = ("?", "?", "?", "?", "?", "?")
        else:
            slots = "-" if one.slots is None else f"{_count(one.leased)}/{one.slots}"
            figures = (one.loaded, one.failed, one.waiting, one.loads, one.evictions)
            cells = (slots, *map(_count, figures))
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
    """The replicas that have it, then those that are to load it yet."""
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
