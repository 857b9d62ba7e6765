"""The parts of an operator, the tasks that run while it leads, and its health."""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import prometheus_client
import structlog

from shoal.api import names, reasons
from shoal.api.config import OperatorConfig
from shoal.api.demand import FirstToken
from shoal.api.model import CanaryAnswers
from shoal.controllers import devices, triggers
from shoal.controllers.cachevolumes import CacheVolumesController
from shoal.controllers.children import inferencepools
from shoal.controllers.classbackoffs import ClassBackoffs
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.consolidation import FleetConsolidation
from shoal.controllers.enginesizes import EngineSizes
from shoal.controllers.executor import Executor
from shoal.controllers.gpuclass import GPUClassController
from shoal.controllers.healthprobes import HealthProbes
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.keda.certificate import ScalerCertificate
from shoal.controllers.keda.driver import Driver
from shoal.controllers.keda.targets import ScalerTargets
from shoal.controllers.lora import LoRAControllers
from shoal.controllers.lora.signals import NoAdapterSignals
from shoal.controllers.metrics import EventMetrics, ObjectMetrics
from shoal.controllers.model import ModelController
from shoal.controllers.modelqueue import ModelQueue
from shoal.controllers.pendingpodevents import PendingPodEvents
from shoal.controllers.planner import Planner
from shoal.controllers.prefetch import PrefetchController
from shoal.controllers.queuemessages import QueueMessages
from shoal.controllers.route import RouteController
from shoal.controllers.scaling.history import DecisionHistory
from shoal.controllers.scaling.observe import ModelObserver, no_past
from shoal.controllers.scaling.scaler import Scaler
from shoal.controllers.scaling.signals import ScalingSignals, SignalStreams
from shoal.controllers.scaling.stalesignals import StaleSignals
from shoal.controllers.scaling.wake import Waker
from shoal.controllers.state import FleetState
from shoal.controllers.tenant import TenantController
from shoal.controllers.transport import CertificateIssuer
from shoal.controllers.world import World
from shoal.core.ownership import Link, link
from shoal.core.placement import Moves
from shoal.kube import auth
from shoal.kube.client import KubeClient
from shoal.kube.events import Event, Recorder
from shoal.kube.lease import Elector
from shoal.kube.ownership import ENGINES
from shoal.kube.queue import WorkQueue
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import (
    DEPLOYMENTS,
    GPUCLASSES,
    JOBS,
    LORA_ADAPTERS,
    LORA_POOLS,
    MODEL_ROUTES,
    MODELS,
    NETWORKPOLICIES,
    NODES,
    PDBS,
    PERSISTENTVOLUMECLAIMS,
    PERSISTENTVOLUMES,
    PODS,
    REPLICASETS,
    TENANTS,
)
from shoal.kube.watch import Watched, Watcher
from shoal.net.stream import ListenerIdentity
from shoal.runtime import collector
from shoal.runtime.scaler import ScalerPlace, scaler_server
from shoal.signals.dcgm import DCGMMetrics
from shoal.signals.history import History
from shoal.signals.prometheus import PrometheusSignals

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


