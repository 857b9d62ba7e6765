"""Bytes in binary units, and what is in use on a GPU before any engine starts."""

from math import log2

from shoal.core.sizing.types import GPU

MI = 2**20
GI = 2**30
RESERVED = 6 * GI // 10
"""Of the memory that nvidia-smi and the node's label tell, what the driver keeps and no process can have: an estimate.
616 MiB of an H200's 143,771 (`nvidia-smi --query-gpu=memory.reserved`, driver 580)."""
CONTEXT = 6 * GI // 10
"""CUDA context on a GPU that runs alone, before anything is loaded: an estimate. On an H200 527 MiB, and 621 after the
first kernel."""
OVERHEAD = RESERVED + CONTEXT
"""What an engine that runs alone finds missing at its start."""
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


def usable(memory: int, overhead: int) -> int:
    """Bytes of one GPU as CUDA counts them; `overhead` is what an engine finds missing, with what the driver keeps."""
    return memory - min(RESERVED, overhead)
