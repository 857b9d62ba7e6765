"""Makes space before a fetch, and reserves it for that fetch."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator
from typing import Final

import structlog

from shoal.api import reasons
from shoal.artifacts import ArtifactError
from shoal.artifacts.errors import gib
from shoal.cache.disk import CacheDisk
from shoal.cache.index import Index
from shoal.core.eviction import choose

AGAIN_SECONDS: Final = 1.0
FREE_PERCENT: Final = 15
"""Percentage of the disk that is kept free. The kubelet evicts pods when less than 10 % of its own disk or 15 % of the
image disk is free."""
ADVICE: Final = "raise the chart's cache.size, give the node a larger disk, or run fewer models on it"

log = structlog.get_logger()


class DiskQuota:
    """Enforces the size limit of the cache and the free space of the disk."""

    def __init__(self, disk: CacheDisk, index: Index, size: int, free_percent: int = FREE_PERCENT) -> None:
        self._disk = disk
        self._index = index
        self.size = size
        self._free_percent = free_percent
        self._reserved: dict[str, int] = {}
        self.lock = asyncio.Lock()
        """Held while blobs are added or removed, so that a blob that has just been taken into use is not removed."""
        self.evicted = 0
        """Number of models evicted."""

    @contextlib.asynccontextmanager
    async def reserve(self, key: str, needed: int, here: int) -> AsyncGenerator[None]:
        """Reserves `needed` bytes while the body runs; `here` of them are already on the disk, as part of an unfinished
        fetch.

        Raises ArtifactError(DiskFull).
        """
        while True:
            async with self.lock:
                if await self._make_space(key, needed, here):
                    self._reserved[key] = needed
                    break
            await asyncio.sleep(AGAIN_SECONDS)
        try:
            yield
        finally:
            self.release(key)

    def release(self, key: str) -> None:
        """Releases the reservation: its bytes have arrived, or will not."""
        self._reserved.pop(key, None)

    def is_reserved(self, key: str) -> bool:
        return key in self._reserved

    async def _make_space(self, key: str, needed: int, here: int) -> bool:
        """Evicts until the bytes fit. False: evictable models may still turn out to be in use, so the caller should
        wait."""
        partials = await asyncio.to_thread(self._disk.partials)
        left = {k: size for k, (size, _) in partials.items() if k != key and k not in self._reserved}
        usage = await asyncio.to_thread(shutil.disk_usage, self._disk.root)
        left_free = usage.total * self._free_percent // 100
        # Reserved bytes that have not arrived yet.
        coming = sum(max(0, p - partials.get(k, (0, 0.0))[0]) for k, p in self._reserved.items())
        used = self._index.bytes + sum(self._reserved.values())
        missing = max(
            needed - (self.size - used - sum(left.values())),
            needed - here + coming - (usage.free - left_free),
        )
        for k in sorted(left, key=lambda k: partials[k][1]):  # first those without waiters
            if missing <= 0:
                break
            await asyncio.to_thread(self._disk.drop_partial, k)
            missing -= left[k]
            log.info("cache.partial_dropped", model=k, bytes=left[k])
        choice = choose((c for c in self._index.candidates() if c.key != key), missing)
        if choice.short:
            if choose((c for c in self._index.candidates(grace=False) if c.key != key), missing).short:
                raise ArtifactError(reasons.DISK_FULL, self._full(needed, usage.free, left_free))
            return False
        if choice.evict:
            await self.evict(choice.evict)
        return True

    def _full(self, needed: int, free: int, left_free: int) -> str:
        in_use = self._index.in_use_bytes() + sum(self._reserved.values())
        return (
            f"the model needs {gib(needed)}, and the node cache cannot make that free: of its {gib(self.size)}, "
            f"{gib(in_use)} are in use, and the disk has {gib(free)} free, of which {gib(left_free)} are left to "
            f"others; {ADVICE}"
        )

    async def evict(self, keys: tuple[str, ...]) -> None:
        """Evicts models. The caller holds the lock."""
        names = {key: model.source for key in keys if (model := self._index.get(key)) is not None}
        blobs = self._index.remove(keys)  # first, so that they are not given out any more
        await asyncio.to_thread(self._disk.evict, keys, blobs)
        self.evicted += len(keys)
        for key, source in names.items():
            log.info("cache.evicted", model=key, source=source)
