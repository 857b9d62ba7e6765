"""Which change wakes what: one table.

`connect` lists every kind that the operator watches, and the handlers of its changes, in the order of their calls.
First are the handlers that remember a change (`state.py`, GPU counts, cold starts), then those that put a key into a
queue. A handler neither waits nor writes to the cluster. Changes of anything but cluster objects are at the end.

| queue | keys | reconciled by |
|---|---|---|
| model | Models | `model/controller.py` |
| wake | Models at zero for which a request waits | `scaling/wake.py` (the write: `executor.py`) |
| (plan) | the whole fleet, `FleetState.replan` | `planner.py` |
| (replicas) | Models whose number may be another one | `scaling/scaler.py` |
| gpuclass, tenant, lorapool, loraadapter, modelroute | objects of the kind | the kind's controller |
| adapters | replicas whose desired adapters have changed | `lora/desired.py` |
| engine-sizes | pods whose engine is asked for the size of its KV cache | `enginesizes.py` |
| cache-volumes | all namespaces' volumes of the node cache | `cachevolumes.py` |
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shoal.controllers.cachevolumes import CacheVolumesController
from shoal.controllers.classbackoffs import ClassBackoffs
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.enginesizes import EngineSizes
from shoal.controllers.gpuclass import GPUClassController
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.keda.driver import Driver
from shoal.controllers.keda.server import ScalerServer
from shoal.controllers.lora import LoRAControllers
from shoal.controllers.metrics import EventMetrics
from shoal.controllers.model import ModelController
from shoal.controllers.planner import Planner
from shoal.controllers.prefetch import PrefetchController
from shoal.controllers.route import RouteController
from shoal.controllers.scaling.scaler import Scaler
from shoal.controllers.scaling.signals import SignalStreams
from shoal.controllers.state import FleetState
from shoal.controllers.tenant import TenantController
from shoal.controllers.transport import CertificateIssuer
from shoal.controllers.world import World
from shoal.kube.optional import OptionalKinds
from shoal.kube.queue import WorkQueue
from shoal.kube.store import Listener, Table

if TYPE_CHECKING:
    from shoal.controllers.tracing import OperatorSpans  # its library is loaded only where traces are on

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of an operator that have handlers."""

    world: World
    state: FleetState
    cold: ColdStarts
    backoffs: ClassBackoffs
    scaler: Scaler
    planner: Planner
    driver: Driver
    keda: ScalerServer
    models: ModelController
    classes: GPUClassController
    tenants: TenantController
    routes: RouteController
    lora: LoRAControllers
    engine_sizes: EngineSizes
    cache_volumes: CacheVolumesController
    prefetch: PrefetchController
    install: InstallKeySource
    transport: CertificateIssuer
    events: EventMetrics
    streams: Sequence[SignalStreams]
    dra: OptionalKinds
    proxies: OptionalKinds
    """InferencePools, and what belongs to them."""


def subscribe(table: Table[T], *listeners: Listener[T]) -> None:
    """Every change of the table, from now on."""
    table.listeners.extend(listeners)


def remember(world: World, state: FleetState) -> None:
    """What `FleetState` holds follows the store, and a plan is due when something changes that it reads."""
    subscribe(world.nodes, state.gpus.on_node)
    subscribe(world.pods, state.gpus.on_pod, state.on_pod)
    subscribe(world.resource_slices, state.gpus.on_devices)
    subscribe(world.taint_rules, state.gpus.on_devices)
    subscribe(world.taint_rules_beta, state.gpus.on_devices)
    subscribe(world.resource_claims, state.gpus.on_devices, state.on_claim)
    subscribe(world.device_classes, state.gpus.on_devices)
    subscribe(world.deployments, state.on_deployment)
    subscribe(world.scaled_objects, state.on_scaled_object)
    subscribe(world.models, state.on_model)
    subscribe(world.classes, state.on_class)
    state.gpus.changed.append(state.replan)


