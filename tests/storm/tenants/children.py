"""Processes of a storm without a lab, each of which may be killed and is started again as it was."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0


@dataclass(slots=True)
class Child:
    """One program. `ready` is the URL that answers 200 when it serves; None: nobody asks."""

    name: str
    command: Sequence[str]
    env: dict[str, str]
    log: Path
    ready: str | None
    _process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns at once; `serves` waits."""
        with self.log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, stdout=out, stderr=out, env=os.environ | self.env, start_new_session=True
            )

    async def serves(self, session: aiohttp.ClientSession, within: float = READY_SECONDS) -> None:
        """Raises AssertionError with the end of its log."""
        assert self._process is not None
        deadline = time.monotonic() + within
        while self.ready is not None:
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
                async with session.get(self.ready, timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    if answer.status == 200:
                        return
            assert self._process.returncode is None, f"{self.name} has ended: {self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} does not serve: {self.tail()}"
            await asyncio.sleep(0.05)

    def strike(self) -> None:
        """SIGKILL, at this very moment."""
        if self._process is not None and self._process.returncode is None:
            # The whole session: SGLang has child processes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Waits for the end of a process that was struck."""
        if self._process is not None:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()

    async def stop(self) -> int | None:
        """SIGTERM, and its exit code; None: there was no process, or it had to be killed."""
        if self._process is None or self._process.returncode is not None:
            return None
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            return None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]
