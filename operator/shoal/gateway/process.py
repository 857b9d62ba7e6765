"""The gateway's parts, put together and run: watches, streams, spool, two servers, housekeeping, the stop."""

import asyncio
import signal
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from shoal.api import keys
from shoal.api.usage import gateway_boot
from shoal.core import facts
from shoal.core.resolve import ServedModel
from shoal.core.routing import Replica
from shoal.gateway import collector, mediafetch
from shoal.gateway.acks import Acks
from shoal.gateway.app import Gateway, engine_port
from shoal.gateway.demand import DemandBook, Teller
from shoal.gateway.directory import (
    Directory,
    Source,
    project_adapter,
    project_model,
    project_pod,
    project_pool,
    project_tenant,
)
from shoal.gateway.figures import Figures
from shoal.gateway.fleet import Fleet
from shoal.gateway.metrics import Metrics
from shoal.gateway.ops import Ops
from shoal.gateway.peers import Peers
from shoal.gateway.quota import Quotas
from shoal.gateway.requestlog.api import LogsApi
from shoal.gateway.requestlog.book import RequestLog
from shoal.gateway.requestlog.figures import LogFigures
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.upstream import Pool
from shoal.kube.access import Access
from shoal.kube.client import Client
from shoal.kube.enginepods import EnginePods
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import LORA_ADAPTERS, LORA_POOLS, MODELS, TENANTS
from shoal.ledger.shipper import Shipper
from shoal.ledger.spool import Spool
from shoal.ledger.tokenfile import TokenFile
from shoal.net.tls import Credentials
from shoal.serving import tracing
from shoal.serving.installkey import KeyRing
from shoal.serving.server import Server, make_server
from shoal.signals.stream import Me
from shoal.signals.totals import Totals

if TYPE_CHECKING:
    from shoal.gateway.tracing import Traces

log = structlog.get_logger()

_AGENT_KEEP_ALIVE: Final = 30.0
"""Longer than the time between two acknowledgements."""
_SECURED_KEEP_ALIVE: Final = 50.0
"""Of connections to what ends mutual TLS in front of engines: shorter than `sidecar.IDLE_SECONDS`."""


_NOT_LISTED: Final = "not listed yet: the API server is not reachable, or does not allow it"


