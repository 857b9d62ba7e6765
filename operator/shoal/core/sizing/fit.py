"""How many GPUs a replica needs on a class, and what is left for its KV cache."""

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.sizing import messages, stages
from shoal.core.sizing.tensor import choices, obstacle
from shoal.core.sizing.types import GPU, MemoryBreakdown, Misfit, Sized, Tuning
from shoal.core.sizing.weights import Weights, weights

NO_FACTS = ArtifactFacts(source="")


def size(
    facts: ArtifactFacts | None,
    gpu: GPU,
    *,
    tensor: int | None,
    context_length: int | None,
    overrides: Sizing,
    tuning: Tuning,
) -> Sized | Misfit:
    """The size of a replica of this model on this class, or why it does not fit.

    `facts` None: nothing is known yet, so `overrides` must give all. `tensor`: the requested GPUs of a stage; None: the
    fewest that fit. `context_length`: requested tokens; None: the config's. `overrides` win over computed values. A
    class fits when the KV cache of one replica holds one request of the whole context. Raises ValueError for an
    override that is no quantity.
    """
    if facts is None and (overrides.weight_bytes is None or overrides.kv_bytes_per_token is None):
        return Misfit(reasons.SIZE_UNKNOWN, "nothing is known of its weights yet")
    facts = facts or NO_FACTS
    longest = context_length or facts.context_length
    if misfit := _asked(facts, gpu, tensor, context_length, tuning):
        return misfit
    context = longest or tuning.default_context
    if tuning.device == "cpu":
        return _on_cpu(facts, tensor or tuning.attention_dp, longest, overrides, tuning)
    found = weights(facts, gpu, overrides, tuning)
    if isinstance(found, Misfit):
        return found
    if overrides.kv_bytes_per_token is None and (facts.kv.kind == "Unknown" or tuning.draft):
        return Misfit(reasons.SIZE_UNKNOWN, messages.unknown(facts, tuning))
    if overrides.kv_bytes_per_token is None and (why := tuning.unsized(facts)) is not None:
        return Misfit(reasons.SIZE_UNKNOWN, why)
    if overrides.kv_bytes_per_token is None and stages.uneven(facts, tuning):
        return Misfit(reasons.SIZE_UNKNOWN, messages.uneven(facts, tuning))
    if tuning.adapters is not None and tuning.slot_bytes(facts, 1) is None:
        return Misfit(reasons.SIZE_UNKNOWN, messages.unknown_slots(facts))
    tried = (tensor,) if tensor is not None else choices(facts, gpu, tuning)
    if not tried:
        return Misfit(reasons.INVALID, messages.uncuttable(facts, gpu, tuning))
    last: Sized | None = None
    for gpus in tried:
        last = _replica(facts, gpu, gpus, longest, found, overrides, tuning)
        if _fits(last, facts, gpu, context, tuning):
            return last
    if last is None:
        raise AssertionError("`tried` is not empty")
    return Misfit(reasons.NO_FIT, messages.too_small(last, facts, gpu, context, asked=tensor, tuning=tuning))


def _asked(
    facts: ArtifactFacts, gpu: GPU, tensor: int | None, context_length: int | None, tuning: Tuning
) -> Misfit | None:
    """What is wrong with the requested parameters, independent of memory; None: nothing."""
    if tensor is not None:
        if gpu.largest_node is not None and tensor * tuning.pipeline > gpu.largest_node:
            return Misfit(reasons.NO_FIT, messages.no_node(tensor, gpu.largest_node, tuning))
        if why := obstacle(facts, tensor, tuning):
            return Misfit(
                reasons.INVALID, f"`tensor` is {tensor}: {why}{messages.instead(choices(facts, gpu, tuning))}"
            )
    longest = facts.context_length
    if context_length is not None and longest is not None and context_length > longest and not tuning.longer_context:
        return Misfit(reasons.INVALID, messages.too_long(context_length, longest, tuning))
    return None


def _on_cpu(facts: ArtifactFacts, gpus: int, context: int | None, overrides: Sizing, tuning: Tuning) -> Sized:
    """An engine that runs on CPUs: GPUs are only counted."""
    none = MemoryBreakdown(
        memory=0, overhead=0, reserve=0, weights=0, images=0, state=0, adapters=0, kv=0, fraction=0.0
    )
    return Sized(
        gpus=gpus * tuning.pipeline,
        kv_tokens=tuning.cpu_tokens(facts, overrides, context or tuning.default_context),
        kv_bytes_per_token=overrides.kv_bytes_per_token or facts.kv_bytes_per_token or 0,
        weight_bytes_per_gpu=0,
        context_length=context,
        breakdown=none,
        peak_bytes_per_gpu=0,
        max_requests=tuning.max_running_requests,
    )


def _replica(
    facts: ArtifactFacts,
    gpu: GPU,
    gpus: int,
    context: int | None,
    all_weights: Weights,
    overrides: Sizing,
    tuning: Tuning,
) -> Sized:
    """The memory arithmetic with this many GPUs in each stage, whether the replica fits or not."""
    groups, share = tuning.attention_dp, stages.share(facts, tuning)
    per_gpu = max(0, all_weights.per_gpu(gpus, groups, share) - tuning.cpu_offload_bytes)
    stage = stages.largest(facts, tuning)
    found = tuning.memory(stage, gpu, gpus, per_gpu, overrides, context or tuning.default_context)
    peak = all_weights.peak_per_gpu(gpus, groups, share) - tuning.cpu_offload_bytes
    return Sized(
        gpus=gpus * tuning.pipeline,
        kv_tokens=found.tokens * groups,
        kv_bytes_per_token=-int(-found.cell // 1),
        weight_bytes_per_gpu=per_gpu,
        context_length=context,
        breakdown=found.breakdown,
        peak_bytes_per_gpu=max(per_gpu, peak),
        max_requests=groups * found.requests,
        attention_groups=groups,
        estimates=found.estimates,
    )


def _fits(sized: Sized, facts: ArtifactFacts, gpu: GPU, context: int, tuning: Tuning) -> bool:
    tokens = (sized.kv_tokens or 0) // sized.attention_groups
    return (
        tokens >= context
        and sized.peak_bytes_per_gpu + sized.breakdown.overhead <= gpu.memory_bytes
        and tuning.refusal(facts, sized, context) is None
    )
