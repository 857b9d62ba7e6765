"""Tells the agent how far staging is: a small file, replaced at most twice a second."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from shoal.api.replica import StageProgress

INTERVAL_SECONDS = 0.5


def write_progress(path: Path, progress: StageProgress) -> None:
    """Replaces the progress file. A reader sees the old one or the new one, never half of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(progress.model_dump_json(exclude_none=True))
    os.replace(beside, path)


class Progress:
    """Measures what has arrived by looking at the disk: true for every source, whatever library fetches it."""

    def __init__(self, path: Path, measure: Callable[[], int]) -> None:
        self._path = path
        self.measure = measure
        """Bytes that have arrived. Called in a thread."""
        self.total: int | None = None
        """Bytes that will arrive; None while the source has not said."""

    async def report(self, state: str) -> None:
        """Writes the file now."""
        await asyncio.to_thread(self._write, state)

    def _write(self, state: str) -> None:
        progress = StageProgress.model_validate(
            {"state": state, "bytes_done": self.measure(), "bytes_total": self.total}
        )
        write_progress(self._path, progress)

    @contextlib.asynccontextmanager
    async def fetching(self) -> AsyncGenerator[None]:
        """Keeps the file fresh while the body runs."""

        ended = asyncio.Event()

        async def repeat() -> None:
            while not ended.is_set():
                await self.report("fetching")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_SECONDS):
                        await ended.wait()

        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            # Not cancelled: a write that goes on in its thread would meet the next one.
            ended.set()
            await asyncio.gather(task, return_exceptions=True)
