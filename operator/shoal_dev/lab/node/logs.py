"""Container logs in the CRI format (TIME STREAM F LINE), so that `kubectl logs` can filter by time."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

FOLLOW_SECONDS = 0.2
"""Pause between looks for more, while following."""
CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20
_TIMES_SHARE = 4
"""A log with short lines is mostly times; so much more is read to find enough text."""


class LogWriter:
    """Reads a container's output from a pipe and writes it with times. Closes when the last writer has closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._pipe, self.output = os.pipe()
        os.set_blocking(self._pipe, False)
        self._rest = b""
        self.closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def started(self) -> None:
        """The container has its copy of `output`."""
        os.close(self.output)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, CHUNK)
        except BlockingIOError:
            return
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode() + b" stdout F "
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._file.write(b"".join(stamp + line + b"\n" for line in lines))
        if not data:
            self.close()

    def close(self) -> None:
        if not self.closed.is_set():
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._file.close()
            self.closed.set()


def tail_of(path: Path, size: int) -> str:
    """The last `size` bytes of text, without times: FallbackToLogsOnError."""
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - _TIMES_SHARE * size - CHUNK)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return ""
    if start:
        lines = lines[1:]  # cut in the middle
    text = b"\n".join(line.split(b" ", 3)[-1] for line in lines if line)
    return text[-size:].decode(errors="replace")


async def read(
    path: Path, *, follow: asyncio.Event | None, tail: int | None, since: str | None, timestamps: bool
) -> AsyncIterator[bytes]:
    """Log lines as `kubectl logs` prints them. `since` is an RFC 3339 time in UTC; `follow` until that event is set."""
    with path.open("rb") as file:
        first = True
        rest = b""
        while True:
            ending = follow is None or follow.is_set()
            data = file.read() if not first or tail is None else _last_lines(file.read(), tail)
            first = False
            *lines, rest = (rest + data).split(b"\n")
            shown: list[bytes] = []
            for line in lines:
                time, _, tagged = line.partition(b" ")
                if since is None or time.decode() >= since:
                    text = tagged.split(b" ", 2)[-1]
                    shown.append((time + b" " + text if timestamps else text) + b"\n")
            if shown:
                yield b"".join(shown)
            if ending:
                return
            await asyncio.sleep(FOLLOW_SECONDS)


def _last_lines(data: bytes, count: int) -> bytes:
    if count <= 0:
        return b""
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(count):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return data
    return data[position + 1 :]
