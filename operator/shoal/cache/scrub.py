"""Verifies stored files slowly and continuously: bit rot changes neither size nor mtime of a file.

A damaged file is dropped. The next request fetches that file again and repairs the namespace's folder. Pods that have
already read the damaged file are named in the log.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from shoal.cache.disk import CachedFile, CacheDisk
from shoal.cache.diskquota import DiskQuota
from shoal.cache.index import Index

BYTES_PER_SECOND: Final = 16 << 20
"""A small fraction of a disk's throughput: 500 GiB in nine hours."""
EVERY_SECONDS: Final = 7 * 24 * 3600.0
"""Interval between two checks of a file."""
_PIECE: Final = 4 << 20
_IDLE_SECONDS: Final = 300.0

log = structlog.get_logger()


class Scrub:
    """Progress is kept in memory: after a restart the scrub starts over at the same rate."""

    def __init__(
        self,
        disk: CacheDisk,
        index: Index,
        quota: DiskQuota,
        *,
        bytes_per_second: int = BYTES_PER_SECOND,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._disk, self._index, self._quota = disk, index, quota
        self._rate, self._sleep = bytes_per_second, sleep
        self._checked: dict[str, float] = {}
        """SHA-256 -> time at which it was found intact."""
        self.broken = 0
        """Number of damaged files found."""

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            file = self._next()
            if file is None:
                await self._sleep(_IDLE_SECONDS)
            else:
                await self._check(file)

    def _next(self) -> CachedFile | None:
        """The file with the oldest check, if it is due."""
        contents = self._index.contents()
        self._checked = {sha: at for sha, at in self._checked.items() if sha in contents}
        due = [sha for sha in contents if sha not in self._checked]
        if due:
            return contents[min(due)]
        first = min(self._checked, key=lambda sha: self._checked[sha], default=None)
        if first is None or time.monotonic() - self._checked[first] < EVERY_SECONDS:
            return None
        return contents[first]

    async def _check(self, file: CachedFile) -> None:
        try:
            found = await self._hash(self._disk.blob(file.sha256), keep=self._index.is_used(file.sha256))
        except FileNotFoundError:
            found = file.sha256  # already dropped or evicted; the next request handles it
        except OSError as error:
            log.warning("cache.unreadable", sha256=file.sha256, problem=str(error))
            found = ""
        self._checked[file.sha256] = time.monotonic()
        if found != file.sha256:
            await self._drop(file)

    async def _drop(self, file: CachedFile) -> None:
        self.broken += 1
        users = self._index.users(file.sha256)
        async with self._quota.lock:
            await asyncio.to_thread(self._disk.drop_blobs, [file.sha256])
        log.error(
            "cache.rotten",
            file=file.name,
            sha256=file.sha256,
            pods=users,
            consequence="fetched again for the next pod that asks; pods that run have read it: delete them",
        )

    async def _hash(self, path: Path, *, keep: bool) -> str:
        """Hashes a file at the configured rate. `keep`: keep its pages in the page cache for other readers."""
        digest = hashlib.sha256()
        descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY)
        try:
            offset = 0
            while True:
                begun = time.monotonic()
                piece = await asyncio.to_thread(_read, descriptor, offset, digest.update, keep)
                if not piece:
                    return digest.hexdigest()
                offset += piece
                await self._sleep(max(0.0, piece / self._rate - (time.monotonic() - begun)))
        finally:
            os.close(descriptor)


def _read(descriptor: int, offset: int, take: Callable[[bytes], None], keep: bool) -> int:
    data = os.pread(descriptor, _PIECE, offset)
    take(data)
    if not keep and data:
        with contextlib.suppress(OSError):  # frees the page cache, since no other process reads the data
            os.posix_fadvise(descriptor, offset, len(data), os.POSIX_FADV_DONTNEED)
    return len(data)
