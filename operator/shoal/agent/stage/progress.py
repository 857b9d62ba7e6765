"""Reports the progress of staging to the agent: a small file, replaced at most twice a second."""

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
"""Interval of log lines. `shoal status` reads the percentage from the log, because more people may read logs than exec
into pods."""

log = structlog.get_logger()


def write_progress(path: Path, progress: StageProgress) -> None:
    """Replaces the progress file atomically."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(progress.model_dump_json(exclude_none=True))
    os.replace(temporary, path)


class DownloadProgress:
    """Periodically measures and reports the bytes that have arrived."""

    def __init__(self, path: Path, measure: Callable[[], int]) -> None:
        self._path = path
        self.measure = measure
        """Returns the bytes that have arrived. Called in a thread."""
        self.total: int | None = None
        """Total bytes; None: unknown yet."""
        self._logged: tuple[float, StageProgress] | None = None

    async def report(self, state: str) -> None:
        """Writes the file now, and a log line every LOG_SECONDS."""
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
        """Updates the file while the body runs."""

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
            # Not cancelled: a write that is running in its thread would overlap with the next one.
            ended.set()
            await asyncio.gather(task, return_exceptions=True)
