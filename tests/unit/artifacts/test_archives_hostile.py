"""Archives that mean harm: each is refused for what it is, having taken no more than it may. Beside it, the same bomb
goes off where the limits are taken away."""

import io
import lzma
import os
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.api import reasons
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, archive, inside, open_source, unpacker
from shoal.artifacts.metadata import read_metadata
from shoal.cache.diskquota import DiskQuota
from tests.support import bombs
from tests.support.bombs import MIB
from tests.support.cache import Cache, running, short_folder
from tests.support.hostile import Server, telling
from tests.support.limited import run
from tests.support.sources import LOCAL, model_files, tar_of

LIMIT = 8 * MIB


def taken(folder: Path) -> int:
    """Bytes on the disk: a file with two names takes them once."""
    found = [os.lstat(Path(root, name)) for root, _, names in os.walk(folder) for name in names]
    return sum({each.st_ino: each.st_blocks * 512 for each in found}.values())


def refused(content: bytes, tmp_path: Path, limit: int = LIMIT) -> ArtifactError:
    packed, target = tmp_path / "packed", tmp_path / "target"
    packed.write_bytes(content)
    target.mkdir()
    with pytest.raises(ArtifactError) as caught:
        archive.unpack(packed, target, "https://host/x", limit=limit)
    assert taken(target) <= limit
    assert sum(len(folders) + len(names) for _, folders, names in os.walk(target)) <= unpacker.ENTRIES
    assert not any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in target.rglob("*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "target"]
    return caught.value


@pytest.mark.parametrize(
    ("bomb", "told"),
    [
        (bombs.zeros, "unpacks to more than 8.0 MiB"),
        (lambda: bombs.zeros(24 * MIB, "w:bz2"), "unpacks to more than 8.0 MiB"),
        (lambda: bombs.zeros(24 * MIB, "w:xz"), "unpacks to more than 8.0 MiB"),
        (bombs.zipped, "unpacks to more than 8.0 MiB"),
        (bombs.sparse, "unpacks to more than 8.0 MiB"),
        (bombs.many, "unpacks to more than 8.0 MiB"),
        (bombs.folders, "unpacks to more than 8.0 MiB"),
    ],
)
def test_what_unpacks_to_too_much_is_refused(bomb: Callable[[], bytes], told: str, tmp_path: Path):
    error = refused(bomb(), tmp_path)
    assert error.reason == reasons.TOO_LARGE
    assert told in str(error)


@pytest.mark.parametrize(
    "bomb",
    [lambda: bombs.many(600), lambda: bombs.folders(40), lambda: bombs.directory(600)],
    ids=["tar", "deep", "zip"],
)
def test_files_and_folders_are_counted_however_small(
    bomb: Callable[[], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(archive, "_ENTRIES", 500)
    error = refused(bomb(), tmp_path, limit=1 << 40)
    assert error.reason == reasons.TOO_LARGE
    assert "has more than 500 files and folders" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        bombs.linked(tarfile.SYMTYPE, "/etc"),
        bombs.linked(tarfile.SYMTYPE, "../.."),
        bombs.linked(tarfile.LNKTYPE, "../../packed"),
        bombs.linked(tarfile.FIFOTYPE, ""),
        bombs.linked(tarfile.CHRTYPE, ""),
        bombs.linked(tarfile.BLKTYPE, ""),
        bombs.zip_link(),
        bombs.named("../escaped"),
        bombs.named("/etc/escaped"),
        bombs.named("a/../../escaped"),
        bombs.named("..\\escaped"),
        bombs.named("a\nb"),
        bombs.named("a\x1b[2Jb"),
        bombs.deep(),
        bombs.named("n" * 300),
        bombs.zipped(4 * MIB, claims=10),
        b"\x1f\x8b" + bytes(100),
        b"PK\x05\x06" + b"\xff" * 18,
    ],
)
def test_what_is_no_plain_archive_is_refused(content: bytes, tmp_path: Path):
    assert refused(content, tmp_path).reason == reasons.SOURCE_INVALID


def test_a_header_that_fills_the_memory_is_refused(tmp_path: Path):
    error = refused(bombs.header(), tmp_path)
    assert error.reason in (reasons.SOURCE_INVALID, reasons.TOO_LARGE)


def test_a_decompressor_that_wants_much_memory_does_not_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archive, "_MEMORY", (16 * MIB, 16 * MIB))
    packed = io.BytesIO()
    with lzma.open(packed, "wb", preset=9) as out:  # a dictionary of 64 MiB
        out.write(tar_of({"model.safetensors": os.urandom(MIB)}, "w:"))
    error = refused(packed.getvalue(), tmp_path)
    assert error.reason == reasons.TOO_LARGE
    assert "takes more memory" in str(error)


@pytest.mark.parametrize("bomb", [bombs.named("../escaped"), bombs.named("a/../../escaped")])
def test_a_name_that_nobody_looks_at_leads_out(bomb: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unpacker.Unpacker, "_inside", lambda self, name: tmp_path / "target" / name)
    unbounded(bomb, tmp_path)
    assert (tmp_path / "escaped").is_file()


