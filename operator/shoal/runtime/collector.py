"""Python's garbage collector, set for a process that keeps a whole cluster in memory.

It looks for cycles; what is in none is freed without it. Left alone it looks through everything that is kept, every few
seconds while objects come and go: with 300 Models that stopped the process for 0.2 to 0.6 s, and a wake that came just
then waited as long. So what has stayed is taken out of its sight, and only what is new is looked through.
"""

import asyncio
import gc
import time
from typing import Final

NEW_OBJECTS: Final = (5_000, 4)
"""Containers made and not freed, from which on the youngest are looked through; and after how many such looks those
that stayed then, too: a few milliseconds."""
NEVER: Final = 1_000_000
EVERY_SECONDS: Final = 5.0
"""Between two looks at what is new since the last one, at most."""
OFTEN_SECONDS: Final = 0.5
"""At least, where much is new: a look stops the process, and takes the longer the more there is."""
MUCH: Final = 1
"""Rounds of NEW_OBJECTS, 25,000 containers, since the last look."""
WHOLE_SECONDS: Final = 6 * 3600.0
"""After which everything is looked through once: cycles of old objects are rare, not impossible."""


async def run() -> None:
    """Call it when what lives as long as the process is there; runs until cancelled."""
    before = gc.get_threshold()
    gc.set_threshold(*NEW_OBJECTS, NEVER)
    try:
        collect(whole=True)
        whole_at, due = time.monotonic() + WHOLE_SECONDS, time.monotonic() + EVERY_SECONDS
        while True:
            await asyncio.sleep(OFTEN_SECONDS)
            now = time.monotonic()
            if now >= due or gc.get_count()[2] >= MUCH:
                collect(whole=now >= whole_at)
                due = now + EVERY_SECONDS
                whole_at = now + WHOLE_SECONDS if now >= whole_at else whole_at
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def collect(*, whole: bool) -> int:
    """Frees cycles among what is new, or among everything; what is left is not looked at again before a look at the
    whole. Returns how many objects were freed."""
    if whole:
        gc.unfreeze()
    freed = gc.collect()
    gc.freeze()
    return freed
