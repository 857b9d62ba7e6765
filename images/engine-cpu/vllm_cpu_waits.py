"""A plugin of vLLM for engines on a CPU: an engine's processes sleep while they wait for each other.

The engine and its worker look for each other's messages in a loop that gives way by sched_yield (vLLM 0.32.0, in
shm_broadcast). On a Linux 6.18 that schedules by sessions (kernel.sched_autogroup_enabled), with two cores, that
kept other sessions from a core for up to 6 seconds, while nothing else ran: agents and clients stood still. With GPUs
such loops have cores of their own.

vLLM loads it through the entry point `vllm.general_plugins`, in every process of an engine. install-vllm.sh declares
it.
"""

import time
from typing import Final

SLEEP_SECONDS: Final = 20e-6
"""A step of the smallest model takes a hundred times as long."""


def apply() -> None:
    """Replaces the yield. Does nothing on other platforms."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(SLEEP_SECONDS)
