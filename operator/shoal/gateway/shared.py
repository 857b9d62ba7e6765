"""What all requests of one gateway share: the cluster's state, the clients, the budgets, the counts."""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from shoal.api.identity import model_server_name
from shoal.api.keys import LEDGER
from shoal.api.names import ENGINE_PORT, ENGINE_TLS_PORT
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routestats import RouteWindows
from shoal.gateway.bigbodies import BigBodies
from shoal.gateway.body import BodyBudget
from shoal.gateway.canaries import Canaries
from shoal.gateway.cancellations import Cancellations
from shoal.gateway.choices import ChoiceMemory
from shoal.gateway.copies import CopyTasks
from shoal.gateway.deadlines import Deadlines
from shoal.gateway.demand import DemandState
from shoal.gateway.directory import Directory
from shoal.gateway.externals import CredentialFiles, Externals
from shoal.gateway.hold import Holds
from shoal.gateway.leases import LeaseClient
from shoal.gateway.mediafetch import MediaFetcher
from shoal.gateway.memory import container_limit, json_bounds, memory_bounds
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.quota import Quotas
from shoal.gateway.remainders import Remainders
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.traffic import TrafficSample
from shoal.gateway.upstream import Upstream, UpstreamAddress
from shoal.gateway.usageapi import UsageApi
from shoal.metering.checkpoints import Checkpoints
from shoal.metering.spool import UsageSpool
from shoal.net.installkey import KeyRing
from shoal.net.stream import ListenerIdentity
from shoal.net.tls import TLSCredentials
from shoal.requestlog.api import LogsApi
from shoal.requestlog.logger import RequestLogger

if TYPE_CHECKING:
    from shoal.gateway.tracing import Traces


def engine_port(replica: Replica) -> int:
    """The port of the replica's engine."""
    return ENGINE_TLS_PORT if replica.mtls else ENGINE_PORT


@lru_cache(maxsize=4096)  # each request asks, for one of few replicas
def _address(host: str, port: int, model_uid: str | None) -> UpstreamAddress:
    return UpstreamAddress(host, port, None if model_uid is None else model_server_name(model_uid))


class Gateway:
    """`agents` is the HTTP client towards agents, by default the one towards engines. `held_by_peers` returns how many
    requests of a Model wait in other gateways; None: unknown. `quotas` are the tenants' limits, by default as if there
    were no other gateway. `engine_port` is replaced by tests in which engines share one address."""

    def __init__(
        self,
        settings: GatewaySettings,
        directory: Directory,
        fleet: ReplicaPool,
        key_ring: KeyRing,
        spool: UsageSpool,
        upstream: Upstream,
        metrics: GatewayMetrics,
        *,
        held_by_peers: Callable[[str], int | None] = lambda _uid: None,
        identity: ListenerIdentity = ListenerIdentity(),  # noqa: B008 - immutable
        agents: Upstream | None = None,
        engine_port: Callable[[Replica], int] = engine_port,
        logs: LogsApi | None = None,
        quotas: Quotas | None = None,
        traces: "Traces | None" = None,
        credentials: TLSCredentials | None = None,
        canaries: Canaries | None = None,
        externals: Externals | None = None,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.fleet = fleet
        self.key_ring = key_ring
        self.spool = spool
        self.upstream = upstream
        self.metrics = metrics
        self._engine_port = engine_port
        self.boot = identity.boot or None
        """Written to usage records: the process whose counters include them."""
        self.demand: DemandState = fleet.demand
        self.holds = Holds(directory, fleet, fleet.demand, metrics, held_by_peers)
        self.leases = LeaseClient(fleet, identity, agents or upstream, metrics)
        self.cancellations = Cancellations(fleet, agents or upstream)
        self.remainders = Remainders()
        self.memory = memory_bounds(settings, container_limit())
        self.json_bounds = json_bounds(settings)
        self.body_budget = BodyBudget(self.memory.bodies, self.memory.bodies_of_tenant)
        self.answer_budget = BodyBudget(self.memory.answers, self.memory.answer, "answers")
        self.big_bodies = BigBodies()
        self.media = MediaFetcher(metrics.media)
        self.checkpoints = Checkpoints(spool)
        self.canaries = canaries or Canaries()
        self.externals = externals or Externals(settings.external_hosts, CredentialFiles(settings.external_keys_dir))
        self.copies = CopyTasks()
        self.deadlines = Deadlines(settings.request_seconds)
        self._deadlines: dict[float, Deadlines] = {}
        self.demand.tenants.boot = identity.boot
        self.quotas = quotas or Quotas(self.demand.tenants)
        self.usage = UsageApi(
            settings.ledger_url, lambda: key_ring.bearers_of("gateway", LEDGER), credentials=credentials
        )
        self.logs = logs or LogsApi(RequestLogger(settings, gateway=identity.name), key_ring)
        self.traces = traces
        """None: tracing is off, and a client's own trace headers are passed to the engine."""
        self.traffic = TrafficSample(settings.traffic_requests)
        """Answered requests without their prompts, for advice."""
        self.choices = ChoiceMemory()
        self.routes = RouteWindows(time.monotonic())
        """The last minute of routes."""
        self.in_flight = 0
        self.stopping = False

    @property
    def busy(self) -> bool:
        """The limit on requests in progress is reached. Held requests do not count: they have bounds of their own."""
        most = self.settings.max_requests
        return self.in_flight > most and self.in_flight - self.holds.waiting > most

    def target(self, replica: Replica) -> UpstreamAddress:
        """The address of the replica's engine, and the name that its certificate must carry."""
        return _address(replica.ip or "", self._engine_port(replica), replica.model_uid if replica.mtls else None)

    def deadlines_of(self, model: ServedModel) -> Deadlines:
        """The deadlines of a Model's requests: the Model's own limit where it is shorter than the gateway's."""
        seconds = model.request_seconds
        if seconds is None or seconds >= self.deadlines.seconds:
            return self.deadlines
        found = self._deadlines.get(seconds)
        if found is None:
            found = self._deadlines[seconds] = Deadlines(seconds)
        return found

    def leave(self, replica: Replica, tokens: int) -> None:
        """A request has left a replica, which may have capacity for a held one."""
        self.fleet.leave(replica, tokens)
        if self.holds.queues:
            self.holds.schedule_round(replica.model_uid)
