"""GET /v1/routestats on the operations port: the last minute of each route's targets. A person's call is answered for
all gateways, a gateway's call for this one."""

import time
from collections.abc import Callable
from typing import Final

from starlette.responses import Response

from shoal.api import names
from shoal.api.rights import TRAFFIC
from shoal.api.routestats import MOST_ROWS, ExternalStats, RoutePrices, RouteStatsPage, TargetStats
from shoal.core.rating.price import RateTable
from shoal.core.routing.cost import without_price
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.routestats import RouteWindows
from shoal.gateway.externals import Externals
from shoal.kube.callers import Callers
from shoal.net.gatewaycalls import GatewayKeys, GatewayPods
from shoal.net.gatheredpage import GatheredPage, MissingPart
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

PEER_SECONDS: Final = 5.0
_MOST_BYTES: Final = 16 * 1024 * 1024
"""Of a peer's answer."""


def route_prices(index: ModelIndex, table: RateTable | None, gateway: str) -> tuple[RoutePrices, ...]:
    """What is known of the prices of each route that has conditions on costs."""
    found: list[RoutePrices] = []
    for route in index.routes.values():
        refs = dict.fromkeys(ref for rule in route.rules if rule.cost is not None for ref in rule.destinations())
        if not refs:
            continue
        models = [model for ref in refs if (model := index.limited_target(route, ref)) is not None]
        targets = [(model.key, None if model.adapter is None else model.adapter.key) for model in models]
        unpriced = () if table is None else tuple(without_price(table, targets))
        currency = None if table is None else table.currency
        found.append(RoutePrices(route=route.key, gateway=gateway, currency=currency, unpriced=unpriced))
    return tuple(found)


class RouteStatsApi:
    """Serves `names.ROUTE_STATS_PATH` to gateways, and to people with the right to facts of requests."""

    def __init__(
        self,
        windows: RouteWindows,
        externals: Externals,
        gateway: str,
        keys: GatewayKeys,
        peers: GatewayPods = lambda: (),
        port: int = names.OPS_PORT,
        *,
        prices: Callable[[], tuple[RoutePrices, ...]] = tuple,
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
    ) -> None:
        """`gateway`: name of this pod. `prices`: what is known of prices (`route_prices`). `callers` knows people by
        their tokens; None: keys only."""
        self._windows = windows
        self._externals = externals
        self._gateway = gateway
        self._prices = prices
        self.page = GatheredPage(names.ROUTE_STATS_PATH, TRAFFIC, keys, peers, port, credentials, callers)

    async def answer(self, request: ShellRequest) -> Response:
        namespace = request.one("namespace")
        externals = tuple(
            ExternalStats(gateway=self._gateway, **each._asdict())
            for each in self._externals.observe()
            if namespace is None or each.target.startswith(f"{namespace}/")
        )
        prices = (each for each in self._prices() if namespace is None or each.route.startswith(f"{namespace}/"))
        found = RouteStatsPage(
            gateways=(self._gateway,),
            targets=self._own(namespace),
            externals=externals[:MOST_ROWS],
            prices=tuple(prices)[:MOST_ROWS],
        )
        if not self.page.for_gateway(request):
            found = await self._everywhere(found, namespace)
        return Response(found.model_dump_json(by_alias=True), media_type="application/json")

    def _own(self, namespace: str | None) -> tuple[TargetStats, ...]:
        seconds, counts = self._windows.read(time.monotonic())
        return tuple(
            TargetStats(
                route=key.route,
                target=key.target,
                role=key.role,
                gateway=self._gateway,
                window_seconds=seconds,
                requests=each.requests,
                failed=each.failed,
                output_tokens=each.output_tokens,
                first_bytes=tuple(each.first_bytes),
            )
            for key, each in counts.items()
            if namespace is None or key.route.startswith(f"{namespace}/")
        )

    async def _everywhere(self, own: RouteStatsPage, namespace: str | None) -> RouteStatsPage:
        pods, missing = self.page.peers()
        query = {"namespace": namespace}
        parts = await self.page.gather(pods, query, RouteStatsPage, seconds=PEER_SECONDS, most_bytes=_MOST_BYTES)
        gateways, targets, externals = list(own.gateways), list(own.targets), list(own.externals)
        prices = list(own.prices)
        for found in parts:
            if isinstance(found, MissingPart):
                missing.append(found)
                continue
            gateways += found.gateways
            targets += found.targets
            externals += found.externals
            prices += found.prices
        return RouteStatsPage(
            gateways=tuple(gateways),
            targets=tuple(targets[:MOST_ROWS]),
            externals=tuple(externals[:MOST_ROWS]),
            prices=tuple(prices[:MOST_ROWS]),
            missing=tuple(sorted(map(str, missing))),
        )
