"""GPU memory that SGLang reserves for LoRA adapters at its start: its `LoRAMemoryPool` of 0.5.23.

bytes per GPU = slots x rank x bytes of a number x [ layers x (input and output widths of the modules) + embeddings ]
"""

from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.lora.format.layers import fused
from shoal.core.sizing.types import Tuning
from shoal.core.sizing.weights import runs_in

_VOCABULARY_BLOCK: Final = 64
"""The output layer is cut into equal parts of the vocabulary, each padded to a multiple of this."""


def slot_bytes(facts: ArtifactFacts, gpus: int, tuning: Tuning) -> int | None:
    """Bytes on each of `gpus` GPUs of one replica; 0 without adapters. None: the layers' widths are unknown."""
    asked, widths = tuning.adapters, facts.widths
    if asked is None:
        return 0
    modules = fused(asked.modules)
    if widths is None or facts.kv.head_dim is None:
        return None
    # Attention is cut within its own group, and a key-value head is never cut.
    attention = max(1, gpus // tuning.attention_dp)
    keys = max(facts.kv.head_dim, widths.key // attention)
    hidden, layer = widths.hidden, 0
    if "qkv_proj" in modules:
        layer += 3 * hidden + widths.query // attention + 2 * keys
    if "o_proj" in modules:
        layer += widths.query // attention + hidden
    if modules & {"gate_up_proj", "down_proj"}:
        if widths.feed_forward is None:
            return None
        part = widths.feed_forward // gpus
        layer += 2 * hidden + 2 * part if "gate_up_proj" in modules else 0
        layer += part + hidden if "down_proj" in modules else 0
    tables = 0
    if modules & {"embed_tokens", "lm_head"}:
        if facts.vocabulary is None:
            return None
        blocks = -(-facts.vocabulary // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK
        tables += facts.vocabulary + hidden if "embed_tokens" in modules else 0
        tables += hidden + (blocks // gpus if gpus > 1 else facts.vocabulary) if "lm_head" in modules else 0
        if {"embed_tokens", "lm_head"} <= modules:
            tables *= 2  # SGLang reserves both twice: once for each of the two
    size = 4 if runs_in(facts, tuning) == "float32" else 2
    return asked.slots * asked.rank * size * (widths.layers * layer + tables)
