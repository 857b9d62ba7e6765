"""Whether a LoRAAdapter may join the pool that it names."""

from collections.abc import Mapping
from typing import Final

from shoal.api import reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.core.status.observed import ModelProblem

UNDECIDED: Final = reasons.PENDING
"""Reason while a decision is not possible, because something is not known yet."""


def may_join(
    adapter: LoRAAdapter,
    pool: LoRAPool | None,
    *,
    pool_problem: ModelProblem | None,
    labels: Mapping[str, str] | None,
) -> ModelProblem | None:
    """Why the adapter may not join the pool; None: it may.

    `pool_problem`: why the pool itself cannot be used. `labels`: those of the adapter's namespace; None: not known yet.
    """
    if pool is None:
        return ModelProblem(
            reasons.POOL_NOT_FOUND,
            f"spec.poolRef: there is no LoRAPool {adapter.pool_key}; create it, or name another one",
        )
    if (problem := _namespace(adapter, pool, labels)) is not None:
        return problem
    if pool_problem is not None:
        return ModelProblem(pool_problem.reason, f"LoRAPool {pool.key} is not accepted: {pool_problem.message}")
    return None


def _namespace(adapter: LoRAAdapter, pool: LoRAPool, labels: Mapping[str, str] | None) -> ModelProblem | None:
    theirs, own = pool.metadata.namespace, adapter.metadata.namespace
    allowed = pool.spec.allowed_namespaces
    if own == theirs or allowed.from_ == "All":
        return None
    if allowed.from_ == "Same":
        return ModelProblem(
            reasons.NAMESPACE_NOT_ALLOWED,
            f"LoRAPool {pool.key} takes adapters of its own namespace only (spec.allowedNamespaces), not of {own}",
        )
    asked = allowed.selector.match_labels if allowed.selector else {}
    if labels is None:
        return ModelProblem(UNDECIDED, f"the labels of namespace {own} are not known yet")
    missing = [f"{name}={value}" for name, value in sorted(asked.items()) if labels.get(name) != value]
    if not missing:
        return None
    return ModelProblem(
        reasons.NAMESPACE_NOT_ALLOWED,
        f"LoRAPool {pool.key} takes adapters of namespaces with labels that {own} lacks: {', '.join(missing)}",
    )
