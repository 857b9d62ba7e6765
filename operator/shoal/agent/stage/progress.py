"""Tells the agent how far staging is: a small file, replaced at most twice a second."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
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

    @asynccontextmanager
    async def fetching(self) -> AsyncGenerator[None]:
        """Keeps the file fresh while the body runs."""

        async def repeat() -> None:
            while True:
                await self.report("fetching")
                await asyncio.sleep(INTERVAL_SECONDS)

        await self.report("fetching")
        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
