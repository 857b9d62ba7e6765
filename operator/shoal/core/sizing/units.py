"""Bytes in binary units, and what is in use on a GPU before any engine starts."""

from math import log2

from shoal.core.sizing.types import GPU

MI = 2**20
GI = 2**30
OVERHEAD = 6 * GI // 10
"""CUDA context and allocator on a GPU that runs alone, before anything is loaded: an estimate."""
NCCL = 3 * GI // 10
"""More for every doubling of the GPUs of a replica: an estimate."""


def gib(size: float) -> str:
    """Bytes for a reader: 14.96 GiB, 131 GiB."""
    value = size / GI
    return f"{value:.0f} GiB" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".") + " GiB"


def communication(gpus: int) -> int:
    """Bytes that NCCL needs on one GPU of a replica with this many."""
    return int(NCCL * log2(gpus))


def before(gpu: GPU, gpus: int) -> int:
    """Bytes of one GPU in use before the engine allocates any: measured on the class, or an estimate."""
    base = OVERHEAD if gpu.overhead_bytes is None else gpu.overhead_bytes
    return min(base + communication(gpus), gpu.memory_bytes)
