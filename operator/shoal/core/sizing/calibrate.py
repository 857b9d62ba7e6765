"""Calibration: the memory overhead of a GPU class, from the KV cache size that an engine reported."""

from shoal.core.sizing.kvcache import GI, communication, state_ratio
from shoal.core.sizing.types import GPU, Sized, Tuning

_NOISE = GI // 2
"""An engine that found this much more memory than expected still means an overhead of zero."""


def implied_overhead(gpu: GPU, sized: Sized, engine_tokens: int, tuning: Tuning) -> int | None:
    """Bytes of one GPU that must have been in use before the engine started, given that it has room for `engine_tokens`
    (its own `max_total_num_tokens`, over all attention groups). The part of NCCL that grows with a replica's GPUs is
    left out, so that replicas of all sizes correct the same value of their class.

    None: the report says nothing about the class. That is so when the arguments set the size of the cache, when the
    engine runs on CPUs, and when the result is not plausible (below zero, or above an eighth of the memory and 4 GiB):
    the cause is then another, such as a simulator or wrong facts of the weights.
    """
    if tuning.device == "cpu" or tuning.max_total_tokens is not None or not sized.kv_tokens or engine_tokens <= 0:
        return None
    found = sized.breakdown
    if found.mem_fraction_static <= 0:
        return None
    # From the reported tokens alone: the predicted ones depend on the overhead that is being computed.
    kv = engine_tokens / sized.attention_groups * sized.kv_bytes_per_token
    shared = tuning.radix_cache or tuning.max_running_requests is None
    state = kv * state_ratio(tuning) if found.state and shared else found.state
    before = (kv + state + found.images + found.adapters + found.weights) / found.mem_fraction_static
    overhead = int(found.memory - before) - communication(sized.gpus)
    if not -_NOISE <= overhead <= max(4 * GI, gpu.memory_bytes // 8):
        return None
    return max(0, overhead)
