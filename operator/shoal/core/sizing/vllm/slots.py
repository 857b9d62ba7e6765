"""GPU memory that vLLM reserves for LoRA adapters at its start (`create_lora_weights`).

bytes per GPU = --max-loras x --max-lora-rank x bytes of a number x (numbers of the layers + embeddings)

Without --lora-target-modules there is room for every module that the engine adapts, whatever the adapters change.
"""

from shoal.api.artifact import ArtifactFacts
from shoal.core.lora.format.layers import fused
from shoal.core.sizing.adapters import EVERY, layer_numbers
from shoal.core.sizing.vllm.arguments import VLLMArguments
from shoal.core.sizing.weights import runs_in

_TABLES = ("embed_tokens", "lm_head")


def slot_bytes(facts: ArtifactFacts, gpus: int, tuning: VLLMArguments) -> int | None:
    """Bytes on each of `gpus` GPUs of one replica; 0 without adapters. None: the layers' widths are unknown."""
    asked, widths = tuning.adapters, facts.widths
    if asked is None:
        return 0
    modules = asked.modules or (*EVERY, *_TABLES)
    layers = layer_numbers(facts, gpus, gpus, modules)
    if layers is None or widths is None:
        return None
    tables = len(fused(modules) & set(_TABLES))
    if tables and facts.vocabulary is None:
        return None
    # Neither table is cut.
    numbers = layers + tables * ((facts.vocabulary or 0) + widths.hidden)
    return asked.slots * asked.rank * (4 if runs_in(facts, tuning) == "float32" else 2) * numbers
