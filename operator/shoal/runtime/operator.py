"""`shoal operator run`: wiring, leadership, probes, the end."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import prometheus_client
import structlog
import yaml
from aiohttp import web
from pydantic import ValidationError

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.controllers.cachevolumes import CacheVolumesController
from shoal.controllers.capacity import Capacity
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.figures import EngineFigures
from shoal.controllers.gpuclass import GPUClassController
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.keda.driver import Driver
from shoal.controllers.lora import LoRA
from shoal.controllers.lora import serve as serve_adapters
from shoal.controllers.lora.hearing import Deaf
from shoal.controllers.metrics import Events, Objects
from shoal.controllers.model import ModelController
from shoal.controllers.planner import Planner
from shoal.controllers.scaling import serve as serve_decisions
from shoal.controllers.scaling.ears import Ears, Streams
from shoal.controllers.scaling.observe import no_past
from shoal.controllers.scaling.scale import ScaleWriter
from shoal.controllers.scaling.scaler import Scaler
from shoal.controllers.scaling.wake import Waker
from shoal.controllers.setbacks import Setbacks
from shoal.controllers.standing import Standings
from shoal.controllers.tenant import TenantController
from shoal.controllers.world import World
from shoal.core.placement import Moves
from shoal.kube import auth
from shoal.kube.client import Client
from shoal.kube.events import Recorder
from shoal.kube.lease import Elector
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import (
    DEPLOYMENTS,
    GPUCLASSES,
    JOBS,
    LORA_ADAPTERS,
    LORA_POOLS,
    MODELS,
    NETWORKPOLICIES,
    NODES,
    PDBS,
    PERSISTENTVOLUMECLAIMS,
    PERSISTENTVOLUMES,
    PODS,
    TENANTS,
)
from shoal.kube.watch import Watched, Watcher
from shoal.runtime import collector, logs
from shoal.runtime.scaler import ScalerPlace, scaler_server
from shoal.serving import tracing
from shoal.signals.history import History
from shoal.signals.prometheus import PrometheusEars
from shoal.signals.stream import Me

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = structlog.get_logger()

STUCK_SECONDS: Final = 300.0
"""A reconcile that runs longer hangs: each of its calls has a deadline far below."""
BEAT_SECONDS: Final = 1.0
OURS: Final = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_MODEL}"

SHARES_OF_THE_CACHE: Final = (
    f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_COMPONENT}={names.COMPONENT_CACHE}"
)


class Operator:
    """One operator process. `run` until cancelled."""

    def __init__(
        self,
        client: Client,
        config: OperatorConfig,
        namespace: str,
        *,
        identity: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        ears: Ears | None = None,
        scaler: ScalerPlace | None = None,
    ):
        """`ears`: what tells of replicas and gateways instead of their streams. `scaler`: where KEDA is answered; by
        default only inside this host. Raises ValueError when the pod's address is none."""
        self.identity = identity or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.client = client
        self.recorder = Recorder(client, self.identity[:128])
        self.world = world = World(client, config, namespace, self.recorder)
        self.capacity = Capacity(world)
        self.install = InstallKeySource(client, namespace)
        self.planner = Planner(world, self.capacity, Standings(world), Moves())
        self.elector = Elector(client, namespace, names.LEASE_NAME, self.identity)
        cold = ColdStarts(world)
        self.setbacks = Setbacks(world, cold, self.planner.changed)
        self.planner.setbacks = self.setbacks.of
        me = Me(self.identity, secrets.token_hex(8))
        self.listening: Streams | PrometheusEars | None = None
        if ears is None and config.signals.source == "Prometheus":
            self.listening = ears = PrometheusEars(config.signals.prometheus, world.voices, self.heard)
        elif ears is None:
            self.listening = Streams(world, self.install, self.heard, me)
            ears = self.listening.listener
        scales = ScaleWriter(world, ears.load, lambda: self.elector.certain)
        self.driver = Driver(world, scales)
        self.planner.standings.promised = self.driver.book.promised
        self.driver.book.repromised.append(self.planner.standings.refresh)
        self.waker = Waker(world, self.planner, scales, self.driver, WorkQueue("wake", workers=16))
        self.history = History(config.signals.prometheus) if config.signals.prometheus.url else None
        past = self.history.work_rate if self.history else no_past
        self.scaler = Scaler(world, self.planner, cold, ears, self.waker, past=past)
        self.scaler.book.driven = self.driver.conditions.told
        self.models = ModelController(
            world,
            self.planner,
            self.install,
            self.scaler,
            scales,
            self.driver,
            cold,
            WorkQueue("model", workers=24, behind=self.waker.queue),
        )
        self.classes = GPUClassController(
            world, self.capacity, self.planner, WorkQueue("gpuclass", workers=2, behind=self.waker.queue)
        )
        self.figures = EngineFigures(world, self.planner, self.install, WorkQueue("figures", workers=8))
        # Adapters have no samples: thousands of names are nothing for Prometheus.
        self.beside = (
            Streams(world, self.install, self._heard_of_adapters, me, pooled=True)
            if isinstance(self.listening, PrometheusEars)
            else None
        )
        streams = self.listening if isinstance(self.listening, Streams) else self.beside
        hears = streams.listener if streams is not None else Deaf()
        self.lora = LoRA(world, self.install, hears, me)
        currency = None if isinstance(hears, Deaf) else hears.currency
        self.tenants = TenantController(world, WorkQueue("tenant", workers=2), currency)
        if not isinstance(hears, Deaf):
            hears.priced = self.tenants.repriced
        self.cache_volumes = CacheVolumesController(world, WorkQueue("cache-volumes", workers=1))
        self.registry = prometheus_client.CollectorRegistry()
        """What is said of this operator's fleet; the process's own metrics are in the default registry."""
        leads: Callable[[], bool] = lambda: self.elector.leading  # noqa: E731
        self.scaler.decided.append(Events(world, self.registry, leads, time.monotonic).decided)
        self.registry.register(Objects(world, self.capacity, ears, self.scaler.known, leads))
        self.watcher = Watcher(
            client,
            [
                Watched(GPUCLASSES, world.classes),
                Watched(TENANTS, world.tenants),
                Watched(MODELS, world.models),
                Watched(LORA_POOLS, world.pools),
                Watched(LORA_ADAPTERS, world.adapters),
                Watched(NODES, world.nodes),
                Watched(PODS, world.pods),
                Watched(DEPLOYMENTS, world.deployments, OURS),
                Watched(JOBS, world.jobs, OURS),
                Watched(PERSISTENTVOLUMES, world.cache_volumes, SHARES_OF_THE_CACHE),
                Watched(PERSISTENTVOLUMECLAIMS, world.cache_claims, SHARES_OF_THE_CACHE),
                Watched(PDBS, world.budgets, OURS),
                Watched(NETWORKPOLICIES, world.policies, OURS),
            ],
            credentials=lambda: auth.load(kubeconfig, context),
            resync_seconds=config.resync_seconds,
        )
        self.watcher.resynced.append(self._compare_all)
        self.keda = scaler_server(world, self.driver.book, lambda: self.elector.certain, scaler or ScalerPlace())
        self.driver.follow(self.keda)
        self._beat = time.monotonic()

    @property
    def queues(self) -> tuple[WorkQueue, ...]:
        return (
            self.models.queue,
            self.waker.queue,
            self.classes.queue,
            self.tenants.queue,
            self.cache_volumes.queue,
            *self.lora.queues,
        )

    def trace(self, tracer: "Tracer") -> None:
        """Makes spans of what is done and decided from now on."""
        from shoal.controllers.tracing import OperatorSpans

        spans = OperatorSpans(tracer)
        for queue in (*self.queues, self.figures.queue):
            queue.finished = spans.reconciled
        self.scaler.decided.append(spans.decided)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heart())
            group.create_task(self.watcher.run())
            group.create_task(self.driver.watch())
            # Only who knows the cluster may lead; who does not lead keeps knowing it.
            await self.watcher.synced.wait()
            await self.driver.kinds.known.wait()
            log.info("synced", models=len(self.world.models), pods=len(self.world.pods), nodes=len(self.world.nodes))
            group.create_task(self.install.run(make=False))
            if self.listening is not None:
                group.create_task(self.listening.run())
            if self.beside is not None:
                group.create_task(self.beside.run())
            if self.history is not None:
                group.create_task(self.history.run())
            group.create_task(self.elector.run(self._lead))
            group.create_task(collector.run())

    async def _lead(self) -> None:
        self.driver.begin()
        self._compare_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.install.run())
            group.create_task(self.recorder.run())
            group.create_task(self.classes.queue.run(self.classes.reconcile))
            group.create_task(self.tenants.queue.run(self.tenants.reconcile))
            group.create_task(self.cache_volumes.queue.run(self.cache_volumes.reconcile))
            group.create_task(self.scaler.run())
            group.create_task(self.waker.run())
            group.create_task(self.setbacks.run())
            group.create_task(self.planner.run())
            group.create_task(self.models.queue.run(self.models.reconcile))
            group.create_task(self.figures.run())
            group.create_task(self.lora.run())
            group.create_task(self.driver.run())
            group.create_task(self.keda.run())

    def heard(self, model_uid: str | None, urgent: bool) -> None:
        """Something else is said of a Model, or with None perhaps of every Model."""
        self.scaler.changed(model_uid, urgent)
        self.lora.heard(model_uid, urgent)

    def _heard_of_adapters(self, model_uid: str | None, urgent: bool) -> None:
        self.lora.heard(model_uid, urgent)

    def _compare_all(self) -> None:
        self.classes.enqueue_all()
        self.tenants.enqueue_all()
        self.models.enqueue_all()
        self.lora.enqueue_all()
        self.figures.enqueue_all()
        self.cache_volumes.enqueue_all()

    async def _heart(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)

    # --- probes -----------------------------------------------------------------------------------------------------

    def sick(self) -> list[str]:
        """Why the process should be restarted; empty when it need not be."""
        now, health = time.monotonic(), self.watcher.health
        silence = now - health.last_heard
        longest = 3 * self.world.config.resync_seconds + 300
        problems: list[str] = []
        if now - self._beat > 30:
            problems.append(f"the event loop stood still for {now - self._beat:.0f} s")
        if self.watcher.synced.is_set() and silence > longest:
            problems.append(f"nothing heard from the API server for {silence:.0f} s")
        problems += [
            f"a reconcile of {queue.name} runs for {queue.longest_running():.0f} s"
            for queue in (*self.queues, self.figures.queue)
            if queue.longest_running() > STUCK_SECONDS
        ]
        return problems

    def unready(self) -> list[str]:
        """Why the process is of no use yet."""
        health = self.watcher.health
        if health.missing_kinds:
            kinds = ", ".join(f"{plural}.shoal.dev" for plural in sorted(health.missing_kinds))
            return [f"CustomResourceDefinitions are missing: {kinds}; install the chart shoal-crds"]
        return [] if self.watcher.synced.is_set() else ["not every kind was listed yet"]


