"""Whether a model fits on a GPU class, on how many GPUs, and how many tokens its KV cache will hold there.

The sums are SGLang's own (0.5.23), so that what is promised here is what the engine then says at its start. Pure: facts
of the weights, a GPU, and what the engine's arguments change go in; `Sized` or `Misfit` with the sum come out.
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
