"""Python's garbage collector, set for a process that keeps a whole cluster in memory.

It looks for cycles; what is in none is freed without it. Left alone it looks through everything that is kept, every few
seconds while objects come and go: with 300 Models that stopped the process for 0.2 to 0.6 s, and a wake that came just
then waited as long. So what has stayed is taken out of its sight, and only what is new is looked through.
"""

import asyncio
import gc
from typing import Final

NEW_OBJECTS: Final = (5_000, 4)
"""Containers made and not freed, from which on the youngest are looked through; and after how many such looks those
that stayed then, too: a few milliseconds."""
NEVER: Final = 1_000_000
EVERY_SECONDS: Final = 5.0
"""Between two looks at what is new since the last one."""
WHOLE_EVERY: Final = 4320
"""Looks, after which everything is looked through once (six hours): cycles of old objects are rare, not impossible."""


async def run() -> None:
    """Call it when what lives as long as the process is there; runs until cancelled."""
    before = gc.get_threshold()
    gc.set_threshold(*NEW_OBJECTS, NEVER)
    try:
        look(whole=True)
        looks = 0
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            looks += 1
            look(whole=looks % WHOLE_EVERY == 0)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def look(*, whole: bool) -> int:
    """Frees cycles among what is new, or among everything; what is left is not looked at again before a look at the
    whole. Returns how many objects were freed."""
    if whole:
        gc.unfreeze()
    freed = gc.collect()
    gc.freeze()
    return freed
