"""The OpenAI API: a pure ASGI application. `request.py` and `attempts.py` have one request's way."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.api.identity import model_server_name
from shoal.api.keys import LEDGER
from shoal.api.names import ENGINE_PORT, ENGINE_TLS_PORT
from shoal.core.resolve import ServedModel
from shoal.core.routing import Replica
from shoal.gateway.bigbodies import BigBodies
from shoal.gateway.body import Budget
from shoal.gateway.cancellations import Cancellations
from shoal.gateway.checkpoints import Checkpoints
from shoal.gateway.deadlines import Deadlines
from shoal.gateway.demand import DemandBook
from shoal.gateway.directory import Directory
from shoal.gateway.fleet import Fleet
from shoal.gateway.hold import Holds
from shoal.gateway.leases import Leases
from shoal.gateway.mediafetch import MediaFetcher
from shoal.gateway.memory import container_limit, json_bounds, memory_bounds
from shoal.gateway.metrics import Metrics
from shoal.gateway.quota import Quotas
from shoal.gateway.request import Request
from shoal.gateway.requestlog.api import LogsApi
from shoal.gateway.requestlog.book import RequestLog
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.upstream import Target, Upstream
from shoal.gateway.usageapi import UsageApi
from shoal.ledger.spool import Spool
from shoal.net.tls import Credentials
from shoal.serving.asgi import Receive, Scope, Send
from shoal.serving.installkey import KeyRing
from shoal.signals.stream import Me

if TYPE_CHECKING:
    from shoal.gateway.tracing import Traces


def engine_port(replica: Replica) -> int:
    """On which its engine is called."""
    return ENGINE_TLS_PORT if replica.mtls else ENGINE_PORT


class Gateway:
    """`agents` is the client towards them, by default the engines'. `elsewhere` says how many requests of a Model wait
    in other gateways, None when that is not known. `quotas` are tenants' limits, by default as if there were no other
    gateway. `engine_port` is there for tests, where engines share one
    address."""

    def __init__(
        self,
        settings: GatewaySettings,
        directory: Directory,
        fleet: Fleet,
        key_ring: KeyRing,
        spool: Spool,
        upstream: Upstream,
        metrics: Metrics,
        *,
        elsewhere: Callable[[str], int | None] = lambda _uid: None,
        me: Me = Me(),  # noqa: B008 - immutable
        agents: Upstream | None = None,
        engine_port: Callable[[Replica], int] = engine_port,
        logs: LogsApi | None = None,
        quotas: Quotas | None = None,
        traces: "Traces | None" = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.fleet = fleet
        self.key_ring = key_ring
        self.spool = spool
        self.upstream = upstream
        self.metrics = metrics
        self._engine_port = engine_port
        self.boot = me.boot or None
        """On usage records: which process's counters they are part of."""
        self.demand: DemandBook = fleet.book
        self.holds = Holds(directory, fleet, fleet.book, metrics, elsewhere)
        self.leases = Leases(fleet, me, agents or upstream, metrics)
        self.cancellations = Cancellations(fleet, agents or upstream)
        self.memory = memory_bounds(settings, container_limit())
        self.json_bounds = json_bounds(settings)
        self.budget = Budget(self.memory.bodies, self.memory.bodies_of_tenant)
        self.answers = Budget(self.memory.answers, self.memory.answer, "answers")
        self.big = BigBodies()
        self.media = MediaFetcher(metrics.media)
        self.checkpoints = Checkpoints(spool)
        self.deadlines = Deadlines(settings.request_seconds)
        self._deadlines: dict[float, Deadlines] = {}
        self.demand.tenants.me = me.boot
        self.quotas = quotas or Quotas(self.demand.tenants)
        self.usage = UsageApi(settings.ledger_url, lambda: key_ring.said_by("gateway", LEDGER), credentials=credentials)
        self.logs = logs or LogsApi(RequestLog(settings, gateway=me.name), key_ring)
        self.traces = traces
        """None: nothing is traced, and a client's own trace goes on to the engine."""
        self.in_flight = 0
        self.stopping = False

    @property
    def busy(self) -> bool:
        """As many requests as may be are being served; those that wait for a replica have bounds of their own."""
        most = self.settings.max_requests
        return self.in_flight > most and self.in_flight - self.holds.waiting > most

    def target(self, replica: Replica) -> Target:
        """Where its engine is called, and as whom it must show itself."""
        name = model_server_name(replica.model_uid) if replica.mtls else None
        return Target(replica.ip or "", self._engine_port(replica), name)

    def deadlines_of(self, model: ServedModel) -> Deadlines:
        """Of a Model's requests: its own cap, where that is shorter than the gateway's."""
        seconds = model.request_seconds
        if seconds is None or seconds >= self.deadlines.seconds:
            return self.deadlines
        found = self._deadlines.get(seconds)
        if found is None:
            found = self._deadlines[seconds] = Deadlines(seconds)
        return found

    def leave(self, replica: Replica, tokens: int) -> None:
        """A request has left a replica: there is room for one that waits."""
        self.fleet.leave(replica, tokens)
        if self.holds.rooms:
            self.holds.poke(replica.model_uid)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(self, scope, receive, send)
        self.in_flight += 1
        try:
            await request.run()
        finally:
            self.in_flight -= 1
