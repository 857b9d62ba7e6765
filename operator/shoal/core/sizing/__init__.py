"""Sizing: whether a model fits on a GPU class, on how many GPUs, and how many tokens its KV cache holds there.

The arithmetic is SGLang's own (0.5.23), so that predictions equal what the engine reports at its start. Pure functions:
input are facts of the weights, a GPU, and the engine's arguments; the result is `Sized`, or `Misfit` with the
calculation.
"""

from shoal.core.sizing.calibrate import implied_overhead
from shoal.core.sizing.classes import gpu_of, memory_label, memory_of
from shoal.core.sizing.fit import size
from shoal.core.sizing.tensor import tries
from shoal.core.sizing.types import GPU, AdapterSlots, MemoryBreakdown, Misfit, Sized, Tuning

__all__ = [
    "GPU",
    "AdapterSlots",
    "MemoryBreakdown",
    "Misfit",
    "Sized",
    "Tuning",
    "gpu_of",
    "implied_overhead",
    "memory_label",
    "memory_of",
    "size",
    "tries",
]