@pytest.mark.parametrize("bomb", [lambda: bombs.many(600), lambda: bombs.folders(40), lambda: bombs.directory(600)])
def test_files_that_nobody_counts_are_all_made(
    bomb: Callable[[], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unpacker.Unpacker, "_count", lambda _: None)
    unbounded(bomb(), tmp_path, entries=500)
    assert sum(1 for _ in (tmp_path / "target").rglob("*")) > 500


def read_header(walls: bool) -> None:
    """In a child: an archive whose extended header is longer than the memory that there is."""
    if not walls:
        unpacker.BoundedHeader._EXTENDED = frozenset()  # type: ignore[misc]  # pyright: ignore
    with tempfile.TemporaryDirectory() as folder:
        unbounded(bombs.header(), Path(folder))


def test_without_the_bound_on_headers_one_fills_the_memory():
    assert run(read_header, True, memory=48 * MIB).ended.startswith("exit code 1")
    assert run(read_header, False, memory=48 * MIB).ended == "memory"


def unbounded(content: bytes, folder: Path, entries: int = unpacker.ENTRIES) -> None:
    """Unpacks, whatever it takes on the disk."""
    packed, target = folder / "packed", folder / "target"
    packed.write_bytes(content)
    target.mkdir()
    unpacker.Unpacker(packed, target, frozenset(), 1 << 60, 1 << 60, entries).run()


def test_without_the_limits_the_bomb_goes_off(tmp_path: Path):
    unbounded(bombs.zeros(), tmp_path)
    assert (tmp_path / "packed").stat().st_size < MIB // 4
    assert taken(tmp_path / "target") >= 24 * MIB


# --- the node cache -------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path):
    with short_folder() as folder:
        yield folder


SIZE = 72 * MIB
"""Of the cache, as the chart's `cache.size` has it."""


@asynccontextmanager
async def serving(content: bytes, root: Path) -> AsyncGenerator[tuple[Server, Cache, str]]:
    async with Server(telling(content)).running() as server:
        settings = Settings(network=LOCAL, pause_seconds=0.001, attempts=1)
        async with running(root, over_http, "a", size=SIZE, settings=settings) as cache:
            yield server, cache, server.url("/x.tar.gz").replace("http://", "https://")


@pytest.mark.parametrize("bomb", [lambda: bombs.zeros(80 * MIB), bombs.sparse, bombs.many])
async def test_the_cache_keeps_its_promise_of_room(bomb: Callable[[], bytes], root: Path):
    async with serving(bomb(), root) as (server, cache, uri):
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", uri)
        assert caught.value.reason == reasons.TOO_LARGE
        assert taken(root) <= SIZE
        assert cache.index.models == 0
        server.answer = telling(tar_of(model_files(5000)))
        done = await cache.fetch("a", uri.replace("x.tar", "y.tar"))
        assert cache.content("a", done) == model_files(5000)


async def test_without_the_limit_of_what_was_promised_the_cache_outgrows_its_size(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    unpack = archive.unpack
    monkeypatch.setattr(
        archive, "unpack", lambda packed, folder, source, limit: unpack(packed, folder, source, limit=1 << 40)
    )
    async with serving(bombs.zeros(80 * MIB), root) as (_, cache, uri):
        await cache.fetch("a", uri)
        assert taken(root) > SIZE


async def test_without_the_promise_two_fetches_take_the_same_room(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Each archive has its limit; together they have the cache's."""

    @asynccontextmanager
    async def promised(*_: object) -> AsyncGenerator[None]:
        yield

    monkeypatch.setattr(DiskQuota, "reserve", promised)
    async with serving(bombs.zeros(40 * MIB), root) as (server, cache, uri):
        await cache.fetch("a", uri)
        server.answer = telling(bombs.zeros(41 * MIB))
        await cache.fetch("a", uri.replace("x.tar", "y.tar"))
        assert taken(root) > SIZE


async def test_with_the_promise_the_one_makes_room_for_the_other(root: Path):
    async with serving(bombs.zeros(40 * MIB), root) as (server, cache, uri):
        await cache.fetch("a", uri)
        server.answer = telling(bombs.zeros(41 * MIB))
        await cache.fetch("a", uri.replace("x.tar", "y.tar"))
        assert taken(root) <= SIZE
        assert cache.index.models == 1


def over_http(uri: str, credentials: object, settings: Settings, *, revision: str | None = None):
    """As `open_source`; the test's server has no certificate."""
    source = open_source(uri, credentials, settings)  # pyright: ignore[reportArgumentType]
    source._url = uri.replace("https://", "http://")  # pyright: ignore[reportAttributeAccessIssue]
    return source


# --- the facts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bomb", [bombs.sparse, bombs.many, bombs.header, bombs.directory])
async def test_looking_inside_ends_soon(bomb: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inside, "_DIRECTORY_BYTES", 1 << 20)
    async with Server(telling(bomb())).running() as server:
        settings = replace(Settings(network=LOCAL), attempts=1)
        async with over_http(server.url().replace("http://", "https://"), StoreCredentials(), settings) as source:
            manifest = await source.manifest()
            with pytest.raises(ArtifactError) as caught:
                await read_metadata(source, manifest)
    assert caught.value.reason in (reasons.SOURCE_INVALID, reasons.TOO_LARGE)
