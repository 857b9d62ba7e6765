"""Rows of the status table, computed from API objects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.api.model import ModelStatus, VariantStatus
from shoal.api.modelroute import ModelRouteStatus
from shoal.api.replica import StageProgress
from shoal.core import facts
from shoal.core.status.conditions import find
from shoal.core.status.variants import step
from shoal.kube import projections

_GI = 2**30


@dataclass(frozen=True, slots=True)
class VariantRow:
    """One GPU class that a Model uses."""

    gpu_class: str
    desired: int
    ready_replicas: int
    waiting: int
    gpus: int | None
    """GPUs of all its replicas; None: unknown."""
    step: str
    """Step of the least advanced replica, with the percentage of the fetch if known."""
    cold_start_seconds: int | None
    kv_tokens_per_replica: int | None
    """KV cache tokens of one replica: reported by the engine, or else predicted."""
    hourly_cost: str | None


@dataclass(frozen=True, slots=True)
class CanaryRow:
    """The canary of one rule of a route."""

    rule: str
    state: str
    """Running or Halted."""
    message: str
    """Why it is halted; "": it is not."""


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One ModelRoute."""

    namespace: str
    name: str
    ready: str
    """True, False or Unknown."""
    reason: str
    message: str
    served_names: tuple[str, ...]
    """Short names that it owns."""
    canaries: tuple[CanaryRow, ...]

    @property
    def noteworthy(self) -> str:
        """What a person should know of it; "": it serves as it was declared."""
        serves = self.ready == "True" and self.reason == reasons.TARGETS_READY
        return "" if serves else f"{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One Model."""

    namespace: str
    name: str
    ready: str
    """True, False or Unknown."""
    reason: str
    message: str
    variants: tuple[VariantRow, ...]
    capabilities: tuple[str, ...] = ()
    """What it can do, as gateways list it."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def engine_pods(raw: Iterable[JsonObject]) -> list[facts.Pod]:
    """The engine pods that are neither finished nor being deleted."""
    found = (projections.pod(pod) for pod in raw)
    return [p for p in found if p is not None and p.model_uid and not p.finished and not p.deleting]


def fetching(pods: Iterable[facts.Pod]) -> list[facts.Pod]:
    """Pods that are fetching weights."""
    return [p for p in pods if (stage := p.container(names.CONTAINER_STAGE)) is not None and stage.running]


def rows(
    models: Iterable[JsonObject], pods: Sequence[facts.Pod] | None, progress: Mapping[str, StageProgress]
) -> list[ModelRow]:
    """One row per Model, sorted by namespace and name. `pods` None: pods may not be read. `progress` is by pod key."""
    found = [_row(raw, pods, progress) for raw in models]
    return sorted(found, key=lambda row: (row.namespace, row.name))


def _row(raw: JsonObject, pods: Sequence[facts.Pod] | None, progress: Mapping[str, StageProgress]) -> ModelRow:
    metadata = raw["metadata"]
    own = None if pods is None else [p for p in pods if p.model_uid == metadata["uid"]]
    try:
        status = ModelStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        unread = "its status is of a version that this command does not know"
        return ModelRow(metadata["namespace"], metadata["name"], "Unknown", reasons.PENDING, unread, ())
    ready = find(status.conditions, reasons.READY)
    return ModelRow(
        metadata["namespace"],
        metadata["name"],
        ready.status if ready else "Unknown",
        ready.reason if ready else reasons.PENDING,
        ready.message if ready else "the operator has not reconciled it yet: is it running?",
        tuple(
            _variant(v, None if own is None else [p for p in own if p.gpu_class == v.gpu_class], progress)
            for v in status.variants
            if v.desired or v.ready or v.waiting
        ),
        status.capabilities,
    )


def route_rows(routes: Iterable[JsonObject]) -> list[RouteRow]:
    """One row per ModelRoute, sorted by namespace and name."""
    return sorted((_route_row(raw) for raw in routes), key=lambda row: (row.namespace, row.name))


def _route_row(raw: JsonObject) -> RouteRow:
    where = raw["metadata"]["namespace"], raw["metadata"]["name"]
    try:
        status = ModelRouteStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        unread = "its status is of a version that this command does not know"
        return RouteRow(*where, "Unknown", reasons.PENDING, unread, (), ())
    canaries = tuple(CanaryRow(one.rule, one.state, one.message or "") for one in status.canaries)
    shown = find(status.conditions, reasons.READY)
    if shown is None:
        unread = "the operator has not reconciled it yet: is it running?"
        return RouteRow(*where, "Unknown", reasons.PENDING, unread, status.served_names, canaries)
    ready, accepted = shown.status, find(status.conditions, reasons.ACCEPTED)
    if shown.reason == reasons.TARGETS_READY and accepted is not None and accepted.reason == reasons.NAME_CLAIMED:
        shown = accepted  # it serves, and clients may not reach it by each of its names
    return RouteRow(*where, ready, shown.reason, shown.message, status.served_names, canaries)


def _variant(
    variant: VariantStatus, pods: Sequence[facts.Pod] | None, progress: Mapping[str, StageProgress]
) -> VariantRow:
    tokens = variant.kv_tokens_per_replica
    return VariantRow(
        gpu_class=variant.gpu_class,
        desired=variant.desired,
        ready_replicas=variant.ready,
        waiting=variant.waiting or 0,
        gpus=None if variant.gpus_per_replica is None else variant.gpus_per_replica * variant.desired,
        step=_step(variant, pods, progress),
        cold_start_seconds=variant.cold_start_seconds,
        kv_tokens_per_replica=(tokens.predicted if tokens.engine is None else tokens.engine) if tokens else None,
        hourly_cost=variant.hourly_cost,
    )


def _step(variant: VariantStatus, pods: Sequence[facts.Pod] | None, progress: Mapping[str, StageProgress]) -> str:
    """Step of the least advanced replica. The pods are more recent than the status."""
    least = (variant.step if pods is None else step(variant.desired, pods)) or "-"
    if pods is None or least != "Fetching":
        return least
    text = fetched([progress[p.key] for p in fetching(pods) if p.key in progress])
    return f"{least} {text}" if text else least


def fetched(known: Sequence[StageProgress]) -> str:
    """`43 % of 15.0 GiB`, summed over the replicas that fetch; without a percentage while a size is unknown."""
    done = sum(p.bytes_done for p in known)
    totals = [p.bytes_total for p in known if p.bytes_total]
    if not known or (not done and not totals):
        return ""
    if len(totals) < len(known):
        return f"{done / _GI:.1f} GiB"
    # Files may grow past what the source had said; more than everything is never shown.
    return f"{min(100, 100 * done // sum(totals))} % of {sum(totals) / _GI:.1f} GiB"
