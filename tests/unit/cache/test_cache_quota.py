"""What the node cache keeps and what it gives up, and what a pod hears when there is no room."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from shoal.api import reasons
from shoal.artifacts import ArtifactError
from shoal.core.eviction import Candidate, Choice, choose
from tests.support.cache import Cache, Shop, running, shop_with, short_folder
from tests.support.sources import model_files
from tests.support.waiting import until_async

SIZE = 300_000


def uri(number: int) -> str:
    return f"hf://team/m{number}"


@pytest.fixture
def root() -> Generator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def shop() -> Shop:
    # Each with content of its own: models that share files share their blobs.
    return shop_with({uri(n): {"config.json": b'{"n": %d}' % n, "w.bin": os.urandom(SIZE)} for n in range(6)})


def model_bytes(shop: Shop) -> int:
    return sum(map(len, shop.models[uri(0)].values()))


def here(cache: Cache) -> set[int]:
    sources = {model.source for key in cache.index.keys() if (model := cache.index.get(key)) is not None}  # noqa: SIM118
    return {number for number in range(6) if uri(number) in sources}


# --- the decision ---------------------------------------------------------------------------------------------------


def candidate(key: str, used: float, *, pinned: bool = False, **blobs: int) -> Candidate:
    return Candidate(key, blobs, used, pinned)


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    known = [candidate("c", 3, z=10), candidate("a", 1, x=10), candidate("b", 2, y=10)]
    assert choose(known, 0) == Choice(())
    assert choose(known, 1) == Choice(("a",))
    assert choose(known, 11) == Choice(("a", "b"))
    assert choose(known, 31) == Choice((), short=1)


def test_what_is_in_use_stays() -> None:
    known = [candidate("a", 1, pinned=True, x=10), candidate("b", 2, y=10)]
    assert choose(known, 5) == Choice(("b",))
    assert choose(known, 15) == Choice((), short=5)


def test_shared_contents_come_free_with_their_last_model() -> None:
    known = [candidate("a", 1, shared=10, x=1), candidate("b", 2, shared=10), candidate("c", 3, pinned=True, kept=7)]
    assert choose(known, 1) == Choice(("a",))
    assert choose(known, 2) == Choice(("a", "b"))
    # Nothing would come free: it stays.
    assert choose([candidate("old", 0, kept=7), known[2]], 1) == Choice((), short=1)


# --- the bound ------------------------------------------------------------------------------------------------------


async def test_the_cache_stays_below_its_bound_and_drops_the_oldest(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    async with running(root, shop, "a", size=3 * one) as cache:
        for number in (0, 1, 2):
            await cache.fetch("a", uri(number))
        await cache.fetch("a", uri(0))  # used again: 1 is now the oldest
        await cache.fetch("a", uri(3))
        assert here(cache) == {0, 2, 3}
        assert cache.index.bytes <= 3 * one
        on_disk = sum(p.stat().st_size for p in (root / "blobs").rglob("*") if p.is_file())
        assert on_disk == cache.index.bytes
        assert len(list((cache.folder("a") / "models").iterdir())) == 3


async def test_the_order_of_use_outlives_the_daemon(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    async with running(root, shop, "a", size=2 * one) as cache:
        done = [await cache.fetch("a", uri(number)) for number in (0, 1)]
    for age, model in ((100, done[1]), (50, done[0])):
        record = root / "models" / f"{model.model}.json"
        os.utime(record, (record.stat().st_atime, record.stat().st_mtime - age))
    async with running(root, shop, "a", size=2 * one) as cache:
        await cache.fetch("a", uri(2))
        assert here(cache) == {0, 2}


async def test_a_model_that_a_pod_uses_is_never_evicted(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    async with running(root, shop, "a", "b", size=2 * one) as cache:
        used = await cache.fetch("a", uri(0))
        with cache.index.hold("a", used.model):
            for number in (1, 2, 3):
                await cache.fetch("b", uri(number))
            assert here(cache) == {0, 3}
        await cache.fetch("b", uri(4))
        await cache.fetch("b", uri(5))
        assert here(cache) == {4, 5}


async def test_with_everything_in_use_the_pod_hears_why_there_is_no_room(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    async with running(root, shop, "a", size=int(1.5 * one)) as cache:
        used = await cache.fetch("a", uri(0))
        with cache.index.hold("a", used.model):
            with pytest.raises(ArtifactError) as caught:
                await cache.fetch("a", uri(1))
            assert caught.value.reason == reasons.DISK_FULL
            assert "the node cache cannot make that free" in str(caught.value)
            assert "0.3 MiB are in use" in str(caught.value)
            assert "cache.size" in str(caught.value)
            assert here(cache) == {0}


async def test_what_was_just_used_is_waited_for(root: Path, shop: Shop) -> None:
    # The agent of a pod that has just started may not have said yet that it uses the model.
    one = model_bytes(shop)
    async with running(root, shop, "a", size=int(1.5 * one), grace=3.0) as cache:
        await cache.fetch("a", uri(0))
        second = asyncio.create_task(cache.fetch("a", uri(1)))
        await asyncio.sleep(0.5)
        assert here(cache) == {0}
        await second
        assert here(cache) == {1}


async def test_two_fetches_at_once_do_not_share_the_same_room(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    shop.gate = asyncio.Event()
    async with running(root, shop, "a", size=int(1.5 * one)) as cache:
        first = asyncio.create_task(cache.fetch("a", uri(0)))
        await until_async(lambda: shop.arrived > 0)
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", uri(1))
        assert caught.value.reason == reasons.DISK_FULL
        shop.gate.set()
        await first


async def test_what_broken_fetches_left_goes_before_any_model(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    async with running(root, shop, "a", size=2 * one) as cache:
        await cache.fetch("a", uri(0))
        shop.broken = True
        with pytest.raises(ArtifactError):
            await cache.fetch("a", uri(1))
        assert len(list((root / "partial").iterdir())) == 1
        shop.broken = False
        await cache.fetch("a", uri(2))
        assert here(cache) == {0, 2}
        assert list((root / "partial").iterdir()) == []


async def test_an_evicted_file_stays_readable_for_who_has_it_open(root: Path, shop: Shop) -> None:
    one = model_bytes(shop)
    async with running(root, shop, "a", size=one) as cache:
        done = await cache.fetch("a", uri(0))
        with (cache.folder("a") / done.path / "w.bin").open("rb") as file:
            await cache.fetch("a", uri(1))
            assert here(cache) == {1}
            assert file.read() == shop.models[uri(0)]["w.bin"]


@pytest.fixture
def small_disk(root: Path) -> Generator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    folder = root / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0755", "cache-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


async def test_a_disk_smaller_than_the_bound_evicts_first_and_says_when_it_is_full(
    small_disk: Path, shop: Shop
) -> None:
    async with running(small_disk, shop, "a") as cache:
        for number in range(6):
            await cache.fetch("a", uri(number))
        assert len(here(cache)) == 3
        shop.models["hf://team/big"] = model_files(2 << 20)
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", "hf://team/big")
        assert caught.value.reason == reasons.DISK_FULL
        assert "larger disk" in str(caught.value)
        assert len(here(cache)) == 3, "nothing is given up when it does not help"


async def test_a_share_of_the_disk_stays_free(small_disk: Path, shop: Shop) -> None:
    async with running(small_disk, shop, "a", free_percent=40) as cache:
        for number in range(4):
            await cache.fetch("a", uri(number))
            usage = await asyncio.to_thread(shutil.disk_usage, small_disk)
            assert usage.free >= 0.4 * usage.total
        assert here(cache) == {2, 3}
        shop.models["hf://team/big"] = model_files(700_000)
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", "hf://team/big")
        assert "of which 0.4 MiB are left to others; raise" in str(caught.value)


async def test_a_disk_that_others_fill_meanwhile_is_a_reason_too(small_disk: Path, shop: Shop) -> None:
    shop.gate = asyncio.Event()
    async with running(small_disk, shop, "a") as cache:
        fetching = asyncio.create_task(cache.fetch("a", uri(0)))
        await until_async(lambda: shop.arrived > 0)
        filler = small_disk / "filler"
        await asyncio.to_thread(_fill, filler)
        shop.gate.set()
        with pytest.raises(ArtifactError) as caught:
            await fetching
        assert caught.value.reason == reasons.DISK_FULL
        assert "no space left while keeping hf://team/m0 in the node cache" in str(caught.value)
        filler.unlink()
        assert (await cache.fetch("a", uri(0))).bytes == model_bytes(shop)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
