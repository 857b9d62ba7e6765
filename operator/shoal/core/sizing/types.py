"""Input and output of sizing, and what the arithmetic of an engine must answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing


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
    """--lora-target-modules; empty: every module that the engine adapts."""


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The parts of one GPU's memory, in bytes. They add up to `memory`."""

    memory: int
    overhead: int
    """In use before the engine starts."""
    reserve: int
    """Kept free by the engine. SGLang: (1 - mem_fraction_static) of what was free at its start, for activations and
    graphs. vLLM: what its share of the memory leaves."""
    weights: int
    images: int
    """Multimodal models: what the engine keeps for images (vLLM: and needs to encode them)."""
    state: int
    """Hybrid models: states of requests, which do not grow with tokens."""
    adapters: int
    """Slots for LoRA adapters."""
    kv: int
    """KV cache. Negative: the other parts do not fit."""
    fraction: float
    """The engine's share: SGLang's mem_fraction_static of what is free, vLLM's gpu_memory_utilization of all."""
    activations: int = 0
    """vLLM: the largest batch while it is computed, and the engine's buffers, taken from its share."""
    graphs: int = 0
    """vLLM: CUDA graphs, taken from its share."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine's arithmetic says of one GPU of a replica, whether the replica fits or not."""

    breakdown: MemoryBreakdown
    cell: float
    """Bytes of one token in the KV cache."""
    tokens: int
    """Tokens that the KV cache of one attention group holds. Below zero where the weights alone are too much."""
    requests: int
    """Requests that one attention group runs at once."""
    estimates: tuple[str, ...]
    """Parts of the breakdown that are estimates, in its names. Each errs to the side of too few tokens."""


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
    estimates: tuple[str, ...] = ()
    """Parts of the breakdown that are estimates, in its names: `kv_tokens` is then the least that is to be expected."""

    @property
    def at_least(self) -> bool:
        """Whether an engine is to be expected to hold more than `kv_tokens`: what it measures at its start was
        estimated, to the side of too few tokens."""
        return "activations" in self.estimates

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(ABC):
    """Engine arguments that change the memory arithmetic, and the arithmetic of that engine.

    Each engine has a class of its own with further arguments. None: the engine's own default.
    """

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the KV cache is not in GPU memory, so GPU memory excludes nothing."""
    dtype: str | None = None
    """--dtype; None: the config's."""
    kv_cache_dtype: str | None = None
    max_running_requests: int | None = None
    """Requests in the running batch at most."""
    pipeline: int = 1
    """Stages of a replica, each with a part of the layers on GPUs of its own."""
    attention_dp: int = 1
    """Data parallelism of attention inside one replica: the GPUs of each stage form this many groups."""
    spread_experts: bool = False
    """Each GPU of a replica holds whole experts."""
    multimodal: bool | None = None
    """Whether the engine reads images, sound or video with the weights; None: as their facts say."""
    cpu_offload_bytes: int = 0
    """Weight bytes of each GPU that are kept in host memory."""
    quantization: str | None = None
    """--quantization, or the variant's. None: that of the checkpoint."""
    longer_context: bool = False
    """The arguments allow a context longer than the config's, or name another config."""
    draft: str | None = None
    """The speculative method, if it loads a draft model of unknown size."""
    speculates: bool = False
    """Tokens are guessed and checked, by whatever method."""
    draft_layers: int = 0
    """Layers of the checkpoint that guess tokens: each keeps every token in the KV cache, as the model's own do."""
    adapters: AdapterSlots | None = None
    """--enable-lora."""

    engine: ClassVar[str]
    """Name of the engine, for messages."""
    default_context: ClassVar[int] = 2048
    """The engine's context length for a config that has none."""
    longer_context_by: ClassVar[str]
    """The environment variable that allows a longer context."""
    attention_dp_by: ClassVar[str]
    """The argument of `attention_dp`, and its field."""
    experts_by: ClassVar[str]
    """The argument that spreads whole experts over GPUs."""
    min_capability: ClassVar[Mapping[str, int]]
    """Ten times the compute capability that a quantization needs, by the engine's name of it."""
    halving: ClassVar[frozenset[str]]
    """Quantizations that turn 16-bit weights into 8 bits while they are loaded."""
    unreadable: ClassVar[frozenset[str]] = frozenset()
    """Checkpoints' quantizations that the engine does not read."""
    reads_as_fp8: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of checkpoints' quantizations that the engine takes for fp8."""

    @abstractmethod
    def expert_groups(self, gpus: int) -> int:
        """Parts into which the experts are dealt out whole; the GPUs of one part cut them."""

    def reads_media(self, facts: ArtifactFacts) -> bool:
        """Whether memory is needed for images, sound or video."""
        return facts.multimodal if self.multimodal is None else self.multimodal

    def dense_parts(self, gpus: int) -> int:
        """Parts into which `gpus` GPUs of a stage cut the layers that are neither attention nor experts."""
        return gpus

    def repeats(self, facts: ArtifactFacts) -> int | None:
        """Bytes of the weights that each attention group holds in full. None: unknown."""
        return facts.attention_bytes

    @abstractmethod
    def slot_bytes(self, facts: ArtifactFacts, gpus: int) -> int | None:
        """Bytes of the adapters' slots on each of `gpus` GPUs; 0 without adapters. None: the widths are unknown."""

    @abstractmethod
    def memory(
        self, facts: ArtifactFacts, gpu: GPU, gpus: int, weights: int, overrides: Sizing, context: int
    ) -> Memory:
        """One GPU of a stage of `gpus` GPUs with `weights` bytes on each; `facts` are those of the stage. What one
        token takes must be known."""

    @abstractmethod
    def cpu_tokens(self, facts: ArtifactFacts, overrides: Sizing, context: int) -> int | None:
        """Tokens of an engine that runs on CPUs, where the arguments say how large its cache is."""

    @abstractmethod
    def unsized(self, facts: ArtifactFacts) -> str | None:
        """Why this engine's KV cache of such a model cannot be computed; None: it can."""

    @abstractmethod
    def refusal(self, facts: ArtifactFacts, sized: Sized, context: int) -> str | None:
        """Why the engine does not start with this replica although its cache holds the context; None: it starts. A
        part of a sentence after "leave room for N tokens"."""

    @abstractmethod
    def limit(self) -> str | None:
        """The argument that fixes the size of the KV cache, with its value; None: the engine fills its share."""

    @abstractmethod
    def parts(self, breakdown: MemoryBreakdown) -> tuple[str, ...]:
        """What takes the memory besides weights and KV cache, each with its size, for a sentence."""

    @abstractmethod
    def overhead_of(self, gpu: GPU, sized: Sized, engine_tokens: int) -> int | None:
        """See `implied_overhead`."""
