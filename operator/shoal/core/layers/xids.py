"""NVIDIA's Xid messages: what their numbers mean, for GPUs since Ampere.

The meanings are those of https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, and the reasons follow
its immediate actions: reset the GPU (48, 95), restart the application (94), ignore (63, 92).
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from shoal.core.layers import faults


class Xid(NamedTuple):
    """What one number means."""

    reason: str
    meaning: str


XIDS: Final[Mapping[int, Xid]] = {
    13: Xid(faults.CUDA_ERROR, "a kernel of the engine failed"),
    31: Xid(faults.CUDA_ERROR, "the engine accessed memory that it does not have"),
    32: Xid(faults.CUDA_ERROR, "the engine's commands were damaged on the way to the GPU"),
    38: Xid(faults.DRIVER_FAULT, "the driver's firmware did not answer"),
    43: Xid(faults.CUDA_ERROR, "the engine was stopped after a fault of its own"),
    45: Xid(faults.CUDA_ERROR, "the engine's work was removed because it ended, or after another Xid"),
    46: Xid(faults.DRIVER_FAULT, "the GPU stopped processing"),
    48: Xid(faults.GPU_ECC_ERROR, "a double-bit error of memory, which cannot be corrected"),
    54: Xid(faults.GPU_LOST, "the GPU's auxiliary power is not connected"),
    61: Xid(faults.DRIVER_FAULT, "a microcontroller of the GPU stopped"),
    62: Xid(faults.DRIVER_FAULT, "a microcontroller of the GPU halted"),
    63: Xid(faults.GPU_MEMORY_REPAIRED, "a row of the GPU's memory was marked for remapping"),
    64: Xid(faults.GPU_ECC_ERROR, "a damaged row of the GPU's memory could not be remapped"),
    68: Xid(faults.CUDA_ERROR, "the GPU's video decoder failed"),
    69: Xid(faults.CUDA_ERROR, "a kernel of the engine failed"),
    74: Xid(faults.NVLINK_FAULT, "an NVLink failed, here or at its other end"),
    79: Xid(faults.GPU_LOST, "the GPU has fallen off the bus"),
    92: Xid(faults.GPU_ECC_CORRECTED, "many single-bit errors of the GPU's memory, all corrected"),
    94: Xid(faults.GPU_ECC_CONTAINED, "an error of the GPU's memory, contained to one process, which ended"),
    95: Xid(faults.GPU_ECC_ERROR, "an error of the GPU's memory that was not contained to one process"),
    109: Xid(faults.DRIVER_FAULT, "the GPU did not switch between processes in time"),
    110: Xid(faults.GPU_UNHEALTHY, "a security fault of the GPU"),
    119: Xid(faults.DRIVER_FAULT, "the GPU's system processor (GSP) did not answer"),
    120: Xid(faults.DRIVER_FAULT, "an error on the GPU's system processor (GSP)"),
    136: Xid(faults.NVLINK_FAULT, "an NVLink could not be trained"),
    137: Xid(faults.CUDA_ERROR, "the engine's access over NVLink was refused"),
    140: Xid(faults.GPU_ECC_ERROR, "errors of the GPU's memory that could be neither corrected nor remapped"),
    143: Xid(faults.GPU_UNHEALTHY, "the GPU could not be initialized"),
    **{number: Xid(faults.NVLINK_FAULT, "an NVLink error") for number in range(144, 151)},
    155: Xid(faults.NVLINK_FAULT, "an NVLink went down"),
    156: Xid(faults.GPU_UNHEALTHY, "a damaged part of the GPU is retired at the next reset"),
    157: Xid(faults.GPU_UNHEALTHY, "a damaged part of the GPU could not be retired"),
    158: Xid(faults.GPU_UNHEALTHY, "the GPU did not answer in time"),
    160: Xid(faults.GPU_MEMORY_REPAIRED, "a channel of the GPU's memory was marked for repair"),
    171: Xid(faults.GPU_ECC_ERROR, "an error of the GPU's DRAM that cannot be corrected"),
    172: Xid(faults.GPU_ECC_ERROR, "an error of the GPU's SRAM that cannot be corrected"),
}
INFORM: Final = frozenset({106, 107, 121})
"""Tests of the management bus, and corrected errors of the link to the CPU: nothing is wrong."""
_OTHER: Final = Xid(faults.DRIVER_FAULT, "an error of the GPU or its driver")
_RECOVERY: Final = 154
"""Sums up what others ask for. A change to "None" asks for nothing."""
_ASKS: Final = re.compile(r"\b(reset|reboot|drain)\b", re.IGNORECASE)


def of(number: int, line: str = "") -> Xid | None:
    """What a number means; `line` is the message that it is in. None: nothing is wrong."""
    if number in INFORM:
        return None
    if number == _RECOVERY:
        action = line.rpartition(" to ")[2]
        return Xid(faults.GPU_UNHEALTHY, "the GPU has to be reset, or its node") if _ASKS.search(action) else None
    return XIDS.get(number, _OTHER)