class OperatorProcess:
    """One operator process. `run` until cancelled."""

    def __init__(
        self,
        client: KubeClient,
        config: OperatorConfig,
        namespace: str,
        *,
        identity: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        signals: ScalingSignals | None = None,
        scaler: ScalerPlace | None = None,
    ):
        """`signals`: what reports loads and demands instead of streams to replicas and gateways. `scaler`: where KEDA
        is answered; by default only inside this host. Raises ValueError when the pod's address is none."""
        self.identity = identity or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.client = client
        self.recorder = Recorder(client, self.identity[:128])
        self.world = world = World(client, config, namespace, self.recorder)
        self.state = FleetState(world)
        self.install = InstallKeySource(
            client, namespace, behind=world.has_gateways_of_before, in_use=world.install_keys_in_use
        )
        self.transport = CertificateIssuer(world)
        credentials = self.transport.credentials
        self.elector = Elector(client, namespace, names.LEASE_NAME, self.identity)
        self.registry = prometheus_client.CollectorRegistry()
        """Metrics of the fleet; the process's own metrics are in the default registry."""
        leads: Callable[[], bool] = lambda: self.elector.leading  # noqa: E731
        events = EventMetrics(world, self.registry, leads, time.monotonic)
        self.cold = cold = ColdStarts(world, self.state, events.learned)
        me = ListenerIdentity(self.identity, secrets.token_hex(8))
        self.listening: SignalStreams | PrometheusSignals | None = None
        if signals is None and config.signals.source == "Prometheus":
            self.listening = signals = PrometheusSignals(
                config.signals.prometheus, world.signal_sources, self.signal_changed
            )
        elif signals is None:
            self.listening = SignalStreams(
                world,
                self.install,
                self.signal_changed,
                me,
                credentials=credentials,
                repriced=self._repriced,
                canaries_halted=self._canaries_halted,
                first_tokens=self._first_tokens,
            )
            signals = self.listening.listener

        # Decisions, and what carries them out.
        wakes = WorkQueue("wake", workers=16)
        self.model_queue = models = ModelQueue(world, WorkQueue("model", workers=24, behind=wakes))
        self.backoffs = ClassBackoffs(world, self.state, cold)
        self.pending_events = PendingPodEvents(world, self.state, cold)
        self.queue_messages = QueueMessages(world, self.state)
        targets = ScalerTargets(world, self.state.reservations, models.add_uid)
        self.keda_certificate = ScalerCertificate(world.client, world.namespace, world.config.scaling.keda, world.now)
        self.keda = scaler_server(world, targets, lambda: self.elector.certain, scaler or ScalerPlace())
        self.driver = Driver(world, targets, self.keda, models.add_uid)
        self.proxies = inferencepools.kinds(world)
        executor = Executor(
            world,
            self.state,
            self.driver,
            self.install,
            self.transport,
            cold,
            signals.load,
            self.proxies,
            lambda: self.elector.certain,
        )
        self.waker = Waker(world, self.state, executor, wakes)
        self.past = History(config.signals.prometheus) if config.signals.prometheus.url else None
        observer = ModelObserver(
            world, self.state, cold, signals, time.monotonic, self.past.work_rate if self.past else no_past
        )
        stale_signals = StaleSignals(self.state, models.add, time.monotonic)
        self.scaler = Scaler(world, self.state, observer, self.waker, stale_signals, models.decided)
        self.history = DecisionHistory(world, self.state, signals, self.driver.conditions.stats)
        self.planner = Planner(world, self.state, self.scaler.wanted, models.decided, Moves())

        # A controller for each kind.
        self.dra = devices.kinds(world)
        self.taint_rules = devices.taint_rules(world)
        self.models = ModelController(world, self.state, stale_signals, executor, self.driver, cold, models)
        self.classes = GPUClassController(
            world,
            self.state.gpus,
            self.planner.calibration,
            cold,
            self.dra,
            WorkQueue("gpuclass", workers=2, behind=wakes),
            consolidation=FleetConsolidation(world, self.state, cold, signals),
            state=self.state,
        )
        match = config.health.dcgm.match
        self.gpu_metrics = (
            DCGMMetrics(config.signals.prometheus, config.health.dcgm, self.classes.enqueue_all) if match else None
        )
        self.classes.health.metrics = self.gpu_metrics
        self.probes = HealthProbes(
            world,
            self.install,
            self.classes.health,
            signals.load,
            self.classes.queue.add,
            self._answers_learned,
            credentials,
        )
        self.engine_sizes = EngineSizes(
            world,
            self.planner.sizes,
            self.planner.calibration,
            self.install,
            WorkQueue("engine-sizes", workers=8),
            models.add_uid,
            credentials,
            graphs=lambda pod, seconds: cold.on_graphs(pod, seconds) and models.add_uid(pod.model_uid),
        )
        # Adapters have no samples: thousands of names are nothing for Prometheus.
        self.adapter_streams = (
            SignalStreams(
                world,
                self.install,
                self._adapter_signal_changed,
                me,
                pooled=True,
                credentials=credentials,
                repriced=self._repriced,
                canaries_halted=self._canaries_halted,
                first_tokens=self._first_tokens,
            )
            if isinstance(self.listening, PrometheusSignals)
            else None
        )
        streams = self.listening if isinstance(self.listening, SignalStreams) else self.adapter_streams
        hears = streams.listener if streams is not None else NoAdapterSignals()
        self.lora = LoRAControllers(world, self.install, hears, me, credentials)
        currency = None if isinstance(hears, NoAdapterSignals) else hears.currency
        refused = None if isinstance(hears, NoAdapterSignals) else hears.prices_refused
        self.tenants = TenantController(world, WorkQueue("tenant", workers=2), currency, refused)
        halts = None if isinstance(hears, NoAdapterSignals) else hears.canaries
        self.routes = RouteController(world, WorkQueue("modelroute", workers=2), halts)
        self.cache_volumes = CacheVolumesController(world, WorkQueue("cache-volumes", workers=1))
        self.prefetch = PrefetchController(world, self.state, models, WorkQueue("prefetch", workers=1))
        triggers.connect(
            triggers.Parts(
                world=world,
                state=self.state,
                cold=cold,
                backoffs=self.backoffs,
                scaler=self.scaler,
                planner=self.planner,
                driver=self.driver,
                keda=self.keda,
                models=self.models,
                classes=self.classes,
                tenants=self.tenants,
                routes=self.routes,
                lora=self.lora,
                engine_sizes=self.engine_sizes,
                cache_volumes=self.cache_volumes,
                prefetch=self.prefetch,
                install=self.install,
                transport=self.transport,
                events=events,
                streams=[each for each in (self.listening, self.adapter_streams) if isinstance(each, SignalStreams)],
                dra=self.dra,
                proxies=self.proxies,
            )
        )
        self.registry.register(ObjectMetrics(world, self.state.gpus, signals, self.scaler.current, leads))
        self.watcher = Watcher(
            client,
            [
                Watched(GPUCLASSES, world.classes),
                Watched(TENANTS, world.tenants),
                Watched(MODELS, world.models),
                Watched(LORA_POOLS, world.pools),
                Watched(LORA_ADAPTERS, world.adapters),
                Watched(MODEL_ROUTES, world.routes),
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
        self.replica_sets = Reflector(
            client,
            REPLICASETS,
            label_selector=ENGINES,
            project=link,
            on_event=self._replica_set,
            metadata_only=True,
        )
        world.ownership.reported.append(self._rogue)
        self._beat = time.monotonic()

    @property
    def queues(self) -> tuple[WorkQueue, ...]:
        return (
            self.models.queue,
            self.waker.queue,
            self.classes.queue,
            self.tenants.queue,
            self.routes.queue,
            self.cache_volumes.queue,
            self.prefetch.queue,
            *self.lora.queues,
        )

    def trace(self, tracer: "Tracer") -> None:
        """Makes spans of what is done and decided from now on."""
        from shoal.controllers.tracing import OperatorSpans

        spans = OperatorSpans(tracer)
        triggers.trace((*self.queues, self.engine_sizes.queue), self.scaler, spans)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heart())
            group.create_task(self.watcher.run())
            group.create_task(self.replica_sets.run())
            group.create_task(self.driver.watch())
            group.create_task(self.dra.run())
            for rules in self.taint_rules:
                group.create_task(rules.run())
            if self.world.config.ext_proc.enabled:
                group.create_task(self.proxies.run())
            # Only who knows the cluster may lead; who does not lead keeps knowing it.
            await self.watcher.synced.wait()
            await self.replica_sets.synced.wait()
            await self.driver.kinds.known.wait()
            if self.state.gpus.devices.used:
                await devices.until_listed(self.dra, self.taint_rules)
            log.info("synced", models=len(self.world.models), pods=len(self.world.pods), nodes=len(self.world.nodes))
            group.create_task(self.install.run(make=False))
            group.create_task(self.transport.run(leads=False))
            if self.listening is not None:
                group.create_task(self.listening.run())
            if self.adapter_streams is not None:
                group.create_task(self.adapter_streams.run())
            if self.past is not None:
                group.create_task(self.past.run())
            group.create_task(self.elector.run(self._lead))
            group.create_task(collector.run())

    async def _lead(self) -> None:
        self.driver.begin()
        self.classes.begin_term()
        self.backoffs.begin_term()
        self._compare_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.install.run())
            group.create_task(self.transport.run(leads=True))
            group.create_task(self.recorder.run())
            group.create_task(self.classes.queue.run(self.classes.reconcile))
            group.create_task(self.tenants.queue.run(self.tenants.reconcile))
            group.create_task(self.routes.run())
            group.create_task(self.cache_volumes.queue.run(self.cache_volumes.reconcile))
            group.create_task(self.prefetch.queue.run(self.prefetch.reconcile))
            group.create_task(self.scaler.run())
            group.create_task(self.waker.run())
            group.create_task(self.backoffs.run())
            group.create_task(self.pending_events.run())
            group.create_task(self.queue_messages.run())
            group.create_task(self.planner.run())
            group.create_task(self.models.queue.run(self.models.reconcile))
            group.create_task(self.engine_sizes.run())
            group.create_task(self.probes.run())
            if self.gpu_metrics is not None:
                group.create_task(self.gpu_metrics.run())
            group.create_task(self.lora.run())
            group.create_task(self.driver.run())
            group.create_task(self.keda.run())
            group.create_task(self.keda_certificate.run())

    def signal_changed(self, model_uid: str | None, urgent: bool) -> None:
        """The signals of a Model changed, or with None perhaps those of every Model."""
        self.scaler.changed(model_uid, urgent)
        self.lora.reported(model_uid, urgent)

    def _repriced(self) -> None:
        """The ledger's currency is another one, or why it refuses price lists."""
        self.tenants.repriced()

    def _first_tokens(self, model_uid: str, told: Mapping[str, FirstToken]) -> None:
        """A gateway tells of the first answers of new replicas."""
        if self.cold.on_first_tokens(model_uid, told):
            self.model_queue.add_uid(model_uid)

    def _answers_learned(self, model_uid: str, gpu_class: str, answers: CanaryAnswers) -> None:
        """Replicas answered the canary, and something else is known by that."""
        self.state.record(model_uid).canaries[gpu_class] = answers
        self.model_queue.add_uid(model_uid)

    def _canaries_halted(self) -> None:
        """Gateways have halted other canaries than before."""
        self.routes.enqueue_all()

    def _adapter_signal_changed(self, model_uid: str | None, urgent: bool) -> None:
        self.lora.reported(model_uid, urgent)

    def _replica_set(self, kind: ReflectorEvent, replica_set: Link) -> None:
        if kind == "delete":
            self.world.ownership.replica_set_gone(replica_set.uid)
        else:
            self.world.ownership.replica_set(replica_set)

    def _rogue(self, pod: Link, reason: str) -> None:
        """The leader reports the pod at the Model whose labels it carries."""
        custom = self.world.model_by_uid(pod.model_uid)
        if custom is None or not self.elector.leading:
            return
        note = f"pod {pod.key} has the labels of a replica of this Model and is none: {reason}. It gets no request"
        self.recorder.emit(Event(MODELS, custom.metadata, "Warning", reasons.ROGUE_POD, note, "Ignoring"))

    def _compare_all(self) -> None:
        self.classes.enqueue_all()
        self.tenants.enqueue_all()
        self.routes.enqueue_all()
        self.models.enqueue_all()
        self.lora.enqueue_all()
        self.engine_sizes.enqueue_all()
        self.cache_volumes.enqueue_all()
        self.prefetch.enqueue_all()

    async def _heart(self) -> None:
        while True:
            self._beat = time.monotonic()
            self.world.ownership.report()
            await asyncio.sleep(BEAT_SECONDS)

    # --- probes -----------------------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """Why the process should be restarted; empty when it need not be."""
        now, health = time.monotonic(), self.watcher.health
        silence = now - health.last_event
        longest = 3 * self.world.config.resync_seconds + 300
        problems: list[str] = []
        if now - self._beat > 30:
            problems.append(f"the event loop stood still for {now - self._beat:.0f} s")
        if self.watcher.synced.is_set() and silence > longest:
            problems.append(f"nothing heard from the API server for {silence:.0f} s")
        problems += [
            f"a reconcile of {queue.name} runs for {queue.longest_running():.0f} s"
            for queue in (*self.queues, self.engine_sizes.queue)
            if queue.longest_running() > STUCK_SECONDS
        ]
        return problems

    def unready(self) -> list[str]:
        """Why the process is of no use yet."""
        health = self.watcher.health
        if health.missing_kinds:
            kinds = ", ".join(f"{plural}.shoal.dev" for plural in sorted(health.missing_kinds))
            return [f"CustomResourceDefinitions are missing: {kinds}; install the chart shoal-crds"]
        synced = self.watcher.synced.is_set() and self.replica_sets.synced.is_set()
        return [] if synced else ["not every kind was listed yet"]
