"""vLLM's arguments that change its memory arithmetic."""

from dataclasses import dataclass

from shoal.core.sizing.types import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMArguments(Tuning):
    """Arguments of vLLM 0.32 and 0.33. None: the engine's own default. `max_running_requests` is --max-num-seqs."""

    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV cache on each GPU; the engine's share of the memory then counts only at the start."""
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    """Tokens of one block. None: 16 on a GPU, 128 on a CPU."""
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    """False: a batch holds the longest prompt whole."""
    graphs: bool = True
    """False: --enforce-eager."""
    graphs_counted: bool = True
    """False: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0; graphs are captured beside the engine's share."""
    windows: bool = True
    """False: --disable-hybrid-kv-cache-manager; every layer keeps every token."""
    prefix_cache: bool = True
