"""Checkpoints of running requests, so that a SIGKILL loses only the counts of the last second.

One timer visits all requests, a tenth at a time. So the counts of a request that pauses are saved as well, no streamed
chunk waits for a checkpoint, and many streams do not all write at once.
"""

import asyncio
import time
from typing import Final, Protocol

from shoal.metering.meter import Meter
from shoal.metering.spoolfile import Row

CHECKPOINT_SECONDS: Final = 1.0
_SLOTS: Final = 10


class CheckpointSpool(Protocol):
    def put(self, row: Row) -> None: ...


class Checkpoints:
    """Create and use it in one event loop."""

    def __init__(self, spool: CheckpointSpool) -> None:
        self._spool = spool
        self._loop = asyncio.get_running_loop()
        self._slots: tuple[set[Meter], ...] = tuple(set[Meter]() for _ in range(_SLOTS))
        self._slot = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, meter: Meter) -> None:
        """Starts checkpoints of a request. It gets the slot that is visited last, so a short request has no
        checkpoint."""
        meter.slot = self._slot - 1
        self._slots[meter.slot].add(meter)
        if self._timer is None:
            self._timer = self._loop.call_later(CHECKPOINT_SECONDS / _SLOTS, self._write_due)

    def discard(self, meter: Meter) -> None:
        """Ends the checkpoints of a request: its final row follows."""
        self._slots[meter.slot].discard(meter)

    def _write_due(self) -> None:
        now = time.monotonic()
        for meter in self._slots[self._slot]:
            if (row := meter.next_checkpoint(now)) is not None:
                self._spool.put(row)
        self._slot = (self._slot + 1) % _SLOTS
        self._timer = self._loop.call_later(CHECKPOINT_SECONDS / _SLOTS, self._write_due) if any(self._slots) else None
