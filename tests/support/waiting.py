"""Waiting for a condition, with the last state in the failure."""

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], bool], within: float, state: Callable[[], object] = lambda: "") -> None:
    """Polls until `condition` holds; fails with `state()` after `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come true within {within:.0f} s: {state()}")
        time.sleep(0.2)


async def until_async(condition: Callable[[], bool], within: float = 60.0) -> None:
    """Lets other tasks run until `condition` holds; fails after `within` seconds."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)
