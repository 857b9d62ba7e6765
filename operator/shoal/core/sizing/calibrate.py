"""Learning from what an engine said of its KV cache."""

from shoal.core.sizing.room import GI, communication, state_ratio
from shoal.core.sizing.types import GPU, Sized, Tuning

_NOISE = GI // 2
"""An engine that found this much more than there should be still means: nothing was gone."""


def implied_overhead(gpu: GPU, sized: Sized, engine_tokens: int, tuning: Tuning) -> int | None:
    """Bytes of one GPU that must have been gone before the engine started, for it to find room for `engine_tokens`
    (its own `max_total_num_tokens`, over all attention groups). Without the share of NCCL that grows with a replica's
    GPUs, so that replicas of all sizes correct the same figure of their class.

    None: the figure says nothing of the class. That is so when the arguments set the size of the cache, when the engine
    is no GPU's, and when the result is not plausible (below zero, or above an eighth of the memory and 4 GiB): then
    something else is wrong, such as a simulator or weights that are not what they were said to be.
    """
    if tuning.device == "cpu" or tuning.max_total_tokens is not None or not sized.kv_tokens or engine_tokens <= 0:
        return None
    found = sized.breakdown
    if found.mem_fraction_static <= 0:
        return None
    # From the figure alone, not from the prediction: that moves with the overhead that is looked for.
    kv = engine_tokens / sized.attention_groups * sized.kv_bytes_per_token
    shared = tuning.radix_cache or tuning.max_running_requests is None
    state = kv * state_ratio(tuning) if found.state and shared else found.state
    before = (kv + state + found.images + found.adapters + found.weights) / found.mem_fraction_static
    overhead = int(found.memory - before) - communication(sized.gpus)
    if not -_NOISE <= overhead <= max(4 * GI, gpu.memory_bytes // 8):
        return None
    return max(0, overhead)
