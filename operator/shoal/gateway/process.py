"""Builds and runs the gateway's parts: watches, streams, spool, servers, housekeeping and shutdown."""

import asyncio
import signal
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from shoal.api import keys, rights
from shoal.core import facts
from shoal.core.routing.canary import CanaryCounts
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.score import ReplicaScores
from shoal.gateway import mediafetch
from shoal.gateway.acks import Acks
from shoal.gateway.app import GatewayApp
from shoal.gateway.canaries import Canaries
from shoal.gateway.choices import ChoicesApi
from shoal.gateway.connections import Pool
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.demandmetrics import DemandMetrics
from shoal.gateway.directory import (
    Directory,
    Source,
    project_adapter,
    project_model,
    project_pod,
    project_pool,
    project_route,
    project_tenant,
)
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.ops import gateway_ops
from shoal.gateway.peers import Peers
from shoal.gateway.prefixes import PrefixShare
from shoal.gateway.quota import Quotas
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.routestats import RouteStatsApi, route_prices
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.shared import Gateway, engine_port
from shoal.gateway.trafficapi import TrafficApi
from shoal.kube.access import Access
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.kube.enginepods import EnginePods
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import LORA_ADAPTERS, LORA_POOLS, MODEL_ROUTES, MODELS, TENANTS
from shoal.metering.record import gateway_boot
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from shoal.metering.tokenfile import TokenFile
from shoal.net import gctuning, trace
from shoal.net.installkey import KeyRing
from shoal.net.server import make_server
from shoal.net.serving import listening, run_server
from shoal.net.stream import ListenerIdentity
from shoal.net.tls import TLSCredentials
from shoal.requestlog.api import Logging, LogsApi
from shoal.requestlog.logger import RequestLogger
from shoal.requestlog.logmetrics import RequestLogMetrics
from shoal.signals.totals import TotalsFollower

if TYPE_CHECKING:
    from shoal.gateway.extproc.server import ExtProcServer
    from shoal.gateway.tracing import Traces

log = structlog.get_logger()

_AGENT_KEEP_ALIVE: Final = 30.0
"""Longer than the pause between two acknowledgements."""
_SECURED_KEEP_ALIVE: Final = 50.0
"""For connections to the sidecar that terminates mutual TLS in front of an engine: shorter than
`sidecar.IDLE_SECONDS`."""


LINGER_SECONDS: Final = 15.0
"""Seconds for which idle client connections stay open when the gateway stops. A client that writes to one just as it is
closed would see a reset."""
PEERS_SECONDS = 3.0
"""How long a gateway that starts, and is otherwise ready, waits to learn what the others have used of limits."""
_PEERS_POLL_SECONDS: Final = 0.05
_NOT_LISTED: Final = "not listed yet: the API server is not reachable, or does not allow it"


