"""What was in use on a GPU before SGLang started, from the KV cache size that it reported."""

from shoal.core.sizing.sglang.arguments import SGLangArguments
from shoal.core.sizing.sglang.kvcache import state_ratio
from shoal.core.sizing.types import GPU, Sized
from shoal.core.sizing.units import GI, communication

_NOISE = GI // 2
"""An engine that found this much more memory than expected still means an overhead of zero."""


def overhead_of(gpu: GPU, sized: Sized, engine_tokens: int, tuning: SGLangArguments) -> int | None:
    """See `sizing.implied_overhead`; `engine_tokens` is `max_total_num_tokens`."""
    if tuning.device == "cpu" or tuning.max_total_tokens is not None or not sized.kv_tokens or engine_tokens <= 0:
        return None
    found = sized.breakdown
    if found.fraction <= 0:
        return None
    # From the reported tokens alone: the predicted ones depend on the overhead that is being computed.
    kv = engine_tokens / sized.attention_groups * sized.kv_bytes_per_token
    shared = tuning.radix_cache or tuning.max_running_requests is None
    state = kv * state_ratio(tuning) if found.state and shared else found.state
    before = (kv + state + found.images + found.adapters + found.weights) / found.fraction
    overhead = int(found.memory - before) - communication(sized.gpus)
    if not -_NOISE <= overhead <= max(4 * GI, gpu.memory_bytes // 8):
        return None
    return max(0, overhead)
