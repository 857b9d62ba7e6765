"""What rots on the disk, with its size and time unchanged, is found and fetched again."""

import asyncio
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from shoal.cache.scrub import Scrub
from tests.support.cache import Cache, Shop, running, shop_with, short_folder
from tests.support.sources import model_files
from tests.support.waiting import until_async

URI = "hf://team/tiny"


@pytest.fixture
def root() -> Generator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def shop() -> Shop:
    return shop_with({URI: model_files(5000)})


def rot(cache: Cache, name: str) -> Path:
    """One bit of a file turns over; nothing else shows it."""
    (file,) = [f for f in cache.index.contents().values() if f.name == name]
    path = cache.disk.blob(file.sha256)
    seen, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(content))
    path.chmod(0o444)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    return path


class Clock:
    """Seconds that the scrub would have slept."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)
        if seconds > 100:  # it found nothing more to look at
            await asyncio.Event().wait()


async def scrub(cache: Cache, clock: Clock, rate: int = 1 << 40) -> Scrub:
    """One look at everything."""
    made = Scrub(cache.disk, cache.index, cache.room, bytes_per_second=rate, sleep=clock)
    task = asyncio.create_task(made.run())
    try:
        await until_async(lambda: bool(clock.slept) and clock.slept[-1] > 100)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return made


async def test_a_rotten_file_is_fetched_again_and_only_that(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        first = await cache.fetch("a", URI)
        shop.downloads.clear()
        path = rot(cache, "model.safetensors")
        assert (await cache.fetch("a", URI)).fetched_bytes == 0, "its size and time are what they were"
        assert cache.content("a", first) != model_files(5000)

        assert (await scrub(cache, Clock())).broken == 1
        assert not path.exists()
        again = await cache.fetch("a", URI)
        assert shop.downloads == ["model.safetensors"]
        assert cache.content("a", again) == model_files(5000)
        assert (await scrub(cache, Clock())).broken == 0


async def test_what_is_sound_stays_and_is_not_read_twice(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        await cache.fetch("a", URI)
        clock = Clock()
        assert (await scrub(cache, clock)).broken == 0
        files = len(cache.index.contents())
        assert len(clock.slept) == files + 1, "one pause per file, and the long one"


async def test_it_reads_no_faster_than_it_was_told(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        done = await cache.fetch("a", URI)
        clock = Clock()
        await scrub(cache, clock, rate=1000)
        assert sum(clock.slept[:-1]) == pytest.approx(done.bytes / 1000, rel=0.2)


async def test_what_was_evicted_meanwhile_is_not_called_broken(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        await cache.fetch("a", URI)
        cache.disk.drop_blobs(list(cache.index.contents()))
        assert (await scrub(cache, Clock())).broken == 0
