"""GPU memory that SGLang reserves for LoRA adapters at its start: its `LoRAMemoryPool` of 0.5.23.

bytes per GPU = slots x rank x bytes of a number x (numbers of the layers + embeddings)
"""

from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.lora.format.layers import fused
from shoal.core.sizing.adapters import layer_numbers
from shoal.core.sizing.sglang.arguments import SGLangArguments
from shoal.core.sizing.weights import runs_in

_VOCABULARY_BLOCK: Final = 64
"""The output layer is cut into equal parts of the vocabulary, each padded to a multiple of this."""


def slot_bytes(facts: ArtifactFacts, gpus: int, tuning: SGLangArguments) -> int | None:
    """Bytes on each of `gpus` GPUs of one replica; 0 without adapters. None: the layers' widths are unknown."""
    asked, widths = tuning.adapters, facts.widths
    if asked is None:
        return 0
    # Attention is cut within its own group.
    layers = layer_numbers(facts, gpus, max(1, gpus // tuning.attention_dp), asked.modules)
    if layers is None or widths is None:
        return None
    modules, hidden, tables = fused(asked.modules), widths.hidden, 0
    if modules & {"embed_tokens", "lm_head"}:
        if facts.vocabulary is None:
            return None
        blocks = -(-facts.vocabulary // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK
        tables += facts.vocabulary + hidden if "embed_tokens" in modules else 0
        tables += hidden + (blocks // gpus if gpus > 1 else facts.vocabulary) if "lm_head" in modules else 0
        if {"embed_tokens", "lm_head"} <= modules:
            tables *= 2  # SGLang reserves both twice: once for each of the two
    size = 4 if runs_in(facts, tuning) == "float32" else 2
    return asked.slots * asked.rank * size * (layers + tables)
