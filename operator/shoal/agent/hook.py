"""The agent's side of the engine's preStop hook: two files in the folder that both containers share.

The hook (`manifests/pod.py: drain_script`) creates `drain` and waits until it is gone; the agent drains and removes it.
During the drain the agent writes `draining` every second, which tells the hook that the agent is alive, and people what
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
HEARTBEAT_SECONDS: Final = 1.0

log = structlog.get_logger()


class Hook:
    """Answers the preStop hooks of one pod."""

    def __init__(self, drain: Drain, run_dir: Path = Path(names.RUN_DIR)) -> None:
        self._drain = drain
        self._file = run_dir / Path(names.DRAIN_FILE).name
        self._state = run_dir / Path(names.DRAIN_STATE_FILE).name
        self._problem = ""

    async def run(self) -> None:
        """Polls until cancelled. File system errors are logged, and the operation is tried again."""
        while True:
            waited = await asyncio.to_thread(self._waited_seconds)
            if waited is not None:
                await self._answer(waited)
            await asyncio.sleep(POLL_SECONDS)

    async def _answer(self, waited: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(self._write_heartbeat())
            await self._drain.wait(waited)
            heartbeat.cancel()
        await asyncio.to_thread(self._remove)

    async def _write_heartbeat(self) -> None:
        for number in itertools.count():
            await asyncio.to_thread(self._write, f"{number} {self._drain.waits_for}\n")
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # --- file access; blocks ------------------------------------------------------------------------------------------

    def _waited_seconds(self) -> float | None:
        """How long a hook has waited; None: there is no hook."""
        try:
            made = self._file.stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log_once(error)
            return None
        # Both containers use the node's clock. Even with a wrong clock, a drain never takes longer than drainSeconds.
        return max(0.0, time.time() - made)

    def _write(self, text: str) -> None:
        part = self._state.with_suffix(".part")
        try:
            part.write_text(text)
            os.replace(part, self._state)
        except OSError as error:
            self._log_once(error)

    def _remove(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            self._log_once(error)

    def _log_once(self, error: OSError) -> None:
        problem = f"{error.filename}: {error.strerror}"
        if problem != self._problem:
            self._problem = problem
            log.error("drain.file", problem=problem, consequence="the hook takes the agent for dead after 15 s")
