"""What goes into sizing and what comes out of it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU of a class."""

    name: str
    """Name of the class, for sentences."""
    memory_bytes: int
    """As nvidia-smi says (nvidia.com/gpu.memory), or as the class's spec says."""
    overhead_bytes: int | None = None
    """Gone before an engine on one GPU asks for any (CUDA context), measured on this class; what larger replicas need
    for NCCL is added. None: an estimate is used."""
    compute_capability: tuple[int, int] | None = None
    """None: not known, nothing is refused because of it."""
    largest_node: int | None = None
    """GPUs of the largest node: no replica has more. None: not known, eight at most are tried."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Places for LoRA adapters in GPU memory, which the engine reserves at its start."""

    slots: int
    rank: int
    """Largest rank of an adapter: each place has room for it."""
    modules: tuple[str, ...]
    """--lora-target-modules."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the engine's arguments change in the memory arithmetic. None is the engine's own default."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the KV cache is not in GPU memory, whose size then excludes nothing."""
    dtype: str | None = None
    """--dtype; None: as the config says."""
    mem_fraction_static: float | None = None
    kv_cache_dtype: str | None = None
    chunked_prefill_size: int | None = None
    """-1: prefill is not cut into chunks."""
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
    """False: --disable-hybrid-swa-memory, every layer keeps every token."""
    mamba_full_memory_ratio: float | None = None
    radix_cache: bool = True
    multimodal: bool | None = None
    """True: --enable-multimodal; False: --language-model-only."""
    cpu_offload_bytes: int = 0
    """Of each GPU's weights, kept in the host's memory."""
    quantization: str | None = None
    """--quantization, or what the variant asks for. None: as the checkpoint is."""
    longer_context: bool = False
    """SGLang was told to take a context that is longer than the config allows, or gets another config."""
    draft: str | None = None
    """The speculative algorithm, where it loads a draft model whose size is not known."""
    adapters: AdapterSlots | None = None
    """--enable-lora."""


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The parts of the memory of one GPU, in bytes. They add up to `memory`."""

    memory: int
    overhead: int
    """Gone before the engine starts."""
    reserve: int
    """Left free by the engine for activations and graphs: (1 - mem_fraction_static) of what it found."""
    weights: int
    images: int
    """Multimodal models: what the engine keeps of images."""
    state: int
    """Hybrid models: states of requests, which do not grow with tokens."""
    adapters: int
    """Places for LoRA adapters."""
    kv: int
    """KV cache. Below zero: the others do not fit."""
    mem_fraction_static: float


@dataclass(frozen=True, slots=True)
class Sized:
    """A replica that fits."""

    gpus: int
    kv_tokens: int | None
    """Tokens that the KV cache of one replica holds, all its attention groups together; None: not in GPU memory."""
    kv_bytes_per_token: int
    """On each GPU."""
    weight_bytes_per_gpu: int
    context_length: int | None
    """Longest prompt plus answer that the engine will take; None: the config says none."""
    breakdown: MemoryBreakdown
    peak_bytes_per_gpu: int
    """Most of one GPU's memory that the weights take while they are loaded and quantized."""
    max_requests: int | None = None
    """Requests that run at once at most, whatever their length; None: no limit is known."""
    attention_groups: int = 1
    """Parts of the KV cache that are apart: one request lives in one of them (attention data parallelism)."""

    def concurrent(self, context: int) -> int | None:
        """Requests of `context` tokens, prompt and answer, that are held at once. None: not known."""
        if self.kv_tokens is None:
            return None
        held = self.attention_groups * (self.kv_tokens // self.attention_groups // max(1, context))
        return held if self.max_requests is None else min(held, self.max_requests)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a model does not run on a class."""

    reason: str
    """reasons.NO_FIT: the class is too small or cannot run the quantization. reasons.SIZE_UNKNOWN: a figure is missing.
    reasons.INVALID: the Model asks for what no engine does, on whatever class."""
    why: str
    """The sum that does not work out, for the person who wrote the Model; without the class's name."""
