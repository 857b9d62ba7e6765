"""Tensor parallelism: the numbers of GPUs over which an engine can divide a model, or each stage of it."""

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing.types import GPU, Tuning

UNKNOWN_NODE = 8
"""GPUs tried at most while no node is known."""
_MOST = 64


def tries(gpu: GPU, tensor: int | None) -> int:
    """Upper bound of the replica sizes that are computed."""
    return min(gpu.largest_node or UNKNOWN_NODE, _MOST) if tensor is None else 1


def most(gpu: GPU, tuning: Tuning) -> int:
    """GPUs of a stage that one node has at most."""
    return min(gpu.largest_node or UNKNOWN_NODE, _MOST) // tuning.pipeline


def choices(facts: ArtifactFacts, gpu: GPU, tuning: Tuning) -> tuple[int, ...]:
    """Numbers of GPUs that one node has for a stage and that can divide the model, smallest first."""
    return tuple(n for n in range(1, most(gpu, tuning) + 1) if obstacle(facts, n, tuning) is None)


def obstacle(facts: ArtifactFacts, tensor: int, tuning: Tuning) -> str | None:
    """Why this many GPUs cannot divide each stage of the model; None: they can."""
    if facts.kv.layers is not None and facts.kv.layers < tuning.pipeline:
        return f"{facts.kv.layers} layers do not make {tuning.pipeline} stages"
    if tensor % tuning.attention_dp:
        return f"{tuning.attention_dp_by} {tuning.attention_dp} does not divide {tensor} GPUs"
    parts = tensor // tuning.attention_dp
    if facts.attention_heads is not None and facts.attention_heads % parts:
        return f"{facts.attention_heads} attention heads do not divide over {parts} GPUs"
    if facts.attention_heads is None and tensor & (tensor - 1):
        return f"{tensor} is no power of two, and how many attention heads the model has is not known"
    kv_heads = None if facts.kv.kv_lora_rank is not None else facts.kv.kv_heads
    if kv_heads is not None and kv_heads % parts and parts % kv_heads:
        return f"{kv_heads} key-value heads neither divide over {parts} GPUs nor repeat on them"
    dense = tuning.dense_parts(tensor)
    if facts.tensor_divisor is not None and facts.tensor_divisor % dense:
        return f"the layers' widths divide over {facts.tensor_divisor} at most, not over {dense} GPUs"
    groups = tuning.expert_groups(tensor)
    if tensor % groups:
        return f"{tuning.experts_by} {groups} does not divide {tensor} GPUs"
    per_expert = tensor // groups
    if facts.expert_divisor is not None and facts.expert_divisor % per_expert:
        most = f"an expert's width divides over {facts.expert_divisor} at most"
        return f"{most}, not over {per_expert} GPUs; {tuning.experts_by} would spread whole experts"
    return None
