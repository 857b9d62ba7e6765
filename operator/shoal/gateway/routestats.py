"""GET /v1/routestats on the operations port: the last minute of each route's targets. A person's call is answered for
all gateways, a gateway's call for this one."""

import asyncio
import time
from typing import Final

from pydantic import ValidationError
from starlette.responses import Response

from shoal.api import names
from shoal.api.keys import Role
from shoal.api.rights import TRAFFIC
from shoal.api.routestats import MOST_ROWS, ExternalStats, RouteStatsPage, TargetStats
from shoal.core.routing.routestats import RouteWindows
from shoal.gateway.externals import Externals
from shoal.kube.callers import Callers
from shoal.net.asgi import unproved
from shoal.net.errors import Problem
from shoal.net.gatewaycalls import GatewayCalls, GatewayKeys, GatewayPods, NoAnswer
from shoal.net.hub import Caller
from shoal.net.rights import PERSON, RightGuard
from shoal.net.roles import given_key, role_of
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

PEER_SECONDS: Final = 5.0
_MOST_BYTES: Final = 16 * 1024 * 1024
"""Of a peer's answer."""
_ROLES: Final[tuple[Role, ...]] = ("gateway", "logs")
_PLACES: Final = ("authorization", names.HEADER_KEY)


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
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
    ) -> None:
        """`gateway`: name of this pod. `callers` knows people by their tokens; None: keys only."""
        self._windows = windows
        self._externals = externals
        self._gateway = gateway
        self._keys = keys
        self._calls = GatewayCalls(keys, peers, port, credentials)
        self._credentials = credentials
        self._person = None if callers is None else RightGuard(callers, TRAFFIC)

    async def close(self) -> None:
        await self._calls.close()

    async def guard(self, request: ShellRequest) -> None:
        """Raises Problem for a caller who may not read this."""
        secret = given_key(request.headers, _PLACES)
        role = role_of(secret, _ROLES, self._keys.demand_keys)
        person = self._person
        if role is None and (person is None or not person.understands(secret)):
            raise Problem(401, "a key for logs, or of a gateway, is needed", {"www-authenticate": "Bearer"})
        if (why := unproved(self._credentials, request.scope, role or PERSON.role)) is not None:
            raise Problem(403, why)
        if role is not None:
            request.caller = Caller(role)
        elif person is not None:
            await person.check(request, secret)

    async def answer(self, request: ShellRequest) -> Response:
        namespace = request.one("namespace")
        externals = tuple(
            ExternalStats(gateway=self._gateway, **each._asdict())
            for each in self._externals.observe()
            if namespace is None or each.target.startswith(f"{namespace}/")
        )
        found = RouteStatsPage(gateways=(self._gateway,), targets=self._own(namespace), externals=externals[:MOST_ROWS])
        if request.caller.role != "gateway":
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
        pods, unreachable = self._calls.reachable()
        missing = [f"{each['gateway']}: {each['reason']}" for each in unreachable]
        query = {"namespace": namespace}
        answers = await asyncio.gather(
            *(
                self._calls.call(
                    "GET", pod, names.ROUTE_STATS_PATH, query, seconds=PEER_SECONDS, most_bytes=_MOST_BYTES
                )
                for pod in pods
            )
        )
        gateways, targets, externals = list(own.gateways), list(own.targets), list(own.externals)
        for pod, answer in zip(pods, answers, strict=True):
            if isinstance(answer, NoAnswer):
                missing.append(f"{pod.name}: {answer.reason}")
                continue
            try:
                found = RouteStatsPage.model_validate_json(answer)
            except ValidationError:
                missing.append(f"{pod.name}: its answer is not understood")
                continue
            gateways += found.gateways
            targets += found.targets
            externals += found.externals
        return RouteStatsPage(
            gateways=tuple(gateways),
            targets=tuple(targets[:MOST_ROWS]),
            externals=tuple(externals[:MOST_ROWS]),
            missing=tuple(sorted(missing)),
        )