def ops_app(operator: Operator) -> web.Application:
    """/healthz, /readyz, /metrics, /v1/decisions, /v1/adapters."""

    def answer(problems: list[str]) -> web.Response:
        return web.Response(status=503 if problems else 200, text="\n".join(problems or ["ok"]) + "\n")

    async def healthz(_: web.Request) -> web.Response:
        return answer(operator.sick())

    async def readyz(_: web.Request) -> web.Response:
        return answer(operator.unready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=prometheus_client.generate_latest() + prometheus_client.generate_latest(operator.registry),
            headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST},
        )

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    leads, leader = (lambda: operator.elector.leading), (lambda: operator.elector.holder)
    app.add_routes(serve_decisions.routes(operator.scaler.book, operator=operator.identity, leads=leads, leader=leader))
    app.add_routes(serve_adapters.routes(operator.lora.book, operator=operator.identity, leads=leads, leader=leader))
    return app


def read_config(path: Path) -> OperatorConfig:
    """Reads the operator's configuration file. Raises click.ClickException with what is wrong in it."""
    try:
        config = OperatorConfig.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise click.ClickException(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors())
        raise click.ClickException(f"{path}: {problems}") from error
    if config.engines.default_version not in config.engines.versions:
        have = ", ".join(config.engines.versions)
        raise click.ClickException(
            f"{path}: engines.defaultVersion {config.engines.default_version!r} is not one of engines.versions: {have}"
        )
    return config