class Process:
    """One gateway. `run` returns after a stop that was asked for by SIGTERM, SIGINT or `stop`."""

    def __init__(
        self,
        settings: GatewaySettings,
        client: Client,
        *,
        engine_port: Callable[[Replica], int] = engine_port,
    ) -> None:
        self.settings = settings
        self.credentials = Credentials(settings.mtls_dir, serves=settings.mtls)
        self.metrics = Metrics(settings.max_tracked_models)
        self.tracing = tracing.from_environment("shoal-gateway", self.metrics.registry)
        self.key_ring = KeyRing(settings.keys_dir, settings.install_key_dir)
        self.demand = DemandBook()
        self.teller = Teller(self.demand, gateway_boot(settings.pod_name, uuid.uuid4().hex))
        self.me = Me(settings.pod_name, self.teller.hub.boot)
        self.metrics.registry.register(Figures(self.me.boot, self.demand, self._model_names))
        self.peers = Peers(
            client,
            settings.pod_namespace,
            self.me,
            self.key_ring,
            changed=self._held_elsewhere,
            tenants=self.demand.tenants,
            credentials=self.credentials,
        )
        self.totals = (
            Totals(
                settings.ledger_url, lambda: self.key_ring.said_by("gateway", keys.LEDGER), self.me, self.credentials
            )
            if settings.ledger_url
            else None
        )
        self.quotas = Quotas(self.demand.tenants, crowd=self.peers.crowd, ledger=self.totals)
        if self.totals is not None:
            self.totals.changed = self.quotas.heard
            self.totals.repriced = self.teller.priced_in
        self.fleet = Fleet(self.key_ring, self.me, self.demand, self.credentials)
        self.spool = Spool(
            settings.spool_dir,
            max_bytes=settings.spool_max_bytes,
            when_full=settings.when_spool_full,
            keep_seconds=settings.spool_keep_seconds,
        )
        self.shipper = (
            Shipper(
                self.spool,
                settings.ledger_url,
                lambda: self.key_ring.said_by("gateway", keys.LEDGER),
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
        self.acks = Acks(self.fleet, self.me, self.agents)
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
        }
        self.directory = Directory(
            self._reflectors["models"].objects,
            self._reflectors["tenants"].objects,
            self.pods.objects,
            self._follow,
            pools=self._reflectors["pools"].objects,
            adapters=self._reflectors["adapters"].objects,
        )
        self.directory.listed = lambda: not self._not_listed()
        self.logs = LogsApi(
            RequestLog(settings, gateway=settings.pod_name, days=self._retention),
            self.key_ring,
            self._other_gateways,
            credentials=self.credentials,
        )
        self.metrics.registry.register(LogFigures(self.logs.book))
        self.gateway = Gateway(
            settings,
            self.directory,
            self.fleet,
            self.key_ring,
            self.spool,
            self.pool,
            self.metrics,
            elsewhere=self.peers.held_elsewhere,
            quotas=self.quotas,
            me=self.me,
            agents=self.agents,
            engine_port=engine_port,
            logs=self.logs,
            traces=self._traces(),
            credentials=self.credentials,
        )
        self.server = make_server(
            self.gateway,
            host=settings.host,
            port=settings.port,
            keep_alive=settings.keep_alive_seconds,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            max_head_bytes=settings.max_head_bytes,
            head_seconds=settings.body_seconds,
            max_connections=self.gateway.memory.connections,
            max_unfinished_bytes=self.gateway.memory.heads,
            stop_seconds=int(settings.hold_seconds + settings.request_seconds + settings.body_seconds)
            + (int(2 * mediafetch.SECONDS) if settings.media_egress else 0)
            + 1,
        )
        ops = Ops(
            self.metrics.registry,
            self.missing,
            self._refresh_gauges,
            self.teller.hub,
            self.key_ring,
            notes=self.notes,
            logs=self.logs,
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
        self._tls_seen: tuple[int, ...] | None = None

    def stop(self) -> None:
        """Asks for a graceful stop; asking again changes nothing."""
        if not self._stop.is_set():
            log.info("stopping: unready now, then no new requests, then the streams to their end")
        self._stop.set()

    def missing(self) -> dict[str, str]:
        """Why the gateway is not ready, by part; empty when it is."""
        missing: dict[str, str] = {}
        if self._stop.is_set():
            missing["stopping"] = "asked to stop"
        missing |= self._not_listed()
        if self.settings.mtls and (why := self.credentials.missing):
            missing["certificate"] = why
        if not self.key_ring:
            missing["installKey"] = f"no keys in {self.settings.keys_dir}: the operator makes them"
        if self.spool.refusing is not None:
            missing["spool"] = self.spool.refusing
        return missing

    def _not_listed(self) -> dict[str, str]:
        """Why a list was never read, by what it is of."""
        missing: dict[str, str] = {}
        for source, reflector in self._reflectors.items():
            if reflector.synced.is_set():
                continue  # once it knows, it goes on with what it knows, whatever becomes of the API server
            if reflector.missing:
                if source in ("pools", "adapters"):
                    continue  # CustomResourceDefinitions of an older version: there are no adapters then
                missing[source] = "the API server does not know this kind: the CustomResourceDefinitions are missing"
            else:
                missing[source] = _NOT_LISTED
        if not self.pods.synced.is_set():
            missing["pods"] = _NOT_LISTED
        return missing

    def notes(self) -> dict[str, str]:
        """What is wrong without making the gateway unready, by part."""
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
        if (why := self.logs.book.writer.stats.error) is not None:
            notes["requestLog"] = f"entries are dropped: {why}"
        return notes

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Runs until stopped. `started` is called when both ports listen."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self.spool.start()
        self.key_ring.refresh()
        self.credentials.refresh()
        self.fleet.streams.start()
        self.peers.streams.start()
        if self.totals is not None:
            self.totals.start()
            self.totals.follow()
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(r.run()) for r in self._reflectors.values()]
                background.append(group.create_task(self.pods.run()))
                background.append(group.create_task(self.peers.reflector.run()))
                background.append(group.create_task(self._housekeeping()))
                background.append(group.create_task(self.logs.book.run()))
                if self.shipper is not None:
                    background.append(group.create_task(self.shipper.run()))
                ops = group.create_task(self._serve(self.ops))
                await _listening(self.ops)
                secured = None
                if self.peer_ops is not None:
                    secured = group.create_task(self._serve(self.peer_ops))
                    await _listening(self.peer_ops)
                main = group.create_task(self._serve(self.server))
                await _listening(self.server)
                log.info("serving", port=self.server.port, ops_port=self.ops.port, tls=bool(self.settings.tls_cert))
                collector.calm()
                started()
                await self._stop.wait()
                self.gateway.stopping = True
                # Endpoints and load balancers learn of us with a delay: until then requests still come.
                await asyncio.sleep(self.settings.settle_seconds)
                self.server.should_exit = True
                await main
                if self.shipper is not None:
                    await self.shipper.drain(self.settings.ship_seconds)
                self.teller.close()
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
            await self.peers.streams.close()
            if self.totals is not None:
                await self.totals.close()
            self.pool.close()
            await self.logs.close()
            await self.gateway.usage.close()
            await self.gateway.media.close()
            await self.logs.book.stop()
            await self.spool.stop()
            await tracing.close(self.tracing)
            log.info("stopped")

    async def _serve(self, server: Server) -> None:
        try:
            await server.serve()
        except SystemExit:
            # uvicorn's way to say that it could not listen; it would slip past the task group.
            config = server.config
            raise RuntimeError(f"cannot listen on {config.host}:{config.port}") from None

    async def _housekeeping(self) -> None:
        while True:
            if self.key_ring.refresh():
                self._follow()
                self.peers.follow()
                if self.totals is not None:
                    self.totals.follow()
                self.gateway.holds.look()
            self.credentials.refresh()
            self.pool.sweep()
            self.agents.sweep()
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
        self.demand.adapters.retain(snapshot.words.adapter_uids)

    def _held_elsewhere(self, uid: str | None) -> None:
        """More or less waits in the other gateways, of one Model or of any: this one's share is another."""
        if uid is None:
            self.gateway.holds.look()
        else:
            self.gateway.holds.poke(uid)

    def _retention(self) -> dict[str, int] | None:
        """Days that each tenant's request log is kept; None while the Tenants are not known."""
        tenants = self._reflectors["tenants"]
        if not tenants.synced.is_set():
            return None
        return {name: tenant.spec.logging.retention_days for name, tenant in tenants.objects.items()}

    def _other_gateways(self) -> list[facts.Pod] | None:
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
        live = len(self.fleet.heard)
        metrics.streams.labels("live").set(live)
        metrics.streams.labels("down").set(max(0, self.fleet.streams.wanted - live))
        metrics.objects.labels("Model").set(len(snapshot.models))
        metrics.objects.labels("LoRAAdapter").set(len(snapshot.words.adapter_uids))
        metrics.objects.labels("TenantKey").set(len(snapshot.keys))
        metrics.objects.labels("Pod").set(sum(map(len, snapshot.replicas.values())))
        metrics.rogue_pods.set(self.pods.ownership.rogue)
        metrics.body_bytes.set(self.gateway.budget.held)


async def _listening(server: Server) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag and no event
        await asyncio.sleep(0.01)