class GatewayProcess:
    """One gateway process. `run` returns after SIGTERM, SIGINT or `stop`."""

    def __init__(
        self,
        settings: GatewaySettings,
        client: KubeClient,
        *,
        engine_port: Callable[[Replica], int] = engine_port,
    ) -> None:
        self.settings = settings
        self.credentials = TLSCredentials(settings.mtls_dir, serves=settings.mtls)
        self.metrics = GatewayMetrics(settings.max_tracked_models)
        self.tracing = trace.from_environment("shoal-gateway", self.metrics.registry)
        self.key_ring = KeyRing(settings.keys_dir, settings.install_key_dir)
        self.demand = DemandState()
        self.demand_publisher = DemandPublisher(self.demand, gateway_boot(settings.pod_name, uuid.uuid4().hex))
        self.identity = ListenerIdentity(settings.pod_name, self.demand_publisher.hub.boot)
        self.metrics.registry.register(DemandMetrics(self.identity.boot, self.demand, self._model_names))
        scores = ReplicaScores() if settings.routing == "Seconds" else None
        self.prefixes = None if scores is None else PrefixShare(scores, self.identity.boot)
        self.fleet = ReplicaPool(
            self.key_ring,
            self.identity,
            self.demand,
            self.credentials,
            scores=scores,
            prompt_sent=None if self.prefixes is None else self.prefixes.sent,
        )
        self.peers = Peers(
            client,
            settings.pod_namespace,
            self.identity,
            self.key_ring,
            changed=self._peer_holds_changed,
            tenants=self.demand.tenants,
            credentials=self.credentials,
            prefixes=self.prefixes,
            canaries_counted=self._canaries_counted,
        )
        self.totals = (
            TotalsFollower(
                settings.ledger_url,
                lambda: self.key_ring.bearers_of("gateway", keys.LEDGER),
                self.identity,
                self.credentials,
            )
            if settings.ledger_url
            else None
        )
        self.quotas = Quotas(self.demand.tenants, peers=self.peers.quota_peers, ledger=self.totals)
        if self.totals is not None:
            self.totals.changed = self.quotas.totals_changed
            self.totals.repriced = self.demand_publisher.set_currency
            self.totals.prices_refused = self.demand_publisher.set_prices_refused
        self.spool = UsageSpool(
            settings.spool_dir,
            max_bytes=settings.spool_max_bytes,
            when_full=settings.when_spool_full,
            keep_seconds=settings.spool_keep_seconds,
        )
        self.shipper = (
            Shipper(
                self.spool,
                settings.ledger_url,
                lambda: self.key_ring.bearers_of("gateway", keys.LEDGER),
                self.credentials,
                token=TokenFile(settings.ledger_token_file),
            )
            if settings.ledger_url
            else None
        )
        self.pool = Pool(
            connect_timeout=settings.connect_seconds,
            credentials=self.credentials,
            secured_keep_alive=_SECURED_KEEP_ALIVE,
        )
        self.agents = Pool(
            connect_timeout=settings.connect_seconds, keep_alive=_AGENT_KEEP_ALIVE, credentials=self.credentials
        )
        invalid: Callable[[str], None] = lambda kind: self.metrics.invalid.labels(kind).inc()  # noqa: E731
        self.pods = EnginePods(client, project=project_pod, on_event=self._marks("pods"))
        self._reflectors: dict[Source, Reflector] = {
            "models": Reflector(client, MODELS, project=partial(project_model, invalid=invalid), on_event=self._model),
            "tenants": Reflector(
                client, TENANTS, project=partial(project_tenant, invalid=invalid), on_event=self._marks("tenants")
            ),
            "pools": Reflector(
                client, LORA_POOLS, project=partial(project_pool, invalid=invalid), on_event=self._marks("pools")
            ),
            "adapters": Reflector(
                client,
                LORA_ADAPTERS,
                project=partial(project_adapter, invalid=invalid),
                on_event=lambda _kind, adapter: self.directory.mark("adapters", adapter.key),
            ),
            "routes": Reflector(
                client, MODEL_ROUTES, project=partial(project_route, invalid=invalid), on_event=self._marks("routes")
            ),
        }
        self.directory = Directory(
            self._reflectors["models"].objects,
            self._reflectors["tenants"].objects,
            self.pods.objects,
            self._follow,
            pools=self._reflectors["pools"].objects,
            adapters=self._reflectors["adapters"].objects,
            routes=self._reflectors["routes"].objects,
        )
        self.directory.listed = lambda: not self._not_listed()
        callers = Callers(client, rights.GATEWAY_AUDIENCE) if settings.role_tokens else None
        self.logs = LogsApi(
            RequestLogger(settings, gateway=settings.pod_name, days=self._retention),
            self.key_ring,
            self._peer_pods,
            credentials=self.credentials,
            callers=callers,
            logging=self._logging,
        )
        self.metrics.registry.register(RequestLogMetrics(self.logs.logger))
        self.gateway = Gateway(
            settings,
            self.directory,
            self.fleet,
            self.key_ring,
            self.spool,
            self.pool,
            self.metrics,
            held_by_peers=self.peers.held_by_peers,
            quotas=self.quotas,
            identity=self.identity,
            agents=self.agents,
            engine_port=engine_port,
            logs=self.logs,
            traces=self._traces(),
            credentials=self.credentials,
            canaries=Canaries(self._canaries_changed, self.demand.canary_counts),
        )
        self.acks = Acks(self.fleet, self.identity, self.agents, self.gateway.leases)
        self.traffic = TrafficApi(
            self.gateway.traffic,
            self.key_ring,
            settings.pod_name,
            self._peer_pods,
            credentials=self.credentials,
            callers=callers,
        )
        self.server = make_server(
            GatewayApp(self.gateway, lambda: not self.missing()),
            host=settings.host,
            port=settings.port,
            keep_alive=settings.keep_alive_seconds,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            max_head_bytes=settings.max_head_bytes,
            head_seconds=settings.body_seconds,
            max_connections=self.gateway.memory.connections,
            max_unfinished_bytes=self.gateway.memory.heads,
            linger_seconds=LINGER_SECONDS,
            stop_seconds=int(settings.hold_seconds + settings.request_seconds + settings.body_seconds)
            + (int(2 * mediafetch.SECONDS) if settings.media_egress else 0)
            + 1,
        )
        self.ext_proc = self._external_processor() if settings.ext_proc else None
        self.choices = ChoicesApi(
            self.gateway.choices,
            settings.pod_name,
            self.key_ring,
            self._peer_pods,
            credentials=self.credentials,
            callers=callers,
        )
        self.routes = RouteStatsApi(
            self.gateway.routes,
            self.gateway.externals,
            settings.pod_name,
            self.key_ring,
            self._peer_pods,
            prices=lambda: route_prices(
                self.directory.snapshot.model_index, self.gateway.quotas.ledger.rate_table, settings.pod_name
            ),
            credentials=self.credentials,
            callers=callers,
        )
        ops = gateway_ops(
            self.metrics.registry,
            self.missing,
            self._refresh_gauges,
            self.demand_publisher.hub,
            self.key_ring,
            notes=self.notes,
            logs=self.logs,
            traffic=self.traffic,
            choices=self.choices,
            routes=self.routes,
            prefixes=None if self.prefixes is None else self.prefixes.hub,
            access=Access(client) if settings.metrics_auth else None,
            credentials=self.credentials,
        )
        self.ops = make_server(
            ops,
            host=settings.ops_host,
            port=settings.ops_port,
            keep_alive=5,
            stop_seconds=1,
        )
        self.peer_ops = (
            make_server(
                ops,
                host=settings.ops_host,
                port=settings.mtls_port,
                keep_alive=5,
                stop_seconds=1,
                credentials=self.credentials,
            )
            if settings.mtls
            else None
        )
        self._stop = asyncio.Event()
        self._peers_known = False
        """The first messages of the other gateways have come, or were waited for in vain. It stays so."""
        self._tls_seen: tuple[int, ...] | None = None

    def stop(self) -> None:
        """Begins a graceful stop; a second call changes nothing."""
        if not self._stop.is_set():
            log.info("stopping: unready first, then no new requests, then running requests finish")
        self._stop.set()

    def missing(self) -> dict[str, str]:
        """Why the gateway is not ready, by part; empty when it is ready."""
        missing: dict[str, str] = {}
        if self._stop.is_set():
            missing["stopping"] = "asked to stop"
        missing |= self._lacking()
        if not missing and not self._peers_known:
            awaited = ", ".join(self.peers.awaited() or ()) or "the other gateways"
            missing["peers"] = f"waits to learn from {awaited} what is used of limits, {PEERS_SECONDS:g} s at most"
        return missing

    def _lacking(self) -> dict[str, str]:
        """What the gateway cannot serve without, by part."""
        missing = self._not_listed()
        if self.settings.mtls and (why := self.credentials.missing):
            missing["certificate"] = why
        if not self.key_ring:
            missing["installKey"] = f"no keys in {self.settings.keys_dir}: the operator makes them"
        if self.spool.refusing is not None:
            missing["spool"] = self.spool.refusing
        return missing

    def _not_listed(self) -> dict[str, str]:
        """Lists that were never read, and why."""
        missing: dict[str, str] = {}
        for source, reflector in self._reflectors.items():
            if reflector.synced.is_set():
                continue  # from then on the last known objects are used, even if the API server is unreachable
            if reflector.missing:
                if source in ("pools", "adapters", "routes"):
                    continue  # the CustomResourceDefinitions are of an older version: there are no such objects
                missing[source] = "the API server does not know this kind: the CustomResourceDefinitions are missing"
            else:
                missing[source] = _NOT_LISTED
        if not self.pods.synced.is_set():
            missing["pods"] = _NOT_LISTED
        return missing

    def notes(self) -> dict[str, str]:
        """Problems that do not make the gateway unready, by part."""
        notes: dict[str, str] = {}
        if self.spool.error is not None:
            notes["spool"] = f"{self.spool.error}; requests are served, their usage may be lost"
        if (stats := self.spool.stats).damaged_rows or stats.damaged_files:
            notes["spoolDamage"] = (
                f"{stats.damaged_rows} damaged rows, {stats.damaged_files} damaged files since the start:"
                " `shoal gateway records --damaged` shows them"
            )
        if self.shipper is not None and (trouble := self.shipper.trouble()) is not None:
            notes["ledger"] = trouble
        if self.credentials.expired():
            notes["certificate"] = "it has expired, so engines refuse it: the operator renews it"
        if (why := self.logs.logger.writer.stats.error) is not None:
            notes["requestLog"] = f"entries are dropped: {why}"
        return notes

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Runs until stopped. `started` is called when all ports listen."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self.spool.start()
        self.key_ring.refresh()
        self.credentials.refresh()
        self.fleet.streams.start()
        self.peers.start()
        if self.totals is not None:
            self.totals.start()
            self.totals.follow()
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(r.run()) for r in self._reflectors.values()]
                background.append(group.create_task(self.pods.run()))
                background.append(group.create_task(self.peers.reflector.run()))
                background.append(group.create_task(self._housekeeping()))
                background.append(group.create_task(self._learn_of_peers()))
                if self.prefixes is not None:
                    background.append(group.create_task(self.prefixes.run()))
                background.append(group.create_task(self.logs.logger.run()))
                if self.shipper is not None:
                    background.append(group.create_task(self.shipper.run()))
                ops = group.create_task(run_server(self.ops))
                await listening(self.ops)
                secured = None
                if self.peer_ops is not None:
                    secured = group.create_task(run_server(self.peer_ops))
                    await listening(self.peer_ops)
                main = group.create_task(run_server(self.server))
                await listening(self.server)
                if self.ext_proc is not None:
                    background.append(group.create_task(self.ext_proc.run()))
                log.info("serving", port=self.server.port, ops_port=self.ops.port, tls=bool(self.settings.tls_cert))
                gctuning.tune_gc()
                started()
                await self._stop.wait()
                self.gateway.stopping = True
                self.server.begin_closing()
                # Endpoints and load balancers react with a delay: until then new requests still arrive.
                await asyncio.sleep(self.settings.settle_seconds)
                self.server.should_exit = True
                if self.ext_proc is not None:
                    await self.ext_proc.stop(self.settings.hold_seconds + self.settings.request_seconds)
                await main
                if self.shipper is not None:
                    await self.shipper.drain(self.settings.ship_seconds)
                self.demand_publisher.close()
                if self.prefixes is not None:
                    self.prefixes.hub.close()
                self.ops.should_exit = True
                await ops
                if self.peer_ops is not None and secured is not None:
                    self.peer_ops.should_exit = True
                    await secured
                for task in background:
                    task.cancel()
        finally:
            await self.fleet.streams.close()
            await self.acks.close()
            await self.gateway.leases.close()
            self.agents.close()
            await self.peers.close()
            if self.totals is not None:
                await self.totals.close()
            self.pool.close()
            await self.logs.close()
            await self.traffic.page.close()
            await self.choices.page.close()
            await self.routes.page.close()
            await self.gateway.usage.close()
            await self.gateway.media.close()
            await self.gateway.copies.close()
            self.gateway.externals.close()
            await self.logs.logger.stop()
            await self.spool.stop()
            await trace.close(self.tracing)
            log.info("stopped")

    async def _learn_of_peers(self) -> None:
        """Waits until the gateway knows what the others have used of limits, for `PEERS_SECONDS` at most: a peer that
        does not answer must not keep it from serving."""
        while self._lacking():  # noqa: ASYNC110 - not all of them have an event
            await asyncio.sleep(_PEERS_POLL_SECONDS)
        try:
            async with asyncio.timeout(PEERS_SECONDS):
                while self.peers.awaited() != []:  # noqa: ASYNC110 - streams have no event, and this lasts milliseconds
                    await asyncio.sleep(_PEERS_POLL_SECONDS)
        except TimeoutError:
            log.warning("ready without knowing what other gateways have used of limits", peers=self.peers.awaited())
        self._peers_known = True

    async def _housekeeping(self) -> None:
        while True:
            if self.key_ring.refresh():
                self._follow()
                self.peers.follow()
                if self.totals is not None:
                    self.totals.follow()
                self.gateway.holds.cluster_changed()
            self.credentials.refresh()
            self.pool.sweep()
            self.agents.sweep()
            self.gateway.externals.sweep()
            self.quotas.sweep()
            self.server.sweep()
            self.ops.sweep()
            if self.peer_ops is not None:
                self.peer_ops.sweep()
            self.spool.check()
            self.pods.ownership.report()
            self._reload_tls()
            await asyncio.sleep(1.0)

    def _reload_tls(self) -> None:
        cert, key = self.settings.tls_cert, self.settings.tls_key
        context = self.server.config.ssl if self.server.config.loaded else None
        if context is None or cert is None:
            return
        try:
            seen = tuple(path.stat().st_mtime_ns for path in (cert, key) if path is not None)
            if self._tls_seen is not None and seen != self._tls_seen:
                context.load_cert_chain(cert, key)
                log.info("TLS certificate read again")
            self._tls_seen = seen
        except OSError as error:
            log.warning("cannot read the TLS certificate again; keeping the old one", error=str(error))

    def _external_processor(self) -> "ExtProcServer":
        from shoal.gateway.extproc.server import ExtProcServer, PortCertificate

        settings = self.settings
        certificate = None
        if settings.ext_proc_tls_dir is not None:
            certificate = PortCertificate(settings.ext_proc_tls_dir, asks_clients=settings.ext_proc_client_certificates)
        return ExtProcServer(
            GatewayApp(self.gateway, lambda: not self.missing()),
            # A gateway that is asked to stop takes requests until load balancers know of it.
            lambda: not self.missing().keys() - {"stopping"} and not self.server.should_exit,
            host=settings.host,
            port=settings.ext_proc_port,
            body_seconds=settings.body_seconds,
            most_streams=self.gateway.memory.connections,
            certificate=certificate,
        )

    def _traces(self) -> "Traces | None":
        if self.tracing is None:
            return None
        from shoal.gateway.tracing import Traces

        return Traces(self.tracing.tracer)

    def _model(self, kind: ReflectorEvent, model: ServedModel) -> None:
        if kind == "delete":
            self.pods.ownership.model_gone(model.uid)
        else:
            self.pods.ownership.model(model.uid, model.key)
        self.directory.mark("models")

    def _marks(self, source: Source) -> Callable[[str, object], None]:
        return lambda _kind, _object: self.directory.mark(source)

    def _follow(self) -> None:
        self.fleet.follow(self.directory.snapshot)
        snapshot = self.directory.snapshot
        self.demand.retain({model.uid for model in snapshot.models.values()})
        self.demand.adapters.retain(snapshot.model_index.adapter_uids)
        self.fleet.residency.retain(snapshot.model_index.adapter_uids)
        self.gateway.canaries.follow(snapshot.model_index.routes.values())
        self.gateway.canaries.heard(self.peers.halted_canaries())
        for boot, counts in self.peers.canary_counts():
            self._canaries_counted(boot, counts)  # of routes that came after the counts
        self.gateway.externals.follow(snapshot.model_index.routes.values())
        if self.directory.complete:
            self.quotas.retain_routes({route.uid for route in snapshot.model_index.routes.values()})

    def _canaries_changed(self) -> None:
        self.demand_publisher.set_canaries(self.gateway.canaries.halts)

    def _canaries_counted(self, boot: str, counts: Mapping[str, CanaryCounts]) -> None:
        self.gateway.canaries.counted(boot, counts)

    def _peer_holds_changed(self, uid: str | None) -> None:
        """Called when the number of requests held by peers changed, for one Model or (None) for all: this gateway's
        share of the replicas' capacity then changes too."""
        if uid is None:
            self.gateway.holds.cluster_changed()
            self.gateway.canaries.heard(self.peers.halted_canaries())
        else:
            self.gateway.holds.schedule_round(uid)

    def _retention(self) -> dict[str, int] | None:
        """Retention of each tenant's request log in days; None while the Tenants are unknown."""
        tenants = self._reflectors["tenants"]
        if not tenants.synced.is_set():
            return None
        return {name: tenant.spec.logging.retention_days for name, tenant in tenants.objects.items()}

    def _logging(self, name: str) -> Logging | None:
        """Whether a tenant's requests are logged; None while the Tenants are unknown."""
        tenants = self._reflectors["tenants"]
        if not tenants.synced.is_set():
            return None
        tenant = tenants.objects.get(name)
        if tenant is None:
            return "NoTenant"
        return "Off" if tenant.spec.logging.mode == "Off" else "On"

    def _peer_pods(self) -> list[facts.Pod] | None:
        found = self.peers.reflector
        return [pod for pod in found.objects.values() if not pod.finished] if found.synced.is_set() else None

    def _model_names(self) -> dict[str, str]:
        return {model.uid: key for key, model in self.directory.snapshot.models.items()}

    def _refresh_gauges(self) -> None:
        metrics, snapshot = self.metrics, self.directory.snapshot
        metrics.in_flight.set(self.gateway.in_flight)
        metrics.ready.set(not self.missing())
        metrics.spool.show(self.spool, self.shipper)
        metrics.tenants.known({identity.tenant for identity in snapshot.keys.values()})
        live = len(self.fleet.live)
        metrics.streams.labels("live").set(live)
        metrics.streams.labels("down").set(max(0, self.fleet.streams.count - live))
        metrics.objects.labels("Model").set(len(snapshot.models))
        metrics.objects.labels("LoRAAdapter").set(len(snapshot.model_index.adapter_uids))
        metrics.objects.labels("ModelRoute").set(len(snapshot.model_index.routes))
        metrics.objects.labels("TenantKey").set(len(snapshot.keys))
        metrics.objects.labels("Pod").set(sum(map(len, snapshot.replicas.values())))
        metrics.rogue_pods.set(self.pods.ownership.rogue)
        metrics.body_bytes.set(self.gateway.body_budget.held)
