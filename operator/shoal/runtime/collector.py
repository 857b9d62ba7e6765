"""Tunes Python's garbage collector for a process that keeps a whole cluster in memory.

The collector only frees reference cycles. By default it scans all objects every few seconds while objects come and go:
with 300 Models that stopped the process for 0.2 to 0.6 s, which delayed a concurrent wake as much. Therefore surviving
objects are frozen, and only new ones are scanned.
"""

import asyncio
import gc
import time
from typing import Final

NEW_OBJECTS: Final = (5_000, 4)
"""gc thresholds: number of new containers after which the youngest generation is scanned, and number of such scans
after which the next one is: a few milliseconds."""
NEVER: Final = 1_000_000
EVERY_SECONDS: Final = 5.0
"""Interval of scans of new objects."""
BUSY_SECONDS: Final = 0.5
"""Interval of scans while many objects are created: a scan stops the process for longer the more new objects there
are."""
MANY_ROUNDS: Final = 1
"""Scans of the middle generation (25,000 containers each) since the last scan that count as many."""
FULL_SECONDS: Final = 6 * 3600.0
"""Interval of full scans: cycles of old objects are rare, not impossible."""


async def run() -> None:
    """Runs until cancelled. Call it when the long-lived objects exist."""
    before = gc.get_threshold()
    gc.set_threshold(*NEW_OBJECTS, NEVER)
    try:
        collect(whole=True)
        whole_at, due = time.monotonic() + FULL_SECONDS, time.monotonic() + EVERY_SECONDS
        while True:
            await asyncio.sleep(BUSY_SECONDS)
            now = time.monotonic()
            if now >= due or gc.get_count()[2] >= MANY_ROUNDS:
                collect(whole=now >= whole_at)
                due = now + EVERY_SECONDS
                whole_at = now + FULL_SECONDS if now >= whole_at else whole_at
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def collect(*, whole: bool) -> int:
    """Frees cycles among new objects, or among all objects if `whole`, and freezes the survivors until the next full
    scan. Returns the number of freed objects."""
    if whole:
        gc.unfreeze()
    freed = gc.collect()
    gc.freeze()
    return freed
