"""The part of a Model's status about each GPU class."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from shoal.api import names
from shoal.api.model import CanaryAnswers, ColdStartStatus, KVTokens, VariantStatus
from shoal.core.facts import Deployment, Pod
from shoal.core.placement import Placement
from shoal.core.sizing import Sized
from shoal.core.status.conditions import shorten

Step = Literal["Waiting", "Fetching", "Loading", "Ready"]
MOST: Final = 32
_LONGEST_WHY: Final = 512


def variants(
    placement: Placement | None,
    *,
    deployments: Sequence[Deployment],
    pods: Sequence[Pod],
    sized: Mapping[str, Sized],
    tokens: Mapping[str, int],
    cold_starts: Mapping[str, int],
    node_waits: Mapping[str, int] = MappingProxyType({}),
    start_stages: Mapping[str, ColdStartStatus] = MappingProxyType({}),
    canaries: Mapping[str, CanaryAnswers] = MappingProxyType({}),
) -> tuple[VariantStatus, ...]:
    """One entry per class that is used or was considered; without a placement per Deployment."""
    by_class = {d.gpu_class: d for d in deployments if not d.deleting}
    if placement is None:
        return tuple(
            VariantStatus(
                gpu_class=name,
                gpusPerReplica=d.gpus_per_replica,
                kv_tokens_per_replica=_tokens(None, tokens.get(name)),
                desired=d.replicas,
                ready=min(_ready(pods, name), d.replicas),
                step=step(d.replicas, _of(pods, name)),
                cold_start_seconds=cold_starts.get(name),
                node_wait_seconds=node_waits.get(name),
                cold_start=start_stages.get(name),
                canary=canaries.get(name),
            )
            for name, d in sorted(by_class.items())
        )
    used = [
        VariantStatus(
            gpu_class=plan.gpu_class,
            gpusPerReplica=plan.gpus,
            kv_tokens_per_replica=_predicted(plan.gpu_class, sized, tokens),
            desired=plan.replicas,
            ready=min(_ready(pods, plan.gpu_class), plan.replicas),
            waiting=plan.waiting or None,
            step=step(plan.replicas, _of(pods, plan.gpu_class)),
            hourly_cost=plan.hourly_cost if plan.replicas else None,
            cold_start_seconds=cold_starts.get(plan.gpu_class),
            node_wait_seconds=node_waits.get(plan.gpu_class),
            cold_start=start_stages.get(plan.gpu_class),
            canary=canaries.get(plan.gpu_class),
            excluded=shorten(plan.why, _LONGEST_WHY) if plan.why else None,
        )
        for plan in placement.variants
    ]
    left = [
        VariantStatus(
            gpu_class=e.gpu_class,
            gpusPerReplica=e.gpus,
            kv_tokens_per_replica=_tokens(e.kv_tokens, tokens.get(e.gpu_class)),
            hourly_cost=e.hourly_cost,
            cold_start_seconds=cold_starts.get(e.gpu_class),
            node_wait_seconds=node_waits.get(e.gpu_class),
            cold_start=start_stages.get(e.gpu_class),
            canary=canaries.get(e.gpu_class),
            excluded=shorten(e.why, _LONGEST_WHY),
        )
        for e in placement.excluded
        if e.gpu_class not in {v.gpu_class for v in used}
    ]
    return tuple((used + left)[:MOST])


def step(desired: int, pods: Sequence[Pod]) -> Step | None:
    """The step of the replica that has come least far; None: no replica is wanted."""
    if not desired:
        return None
    steps = [_step(pod) for pod in pods if not pod.deleting and not pod.finished]
    if len(steps) < desired or "Waiting" in steps:
        return "Waiting"
    return "Fetching" if "Fetching" in steps else "Loading" if "Loading" in steps else "Ready"


def _step(pod: Pod) -> Step:
    if pod.ready:
        return "Ready"
    if not pod.node:
        return "Waiting"
    engine = pod.container(names.CONTAINER_ENGINE)
    if engine is not None and all(c.ready for c in pod.containers):
        return "Waiting"  # for its replacement: its node does not answer
    return "Loading" if engine is not None and (engine.running or engine.restarts) else "Fetching"


def cold_start(pod: Pod) -> int | None:
    """Seconds to Ready from the pod's creation, or from its binding where a quota held it back before; None: it is not
    Ready, or its engine restarted."""
    engine = pod.container(names.CONTAINER_ENGINE)
    if pod.ready_since is None or pod.created is None or (engine is not None and engine.restarts):
        return None
    # The next replica may not have to wait for quota: what such a pod waited before it was bound is out.
    begun = pod.scheduled or pod.created if pod.waited_for_quota else pod.created
    return max(0, round((pod.ready_since - begun).total_seconds()))


def _ready(pods: Sequence[Pod], gpu_class: str) -> int:
    """Counted from pods, like placement and routing. A Deployment's own count comes later: at the end of a move, when
    the new replica is ready, it would show for a moment that no replica serves."""
    return sum(pod.ready and not pod.deleting for pod in _of(pods, gpu_class))


def _of(pods: Sequence[Pod], gpu_class: str) -> list[Pod]:
    return [pod for pod in pods if pod.gpu_class == gpu_class]


def _predicted(name: str, sized: Mapping[str, Sized], tokens: Mapping[str, int]) -> KVTokens | None:
    found = sized.get(name)
    return _tokens(found.kv_tokens if found else None, tokens.get(name))


def _tokens(predicted: int | None, engine: int | None) -> KVTokens | None:
    return None if predicted is None and engine is None else KVTokens(predicted=predicted, engine=engine)
