"""The status of a LoRAPool, computed from observations."""

from dataclasses import dataclass
from datetime import datetime

from shoal.api import reasons
from shoal.api.lorapool import AdapterCounts, LoRAPool, LoRAPoolStatus
from shoal.core.claimants import why_first
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.core.status.observed import ModelProblem


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations that the status is computed from."""

    pool: LoRAPool
    problem: ModelProblem | None
    """Why it is not accepted."""
    counts: AdapterCounts
    model_ready: bool = True
    """Its Model is Ready, with or without a replica."""
    model_message: str = ""
    rolling: str = ""
    """Why not all replicas have the pool's arguments yet; "" if they have."""
    secrets_missing: str = ""
    """Which Secrets of its credentials do not exist; "" if all do."""


def claimed(pool: LoRAPool, holder: LoRAPool | None) -> ModelProblem | None:
    """The problem if another pool has the Model: a Model has one pool, the oldest."""
    if holder is None or holder.metadata.uid == pool.metadata.uid:
        return None
    first = why_first(holder, pool, f"LoRAPool {holder.key}")
    return ModelProblem(
        reasons.POOL_CLAIMED,
        f"spec.modelRef: Model {pool.model_key} has a pool already, {first}; a Model has one. "
        "Let its adapters name that one, or delete it",
    )


def status(seen: Seen, now: datetime) -> LoRAPoolStatus:
    """The whole status. Equal observations give an equal status, apart from the times of conditions that flipped."""
    pool = seen.pool
    before = pool.status.conditions if pool.status else ()
    return LoRAPoolStatus(
        conditions=merge(before, _findings(seen), generation=pool.metadata.generation, now=now),
        observed_generation=pool.metadata.generation,
        adapters=seen.counts,
    )


def _findings(seen: Seen) -> list[ConditionUpdate]:
    problem = seen.problem
    if problem is not None:
        return [
            ConditionUpdate(kind, "False", problem.reason, problem.message)
            for kind in (reasons.ACCEPTED, reasons.READY)
        ] + [ConditionUpdate(reasons.STALLED, "True", problem.reason, problem.message)]
    accepted = ConditionUpdate(reasons.ACCEPTED, "True", reasons.VALID, "the pool and its Model go together")
    if seen.secrets_missing:
        # Adapters that need no credentials, or other ones, are still served, so the pool stays accepted.
        ready = ConditionUpdate(reasons.READY, "False", reasons.SECRET_NOT_FOUND, seen.secrets_missing)
    elif seen.rolling:
        ready = ConditionUpdate(reasons.READY, "False", reasons.ROLLING, seen.rolling)
    elif not seen.model_ready:
        what = f"Model {seen.pool.model_key} is not ready: {seen.model_message}"
        ready = ConditionUpdate(reasons.READY, "False", reasons.NO_REPLICA, what)
    else:
        return [
            accepted,
            ConditionUpdate(reasons.READY, "True", reasons.POOL_READY, f"Model {seen.pool.model_key} takes adapters"),
        ]
    return [accepted, ready, ConditionUpdate(reasons.RECONCILING, "True", ready.reason, ready.message)]