def connect(parts: Parts) -> None:
    """Once, before the watches begin."""
    world, lora, models = parts.world, parts.lora, parts.models
    remember(world, parts.state)
    subscribe(
        world.pods,
        parts.transport.on_pod,  # all processes of Shoal may speak mutual TLS now
        parts.cold.on_pod,  # how long a replica took to start
        parts.backoffs.on_pod,  # a replica starts
        parts.scaler.on_pod,  # a replica or a gateway came, went, or turned ready
        models.artifacts.on_pod,  # the pod of a Job that reads a source
        models.on_pod,  # the Model's status
        models.on_gateway,  # where proxies ask
        parts.classes.on_pod,  # it may need the node that is being emptied
        parts.engine_sizes.on_pod,  # an engine that has not said its KV cache yet
        *(streams.on_pod for streams in parts.streams),  # a stream to it begins or ends
        lora.desired.on_pod,  # adapters of a replica that is gone
        lora.placer.on_pod,  # a replica that may hold adapters
        lora.adapters.reader.on_pod,  # the pod of a Job that reads adapters
        parts.cache_volumes.on_pod,  # a claim on the node cache is in use
        parts.events.on_pod,  # metrics of cold starts and wakes
    )
    subscribe(
        world.models,
        parts.scaler.on_model,  # other bounds, or an annotation that wakes
        parts.driver.on_model,  # KEDA is to be answered, or not any more
        parts.transport.on_model,  # its certificate is gone with it
        models.artifacts.on_model,  # facts of a source that other Models name too
        models.on_model,  # itself, and Models that claim the same names
        parts.engine_sizes.on_model,  # its gauges
        lora.pools.on_model,  # the pool that names it
        lora.adapters.on_model,  # adapters that claim the same names, or whose base it is
        parts.tenants.on_model,  # Tenants that grant it
        parts.routes.on_model,  # routes that name it, or that claim the same names
        parts.cache_volumes.on_model,  # whether its weights are cached
        parts.prefetch.on_model,  # whether they are fetched in advance
        parts.events.on_model,  # its metrics
    )
    subscribe(
        world.deployments,
        parts.scaler.on_deployment,  # replicas as written, and whether a rollout is under way
        parts.driver.on_deployment,  # whether KEDA's answer is carried out
        models.on_child,
        lora.pools.on_deployment,
    )
    subscribe(world.budgets, models.on_child)
    subscribe(world.policies, models.on_child)
    subscribe(world.claim_templates, models.on_child)
    subscribe(world.inference_pools, models.on_child)
    subscribe(world.picker_services, models.on_child)
    subscribe(world.picker_slices, models.on_child)
    subscribe(world.classes, models.on_class, parts.classes.on_class)
    subscribe(world.tenants, models.on_tenant, lora.adapters.on_tenant, parts.tenants.on_tenant, parts.routes.on_tenant)
    subscribe(
        world.pools,
        models.on_pool,
        *(streams.on_pool for streams in parts.streams),
        lora.pools.on_pool,
        lora.adapters.namespaces.on_pool,  # labels of namespaces are needed from the first pool that selects by them
        lora.adapters.on_pool,
    )
    subscribe(
        world.adapters,
        models.on_adapter,
        lora.pools.on_adapter,
        lora.adapters.on_adapter,
        parts.tenants.on_adapter,
        parts.routes.on_adapter,
    )
    subscribe(world.routes, parts.routes.on_route)
    subscribe(world.jobs, models.artifacts.on_job, lora.adapters.reader.on_job, parts.prefetch.on_job)
    subscribe(world.scaled_objects, parts.driver.on_scaled)
    subscribe(world.trigger_authentications, parts.driver.on_scaled)
    subscribe(world.autoscalers, parts.driver.on_autoscaler)
    subscribe(world.cache_volumes, parts.cache_volumes.on_share)
    subscribe(world.cache_claims, parts.cache_volumes.on_share)

    # What is no object of the cluster.
    after(parts.state.gpus.changed, parts.classes.on_counts)  # GPUs that nodes offer or pods hold
    # No further node of a class is expected, or some are: the status of the class, and how long clients of Models wait.
    after(parts.backoffs.changed, parts.classes.enqueue_all, models.enqueue_all)
    after(parts.planner.calibration.overheads_changed, parts.classes.on_counts)  # measured overhead of a class
    after(parts.install.changed, models.enqueue_all, *(streams.follow_all for streams in parts.streams))
    after(parts.transport.changed, models.enqueue_all)  # every engine pod may have to speak otherwise
    after(parts.driver.kinds.changed, models.enqueue_all)  # KEDA was installed or removed
    after(parts.proxies.changed, models.enqueue_all)  # InferencePools are there now, or no more
    after(parts.dra.changed, parts.classes.enqueue_all)  # the cluster has dynamic resource allocation now
    parts.driver.targets.changed.append(parts.keda.answer_changed)  # pushed to KEDA's open streams
    if parts.keda.certificate is not None:
        after(parts.keda.certificate.changed, parts.driver.conditions.wake_all)  # the status of Models that KEDA scales
    parts.scaler.decided.append(parts.events.decided)


def trace(queues: Iterable[WorkQueue], scaler: Scaler, spans: "OperatorSpans") -> None:
    """A span for each reconcile, and for each decision that changes a Model's replicas, from now on."""
    for queue in queues:
        queue.finished.append(spans.reconciled)
    scaler.decided.append(spans.decided)


def after(changes: list[Callable[[], None]], *listeners: Callable[[], None]) -> None:
    """Each time that something has changed."""
    changes.extend(listeners)
