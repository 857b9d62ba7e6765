"""What runs proves that it fits: no correction of a class's figures takes an engine away that holds what it must."""

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Final

from shoal.api import reasons
from shoal.api.model import ModelSpec
from shoal.core.candidates import Considered
from shoal.core.placement import Candidate, ReplicaState

_PLAIN: Final = (None, None)


def keep_what_runs(
    considered: Considered,
    replica_states: Mapping[str, ReplicaState],
    tokens: Mapping[str, int],
    *,
    context_length: int | None,
    hourly_cost: Mapping[str, Decimal | None],
    max_replicas: Mapping[str, int | None],
    interruptible: Mapping[str, bool],
) -> Considered:
    """`considered`, with the GPUs per replica that the Model's engines run on now.

    It holds for a class on which replicas stand whose engine said itself (`tokens`, by class) that its KV cache reaches
    the context length: there neither another number of GPUs nor "does not fit" can be right. `hourly_cost` is of one
    GPU. The caller leaves out classes whose number of GPUs the specification names.
    """
    candidates = {c.gpu_class: c for c in considered.candidates}
    rejected = {r.gpu_class: r for r in considered.rejected}
    for name, stands in replica_states.items():
        said = tokens.get(name)
        if said is None or said < (context_length or 1) or not stands.ready or stands.gpus < 1:
            continue
        known = candidates.get(name)
        cost = hourly_cost.get(name)
        per_replica = None if cost is None else cost * stands.gpus
        if known is not None and known.gpus != stands.gpus:
            candidates[name] = replace(known, gpus=stands.gpus, hourly_cost=per_replica, kv_tokens=said)
        elif known is None and name in rejected and rejected[name].reason == reasons.NO_FIT:
            del rejected[name]
            candidates[name] = Candidate(
                gpu_class=name,
                gpus=stands.gpus,
                hourly_cost=per_replica,
                max_replicas=max_replicas.get(name),
                interruptible=interruptible.get(name, False),
                kv_tokens=said,
            )
    return Considered(tuple(candidates.values()), tuple(rejected.values()), considered.sized)


def still_said(tokens: Mapping[str, int], before: ModelSpec, after: ModelSpec) -> dict[str, int]:
    """What engines said of their KV caches (`tokens`, by class) under one specification, as far as it holds under
    another one.

    What changes how many replicas there may be, where, or how they are reached, changes no KV cache, and replaces no
    pod that would say its figure again. Where pods are replaced for another reason, the new ones say theirs.
    """
    if (before.source, before.engine) != (after.source, after.engine):
        return {}
    old, new = _kinds(before), _kinds(after)
    return {name: said for name, said in tokens.items() if old.get(name, _PLAIN) == new.get(name, _PLAIN)}


def _kinds(spec: ModelSpec) -> dict[str, tuple[str | None, int | None]]:
    """(quantization, tensor parallelism) of the classes that the specification names."""
    return {v.gpu_class: (v.quantization, v.tensor) for v in spec.variants}
