"""Threads that end before their caller continues, even when the caller is cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Runs `work` in a thread and waits for its end even when cancelled, so that it never runs concurrently with the
    caller's cleanup.

    `asyncio.to_thread` leaves the thread running after cancellation: it would open, write and truncate files that the
    caller is deleting or creating again.
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
        running.exception()  # retrieved, so that asyncio does not log it
    raise cancelled
