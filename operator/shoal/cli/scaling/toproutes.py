"""`shoal top routes`: the last minute of each ModelRoute, as all gateways counted it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.api import names
from shoal.api.routestats import RouteStatsPage, TargetStats
from shoal.cli.client import MissingRight
from shoal.cli.output import none_of
from shoal.cli.scaling.totals import Sum
from shoal.cli.services import GatewayClient
from shoal.cli.status.view import RouteRow, route_rows
from shoal.core.routing.routestats import TTFT_BOUNDS, quantile
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.resources import MODEL_ROUTES

SORTS: Final = ("name", "rate")
HEADINGS: Final = ("SHARE", "REQ/S", "TOK/S", "TTFT P50", "P99", "ERRORS")
COLUMNS: Final = (
    "route", "target", "role", "requests", "failed", "requestsPerSecond", "tokensPerSecond", "ttftSecondsP50",
    "ttftSecondsP99", "errorPercent", "sharePercent", "complete", "reason", "message",
)  # fmt: skip
_ROLES: Final = ("target", "canary", "fallback")
_ENOUGH: Final = len(TTFT_BOUNDS) + 1


class RouteStatsClient(GatewayClient):
    """Client of the gateways for what became of requests to routes."""

    async def page(self, namespace: str | None) -> RouteStatsPage:
        """The last minute of the routes of a namespace (None: all)."""
        return await self.get(names.ROUTE_STATS_PATH, {"namespace": namespace}, RouteStatsPage)

    def _missing_right(self, error: KubeError) -> MissingRight:
        return MissingRight(
            error.message,
            f"This needs the right to get the Secret {names.key_secret('logs')}, to list pods, and to get pods/proxy "
            f"in namespace {self._namespace}.",
        )


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The last minute of a target, or of a whole route."""

    requests: int
    failed: int
    per_second: float
    tokens_per_second: float
    first_bytes: tuple[int, ...]

    @property
    def p50(self) -> float | None:
        """Time to the first byte of streams, in seconds; None: there were no streams."""
        return quantile(self.first_bytes, 0.5)

    @property
    def p99(self) -> float | None:
        return quantile(self.first_bytes, 0.99)

    @property
    def errors(self) -> float | None:
        """Percent; None: there were no requests."""
        return 100 * self.failed / self.requests if self.requests else None

    @property
    def slow(self) -> bool:
        """Whether streams took longer than the largest bound, so that a quantile may be unknown."""
        return self.first_bytes[-1] > 0


@dataclass(frozen=True, slots=True)
class TargetLine:
    target: str
    role: str
    stats: RequestStats
    share: float
    """Percent of the route's requests."""


@dataclass(frozen=True, slots=True)
class RouteLine:
    """One route: stats and state."""

    route: str
    """namespace/name."""
    stats: RequestStats
    targets: tuple[TargetLine, ...]
    row: RouteRow | None
    """Its object; None: it could not be read, or is gone."""

    @property
    def state(self) -> str:
        """What a person should know of it: why it is not as declared, or which canary is halted."""
        if self.row is None:
            return "its object is not there, or cannot be read"
        halted = [one for one in self.row.canaries if one.state == "Halted"]
        running = [f"canary {one.rule} running" for one in self.row.canaries if one.state == "Running"]
        stopped = [f"canary {one.rule} halted: {one.message}" for one in halted]
        return self.row.noteworthy or "; ".join([*stopped, *running])


@dataclass(frozen=True, slots=True)
class RouteTop:
    """What one read found."""

    routes: tuple[RouteLine, ...]
    missing: tuple[str, ...]
    """Gateways that did not answer: every sum has an unknown part."""
    notes: tuple[str, ...] = ()


async def read_routes(client: KubeClient, gateways: RouteStatsClient, namespace: str | None) -> RouteTop:
    """Raises KubeError, ServiceError."""
    page = await gateways.page(namespace)
    notes: list[str] = []
    rows: list[RouteRow] = []
    try:
        rows = route_rows([raw async for raw in client.list(MODEL_ROUTES, namespace=namespace)])
    except (Forbidden, NotFound) as error:
        notes.append(f"canaries and reasons are unknown: {error.message}")
    return RouteTop(tuple(lines(page, rows)), page.missing, tuple(notes))


def lines(page: RouteStatsPage, rows: Iterable[RouteRow]) -> list[RouteLine]:
    """One line for each route that exists or had requests, sorted by name."""
    known = {f"{row.namespace}/{row.name}": row for row in rows}
    by_route: dict[str, list[TargetStats]] = {}
    for each in page.targets:
        if len(each.first_bytes) == _ENOUGH:  # a gateway of another version has other bounds
            by_route.setdefault(each.route, []).append(each)
    found: list[RouteLine] = []
    for route in sorted(known.keys() | by_route.keys()):
        counted = by_route.get(route, [])
        whole = _sum(counted)
        targets: dict[tuple[str, str], list[TargetStats]] = {}
        for each in counted:
            targets.setdefault((each.role, each.target), []).append(each)
        named = [
            TargetLine(target, role, one := _sum(some), 100 * one.requests / whole.requests if whole.requests else 0.0)
            for (role, target), some in sorted(targets.items(), key=lambda item: (_ROLES.index(item[0][0]), item[0][1]))
        ]
        found.append(RouteLine(route, whole, tuple(named), known.get(route)))
    return found


