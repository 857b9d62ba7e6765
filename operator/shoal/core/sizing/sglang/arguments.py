"""SGLang's arguments that change its memory arithmetic."""

from dataclasses import dataclass

from shoal.core.sizing.types import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangArguments(Tuning):
    """Arguments of SGLang 0.5.23. None: the engine's own default."""

    mem_fraction_static: float | None = None
    chunked_prefill_size: int | None = None
    """-1: prefill is not chunked."""
    cuda_graph_max_bs: int | None = None
    decode_graphs: bool = True
    prefill_graphs: bool = True
    max_total_tokens: int | None = None
    page_size: int | None = None
    expert_parallel: int = 1
    swa_full_tokens_ratio: float | None = None
    windows: bool = True
    """False: --disable-hybrid-swa-memory; every layer keeps every token."""
    mamba_full_memory_ratio: float | None = None
    radix_cache: bool = True
