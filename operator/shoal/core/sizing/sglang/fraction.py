"""The fraction of a GPU that SGLang gives to weights and KV cache: its `memory_hook` of 0.5.23.

Memory is counted in MiB here, as in SGLang.
"""

from dataclasses import dataclass
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing.sglang.arguments import SGLangArguments

MULTIMODAL_PREFILL_GRAPHS: Final = frozenset({
    "Cohere2VisionForConditionalGeneration", "KimiK25ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
})  # fmt: skip
"""Multimodal models whose prefill runs in CUDA graphs; for other multimodal models it does not."""
NO_PREFILL_GRAPHS: Final = frozenset({"KimiLinearForCausalLM"})
"""Text models whose prefill does not run in CUDA graphs."""
_PREFILL_SPANS: Final = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
"""Prefill batch sizes that are captured: first, last and step of each span."""
_PREFILL_FROM: Final = 4608
_PREFILL_STEP: Final = 512
"""Step of the sizes above the spans."""
_MAX_PREFILL_TOKENS: Final = 16384
"""--max-prefill-tokens, used when prefill is not chunked."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Settings that SGLang chooses by a GPU's memory."""

    chunked_prefill_size: int
    graph_batch: int
    """Largest decode batch captured in a CUDA graph."""


def defaults(total_mib: float, tensor: int) -> Defaults:
    """SGLang's settings for one GPU of `total_mib` MiB."""
    if total_mib < 20 * 1024:
        return Defaults(2048, 8)
    if total_mib < 35 * 1024:
        return Defaults(4096, 48 if tensor < 4 else 160)
    if total_mib < 60 * 1024:
        return Defaults(4096, 32 if tensor < 4 else 160)
    if total_mib < 160 * 1024:
        return Defaults(8192, 256 if tensor < 4 else 512)
    return Defaults(16384, 512)


def prefill_graphs(max_tokens: int) -> int:
    """Graphs captured for prefill batches of up to `max_tokens`. Counted, not listed: users choose `max_tokens`, so a
    list could be of any length."""
    spans = (*_PREFILL_SPANS, (_PREFILL_FROM, max_tokens, _PREFILL_STEP))
    return sum(max(0, (min(last, max_tokens) - first) // step + 1) for first, last, step in spans)


def reserve_mib(facts: ArtifactFacts, total_mib: float, tensor: int, tuning: SGLangArguments) -> float:
    """MiB of one GPU that SGLang keeps free for activations and graphs."""
    chosen = defaults(total_mib, tensor)
    chunked = tuning.chunked_prefill_size or chosen.chunked_prefill_size
    batch = tuning.cuda_graph_max_bs or chosen.graph_batch
    if tuning.cuda_graph_max_bs is None and tuning.max_running_requests is not None:
        batch = min(batch, tuning.max_running_requests)
    reserve = 512 + 1.5 * max(chunked if chunked > 0 else _MAX_PREFILL_TOKENS, 2048) + tensor * tuning.pipeline * 128.0
    if tuning.decode_graphs:
        reserve += 2 * batch
    if tuning.attention_dp > 1:
        reserve += batch * tuning.attention_dp * (4.5 if batch > 300 else 3)
    if _captures_prefill(facts, tuning):
        if facts.kv.kv_lora_rank is not None:
            reserve += 1536
        else:
            largest = chunked if tuning.max_total_tokens is None else min(chunked, tuning.max_total_tokens)
            reserve += 8 * prefill_graphs(largest)
    return max(reserve, 10 * 1024.0) if total_mib > 60 * 1024 else reserve


def _captures_prefill(facts: ArtifactFacts, tuning: SGLangArguments) -> bool:
    name = facts.architecture
    if not tuning.prefill_graphs or tuning.pipeline > 1 or name in NO_PREFILL_GRAPHS:
        return False
    return not tuning.reads_media(facts) or name in MULTIMODAL_PREFILL_GRAPHS


def static_fraction(facts: ArtifactFacts, total_mib: float, tensor: int, tuning: SGLangArguments) -> float:
    """SGLang's mem_fraction_static: from the arguments, else its own default; 0 on a GPU smaller than the reserve."""
    if tuning.mem_fraction_static is not None:
        return min(1.0, max(0.0, tuning.mem_fraction_static))
    fraction = round((total_mib - reserve_mib(facts, total_mib, tensor, tuning)) / total_mib, 3)
    if tuning.reads_media(facts) and facts.vision_layers is not None and facts.vision_width is not None:
        # A larger image encoder needs more memory for activations; 24 layers of width 1024 are the reference.
        scale = facts.vision_layers * facts.vision_width**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (scale - 1)))
    return max(0.0, fraction)
