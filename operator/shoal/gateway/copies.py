"""The tasks that send copies of requests to mirrors (`mirrors.py`): how many there are, and their end."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

MOST: Final = 32
"""Copies in progress at a time; further ones are dropped."""


class CopyTasks:
    """The copies in progress at this gateway."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_progress(self) -> int:
        """Copies that have not ended."""
        return len(self._tasks)

    def start(self, send: Callable[[], Coroutine[None, None, None]]) -> bool:
        """Starts sending a copy; False: there are too many, or the gateway ends."""
        if self._closed or len(self._tasks) >= MOST:
            return False
        task = asyncio.create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Ends every copy; later ones are dropped."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
