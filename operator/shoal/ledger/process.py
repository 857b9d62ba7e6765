"""Assembles and runs the parts of the ledger: store, API, totals, housekeeping, shutdown."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Final

import structlog

from shoal.api import names, rights
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.kube.access import Access
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.kube.podtokens import PodTokens
from shoal.ledger import maintenance, records
from shoal.ledger.metrics import CoverageMetrics, LedgerMetrics
from shoal.ledger.monthly import Rated
from shoal.ledger.prices import PriceFolder, PriceMetrics
from shoal.ledger.queries.routes import QueryAPI
from shoal.ledger.reconcile.comparisonmetrics import ComparisonMetrics
from shoal.ledger.reconcile.routes import Routes
from shoal.ledger.reconcile.watch import EngineCoverage, Reconciler
from shoal.ledger.records import Senders
from shoal.ledger.service import LedgerService
from shoal.ledger.settings import LedgerSettings
from shoal.ledger.store import DatabaseUnavailable, LedgerStore
from shoal.ledger.sums import Changes
from shoal.ledger.totals import TenantTotals
from shoal.net import gctuning, trace
from shoal.net.hub import EventStream
from shoal.net.installkey import KeyRing
from shoal.net.pages import ops_shell
from shoal.net.server import make_server
from shoal.net.serving import listening, run_server
from shoal.net.shell import ShellRequest
from shoal.net.stream import ListenerIdentity
from shoal.net.tls import TLSCredentials

log = structlog.get_logger()

NO_ENGINES: Final = EngineCoverage(watching=False, live=0, stale=())
_STOP_SECONDS: Final = 5
_AGAIN_SECONDS: Final = 5.0


class LedgerProcess:
    """The ledger's process. `run` returns after SIGTERM, SIGINT or a call of `stop`.

    Modules with routes of their own add them to `service` before `run`.
    """

    def __init__(self, settings: LedgerSettings, client: KubeClient | None = None) -> None:
        """`client` connects to the cluster whose engines are read, and which verifies metrics readers and gateway pods.

        Without a client the engines' counters stay unknown. Raises ValueError if `metrics_auth`, `gateway_tokens` or
        `role_tokens` is set without a client.
        """
        if settings.metrics_auth and client is None:
            raise ValueError("SHOAL_LEDGER_METRICS_AUTH needs a cluster to verify the tokens of metrics readers")
        if settings.gateway_tokens and client is None:
            raise ValueError("SHOAL_LEDGER_GATEWAY_TOKENS needs a cluster to verify the gateways' tokens")
        if settings.role_tokens and client is None:
            raise ValueError("SHOAL_LEDGER_ROLE_TOKENS needs a cluster to verify the tokens of people")
        self.callers = Callers(client, rights.LEDGER_AUDIENCE) if settings.role_tokens and client is not None else None
        self.access = Access(client) if settings.metrics_auth and client is not None else None
        self.settings = settings
        self.key_ring = KeyRing(settings.keys_dir, settings.install_key_dir)
        self.credentials = TLSCredentials(settings.mtls_dir, serves=settings.mtls)
        self.store = LedgerStore(
            settings.database_url,
            readers=settings.readers,
            max_waiting_records=settings.max_waiting_records,
            answer_seconds=settings.answer_seconds,
            keep_days=settings.retention_days,
        )
        self.prices = PriceFolder(settings.prices_dir)
        self.totals = TenantTotals(self.store, self.prices, refused=lambda: self.prices.refused)
        self.liveness = maintenance.GatewayLiveness(settings.close_open_seconds)
        self.service = LedgerService(
            self.key_ring,
            max_body_bytes=settings.max_body_bytes,
            credentials=self.credentials,
            callers=self.callers,
        )
        self.metrics = LedgerMetrics(self.store, self.totals)
        self.metrics.registry.register(PriceMetrics(self.prices))
        records.add_routes(
            self.service, self.store, max_body_bytes=settings.max_body_bytes, senders=_senders(settings, client)
        )
        QueryAPI(
            self.store,
            self.prices,
            settings.installation,
            keep_days=settings.hours_retention_days,
            credited=self.totals.reload,
        ).add(self.service)
        self.compared = ComparisonMetrics(self.store, _now_ms)
        self.metrics.registry.register(self.compared)
        self.reconciler: Reconciler | None = None
        if client is not None and settings.reconcile:
            me = ListenerIdentity(settings.pod_name, self.totals.hub.boot)
            self.reconciler = Reconciler(client, self.key_ring, self.store, me, credentials=self.credentials)
            self.metrics.registry.register(CoverageMetrics(self.reconciler))
        Routes(self.store, self._coverage, _now_ms).add(self.service)
        self.service.route("GET", names.TOTALS_PATH, self._totals, ("gateway", "billing"))
        self.store.restore = self.prices.restore
        self.store.opened = self.totals.reload
        self.store.committed = self._committed
        self.store.cost = Rated(self.prices).cost
        self.tracing = trace.from_environment("shoal-ledger", self.metrics.registry)
        if self.tracing is not None:
            from shoal.ledger.tracing import LedgerSpans

            self.service.shell.answered = LedgerSpans(self.tracing.tracer).answered
        self.server = make_server(
            self.service.shell, host=settings.host, port=settings.port, keep_alive=75, stop_seconds=_STOP_SECONDS
        )
        self.peers = (
            make_server(
                self.service.shell,
                host=settings.host,
                port=settings.mtls_port,
                keep_alive=75,
                stop_seconds=_STOP_SECONDS,
                credentials=self.credentials,
            )
            if settings.mtls
            else None
        )
        # Invalid price lists do not make the ledger unready: the previous lists stay in force, and records are stored.
        ops = ops_shell(
            "the ledger",
            self.metrics.registry,
            self.missing,
            notes=lambda: {"prices": self.prices.error} if self.prices.error else {},
            access=self.access,
        )
        self.ops = make_server(ops, host=settings.ops_host, port=settings.ops_port, keep_alive=5, stop_seconds=1)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Requests a stop; a repeated call changes nothing."""
        self._stop.set()

    def missing(self) -> dict[str, str]:
        """Why the ledger is not ready, by part; empty when it is."""
        missing: dict[str, str] = {}
        if self._stop.is_set():
            missing["stopping"] = "asked to stop"
        if not self.key_ring:
            missing["installKey"] = f"no keys in {self.settings.keys_dir}: the operator makes them"
        if self.settings.mtls and (why := self.credentials.missing):
            missing["certificate"] = why
        if self.store.error is not None:
            missing["database"] = self.store.error
        return missing

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Runs until stopped. `started` is called when all ports listen.

        Raises:
            CannotListen: a port is taken.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self.key_ring.refresh()
        self.credentials.refresh()
        await self.prices.refresh()
        self.store.start()
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(_lasting(name, each)) for name, each in self._background().items()]
                ops = group.create_task(run_server(self.ops))
                await listening(self.ops)
                main = group.create_task(run_server(self.server))
                await listening(self.server)
                peers = None
                if self.peers is not None:
                    peers = group.create_task(run_server(self.peers))
                    await listening(self.peers)
                log.info("serving", port=self.server.port, ops_port=self.ops.port, database=self.store.database.name)
                gctuning.tune_gc()
                started()
                await self._stop.wait()
                log.info("stopping")
                self.totals.close()
                self.server.should_exit = True
                if self.peers is not None and peers is not None:
                    self.peers.should_exit = True
                    await peers
                await main
                self.ops.should_exit = True
                await ops
                for task in background:
                    task.cancel()
        finally:
            await self.store.stop()
            await trace.close(self.tracing)
            log.info("stopped")

    def _background(self) -> dict[str, Callable[[], Coroutine[None, None, None]]]:
        """Tasks that run beside the API until the ledger stops, by name."""
        settings = self.settings
        parts: dict[str, Callable[[], Coroutine[None, None, None]]] = {
            "housekeeping": self._housekeeping,
            "prices": lambda: self.prices.follow(self.totals.reload, self._keep_prices),
            "totals": self.totals.run,
            "closing": self._closing,
            "retention": lambda: maintenance.retain(self.store, settings.retention_days, settings.hours_retention_days),
        }
        if self.reconciler is not None:
            parts["comparison"] = self.compared.run
            parts["reconciliation"] = self.reconciler.run
        return parts

    def _committed(self, changes: Changes) -> None:
        self.liveness.at(changes.gateways_seen)
        self.totals.add(changes)

    async def _keep_prices(self) -> None:
        # Tried again at the next poll of the folder.
        with contextlib.suppress(DatabaseUnavailable):
            await self.store.write(self.prices.keep, self.prices.kept)

    def _coverage(self) -> EngineCoverage:
        return NO_ENGINES if self.reconciler is None else self.reconciler.coverage

    async def _totals(self, request: ShellRequest) -> EventStream:
        if not self.totals.known:
            raise DatabaseUnavailable("the totals are being read")
        return EventStream(self.totals.hub, request.caller, HEARTBEAT_SECONDS)

    async def _housekeeping(self) -> None:
        while True:
            self.key_ring.refresh()
            self.credentials.refresh()
            self.server.sweep()
            if self.peers is not None:
                self.peers.sweep()
            self.ops.sweep()
            await asyncio.sleep(1.0)

    async def _closing(self) -> None:
        with contextlib.suppress(DatabaseUnavailable):
            while self.store.error is not None:
                self.liveness.begin()
                await asyncio.sleep(1.0)
            await maintenance.retry_quarantined_once(self.store, self.settings.retention_days, self._committed)
        while True:
            await asyncio.sleep(maintenance.CLOSE_SECONDS)
            # The store itself reports that the database is unavailable.
            with contextlib.suppress(DatabaseUnavailable):
                closed, still = await maintenance.close_once(self.store, self.liveness, self._committed)
                self.metrics.closed_rows += closed
                self.metrics.open_rows = still


def _senders(settings: LedgerSettings, client: KubeClient | None) -> Senders | None:
    if not settings.gateway_tokens or client is None:
        return None
    namespace, account = settings.pod_namespace, settings.gateway_account
    return Senders(PodTokens(client, namespace=namespace, account=account, audience=names.LEDGER_AUDIENCE))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _lasting(name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Runs a part of the ledger, and restarts it when it fails: a failed part must not end the ingestion of records."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("a part of the ledger failed and is restarted", part=name)
        await asyncio.sleep(_AGAIN_SECONDS)
