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
    """Gone before the engine asks for any (CUDA context, NCCL), measured on this class. None: an estimate is used."""
    compute_capability: tuple[int, int] | None = None
    """None: not known, nothing is refused because of it."""
    largest_node: int | None = None
    """GPUs of the largest node: no replica has more. None: not known, eight at most are tried."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the engine's arguments change in the memory arithmetic. None is the engine's own default."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the KV cache is not in GPU memory, whose size then excludes nothing."""
    dtype: str | None = None
    """--dtype; None or "auto": as the config says."""
    mem_fraction_static: float | None = None
    kv_cache_dtype: str | None = None
    chunked_prefill_size: int | None = None
    """-1: prefill is not cut into chunks."""
    cuda_graph_max_bs: int | None = None
    decode_graphs: bool = True
    prefill_graphs: bool = True
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    page_size: int = 1
    pp_size: int = 1
    attention_dp: int = 1
    """--attn-dp-size: data parallelism of attention inside the tensor-parallel group."""
    quantization: str | None = None
    """--quantization, or what the variant asks for. None: as the checkpoint is."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The parts of the memory of one GPU, in bytes. They add up to `memory`, but for what rounding leaves over."""

    memory: int
    overhead: int
    """Gone before the engine starts."""
    reserve: int
    """Left free by the engine for activations and graphs: (1 - mem_fraction_static) of what it found."""
    weights: int
    state: int
    """Hybrid models: states of requests that do not grow with tokens."""
    kv: int
    """KV cache."""
    mem_fraction_static: float


@dataclass(frozen=True, slots=True)
class Sized:
    """A replica that fits."""

    gpus: int
    kv_tokens: int | None
    """Tokens that the KV cache of one replica holds; None: the engine is no GPU's (Tuning.device is cpu)."""
    kv_bytes_per_token: int
    """On each GPU."""
    weight_bytes_per_gpu: int
    context_length: int | None
    """Longest prompt plus answer that the engine will take; None: the config says none."""
    sums: Sums
    peak_bytes_per_gpu: int
    """Most of one GPU's memory that the weights take while they are loaded and quantized."""

    def concurrent(self, context: int) -> int | None:
        """Requests of `context` tokens, prompt and answer, that are held at once. None: not known."""
        return None if self.kv_tokens is None else self.kv_tokens // max(1, context)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a model does not run on a class."""

    reason: str
    """reasons.NO_FIT, reasons.SIZE_UNKNOWN, or reasons.INVALID for arguments that exclude each other."""
    why: str
    """The sum that does not work out, for the person who wrote the Model."""
