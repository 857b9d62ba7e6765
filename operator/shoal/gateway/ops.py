"""The gateway's port for operations: probes and metrics (`net/pages.py`), the demand stream, the request log, and
facts of the last requests, why they went to their replicas, and the last minute of routes.

/healthz and /readyz answer every caller with a status, and with the names of the parts that are not ready. The reasons,
and the metrics, are only for callers that `access` allows."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from prometheus_client import CollectorRegistry

from shoal.api import names
from shoal.api.keys import Role
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.core.quota.share import PUBLISH_SECONDS
from shoal.gateway.choices import ChoicesApi
from shoal.gateway.routestats import RouteStatsApi
from shoal.gateway.trafficapi import TrafficApi
from shoal.kube.access import Access
from shoal.net.hub import EventStream, StreamHub
from shoal.net.pages import Causes, ops_shell
from shoal.net.roles import RoleGuard
from shoal.net.shell import ANY, GET, Shell, ShellRequest
from shoal.net.tls import TLSCredentials
from shoal.requestlog.api import LogsApi

CALLERS: Final[tuple[Role, ...]] = ("operator", "gateway")
"""Roles that may read the demand stream."""


class DemandKeys(Protocol):
    """The part of the key ring that is used here."""

    def demand_keys(self, role: Role) -> Iterable[str]:
        """The keys with which `role` authenticates here, one per valid install key."""
        ...


def gateway_ops(
    registry: CollectorRegistry,
    missing: Causes,
    refresh: Callable[[], None],
    demand: StreamHub,
    keys: DemandKeys,
    *,
    notes: Causes = dict[str, str],
    logs: LogsApi | None = None,
    traffic: TrafficApi | None = None,
    choices: ChoicesApi | None = None,
    routes: RouteStatsApi | None = None,
    prefixes: StreamHub | None = None,
    access: Access | None = None,
    credentials: TLSCredentials | None = None,
) -> Shell:
    """`missing` says why the gateway is not ready, `notes` are problems that do not make it unready. `refresh` updates
    the gauges before they are read."""
    shell = ops_shell("the gateway", registry, missing, notes=notes, refresh=refresh, access=access)

    async def tell_demand(request: ShellRequest) -> EventStream:
        # Gateways share tenants' limits: each must learn soon that another has not used more.
        seconds = PUBLISH_SECONDS if request.caller.role == "gateway" else HEARTBEAT_SECONDS
        return EventStream(demand, request.caller, seconds)

    needed = "a key of an operator or a gateway is needed, as a bearer token"
    shell.route(
        ANY, names.DEMAND_PATH, tell_demand, RoleGuard(CALLERS, keys.demand_keys, needed, credentials=credentials)
    )
    if prefixes is not None:

        async def tell_prefixes(request: ShellRequest) -> EventStream:
            return EventStream(prefixes, request.caller, HEARTBEAT_SECONDS)

        only = RoleGuard(
            ("gateway",), keys.demand_keys, "a gateway's key is needed, as a bearer token", credentials=credentials
        )
        shell.route(ANY, names.PREFIXES_PATH, tell_prefixes, only)
    if logs is not None:
        shell.route(ANY, names.LOGS_PATH, logs.ops)
    if traffic is not None:
        shell.route(ANY, names.TRAFFIC_PATH, traffic.ops)
    if choices is not None:
        shell.route(GET, names.CHOICES_PATH, choices.answer, choices.page.guard)
    if routes is not None:
        shell.route(GET, names.ROUTE_STATS_PATH, routes.answer, routes.page.guard)
    return shell
