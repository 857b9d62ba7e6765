"""Downloading one file: ranges, resumption, verification, and what each failure says."""

import asyncio
import errno
import hashlib
import json
import os
import shutil
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import TestServer

from shoal.api import reasons
from shoal.artifacts import ArtifactError, File, Interrupted, Manifest, Settings, StoreCredentials, open_source
from shoal.artifacts.errors import NoRanges
from shoal.artifacts.manifest import sort
from shoal.artifacts.ranges import RangedSource
from tests.support.flaky import Flaky
from tests.support.slowdisk import SlowDisk
from tests.support.sources import LOCAL, HubServer, model_files
from tests.support.waiting import until_async

CONTENT = bytes(i * 7 % 256 for i in range(100_000))
PIECE = 1000
QUICK = Settings(network=LOCAL, pause_seconds=0.0001, segment_bytes=9_973, connections=4)


@dataclass
class Scripted(RangedSource):
    """A source in memory that does what a test says."""

    content: bytes = CONTENT
    settings: Settings = QUICK
    breaks: list[int] = field(default_factory=list)
    """Bytes after which the next streams break, one after the other."""
    corrupt: int = 0
    """How many of the next streams have a wrong byte."""
    ranges: bool = True
    down: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)
    pause: asyncio.Event | None = None
    """Streams wait for it after their first piece."""
    waiting: int = 0
    """Streams that wait, their first piece written."""

    def __post_init__(self) -> None:
        super().__init__(self.settings)

    async def manifest(self) -> Manifest:
        raise NotImplementedError

    async def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        if self.down:
            raise Interrupted("the host is down")
        if not self.ranges and (start, end) != (0, file.size):
            raise NoRanges("it")
        self.asked.append((start, end))
        limit = start + self.breaks.pop(0) if self.breaks else end
        wrong, self.corrupt = self.corrupt > 0, max(0, self.corrupt - 1)
        while start < end:
            if start >= limit:
                raise Interrupted("broke off")
            piece = self.content[start : min(start + PIECE, end, limit)]
            yield bytes([piece[0] ^ 1]) + piece[1:] if wrong else piece
            start += len(piece)
            if self.pause is not None:
                self.waiting += 1
                await self.pause.wait()


def file_of(content: bytes = CONTENT, validator: str = "etag:1", *, promised: bool = True) -> File:
    return File("m", len(content), validator, hashlib.sha256(content).hexdigest() if promised else None)


async def fetch(source: Scripted, path: Path, file: File | None = None) -> list[int]:
    came: list[int] = []
    await source.download(file or file_of(), path, came.append)
    return came


async def test_several_ranges_at_once_make_the_file(tmp_path: Path):
    source = Scripted()
    came = await fetch(source, tmp_path / "deep" / "x")
    assert (tmp_path / "deep" / "x").read_bytes() == CONTENT
    assert sum(came) == len(CONTENT)
    assert len(source.asked) == 11
    assert os.listdir(tmp_path / "deep") == ["x"]


async def test_an_empty_file_is_made_without_a_transfer(tmp_path: Path):
    source = Scripted(content=b"")
    await fetch(source, tmp_path / "x", file_of(b""))
    assert ((tmp_path / "x").read_bytes(), source.asked) == (b"", [])


