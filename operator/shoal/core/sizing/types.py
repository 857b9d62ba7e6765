"""Input and output of sizing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU of a class."""

    name: str
    """Name of the class, for messages."""
    memory_bytes: int
    """From nvidia-smi (nvidia.com/gpu.memory), or from the class's spec."""
    overhead_bytes: int | None = None
    """Bytes in use before an engine on one GPU allocates any (CUDA context), measured on this class; NCCL's share of
    larger replicas is added. None: an estimate is used."""
    compute_capability: tuple[int, int] | None = None
    """None: unknown, so nothing is refused because of it."""
    largest_node: int | None = None
    """GPUs of the largest node, the limit of a replica. None: unknown; at most eight are tried."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Slots for LoRA adapters in GPU memory, reserved by the engine at its start."""

    slots: int
    rank: int
    """Largest rank of an adapter: each slot has room for it."""
    modules: tuple[str, ...]
    """--lora-target-modules."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Engine arguments that change the memory arithmetic. None: the engine's own default."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the KV cache is not in GPU memory, so GPU memory excludes nothing."""
    dtype: str | None = None
    """--dtype; None: the config's."""
    mem_fraction_static: float | None = None
    kv_cache_dtype: str | None = None
    chunked_prefill_size: int | None = None
    """-1: prefill is not chunked."""
    cuda_graph_max_bs: int | None = None
    decode_graphs: bool = True
    prefill_graphs: bool = True
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    page_size: int | None = None
    pp_size: int = 1
    attention_dp: int = 1
    """--attn-dp-size: data parallelism of attention inside the tensor-parallel group."""
    expert_parallel: int = 1
    swa_full_tokens_ratio: float | None = None
    windows: bool = True
    """False: --disable-hybrid-swa-memory; every layer keeps every token."""
    mamba_full_memory_ratio: float | None = None
    radix_cache: bool = True
    multimodal: bool | None = None
    """True: --enable-multimodal; False: --language-model-only."""
    cpu_offload_bytes: int = 0
    """Weight bytes of each GPU that are kept in host memory."""
    quantization: str | None = None
    """--quantization, or the variant's. None: that of the checkpoint."""
    longer_context: bool = False
    """SGLang's arguments allow a context longer than the config's, or name another config."""
    draft: str | None = None
    """The speculative algorithm, if it loads a draft model of unknown size."""
    adapters: AdapterSlots | None = None
    """--enable-lora."""


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The parts of one GPU's memory, in bytes. They add up to `memory`."""

    memory: int
    overhead: int
    """In use before the engine starts."""
    reserve: int
    """Kept free by the engine for activations and graphs: (1 - mem_fraction_static) of what was free at its start."""
    weights: int
    images: int
    """Multimodal models: the engine's cache of image embeddings."""
    state: int
    """Hybrid models: states of requests, which do not grow with tokens."""
    adapters: int
    """Slots for LoRA adapters."""
    kv: int
    """KV cache. Negative: the other parts do not fit."""
    mem_fraction_static: float


@dataclass(frozen=True, slots=True)
class Sized:
    """A replica that fits."""

    gpus: int
    kv_tokens: int | None
    """Tokens that the KV cache of one replica holds, over all attention groups; None: not in GPU memory."""
    kv_bytes_per_token: int
    """On each GPU."""
    weight_bytes_per_gpu: int
    context_length: int | None
    """Longest prompt plus answer that the engine accepts; None: the config does not say."""
    breakdown: MemoryBreakdown
    peak_bytes_per_gpu: int
    """Peak of the weights on one GPU while they are loaded and quantized."""
    max_requests: int | None = None
    """Requests that run at once at most, of any length; None: unknown."""
    attention_groups: int = 1
    """Separate parts of the KV cache; one request lives in one of them (attention data parallelism)."""

    def concurrent(self, context: int) -> int | None:
        """Requests of `context` tokens, prompt and answer, that fit at once. None: unknown."""
        if self.kv_tokens is None:
            return None
        held = self.attention_groups * (self.kv_tokens // self.attention_groups // max(1, context))
        return held if self.max_requests is None else min(held, self.max_requests)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a model does not run on a class."""

    reason: str
    """reasons.NO_FIT: the class is too small or cannot run the quantization. reasons.SIZE_UNKNOWN: a value is missing.
    reasons.INVALID: the Model asks for something that no engine does on any class."""
    why: str
    """The calculation that fails, for the author of the Model; without the class's name."""