def ordered(routes: Sequence[RouteLine], sort: str) -> list[RouteLine]:
    """Sorts by name, or with the most requests first."""
    return sorted(routes, key=lambda one: (0.0 if sort == "name" else -one.stats.per_second, one.route))


def _sum(some: Sequence[TargetStats]) -> RequestStats:
    return RequestStats(
        requests=sum(each.requests for each in some),
        failed=sum(each.failed for each in some),
        per_second=sum(each.requests / each.window_seconds for each in some),
        tokens_per_second=sum(each.output_tokens / each.window_seconds for each in some),
        first_bytes=tuple(map(sum, zip(*(each.first_bytes for each in some), strict=True))) or (0,) * _ENOUGH,
    )


def documents(found: RouteTop, sort: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For JSON and YAML, and rows for CSV: one for each route, and one for each target below it."""
    documents: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for one in ordered(found.routes, sort):
        row = one.row
        said = {
            "route": one.route,
            **_stats(one.stats),
            "complete": not found.missing,
            "missing": list(found.missing),
            "ready": None if row is None else row.ready,
            "reason": None if row is None else row.reason,
            "message": None if row is None else row.message,
            "canaries": [
                {"rule": canary.rule, "state": canary.state, "message": canary.message}
                for canary in (() if row is None else row.canaries)
            ],
        }
        targets = [
            {"target": each.target, "role": each.role, "sharePercent": each.share, **_stats(each.stats)}
            for each in one.targets
        ]
        documents.append({**said, "targets": targets})
        rows += [said, *({"route": one.route, "complete": not found.missing, **target} for target in targets)]
    return documents, rows


def _stats(of: RequestStats) -> dict[str, Any]:
    return {
        "requests": of.requests,
        "failed": of.failed,
        "requestsPerSecond": of.per_second,
        "tokensPerSecond": of.tokens_per_second,
        "ttftSecondsP50": of.p50,
        "ttftSecondsP99": of.p99,
        "errorPercent": of.errors,
    }


def render(
    found: RouteTop, namespace: str | None, *, sort: str, height: int | None = None, note: str = ""
) -> RenderableType:
    """A line for each route of a namespace (None: all), and below it one for each target if it has several. With a
    `height`, the first routes that fit."""
    wide = namespace is None
    notes = [note, *(f"gateway {each}" for each in found.missing), *found.notes]
    said = [Text(text, style="yellow") for text in notes if text]
    if not found.routes:
        return Group(*said, Text(none_of("ModelRoute", namespace)))
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in (*(["NAMESPACE"] if wide else []), "ROUTE", "ROLE"):
        table.add_column(heading, no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("STATE", no_wrap=True, overflow="ellipsis")
    left = None if height is None else max(2, height - 2 - len(said))
    routes = ordered(found.routes, sort)
    shown = 0
    for one in routes:
        several = one.targets if len(one.targets) > 1 else ()
        if left is not None and shown and table.row_count + 1 + len(several) > left:
            break
        shown += 1
        namespace, _, name = one.route.partition("/")
        only = one.targets[0].role if len(one.targets) == 1 else ""
        first = [Text(namespace)] if wide else []
        table.add_row(*first, Text(name), only, "", *_cells(one.stats, bool(found.missing)), Text(one.state))
        for each in several:
            what = Text(f"  {each.target.removeprefix(f'{namespace}/')}", style="dim")
            blank = [Text("")] if wide else []
            cells = _cells(each.stats, bool(found.missing))
            table.add_row(*blank, what, each.role, f"{each.share:.0f} %", *cells, "")
    more = len(routes) - shown
    return Group(*said, table, *([Text(f"and {more} more routes", style="dim")] if more else []))


def _cells(of: RequestStats, part: bool) -> tuple[Text, ...]:
    """`part`: a gateway is missing, so that the sums have unknown parts."""
    errors = of.errors
    return (
        _cell(Sum(of.per_second, not part).text(_rate)),
        _cell(Sum(of.tokens_per_second, not part).text(_rate)),
        _cell(_seconds(of, of.p50)),
        _cell(_seconds(of, of.p99)),
        Text("-" if errors is None else f"{errors:.0f} %", style="red" if errors else ""),
    )


def _seconds(of: RequestStats, value: float | None) -> str:
    if value is None:
        return f"> {TTFT_BOUNDS[-1]:.0f} s" if of.slow else "-"
    return f"{value:.2f} s"


def _cell(text: str) -> Text:
    return Text(text, style="yellow" if "?" in text else "")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
