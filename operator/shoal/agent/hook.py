"""The engine's preStop hook as the agent sees it: two files of the folder that both containers share.

The hook (`manifests/pod.py: drain_script`) makes `drain` and waits until it is gone; the agent drains and removes it.
Meanwhile the agent writes `draining` every second, by which the hook knows that somebody works on it, and people what
the drain waits for.
"""

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Final

import structlog

from shoal.agent.drain import Drain
from shoal.api import names

POLL_SECONDS: Final = 0.1
BEAT_SECONDS: Final = 1.0

log = structlog.get_logger()


class Hook:
    """Answers the hooks of one pod, as often as they come."""

    def __init__(self, drain: Drain, run_dir: Path = Path(names.RUN_DIR)) -> None:
        self._drain = drain
        self._file = run_dir / Path(names.DRAIN_FILE).name
        self._state = run_dir / Path(names.DRAIN_STATE_FILE).name
        self._problem = ""

    async def run(self) -> None:
        """Looks for ever. What the file system refuses is logged and tried again."""
        while True:
            ago = await asyncio.to_thread(self._waited_seconds)
            if ago is not None:
                await self._answer(ago)
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, ago: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat())
            await self._drain.wait(ago)
            beating.cancel()
        await asyncio.to_thread(self._remove)

    async def _beat(self) -> None:
        for number in itertools.count():
            await asyncio.to_thread(self._write, f"{number} {self._drain.waits_for}\n")
            await asyncio.sleep(BEAT_SECONDS)

    # --- files: these block -------------------------------------------------------------------------------------------

    def _waited_seconds(self) -> float | None:
        """For how long a hook has waited; None: none does."""
        try:
            made = self._file.stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(error)
            return None
        # Both containers have the node's clock. Whatever is wrong with it, a drain is never longer than drainSeconds.
        return max(0.0, time.time() - made)

    def _write(self, text: str) -> None:
        part = self._state.with_suffix(".part")
        try:
            part.write_text(text)
            os.replace(part, self._state)
        except OSError as error:
            self._note(error)

    def _remove(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        problem = f"{error.filename}: {error.strerror}"
        if problem != self._problem:
            self._problem = problem
            log.error("drain.file", problem=problem, consequence="the hook takes the agent for dead after 15 s")
