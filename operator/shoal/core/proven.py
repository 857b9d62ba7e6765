"""What runs proves that it fits: no correction of a class's figures takes an engine away that holds what it must."""

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal

from shoal.api import reasons
from shoal.api.model import ModelSpec
from shoal.core.candidates import Considered
from shoal.core.placement import Candidate, ReplicaState


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


def same_kv_cache(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether what an engine of one specification said of its KV cache holds for one of the other too.

    What changes how many replicas there may be, or how they are reached, changes no KV cache. Where pods are replaced
    for another reason, the new ones say their figure themselves."""

    def made_of(spec: ModelSpec) -> tuple[object, ...]:
        return spec.source, spec.engine, {v.gpu_class: (v.quantization, v.tensor) for v in spec.variants}

    return made_of(one) == made_of(other)
