"""Sizing: whether a model fits on a GPU class, on how many GPUs, and how many tokens its KV cache holds there.

The arithmetic is the engine's own, so that predictions equal what it reports at its start: `sglang/` and `vllm/` stand
side by side, each behind a `Tuning` that carries the engine's arguments. Pure functions: input are facts of the
weights, a GPU, and a `Tuning`; the result is `Sized`, or `Misfit` with the calculation.
"""

from shoal.core.sizing.calibrate import implied_overhead
from shoal.core.sizing.classes import gpu_of, last_devices, memory_label, memory_of
from shoal.core.sizing.fit import size
from shoal.core.sizing.sglang import SGLangTuning
from shoal.core.sizing.tensor import tries
from shoal.core.sizing.types import GPU, AdapterSlots, MemoryBreakdown, Misfit, Sized, Tuning
from shoal.core.sizing.vllm import VLLMTuning

__all__ = [
    "GPU",
    "AdapterSlots",
    "MemoryBreakdown",
    "Misfit",
    "SGLangTuning",
    "Sized",
    "Tuning",
    "VLLMTuning",
    "gpu_of",
    "implied_overhead",
    "last_devices",
    "memory_label",
    "memory_of",
    "size",
    "tries",
]
