"""Helper processes of `bench_replicas`: each has a session of its own, as the engines have. Linux shares a CPU among
sessions (autogroups), so each router and each engine has the same claim to it.

A helper of ours gets its configuration as one line of JSON on standard input, answers one line when it is ready, and
ends when standard input does: also when the bench was killed.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

READY_SECONDS: Final = 180.0
_END_SECONDS: Final = 15.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class NotStarted(Exception):
    """A helper ended, or was not ready in time. Has the end of its log."""


@dataclass(frozen=True, slots=True)
class Helper:
    process: asyncio.subprocess.Process
    log: Path

    def cpu_seconds(self) -> float:
        """Of all its threads, since its start."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    async def ready(self) -> dict[str, Any]:
        """What one of our helpers says when it is ready. Raises NotStarted."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(READY_SECONDS):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise self.failure(f"not ready after {READY_SECONDS:g} s") from None
        if not line:
            raise self.failure("it ended")
        return json.loads(line)

    def failure(self, why: str) -> NotStarted:
        return NotStarted(f"{why}: {self.log.read_text(errors='replace')[-2000:]}")


@contextlib.asynccontextmanager
async def started(command: Sequence[str], log: Path, *, talks: bool = False) -> AsyncGenerator[Helper]:
    """A process in a session of its own, which is ended with all its children at the end. `talks`: it is one of ours:
    it speaks on standard output, and is told to end by the end of its standard input."""
    pipe = asyncio.subprocess.PIPE if talks else asyncio.subprocess.DEVNULL
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=asyncio.subprocess.PIPE if talks else out, stderr=out, start_new_session=True
        )
    try:
        yield Helper(process, log)
    finally:
        if process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@contextlib.asynccontextmanager
async def helper(module: str, config: dict[str, Any], log: Path) -> AsyncGenerator[Helper]:
    """A module of the bench as a process of its own."""
    async with started([sys.executable, "-m", f"tests.bench.{module}"], log, talks=True) as it:
        assert it.process.stdin is not None
        it.process.stdin.write(json.dumps(config).encode() + b"\n")
        yield it


def configuration() -> dict[str, Any]:
    """In the helper: what the bench wants of it. Blocks."""
    return json.loads(sys.stdin.readline())


async def ready(**said: object) -> None:
    """In the helper: says that it is ready, and returns when it is to end."""
    print(json.dumps(said), flush=True)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()
