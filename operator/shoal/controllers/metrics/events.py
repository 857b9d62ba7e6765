"""Counters and histograms of what happened in this process: decisions, wakes from zero, cold starts."""

from collections.abc import Callable
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from shoal.api.model import Model
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.coldstart import FIRST_TOKEN, GRAPH_CAPTURE, STAGES, of_pod
from shoal.core.layers.faults import layer_label
from shoal.core.scaling import ScalingDecision
from shoal.core.status.variants import cold_start
from shoal.kube.projections import Custom

BUCKETS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
"""Seconds: from a small model out of a warm cache to a large one from far away."""
_MODEL: Final = ("model",)
"""`namespace/name`."""

Labels = tuple[str, ...]
T = TypeVar("T", Counter, Histogram)


class EventMetrics:
    """`decided` and the store's events come here; `leads` says whether they are this operator's to count."""

    def __init__(
        self, world: World, registry: CollectorRegistry, leads: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """`clock` gives seconds and never goes back."""
        self._world, self._leads, self._clock = world, leads, clock
        self._decisions = Counter(
            "shoal_model_decisions",
            "Decisions that changed a Model's replicas, with the layer of the reason.",
            [*_MODEL, "direction", "reason", "layer"],
            registry=registry,
        )
        self._wakes = Histogram(
            "shoal_model_wake_seconds",
            "Time from the decision to wake a Model without replicas until its first replica is Ready.",
            _MODEL,
            buckets=BUCKETS,
            registry=registry,
        )
        self._cold_starts = Histogram(
            "shoal_model_cold_start_seconds",
            "Time from the creation of the pod to Ready. Replicas whose engine restarted do not count.",
            [*_MODEL, "gpu_class"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._stages = Histogram(
            "shoal_model_cold_start_stage_seconds",
            "Part of a cold start: schedule, pull (images and volumes), fetch (weights), load (engine, to Ready), "
            "graph_capture (part of load, where the engine says it), first_token (after Ready, to the first answer).",
            [*_MODEL, "gpu_class", "stage"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._waking: dict[str, float] = {}
        """Uid of a Model that wakes -> when that was decided."""
        self._shown: dict[str, set[tuple[Counter | Histogram, Labels]]] = {}
        """Uid of a Model -> its series: they go with it."""

    def decided(self, model: Model, decision: ScalingDecision, before: int) -> None:
        """Another number of replicas was decided for."""
        uid = model.metadata.uid
        if decision.wanted == before:
            return
        direction = "up" if decision.wanted > before else "down"
        self._of(self._decisions, model, direction, decision.reason, layer_label(decision.reason)).inc()
        if not decision.wanted:
            self._waking.pop(uid, None)
        elif not before and not any(p.ready and not p.deleting for p in self._world.pods.by("model", uid)):
            self._waking.setdefault(uid, self._clock())
            self._of(self._wakes, model)

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is None or after.gpu_class is None or (before is not None and before.ready) or not self._leads():
            return
        custom = self._world.model_by_uid(after.model_uid)
        if custom is None or custom.object is None:
            return
        if not after.ready:
            # Shown before it ends: an increase over a time does not see what a series begins with.
            self._of(self._cold_starts, custom.object, after.gpu_class)
            for stage in (*STAGES, GRAPH_CAPTURE, FIRST_TOKEN):
                self._of(self._stages, custom.object, after.gpu_class, stage)
            return
        began = self._waking.pop(custom.metadata.uid, None)
        if began is not None:
            self._of(self._wakes, custom.object).observe(self._clock() - began)
        # A pod that was there when this process first looked started at a time that nobody here measured.
        if before is not None and not before.was_ready and (seconds := cold_start(after)) is not None:
            self._of(self._cold_starts, custom.object, after.gpu_class).observe(seconds)
            if (stages := of_pod(after)) is not None:
                for stage in STAGES:
                    self._of(self._stages, custom.object, after.gpu_class, stage).observe(getattr(stages, stage))

    def learned(self, model_uid: str, gpu_class: str, stage: str, seconds: float) -> None:
        """A stage of a cold start that its pod does not tell became known (`ColdStarts`)."""
        custom = self._world.model_by_uid(model_uid)
        if custom is not None and custom.object is not None and self._leads():
            self._of(self._stages, custom.object, gpu_class, stage).observe(seconds)

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is None or (after is not None and after.metadata.uid == before.metadata.uid):
            return
        uid = before.metadata.uid
        self._waking.pop(uid, None)
        for metric, labels in self._shown.pop(uid, set()):
            metric.remove(*labels)

    def _of(self, metric: T, model: Model, *labels: str) -> T:
        all_labels = (f"{model.metadata.namespace}/{model.metadata.name}", *labels)
        self._shown.setdefault(model.metadata.uid, set()).add((metric, all_labels))
        return metric.labels(*all_labels)
