"""Work in a thread that is over when its caller goes on, also when that was cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Runs `work` in a thread, and waits for its end even when cancelled: who then cleans up must not meet it.

    `asyncio.to_thread` leaves the thread running then: it opens, writes and truncates files behind the back of whoever
    removes them or begins again.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return running.result()
    if not running.cancelled():
        running.exception()  # nobody is there to hear it
    raise cancelled
