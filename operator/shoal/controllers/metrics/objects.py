"""Gauges of Shoal's own objects, read from the store when they are scraped. What is not known has no sample.

One label, `model`, `pool` or `route`, names an object as `namespace/name`: a scrape has a label `namespace` of its own,
the scraped pod's. Labels are bounded by the number of objects; no message and nothing that a client made up is among
them. Of Tenants and LoRAAdapters there may be thousands, so those with the same condition are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject, ObjectMeta
from shoal.api.model import Model
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.scaling.signals import ScalingSignals
from shoal.controllers.world import World
from shoal.core import quantity
from shoal.core.coldstart import measured
from shoal.core.layers.faults import layer_label
from shoal.kube.projections import Custom

_MODEL: Final = ["model"]
_VARIANT: Final = [*_MODEL, "gpu_class"]
_CONDITION: Final = ["type", "status", "reason", "layer"]
_FAMILIES: Final[dict[str, tuple[str, list[str]]]] = {
    "shoal_model_replicas_wanted": ("Decided number of replicas, whether or not there are GPUs for them.", _MODEL),
    "shoal_model_replicas_min": ("Lower limit of replicas of the Model.", _MODEL),
    "shoal_model_replicas_max": ("Upper limit of replicas of the Model; absent: no limit.", _MODEL),
    "shoal_model_replicas": (
        "Replicas by state: desired and waiting from the Model's status; starting, ready and draining from its pods.",
        [*_VARIANT, "state"],
    ),
    "shoal_model_condition": (
        "1 for the current status and reason of each condition of a Model, with the layer of the reason.",
        [*_MODEL, *_CONDITION],
    ),
    "shoal_model_gpus": ("GPUs that the Model's pods hold, including terminating pods.", _VARIANT),
    "shoal_model_hourly_cost": (
        "Cost of these GPUs per hour. No sample: the class has no price.",
        [*_VARIANT, "currency"],
    ),
    "shoal_model_cold_start_expected_seconds": (
        "Time from the creation of the pod to Ready, of the last replica that started on the class.",
        _VARIANT,
    ),
    "shoal_model_cold_start_longest_stage_seconds": (
        "Stage that takes most of the median of the last cold starts on the class. No sample: they take at most 10 s.",
        [*_VARIANT, "stage"],
    ),
    "shoal_model_signal_sources": (
        "Replicas and gateways that the decision on the Model's replicas depends on, by state: live, or stale.",
        [*_MODEL, "kind", "state"],
    ),
    "shoal_signals_age_seconds": (
        "Age of the oldest live signal.",
        ["kind"],
    ),
    "shoal_rogue_pods": (
        "Pods with the labels of an engine that no Model owns. They are ignored.",
        [],
    ),
    "shoal_gpu_class_gpus": ("GPUs: capacity, allocatable, allocated, free.", ["gpu_class", "state"]),
    "shoal_gpu_class_quarantined": (
        "GPUs, or nodes with all their GPUs, that are out of use or on probation, by reason.",
        ["gpu_class", "state", "reason", "by"],
    ),
    "shoal_gpu_class_consolidating": (
        "1 while a node of the class is being emptied, or is kept empty for the autoscaler to remove it.",
        ["gpu_class"],
    ),
    "shoal_gpu_class_hourly_cost": ("Price of one GPU per hour.", ["gpu_class", "currency"]),
    "shoal_gpu_class_condition": (
        "1 for the current status and reason of each condition of a GPUClass, with the layer of the reason.",
        ["gpu_class", *_CONDITION],
    ),
    "shoal_lora_pool_adapters": (
        "Adapters of the pool: total, available (can serve requests), failed.",
        ["pool", "state"],
    ),
    "shoal_lora_pool_condition": (
        "1 for the current status and reason of each condition of a LoRAPool, with the layer of the reason.",
        ["pool", *_CONDITION],
    ),
    "shoal_lora_adapter_conditions": (
        "LoRAAdapters of a pool by status and reason of each condition, with the layer of the reason.",
        ["pool", *_CONDITION],
    ),
    "shoal_model_route_condition": (
        "1 for the current status and reason of each condition of a ModelRoute, with the layer of the reason.",
        ["route", *_CONDITION],
    ),
    "shoal_tenant_conditions": (
        "Tenants by status and reason of each condition, with the layer of the reason.",
        _CONDITION,
    ),
}


class ObjectMetrics(Collector):
    """`leads`: whether this operator does; `wanted`: replicas that were decided for, by uid of the Model."""

    def __init__(
        self,
        world: World,
        capacity: FleetGPUs,
        signals: ScalingSignals,
        wanted: Callable[[str], int | None],
        leads: Callable[[], bool],
    ) -> None:
        self._world, self._capacity, self._signals = world, capacity, signals
        self._wanted, self._leads = wanted, leads

    def describe(self) -> Iterable[Metric]:
        """The metrics' names, also while nothing is exported."""
        return list(_families().values())

    def collect(self) -> Iterable[Metric]:
        if not self._leads():
            return ()
        families = _families()
        gateways = Counter(self._signals.boot(pod.uid) is not None for pod in self._world.gateways())
        families["shoal_rogue_pods"].add_metric([], self._world.ownership.rogue)
        ages: dict[str, float] = {}
        for pod in self._world.signal_sources():
            if (age := self._signals.age(pod.uid)) is not None:
                kind = "gateway" if pod.gateway else "replica"
                ages[kind] = max(age, ages.get(kind, 0.0))
        for kind, age in ages.items():
            families["shoal_signals_age_seconds"].add_metric([kind], age)
        for custom in self._world.models.values():
            if custom.object is not None:
                for name, labels, value in self._model(custom.object, gateways):
                    families[name].add_metric(labels, value)
        for gpu_class in self._world.accepted_classes().values():
            for name, labels, value in self._class(gpu_class):
                families[name].add_metric(labels, value)
        for pool in self._world.pools.values():
            if pool.object is not None:
                for name, labels, value in _pool(pool.object):
                    families[name].add_metric(labels, value)
        for name, labels, value in self._conditions():
            families[name].add_metric(labels, value)
        return families.values()

    def _model(self, model: Model, gateways: Counter[bool]) -> Iterator[tuple[str, list[str], float]]:
        of = [f"{model.metadata.namespace}/{model.metadata.name}"]
        scaling, status = model.spec.scaling, model.status
        wanted = self._wanted(model.metadata.uid)
        if wanted is not None:
            yield "shoal_model_replicas_wanted", of, wanted
        yield "shoal_model_replicas_min", of, scaling.min_replicas
        if scaling.max_replicas is not None:
            yield "shoal_model_replicas_max", of, scaling.max_replicas
        for variant in status.variants if status is not None else ():
            here = [*of, variant.gpu_class]
            yield "shoal_model_replicas", [*here, "desired"], variant.desired
            yield "shoal_model_replicas", [*here, "waiting"], variant.waiting or 0
            if variant.cold_start_seconds is not None:
                yield "shoal_model_cold_start_expected_seconds", here, variant.cold_start_seconds
            if variant.cold_start is not None and (longest := measured(variant.cold_start.median).bottleneck):
                stage, seconds = longest
                yield "shoal_model_cold_start_longest_stage_seconds", [*here, stage], seconds
        yield from self._pods(model, of, {v.gpu_class for v in status.variants} if status is not None else set())
        for live in (True, False):
            yield "shoal_model_signal_sources", [*of, "gateway", "live" if live else "stale"], gateways[live]

    def _pods(self, model: Model, of: list[str], known: set[str]) -> Iterator[tuple[str, list[str], float]]:
        states: Counter[tuple[str, str]] = Counter()
        gpus: Counter[str] = Counter()
        replicas: Counter[bool] = Counter()
        classes = self._world.accepted_classes()
        for pod in self._world.pods.by("model", model.metadata.uid):
            name = pod.gpu_class
            if pod.finished or name is None:
                continue
            states[name, "draining" if pod.deleting else "ready" if pod.ready else "starting"] += 1
            if pod.node is not None and name in classes:
                gpus[name] += pod.requests.get(classes[name].resource, 0)
            if pod.was_ready and not pod.deleting:
                replicas[self._signals.load(pod.uid) is not None] += 1
        for name in known | {name for name, _ in states}:
            for state in ("starting", "ready", "draining"):
                yield "shoal_model_replicas", [*of, name, state], states[name, state]
            if name in classes:
                yield "shoal_model_gpus", [*of, name], gpus[name]
                if (price := classes[name].spec.hourly_cost) is not None:
                    cost = float(quantity.parse(price.amount)) * gpus[name]
                    yield "shoal_model_hourly_cost", [*of, name, price.currency], cost
        for live in (True, False):
            yield "shoal_model_signal_sources", [*of, "replica", "live" if live else "stale"], replicas[live]

    def _conditions(self) -> Iterator[tuple[str, list[str], float]]:
        """Of all objects, also of those that this version's validation refuses."""
        of_each = (
            ("shoal_model_condition", self._world.models),
            ("shoal_gpu_class_condition", self._world.classes),
            ("shoal_lora_pool_condition", self._world.pools),
            ("shoal_model_route_condition", self._world.routes),
        )
        for name, table in of_each:
            for custom in table.values():
                for labels in _labels(custom.status):
                    yield name, [_key(custom.metadata), *labels], 1
        tenants = Counter(tuple(labels) for custom in self._world.tenants.values() for labels in _labels(custom.status))
        for labels, count in tenants.items():
            yield "shoal_tenant_conditions", list(labels), count
        adapters = Counter(
            (self._pool_of(custom), *labels)
            for custom in self._world.adapters.values()
            for labels in _labels(custom.status)
        )
        for labels, count in adapters.items():
            yield "shoal_lora_adapter_conditions", list(labels), count

    def _pool_of(self, custom: Custom[LoRAAdapter]) -> str:
        """The adapter's pool; "": there is none of that name."""
        key = "" if custom.object is None else custom.object.pool_key
        return key if self._world.pools.get(key) is not None else ""

    def _class(self, gpu_class: GPUClass) -> Iterator[tuple[str, list[str], float]]:
        name, counts = gpu_class.metadata.name, self._capacity.usage(gpu_class).counts()
        states = {"capacity": counts.capacity, "allocatable": counts.allocatable}
        for state, count in (states | {"allocated": counts.allocated, "free": counts.free}).items():
            yield "shoal_gpu_class_gpus", [name, state], count
        stands = gpu_class.status.quarantined if gpu_class.status is not None else ()
        for (state, reason, by), units in Counter((each.state, each.reason, each.by) for each in stands).items():
            yield "shoal_gpu_class_quarantined", [name, state, reason, by], units
        autoscaled = gpu_class.spec.nodes.autoscaled
        if autoscaled is not None and autoscaled.consolidate is not None:
            emptied = gpu_class.status.consolidation if gpu_class.status is not None else None
            yield "shoal_gpu_class_consolidating", [name], float(emptied is not None)
        if (price := gpu_class.spec.hourly_cost) is not None:
            yield "shoal_gpu_class_hourly_cost", [name, price.currency], float(quantity.parse(price.amount))


def _pool(pool: LoRAPool) -> Iterator[tuple[str, list[str], float]]:
    of, status = [f"{pool.metadata.namespace}/{pool.metadata.name}"], pool.status
    if status is None:
        return
    if (counts := status.adapters) is not None:
        states = {"total": counts.total, "available": counts.available, "failed": counts.failed}
        for state, count in states.items():
            yield "shoal_lora_pool_adapters", [*of, state], count


def _key(of: ObjectMeta) -> str:
    return f"{of.namespace}/{of.name}" if of.namespace else of.name


def _labels(status: JsonObject) -> Iterator[list[str]]:
    """Values of the labels type, status, reason and layer of each condition. A reason of another version has no
    layer."""
    conditions: list[JsonObject] = status.get("conditions") or []
    for each in conditions:
        yield [each["type"], each["status"], each["reason"], layer_label(each["reason"])]


def _families() -> dict[str, GaugeMetricFamily]:
    return {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _FAMILIES.items()}
