"""The files of the request log: format, encryption, cuts, rotation, retention, deletion, a disk that refuses."""

import asyncio
import base64
import errno
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import IO, Any

import orjson
import pytest
import zstandard

from shoal.api import keys
from shoal.api.tenant import Redaction, TenantLogging
from shoal.requestlog.capture import CaptureBudget, Captured
from shoal.requestlog.entry import LogEntry
from shoal.requestlog.erase import erase_tenant, erase_user, sweep
from shoal.requestlog.frames import SEALED, Unreadable, read_frames
from shoal.requestlog.logkeys import LogKeys
from shoal.requestlog.query import LogQuery, newest, written
from shoal.requestlog.store import Folder, LogFile
from shoal.requestlog.writer import LogFileWriter
from tests.support.requestlog import entries

NOW = datetime.now(UTC)
FULL = TenantLogging(mode="Full", retention_days=30)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class Rig:
    """A writer alone."""

    def __init__(self, root: Path, key_dir: Path | None = None, room: int = 1 << 20, **settings: Any) -> None:
        self.folder = Folder(root)
        self.keys = LogKeys(key_dir)
        self.room = CaptureBudget(room)
        given: dict[str, Any] = {"rotate_bytes": 1 << 20, "rotate_seconds": 900.0, "max_bytes": 0, **settings}
        self.writer = LogFileWriter(self.folder, self.keys, self.room, gateway="gw-1", entry_bytes=65536, **given)
        self._count = 0

    def put(self, tenant: str = "acme", user: str = "u-1", text: str = "hello", at: datetime = NOW, **meta: Any) -> str:
        self._count += 1
        entry_id = f"00000000-0000-7000-8000-{self._count:012d}"
        request = orjson.dumps({"messages": [{"role": "user", "content": text}]})
        assert self.room.take(len(request))
        logging = meta.pop("logging", FULL)
        said = {"time": written(at), "id": entry_id, "user": user, "tenant": tenant, **meta}
        taken = Captured(request, None, [], (), False)
        self.writer.put(LogEntry(tenant, logging, said, taken, len(request)))
        return entry_id

    def flush(self, tenant: str | None = None) -> None:
        self.writer.close_files(tenant).result(10)

    def files(self, tenant: str = "acme") -> list[Path]:
        return sorted(self.folder.root.glob(f"tenant={tenant}/date=*/*"))

    def read(self, tenant: str = "acme") -> list[dict[str, Any]]:
        return entries(self.folder.root, tenant, self.keys)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    found: list[Rig] = []
    yield found
    for rig in found:
        rig.writer.stop(10)


def rig(rigs: list[Rig], *args: Any, **settings: Any) -> Rig:
    rigs.append(Rig(*args, **settings))
    return rigs[-1]


def key_dir(path: Path, **named: bytes) -> Path:
    path.mkdir(exist_ok=True)
    for name, key in named.items():
        (path / name).write_bytes(key)
    return path


def test_files_stand_by_tenant_and_day_and_any_zstd_reads_them(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "logs")
    first, second = it.put(), it.put(text="again")
    it.put("globex")
    it.flush()
    (file,) = it.files()
    assert file.parent.name == f"date={datetime.now(UTC):%Y-%m-%d}"
    assert file.name.startswith("gw-1-")
    assert file.suffixes[-2:] == [".jsonl", ".zst"]
    assert os.stat(file).st_mode & 0o077 == 0
    with file.open("rb") as opened:
        raw = zstandard.ZstdDecompressor().stream_reader(opened, read_across_frames=True).read()
    assert [orjson.loads(line)["id"] for line in raw.splitlines()] == [first, second]
    assert len(it.files("globex")) == 1
    assert it.room.held == 0


def test_a_file_is_rotated_by_size_and_by_time(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "size", rotate_bytes=4096)
    for _ in range(12):  # a frame is written when its lines have 256 KiB
        it.put(text=base64.b64encode(os.urandom(36_000)).decode())
    it.flush()
    assert len(it.files()) >= 2
    assert len(it.read()) == 12
    by_time = rig(rigs, tmp_path / "time", rotate_seconds=0.001)
    by_time.put()
    until(by_time.files)
    by_time.put()
    until(lambda: len(by_time.read()) == 2)  # a file is there before its first frame
    assert len(by_time.files()) == 2


def test_an_encrypted_file_is_read_with_its_key_and_no_other(tmp_path: Path, rigs: list[Rig]):
    one, two = os.urandom(32), os.urandom(32)
    folder = key_dir(tmp_path / "keys", current=base64.b64encode(one))
    it = rig(rigs, tmp_path / "logs", folder)
    it.put(text="canary-text")
    it.flush()
    # Rotation: the old key goes on reading under another name, the new one writes.
    key_dir(folder, current=two, old=one.hex().encode())
    it.put(text="second")
    it.flush()
    first, second = it.files()
    assert first.name.endswith(SEALED)
    assert keys.fingerprint(one).encode() in first.read_bytes()
    assert keys.fingerprint(two).encode() in second.read_bytes()
    assert b"canary" not in first.read_bytes()
    assert [entry["request"]["messages"][0]["content"] for entry in it.read()] == ["canary-text", "second"]
    (folder / "old").unlink()
    it.keys.refresh()
    with pytest.raises(Unreadable, match=f"its key {keys.fingerprint(one)} is not among those of the request log"):
        it.read()
    found = newest(it.folder, LogQuery("acme", 10), it.keys, longest=60, until=float("inf"))
    assert len(found.lines) == 1
    assert "is not among those of the request log" in found.unreadable[0]


