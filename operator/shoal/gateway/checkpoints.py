"""Checkpoints of the requests under way: what a SIGKILL costs is what they counted in their last second.

One timer walks all of them, a tenth each time, so that a request that has just counted and then falls silent is kept as
well, no chunk pays for it, and many streams do not all write at once.
"""

import asyncio
import time
from typing import Final, Protocol

from shoal.gateway.meter import Meter
from shoal.ledger.spoolfile import Row

CHECKPOINT_SECONDS: Final = 1.0
_SLOTS: Final = 10


class Spool(Protocol):
    def put(self, row: Row) -> None: ...


class Checkpoints:
    """Make and use it in one event loop."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._loop = asyncio.get_running_loop()
        self._slots: tuple[set[Meter], ...] = tuple(set[Meter]() for _ in range(_SLOTS))
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, meter: Meter) -> None:
        """From now on what it counts is kept; its first turn is the longest way off, so a short request has none."""
        meter.slot = self._turn - 1
        self._slots[meter.slot].add(meter)
        if self._timer is None:
            self._timer = self._loop.call_later(CHECKPOINT_SECONDS / _SLOTS, self._look)

    def discard(self, meter: Meter) -> None:
        """Its final row follows."""
        self._slots[meter.slot].discard(meter)

    def _look(self) -> None:
        now = time.monotonic()
        for meter in self._slots[self._turn]:
            if (row := meter.news(now)) is not None:
                self._spool.put(row)
        self._turn = (self._turn + 1) % _SLOTS
        self._timer = self._loop.call_later(CHECKPOINT_SECONDS / _SLOTS, self._look) if any(self._slots) else None
