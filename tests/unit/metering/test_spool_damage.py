"""One bad byte stops nothing: a damaged spool is opened, what can be read of it is kept and shipped, and the writer
goes on. And without the salvage: then it must show."""

import asyncio
import errno
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import orjson
import pytest
from click.testing import CliRunner

from shoal.metering import spool as spoolmodule
from shoal.metering import spoolfile, spoolsalvage
from shoal.metering.spool import UsageSpool
from shoal.metering.spoolfile import DAMAGED_FOLDER, FILE_NAME, DamagedSpool, SpoolFile
from shoal.metering.spoolreader import Batches
from shoal.runtime.gateway import command
from tests.support.fake_ledger import FakeLedger
from tests.support.waiting import until_async
from tests.unit.metering.test_shipper import shipping, until
from tests.unit.metering.test_spool_durability import meter

REQUESTS = 60


def written(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """A checkpointed spool: its bytes, and the records by id. A third of the requests has no end yet."""
    file = SpoolFile(folder / FILE_NAME, None, 900.0)
    rows: dict[str, bytes] = {}
    for number in range(REQUESTS):
        one = meter(f"0000-{number:04}", client_request_id="é" * (number % 7) + "x" * (number * 37 % 300))
        batch = [one.open_row(), one.checkpoint_row()]
        if number % 3:
            one.count(b'{"prompt_tokens":5,"completion_tokens":2}', "final")
            one.outcome, one.status = "answered", 200
            batch.append(one.final_row())
        file.insert(batch)
        rows |= {row[0]: row[3] for row in batch}
    file.tidy.step(40, hurry=False)
    kept = {row[0]: row[3] for row in file.connection.execute("SELECT id, request, kind, body FROM records")}
    file.make_room()
    file.close()
    return (folder / FILE_NAME).read_bytes(), {id: rows[id] for id in kept}


def damage(raw: bytes, rng: random.Random) -> bytes:
    """One cut or some flips, anywhere."""
    if rng.random() < 0.3:
        return raw[: rng.randrange(1, len(raw))]
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        data[at : at + 512] = rng.randbytes(len(data[at : at + 512]))
    return bytes(data)


def shipped(file: SpoolFile, path: Path) -> set[str]:
    """Ids of the records that the shipper would send, damaged rows put aside."""
    ids: set[str] = set()
    with closing(Batches(path)) as batches:
        seq = 0
        while (batch := batches.after(seq, rows=50, size=1 << 20)) is not None:
            if broken := batches.broken(seq, batch.last):
                file.quarantine(broken)
                continue
            ids |= {record["id"] for record in orjson.loads(batch.body)}
            seq = batch.last
    return ids


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder where a sync costs nothing, if there is one: 400 spools are made here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("kind", ["checkpoint:1", "open"])
def test_a_row_that_names_another_request_does_not_end_that_one(tmp_path: Path, kind: str) -> None:
    """One bit of the request's id in the row that a killed gateway's request is closed with."""
    path = tmp_path / FILE_NAME
    file = SpoolFile(path, None, 900.0)
    one = meter("0000-0051")
    file.insert([one.open_row(), one.checkpoint_row()])
    id, body = f"0000-0051:{kind}", b'"requestId":"0000-0051"'
    turned = file.connection.execute("SELECT body FROM records WHERE id = ?", (id,)).fetchone()[0]
    assert body in turned
    turned = turned.replace(body, b'"requestId":"0000-0050"')
    file.connection.execute("UPDATE records SET body = ? WHERE id = ?", (turned, id))
    file.close()

    file = SpoolFile(path, None, 900.0)
    try:
        found = shipped(file, path)
    finally:
        file.close()

    assert "0000-0050:final" not in found
    assert id not in found
    assert "0000-0051:final" in found


def test_400_cuts_and_flips_all_start_and_keep_every_record_that_is_whole(memory: Path):
    tmp_path = memory
    (tmp_path / "made").mkdir()
    raw, rows = written(tmp_path / "made")
    rng = random.Random(18)  # noqa: S311
    salvaged = lost = 0
    for number in range(400):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / FILE_NAME
        broken = damage(raw, rng)
        path.write_bytes(broken)
        file = SpoolFile(path, None, 900.0)
        try:
            file.insert([meter(f"new-{number}").open_row()])
            whole = {id for id, body in rows.items() if body in broken}
            found = shipped(file, path)
            assert whole <= found, (number, whole - found)
            assert f"new-{number}:open" in found
            # Each request that has no end of its own gets one.
            assert {f"{id.rpartition(':')[0]}:final" for id in whole if id.endswith(":open")} <= found | {
                f"{id.partition(':')[0]}:final" for id in rows if id.endswith(":final")
            }
            salvaged += file.damaged_files
            lost += len(rows) - len(whole)
        finally:
            file.close()
    assert salvaged > 200  # most of them hit what SQLite needs
    assert lost > 400  # and many hit records, too


def test_without_the_salvage_they_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spoolfile, "is_damage", lambda _error, **_: False)
    (tmp_path / "made").mkdir()
    raw, _ = written(tmp_path / "made")
    rng = random.Random(18)  # noqa: S311
    failed = 0
    for number in range(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(damage(raw, rng))
        try:
            SpoolFile(folder / FILE_NAME, None, 900.0).close()
        except (sqlite3.Error, DamagedSpool):
            failed += 1
    assert failed > 20


def test_a_damaged_file_is_kept_and_what_comes_of_it_is_as_before(tmp_path: Path):
    raw, rows = written(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(b"\0" * 4096 + raw[4096:])  # its first page is gone, with the schema
    file = SpoolFile(path, None, 900.0)
    ids = {id for (id,) in file.connection.execute("SELECT id FROM records")}
    assert rows.keys() <= ids
    assert (file.damaged_files, file.damaged_rows) == (1, 0)
    assert file.shipped() == 40
    file.close()
    (kept,) = (tmp_path / DAMAGED_FOLDER).glob("*.sqlite")
    assert kept.read_bytes()[4096:] == raw[4096:]
    again = SpoolFile(path, None, 900.0)
    assert again.damaged_files == 0
    again.close()


def test_a_log_that_was_not_checkpointed_is_read_too(tmp_path: Path):
    file = SpoolFile(tmp_path / FILE_NAME, None, 900.0)
    for number in range(30):
        file.insert([meter(f"r{number}").open_row()])
    copy = tmp_path / "copy"
    copy.mkdir()
    for suffix in ("", "-wal"):
        source = tmp_path / f"{FILE_NAME}{suffix}"
        (copy / source.name).write_bytes(source.read_bytes())
    file.close()
    found = spoolsalvage.salvage(copy / FILE_NAME)
    assert {row[0] for row in found.rows.values()} == {f"r{number}:open" for number in range(30)}


def test_a_salvage_that_a_kill_interrupts_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    raw, rows = written(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(b"garbage" * 200 + raw[1400:])

    class Killed(BaseException):
        pass

    def dies(path: Path, to: Path) -> None:
        real(path, to)
        raise Killed

    real = spoolsalvage.move
    with monkeypatch.context() as patch:
        patch.setattr(spoolsalvage, "move", dies)
        with pytest.raises(Killed):
            SpoolFile(path, None, 900.0)
    file = SpoolFile(path, None, 900.0)
    assert rows.keys() <= {id for (id,) in file.connection.execute("SELECT id FROM records")}
    file.close()


async def test_a_damaged_row_is_put_aside_and_those_behind_it_are_shipped(tmp_path: Path):
    _, rows = written(tmp_path)
    spoiled = {"0000-0031:final": b'{"specversion":"1.0","id":"00\xff', "0000-0033:open": b""}
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as connection:
        for id, body in spoiled.items():
            connection.execute("UPDATE records SET body = ? WHERE id = ?", (body, id))
    async with FakeLedger().running() as ledger, shipping(tmp_path, ledger) as (spool, shipper):
        await until(lambda: bool(ledger.records) and not shipper.unshipped)
        got = {record.id for record in ledger.records.values()}
        before = {id for id in rows if id < "0000-0015"}  # of what was shipped when it was spoiled
        assert rows.keys() - spoiled.keys() - before <= got
        assert spool.stats.damaged_rows == 2
        assert (spool.error, shipper.error) == (None, None)
    said = CliRunner().invoke(command, ["records", "--path", str(tmp_path), "--damaged"])
    assert said.exit_code == 0
    assert "its record is not whole" in said.output
    said = CliRunner().invoke(command, ["records", "--path", str(tmp_path), "--damaged", "-o", "csv"])
    assert said.output.startswith("seq,time,reason,body,file\n")
    assert CliRunner().invoke(command, ["records", "--path", str(tmp_path), "--all-rows"]).exit_code == 0


async def test_a_row_that_the_ledger_refuses_stops_none_behind_it(tmp_path: Path):
    ledger = FakeLedger(
        rejects=lambda record: record["data"]["requestId"] == "r7" and record["data"]["kind"] == "final"
    )
    async with ledger.running(), shipping(tmp_path, ledger) as (spool, shipper):
        for number in range(20):
            spool.put(meter(f"r{number}").final_row())
        await until(lambda: not shipper.unshipped and len(ledger.records) == 19)
        assert spool.stats.damaged_rows == 1


async def test_a_ledger_that_refuses_everything_costs_no_row(tmp_path: Path):
    async with FakeLedger(refuse=lambda: 400).running() as ledger, shipping(tmp_path, ledger) as (spool, shipper):
        for number in range(3):
            spool.put(meter(f"r{number}").final_row())
        await until(lambda: shipper.stats.failures >= 2)
        assert spool.stats.damaged_rows == 0
        assert shipper.unshipped == 3


async def test_damage_that_shows_while_it_is_written_to_is_mended_and_nothing_is_lost(tmp_path: Path):
    spool = UsageSpool(tmp_path)
    spool.start()
    await spool.opened()
    try:
        for number in range(50):
            await spool.commit(meter(f"r{number}").open_row())
        spool.damaged("a test says so")
        async with asyncio.timeout(20):
            while spool.opened_times < 2:
                await asyncio.sleep(0.01)
        await spool.commit(meter("after").open_row())
        assert spool.stats.damaged_files == 1
        assert spool.stats.closed_as_cut == 0  # they are under way
    finally:
        await spool.stop()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        ids = {id for (id,) in connection.execute("SELECT id FROM records")}
    assert ids == {f"r{number}:open" for number in range(50)} | {"after:open"}


@pytest.mark.parametrize("when_full", ["Refuse", "Serve"])
async def test_rows_that_come_while_a_damaged_file_cannot_be_opened_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_full: Literal["Refuse", "Serve"]
) -> None:
    """To rescue what is readable takes as much disk again, which may not be there at first."""
    spool = UsageSpool(tmp_path, when_full=when_full)
    spool.start()
    await spool.opened()
    tries, real = 0, SpoolFile

    def full(*args: Any, **more: Any) -> SpoolFile:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **more)

    monkeypatch.setattr(spoolmodule, "SpoolFile", full)
    monkeypatch.setattr(spoolmodule, "_RETRY_SECONDS", 0.2)
    try:
        await spool.commit(meter("before").open_row())
        spool.damaged("a test says so")
        await until_async(lambda: tries > 0)
        begun = meter("before")
        begun.outcome = "answered"
        spool.put(begun.final_row())
        if when_full == "Serve":
            await spool.commit(meter("during").open_row())
        await until_async(lambda: spool.backlog == 0)
        assert tries == 3
        assert spool.stats.lost == 0
    finally:
        await spool.stop()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        ids = {id for (id,) in connection.execute("SELECT id FROM records")}
    assert ids == {"before:open", "before:final"} | ({"during:open"} if when_full == "Serve" else set[str]())
