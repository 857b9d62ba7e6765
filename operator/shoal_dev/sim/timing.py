"""How long one step of continuous batching takes on a GPU, and how many tokens fit into its KV cache.

With m = tokens in the step (one per decoding sequence, plus the prefill chunk), S = sum of the context lengths of the
decoding sequences, P = sum over prefill chunks of c * (prior + c / 2), B = sequences in the batch:

    t = max(t0, t1 * m + t2) + max(a0, kd * S + kp * P) + h0 + hB * B      (milliseconds)

t0 is the floor of reading the weights, t1 the compute slope, kd the KV read per context token, kp the attention of
prefill. t0..a0 are fitted to kernel tables of Llama-3.1-8B; h0 and hB, the scheduler's overhead, to a real run.
Single-engine means come within about 10 % of real engines. Other models get the same times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_H0_MS: Final = 1.0
_HB_MS: Final = 0.01

_KV_BYTES_PER_TOKEN: Final = 2 * 32 * 8 * 128 * 2
"""Llama-3.1-8B: keys and values, 32 layers, 8 KV heads of 128, two bytes."""
_WEIGHT_BYTES: Final = {"bfloat16": 16.06e9, "fp8": 8.03e9}
_WORKSPACE_BYTES: Final = 2.5e9
_MEMORY_MIB: Final = {
    "l40s": 46068, "l4": 23034, "a10g": 23028, "a100_sxm": 81920, "h100_sxm": 81920, "h200_sxm": 144384,
    "rtxpro": 97887,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one step computes."""

    tokens: int
    decode_context: int
    prefill_work: float
    sequences: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Parameters of one GPU and data type, in milliseconds."""

    t0: float
    t1: float
    t2: float
    kd: float
    kp: float
    a0: float

    @classmethod
    def of(cls, params: Mapping[str, float]) -> "Timing":
        return cls(params["t0"], params["t1"], params["t2"], params["kd"], params["kp"], params["att0"])

    def seconds(self, step: EngineStep) -> float:
        """Duration of `step` on one GPU (the formula above)."""
        compute = max(self.t0, self.t1 * step.tokens + self.t2)
        attention = max(self.a0, self.kd * step.decode_context + self.kp * step.prefill_work)
        return (compute + attention + _H0_MS + _HB_MS * step.sequences) / 1000


def kv_tokens(gpu: str, tp_size: int, memory_fraction: float) -> int:
    """KV tokens of one replica: what the weights and the workspace leave of `memory_fraction` of all its GPUs.

    Raises ValueError when nothing is left.
    """
    name, _, dtype = gpu.partition(":")
    memory = memory_fraction * _MEMORY_MIB[name] * 2**20 * tp_size
    tokens = int((memory - _WEIGHT_BYTES[dtype] - _WORKSPACE_BYTES * tp_size) / _KV_BYTES_PER_TOKEN)
    if tokens <= 0:
        raise ValueError(
            f"Not enough memory. Please try to increase --mem-fraction-static. Current value: {memory_fraction}"
        )
    return tokens


def memory_mib(gpu: str) -> int:
    """MiB of one GPU, as nvidia-smi says."""
    return _MEMORY_MIB[gpu.partition(":")[0]]


def weight_gb(gpu: str) -> float:
    """GB of weights of the model that the parameters stand for."""
    return round(_WEIGHT_BYTES[gpu.partition(":")[2]] / 2**30, 2)


def kv_gb(tokens: int) -> float:
    """GB of KV cache of `tokens` tokens."""
    return round(tokens * _KV_BYTES_PER_TOKEN / 2**30, 2)