async def test_a_break_costs_no_byte_twice(tmp_path: Path):
    source = Scripted(settings=replace(QUICK, connections=1, segment_bytes=1 << 30), breaks=[30_000, 20_000])
    await fetch(source, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert source.asked == [(0, 100_000), (30_000, 100_000), (50_000, 100_000)]


async def test_a_killed_download_goes_on_with_what_is_missing(tmp_path: Path):
    killed = Scripted(pause=asyncio.Event())
    task = asyncio.create_task(fetch(killed, tmp_path / "x"))
    await until_async(lambda: killed.waiting == 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not (tmp_path / "x").exists()
    again = Scripted()
    came = await fetch(again, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert sum(end - start for start, end in again.asked) == len(CONTENT) - 4 * PIECE
    assert (came[0], sum(came)) == (4 * PIECE, len(CONTENT))


def open_below(folder: Path) -> list[Path]:
    """Files of the folder that this process has open."""
    found = [Path(entry).resolve() for entry in Path("/proc/self/fd").iterdir()]
    return [path for path in found if folder in path.parents]


async def test_who_gives_up_while_the_disk_is_slow_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A part that is opened afterwards would be cut to nothing under the hands of the next try."""
    disk = SlowDisk(monkeypatch)
    task = asyncio.create_task(fetch(Scripted(), tmp_path / "x"))
    await until_async(disk.asked.is_set)
    task.cancel()
    asyncio.get_running_loop().call_later(0.1, disk.goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    there = os.listdir(tmp_path)
    await until_async(disk.done.is_set)
    assert os.listdir(tmp_path) == there
    assert open_below(tmp_path) == []


async def test_what_was_killed_between_two_notes_is_fetched_again(tmp_path: Path):
    """SIGKILL leaves bytes that no note vouches for."""
    (tmp_path / "x.part").write_bytes(b"\0" * 50_000)
    note = {"validator": "etag:1", "size": len(CONTENT), "missing": [[10_000, len(CONTENT)]]}
    (tmp_path / "x.part.json").write_text(json.dumps(note))
    with (tmp_path / "x.part").open("r+b") as file:
        file.write(CONTENT[:10_000])
    source = Scripted()
    await fetch(source, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert min(source.asked)[0] == 10_000


@pytest.mark.parametrize(
    "note",
    [
        {"validator": "etag:0", "size": 100_000, "missing": [[10_000, 100_000]]},
        {"validator": "etag:1", "size": 99_999, "missing": [[10_000, 99_999]]},
        {"validator": "etag:1", "size": 100_000, "missing": [[60_000, 100_000]]},  # more than the part has
        {"validator": "etag:1", "size": 100_000, "missing": [[-5, 100_000]]},
        {"validator": "etag:1", "size": 100_000, "missing": "x"},
        [],
    ],
)
async def test_a_part_of_another_version_or_with_a_broken_note_is_not_used(tmp_path: Path, note: object):
    (tmp_path / "x.part").write_bytes(b"\0" * 50_000)
    (tmp_path / "x.part.json").write_text(json.dumps(note))
    source = Scripted()
    await fetch(source, tmp_path / "x", file_of(promised=False))
    assert (tmp_path / "x").read_bytes() == CONTENT


async def test_a_host_that_is_down_is_tried_a_few_times(tmp_path: Path):
    source = Scripted(down=True)
    with pytest.raises(ArtifactError, match="the host is down") as caught:
        await fetch(source, tmp_path / "x")
    assert caught.value.reason == reasons.SOURCE_UNREACHABLE


async def test_a_server_that_breaks_off_after_every_byte_is_given_up(tmp_path: Path):
    settings = replace(QUICK, connections=1, segment_bytes=1 << 30, stall_seconds=0.2)
    source = Scripted(settings=settings, breaks=[1] * len(CONTENT))
    with pytest.raises(Interrupted):
        await fetch(source, tmp_path / "x")
    assert len(source.asked) == settings.attempts


async def test_a_proxy_that_cuts_every_connection_after_some_kib_brings_the_file(tmp_path: Path):
    settings = replace(QUICK, connections=1, segment_bytes=1 << 30)
    source = Scripted(settings=settings, breaks=[10_000] * 100)
    await fetch(source, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert len(source.asked) > settings.attempts


async def test_a_corrupt_transfer_is_thrown_away_and_fetched_once_more(tmp_path: Path):
    source = Scripted(corrupt=1)
    came = await fetch(source, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert sum(came) == len(CONTENT)
    assert -len(CONTENT) in came


async def test_a_source_that_stays_corrupt_is_told_so(tmp_path: Path):
    source = Scripted(content=CONTENT[:-1] + b"?")
    with pytest.raises(ArtifactError) as caught:
        await fetch(source, tmp_path / "x")
    found, wanted = (hashlib.sha256(content).hexdigest() for content in (source.content, CONTENT))
    assert caught.value.reason == reasons.DIGEST_MISMATCH
    assert str(caught.value) == (
        "m arrived twice with another content than the source promises: its SHA-256 is "
        f"{found} instead of {wanted}. Upload the file again"
    )
    assert os.listdir(tmp_path) == []


async def test_a_git_blob_is_held_against_its_id(tmp_path: Path):
    blob = hashlib.sha1(b"blob 100000\0" + CONTENT, usedforsecurity=False).hexdigest()
    await fetch(Scripted(), tmp_path / "x", file_of(validator=f"git:{blob}", promised=False))
    with pytest.raises(ArtifactError, match="its git blob id is"):
        await fetch(Scripted(content=CONTENT[::-1]), tmp_path / "y", file_of(validator=f"git:{blob}", promised=False))


async def test_a_server_without_ranges_sends_it_in_one_piece(tmp_path: Path):
    source = Scripted(ranges=False, breaks=[5_000])
    came = await fetch(source, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert source.asked == [(0, 100_000)] * 2
    assert sum(came) == len(CONTENT)


async def test_without_a_validator_nothing_is_put_together_from_pieces(tmp_path: Path):
    source = Scripted(breaks=[5_000])
    await fetch(source, tmp_path / "x", file_of(validator=""))
    assert source.asked == [(0, 100_000)] * 2


async def test_too_little_room_is_told_before_the_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99_999))  # pyright: ignore
    source = Scripted(settings=replace(QUICK, disk_advice="buy a disk"))
    with pytest.raises(ArtifactError) as caught:
        await fetch(source, tmp_path / "x")
    assert caught.value.reason == reasons.DISK_FULL
    assert str(caught.value) == "the model needs 100000 bytes and the volume has 99999 bytes free: buy a disk"
    assert source.asked == []


async def test_a_disk_that_fills_up_meanwhile_tells_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pwrite = os.pwrite

    def fills(descriptor: int, data: bytes, at: int) -> int:
        if at >= 60_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", fills)
    source = Scripted(settings=replace(QUICK, connections=1, segment_bytes=1 << 30))
    with pytest.raises(ArtifactError) as caught:
        await fetch(source, tmp_path / "x")
    assert caught.value.reason == reasons.DISK_FULL
    assert str(caught.value).startswith("no space left while fetching m: 40000 bytes of it are still to come and ")
    monkeypatch.undo()
    again = Scripted()
    await fetch(again, tmp_path / "x")
    assert min(again.asked)[0] == 60_000


async def test_reading_gives_what_is_there_up_to_the_end():
    source = Scripted(breaks=[100])
    assert await source.read(file_of(), 99_000, 5_000) == CONTENT[99_000:]
    assert await source.read(file_of(), 100_000, 5) == b""
    assert await source.read(file_of(), 10, 5) == CONTENT[10:15]


def test_the_manifest_has_one_digest_whatever_the_order():
    files = [File("b", 2, "etag:2"), File("a", 1, "etag:1"), File("ä", 3, "")]
    manifest = Manifest("s", "o", None, sort(files))
    lines = '["a",1,"etag:1"]\n["b",2,"etag:2"]\n["ä",3,""]\n'
    assert manifest.digest == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
    assert manifest.digest == Manifest("other", "else", "c", tuple(files)).digest
    assert manifest.digest != Manifest("s", "o", None, (*files, File("c", 0, ""))).digest
    assert manifest.total_bytes == 6
    assert manifest.identity(files[2]) is None


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//b", "./x", "a\0b", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str):
    with pytest.raises(ArtifactError, match="leads out of its folder"):
        sort([File(name, 1, "")])


async def test_a_hub_that_hangs_is_left_and_the_transfer_goes_on(tmp_path: Path):
    """The connection stays open and nothing comes: after the stall time the rest is asked for anew."""
    hub = HubServer(model_files(3 << 20))
    server = TestServer(hub.app())
    await server.start_server()
    assert server.port is not None
    try:
        async with Flaky(server.port) as flaky:
            settings = Settings(
                network=LOCAL,
                hub_endpoint=f"http://{flaky.address}",
                stall_seconds=0.3,
                pause_seconds=0.001,
                connections=1,
            )
            async with open_source("hf://team/tiny", StoreCredentials(), settings) as source:
                manifest = await source.manifest()
                flaky.hang_after = 1 << 20
                file = max(manifest.files, key=lambda file: file.size)
                before = flaky.connections
                await source.download(file, tmp_path / "x", lambda _: None)
        assert (tmp_path / "x").read_bytes() == hub.files["model.safetensors"]
        assert flaky.connections - before >= 3
    finally:
        await server.close()
