"""Container logs: written with times, read as `kubectl logs` prints them."""

import asyncio
import os
from pathlib import Path

from shoal_dev.lab.node.logs import LogWriter, read, tail_of


async def written(path: Path, *chunks: bytes) -> None:
    writer = LogWriter(path)
    for chunk in chunks:
        os.write(writer.output, chunk)
        await asyncio.sleep(0)
    writer.started()
    async with asyncio.timeout(20):
        await writer.closed.wait()


async def shown(path: Path, *, tail: int | None = None, since: str | None = None, timestamps: bool = False) -> bytes:
    parts = [part async for part in read(path, follow=None, tail=tail, since=since, timestamps=timestamps)]
    return b"".join(parts)


async def test_lines_survive_cut_writes(tmp_path: Path) -> None:
    path = tmp_path / "pod" / "0.log"
    await written(path, b"one\ntw", b"o\n", b"last without newline")
    assert await shown(path) == b"one\ntwo\nlast without newline\n"
    assert await shown(path, tail=1) == b"last without newline\n"
    assert await shown(path, tail=2) == b"two\nlast without newline\n"
    assert await shown(path, tail=99) == await shown(path)
    assert await shown(path, tail=0) == b""
    assert await shown(path, since="2999-01-01T00:00:00Z") == b""
    first = (await shown(path, timestamps=True)).split(b"\n")[0]
    assert first.endswith(b"Z one")
    assert tail_of(path, 1000) == "one\ntwo\nlast without newline"
    assert tail_of(path, 7) == "newline"


async def test_following_ends_with_the_container(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    await written(path, b"early\n")
    ended = asyncio.Event()
    parts: list[bytes] = []

    async def follow() -> None:
        parts.extend([p async for p in read(path, follow=ended, tail=None, since=None, timestamps=False)])

    task = asyncio.create_task(follow())
    await asyncio.sleep(0)
    with path.open("ab") as file:
        file.write(b"2026-01-01T00:00:00Z stdout F late\n")
    ended.set()
    async with asyncio.timeout(20):
        await task
    assert b"".join(parts) == b"early\nlate\n"


def test_no_log_is_no_message(tmp_path: Path) -> None:
    assert tail_of(tmp_path / "none", 100) == ""
