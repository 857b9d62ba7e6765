"""Tells the agent how far staging is: a small file, replaced at most twice a second."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import structlog

from shoal.api.replica import StageProgress

INTERVAL_SECONDS = 0.5
LOG_SECONDS = 5.0
"""Between two lines of the log: `shoal status` reads the per cent there, since more people may read logs than may exec
into a pod."""

log = structlog.get_logger()


def write_progress(path: Path, progress: StageProgress) -> None:
    """Replaces the progress file. A reader sees the old one or the new one, never half of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(progress.model_dump_json(exclude_none=True))
    os.replace(beside, path)


class DownloadProgress:
    """Measures what has arrived by looking at the disk: true for every source, whatever library fetches it."""

    def __init__(self, path: Path, measure: Callable[[], int]) -> None:
        self._path = path
        self.measure = measure
        """Bytes that have arrived. Called in a thread."""
        self.total: int | None = None
        """Bytes that will arrive; None while the source has not said."""
        self._logged: tuple[float, StageProgress] | None = None

    async def report(self, state: str) -> None:
        """Writes the file now, and from time to time a line of the log."""
        progress = await asyncio.to_thread(self._write, state)
        now = time.monotonic()
        if self._logged is None or (now - self._logged[0] >= LOG_SECONDS and progress != self._logged[1]):
            self._logged = now, progress
            log.info(
                "stage.progress",
                state=progress.state,
                bytes_done=progress.bytes_done,
                bytes_total=progress.bytes_total,
            )

    def _write(self, state: str) -> StageProgress:
        progress = StageProgress.model_validate(
            {"state": state, "bytes_done": self.measure(), "bytes_total": self.total}
        )
        write_progress(self._path, progress)
        return progress

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