async def serve(
    config: OperatorConfig,
    namespace: str,
    *,
    host: str,
    port: int,
    scaler: ScalerPlace | None = None,
    kubeconfig: str | None = None,
) -> None:
    """Runs an operator until SIGTERM or SIGINT; then the workers stop, the Lease is freed, and it returns."""
    async with await Client.from_environment(kubeconfig=kubeconfig) as client:
        name = os.environ.get("POD_NAME")
        operator = Operator(client, config, namespace, identity=name, kubeconfig=kubeconfig, scaler=scaler)
        traces = tracing.from_environment("shoal-operator", prometheus_client.REGISTRY)
        if traces is not None:
            operator.trace(traces.tracer)
        runner = web.AppRunner(ops_app(operator), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            log.info("operator", identity=operator.identity, namespace=namespace, api_server=client.server, port=port)
            task = asyncio.ensure_future(operator.run())
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await task
            log.info("stopped")
        finally:
            await runner.cleanup()
            await tracing.close(traces)


@click.group()
def command() -> None:
    """The operator."""


@command.command()
@click.option(
    "--config",
    "path",
    envvar="SHOAL_CONFIG",
    default="/etc/shoal/config.yaml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The configuration file that the chart writes.",
)
@click.option("--namespace", envvar="POD_NAMESPACE", default="shoal-system", show_default=True, help="Shoal's own.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address of probes and metrics.")  # noqa: S104
@click.option("--port", envvar="SHOAL_OPS_PORT", default=names.OPS_PORT, show_default=True, help="Their port.")
@click.option("--scaler-port", default=names.SCALER_PORT, show_default=True, help="Where KEDA is answered, if need be.")
@click.option(
    "--pod-ip", envvar="POD_IP", default="", help="By which KEDA reaches this process; empty: by other means."
)
def run(path: Path, namespace: str, host: str, port: int, scaler_port: int, pod_ip: str) -> None:
    """Runs the operator: reconciles GPUClasses, Models and Tenants while it holds the Lease."""
    config = read_config(path)
    logs.configure(config.log_level)
    code = 0
    try:
        pod, uid = os.environ.get("POD_NAME", ""), os.environ.get("POD_UID", "")
        scaler = ScalerPlace(host, scaler_port, pod_ip, pod, uid)
        asyncio.run(serve(config, namespace, host=host, port=port, scaler=scaler))
    except ValueError as error:  # no credentials, or no address
        raise click.ClickException(str(error)) from error
    except BaseExceptionGroup as error:
        log.exception("the operator ends", error=str(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The workers have stopped and the Lease is free. Kopf's thread may still wait for its streams, and the interpreter
    # would wait for it.
    os._exit(code)