def test_an_encrypted_file_belongs_to_its_tenant(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "logs", key_dir(tmp_path / "keys", current=os.urandom(32)))
    it.put()
    it.flush()
    (file,) = it.files()
    with file.open("rb") as opened, pytest.raises(Unreadable, match="belongs to another tenant"):
        list(read_frames(opened, file.name, "globex", it.keys))


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 33])
def test_without_a_usable_key_nothing_is_written_in_the_clear(tmp_path: Path, rigs: list[Rig], key: bytes):
    it = rig(rigs, tmp_path / "logs", key_dir(tmp_path / "keys", current=key))
    it.put()
    it.flush()
    assert it.files() == []
    assert it.writer.stats.dropped["key"] == 1
    assert "no usable entry 'current': put 32 random bytes there" in (it.writer.stats.error or "")
    assert it.room.held == 0
    key_dir(tmp_path / "keys", current=os.urandom(32))
    it.put()
    it.flush()
    assert len(it.read()) == 1
    assert it.writer.stats.error is None


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_cut_file_is_readable_up_to_its_last_whole_frame(tmp_path: Path, rigs: list[Rig], encrypted: bool):
    it = rig(rigs, tmp_path / "logs", key_dir(tmp_path / "keys", current=os.urandom(32)) if encrypted else None)
    ends: list[int] = []
    for number in range(3):
        it.put(text=str(number))
        until(lambda: it.files() and it.files()[0].stat().st_size > (ends[-1] if ends else 100))
        until(lambda: not it.room.held)
        ends.append(it.files()[0].stat().st_size)
    it.flush()
    (file,) = it.files()
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        texts = [entry["request"]["messages"][0]["content"] for entry in it.read()]
        assert texts == ["0", "1", "2"][: sum(end <= size for end in ends)]
    broken = bytearray(whole)
    broken[(ends[1] + ends[2]) // 2] ^= 1
    file.write_bytes(broken)
    assert len(it.read()) == 2


def test_old_days_go_and_each_tenant_has_its_own_time(tmp_path: Path):
    folder, today = Folder(tmp_path), date(2026, 11, 22)
    for tenant, days in (("acme", (0, 7, 8)), ("globex", (0, 7, 8, 40)), ("gone", (3, 4)), ("unknown", (30, 31))):
        for ago in days:
            with folder.create(LogFile(tenant, (today - timedelta(days=ago)).isoformat(), "gw-1-1.jsonl.zst", 0)):
                pass
    folder.keep_retention("gone", 3)
    assert sweep(folder, {"acme": 7, "globex": 30}, today) == 4
    assert [len(folder.dates(tenant)) for tenant in ("acme", "globex", "gone", "unknown")] == [2, 3, 1, 1]
    assert sweep(folder, {"acme": 7}, today + timedelta(days=1)) == 3
    assert "gone" not in folder.tenants()


@pytest.mark.parametrize("encrypted", [False, True])
def test_one_users_entries_are_deleted_and_no_others(tmp_path: Path, rigs: list[Rig], encrypted: bool):
    it = rig(rigs, tmp_path / "logs", key_dir(tmp_path / "keys", current=os.urandom(32)) if encrypted else None)
    hidden = TenantLogging(mode="Full", redact=(Redaction(name="email", builtin="Email"),))
    for user in ("u-1", "u-2", "alice@example.org"):
        it.put(user=user, text=f"text of {user}, who knows u-1", logging=hidden)
        it.put("globex", user=user)
    it.flush()
    it.put(user="u-1", text="alone")
    it.flush()
    before = it.writer.stats.entries

    def erase(user: str):
        return erase_user(it.folder, it.keys, "acme", user, it.writer.is_open)

    erased = erase("u-1")
    assert (erased.entries, erased.files, erased.unreadable) == (2, 2, [])
    assert [entry["user"] for entry in it.read()] == ["u-2", "[email]"]
    # A user whose name was redacted is found by its hash.
    assert erase("alice@example.org").entries == 1
    assert [entry["user"] for entry in it.read()] == ["u-2"]
    assert len(it.read("globex")) == 3
    assert before == 7
    assert not list(it.folder.root.rglob("*.part"))


def test_a_tenants_log_is_deleted_whole_but_not_the_file_that_grows(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "logs")
    it.put()
    it.put("globex")
    it.flush()
    it.put()
    until(lambda: len(it.files()) == 2)
    assert erase_tenant(it.folder, "acme", it.writer.is_open).files == 1
    it.flush()
    assert erase_tenant(it.folder, "acme", it.writer.is_open).files == 1
    assert it.folder.tenants() == ["globex"]


def test_a_file_whose_key_is_gone_is_named_when_a_user_is_deleted(tmp_path: Path, rigs: list[Rig]):
    folder = key_dir(tmp_path / "keys", current=os.urandom(32))
    it = rig(rigs, tmp_path / "logs", folder)
    it.put()
    it.flush()
    key_dir(folder, current=os.urandom(32))
    it.keys.refresh()
    erased = erase_user(it.folder, it.keys, "acme", "u-1", it.writer.is_open)
    assert erased.entries == 0
    assert "is not among those of the request log" in erased.unreadable[0]


class FullDisk:
    """A file of which the disk takes only so much."""

    def __init__(self, file: IO[bytes], room: list[int]) -> None:
        self._file = file
        self._room = room

    def write(self, data: Any) -> int:
        part = bytes(data)[: self._room[0]]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room[0] -= len(part)
        return self._file.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_costs_entries_that_are_counted_and_nothing_else(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
):
    it = rig(rigs, tmp_path / "logs")
    room = [10_000]
    create = it.folder.create
    monkeypatch.setattr(it.folder, "create", lambda file: FullDisk(create(file), room))
    it.put(text="before")
    it.flush("other")
    until(it.files)
    until(lambda: not it.room.held)
    room[0] = 20  # a part of the next frame goes to the disk, and then no more
    it.put(text="lost")
    it.flush()
    assert it.writer.stats.dropped["disk"] == 1
    assert it.writer.stats.error == "No space left on device"
    assert it.room.held == 0
    room[0] = 10_000
    it.put(text="after")
    it.flush()
    assert it.writer.stats.error is None
    assert [entry["request"]["messages"][0]["content"] for entry in it.read()] == ["before", "after"]


def test_a_folder_that_cannot_be_made_is_said_and_counted(tmp_path: Path, rigs: list[Rig]):
    (tmp_path / "logs").write_text("a file stands there")
    it = rig(rigs, tmp_path / "logs")
    it.put()
    it.flush()
    assert it.writer.stats.dropped["disk"] == 1
    assert it.writer.stats.error


def test_no_more_than_its_bytes_are_kept(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "logs", max_bytes=600)
    for _ in range(10):
        it.put(text=base64.b64encode(os.urandom(300)).decode())
        it.flush()
    kept = len(it.read())
    assert 1 <= kept < 10
    assert it.writer.stats.dropped["full"] == 10 - kept
    assert "as many as it may" in (it.writer.stats.error or "")
    for file in it.files():
        file.unlink()
    it.writer.recount().result(10)
    it.put()
    it.flush()
    assert len(it.read()) == 1


def test_pages_come_newest_first_and_none_is_left_out_or_twice(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "logs")
    ids: list[str] = []
    for number in range(25):
        # They end in this order, and were admitted in another.
        at = NOW - timedelta(seconds=(number * 7) % 25)
        ids.append(it.put(user=f"u-{number % 2}", at=at, model="chat/llama" if number % 5 else "chat/qwen"))
        if number % 4 == 3:
            it.flush()
    it.flush()
    expected = sorted(((entry["time"], entry["id"]) for entry in it.read()), reverse=True)

    def page(**query: Any):
        # NOW is when the module was loaded, minutes ago perhaps: as if the requests had taken so long.
        return newest(it.folder, LogQuery("acme", **query), it.keys, longest=86_400, until=float("inf"))

    seen: list[tuple[str, str]] = []
    before = None
    while True:
        found = page(limit=4, before=before)
        seen += [place for place, _ in found.lines]
        if not found.more:
            break
        before = found.lines[-1][0]
    assert seen == expected
    assert len(page(limit=100, user="u-1").lines) == 12
    assert len(page(limit=100, model="chat/qwen").lines) == 5
    since, until = written(NOW - timedelta(seconds=10)), written(NOW - timedelta(seconds=5))
    assert len(page(limit=100, since=since, until=until).lines) == 5
    assert page(limit=100, since=written(NOW + timedelta(hours=2))).lines == []
    assert newest(it.folder, LogQuery("acme", 5), it.keys, longest=60, until=0.0).incomplete


async def test_what_is_put_while_the_thread_is_busy_is_not_waited_for(tmp_path: Path, rigs: list[Rig]):
    it = rig(rigs, tmp_path / "logs")
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    held = it.writer._call(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10) and None)
    for _ in range(50):
        it.put()
    assert it.files() == []
    release.set()
    await asyncio.wrap_future(held)
    await asyncio.wrap_future(it.writer.close_files())
    assert len(it.read()) == 50


@pytest.mark.parametrize("microsecond", [0, 1, 999, 1_000, 123_456, 999_999])
@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30))])
def test_times_have_a_fixed_width_in_utc(microsecond: int, zone: timezone) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, microsecond, zone)
    expected = moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert written(moment) == expected
    assert len(expected) == len("2026-11-22T01:31:19.123Z")
