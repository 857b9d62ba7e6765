"""The spool keeps what it acknowledged, whatever kills the gateway."""

import asyncio
import contextlib
import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from shoal.metering import spoolfile
from shoal.metering.record import UsageRecord
from shoal.metering.spool import SpoolUnavailable, UsageSpool
from shoal.metering.spoolfile import SpoolFile
from shoal.metering.spoolreader import SpoolReader
from shoal.runtime.gateway import command
from tests.support.records import meter

CHILD = """
import asyncio, sys
from pathlib import Path
from shoal.core.access import KeyIdentity
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.ids import uuid7
from shoal.metering.meter import Meter
from shoal.metering.spool import UsageSpool

IDENTITY = KeyIdentity("acme", None, "prod", None, False, False, frozenset())
MODEL = ServedModel("chat/llama", "u", "chat/llama", (), None)

async def request(spool):
    while True:
        meter = Meter(uuid7(), "shoal", IDENTITY, MODEL, endpoint="/v1/completions", model_name="llama", stream=True)
        await spool.commit(meter.open_row())
        print("ack", "open", meter.id, flush=True)
        meter.count(b'{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}', "continuous")
        await spool.commit(meter.checkpoint_row())
        print("ack", "checkpoint", meter.id, flush=True)
        meter.outcome = "answered"
        await spool.commit(meter.final_row())
        print("ack", "final", meter.id, flush=True)

async def main():
    spool = UsageSpool(Path(sys.argv[1]))
    spool.start()
    await spool.opened()
    await asyncio.gather(*(request(spool) for _ in range(8)))

asyncio.run(main())
"""


def rows(directory: Path) -> list[tuple[str, UsageRecord]]:
    reader = SpoolReader(directory)
    found = [(r.kind, r.record) for r in reader.newest(100_000)]
    reader.close()
    return found


async def opened(directory: Path) -> UsageSpool:
    spool = UsageSpool(directory)
    spool.start()
    await spool.opened()
    return spool


async def test_killed_while_writing(tmp_path: Path):
    """No acknowledged row is lost, and every open row gets exactly one final row after the next start."""
    acknowledged: set[tuple[str, str]] = set()

    def take(line: str) -> None:
        match line.split():
            case ["ack", kind, id] if len(id) == 36:
                acknowledged.add((kind, id))
            case _:  # a log line, or one that the kill cut off
                pass

    for round_ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(200 + 17 * round_):
            take(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        for line in child.stdout.read().splitlines():
            take(line)
        child.wait()
        child.stdout.close()
    spool = await opened(tmp_path)
    await spool.stop()
    found = rows(tmp_path)
    assert acknowledged <= {(kind, record.data.request_id) for kind, record in found}
    opens = [record.data.request_id for kind, record in found if kind == "open"]
    finals = [record.data.request_id for kind, record in found if kind == "final"]
    assert sorted(opens) == sorted(finals)
    assert len(set(finals)) == len(finals)
    cut = [record.data for kind, record in found if kind == "final" and record.data.outcome == "cut"]
    assert cut
    had_checkpoint = {record.data.request_id for kind, record in found if kind == "checkpoint"}
    for data in cut:
        assert data.output_tokens == (2 if data.request_id in had_checkpoint else None)


async def test_open_rows_are_closed_with_their_last_checkpoint(tmp_path: Path):
    spool = await opened(tmp_path)
    a, b = meter("a"), meter("b")
    await spool.commit(a.open_row())
    await spool.commit(b.open_row())
    for n in range(1, 13):
        a.count(b'{"prompt_tokens":5,"completion_tokens":%d}' % n, "continuous")
        spool.put(a.checkpoint_row())
    await spool.stop()

    spool = await opened(tmp_path)
    assert spool.stats.closed_as_cut == 2
    await spool.stop()
    finals = {r.data.request_id: r for kind, r in rows(tmp_path) if kind == "final"}
    assert (finals["a"].data.outcome, finals["a"].data.output_tokens) == ("cut", 12)
    assert finals["a"].data.count_source == "continuous"
    assert (finals["b"].data.outcome, finals["b"].data.output_tokens) == ("cut", None)
    assert finals["a"].id == "a:final"

    spool = await opened(tmp_path)  # a second start finds nothing to close
    assert spool.stats.closed_as_cut == 0
    await spool.stop()


async def test_a_start_reads_what_is_open_and_not_all_that_is_there(tmp_path: Path):
    """Of a spool of a million requests, a gateway is ready again as soon as of an empty one."""
    spool = await opened(tmp_path)
    for n in range(3):
        it = meter(f"r{n}")
        await spool.commit(it.open_row())
        if n:
            it.outcome = "answered"
            await spool.commit(it.final_row())
    await spool.stop()
    with contextlib.closing(sqlite3.connect(tmp_path / "spool.sqlite", isolation_level=None)) as connection:
        steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {spoolfile.OPEN_ROWS}")]
        scans = [step.replace("COVERING ", "") for step in steps if step.startswith("SCAN")]  # as newer SQLites say it
        assert scans == ["SCAN o USING INDEX open_rows"]
        connection.execute("DROP INDEX open_rows")  # a file of an older version has none
    spool = await opened(tmp_path)
    assert spool.stats.closed_as_cut == 1
    await spool.stop()


async def test_what_a_newer_version_left_open_is_closed_as_it_is(tmp_path: Path):
    spool = await opened(tmp_path)
    await spool.commit(meter("r1").open_row())
    id, request, kind, body = meter("r1").checkpoint_row()
    record = json.loads(body)
    record["data"] |= {"countSource": "measured", "colour": "blue", "outputTokens": 4}
    spool.put((id, request, kind, json.dumps(record).encode()))
    await spool.stop()

    spool = await opened(tmp_path)
    assert spool.stats.closed_as_cut == 1
    await spool.stop()
    with contextlib.closing(sqlite3.connect(tmp_path / "spool.sqlite")) as connection:
        (final,) = connection.execute("SELECT body FROM records WHERE id = 'r1:final'").fetchone()
    data = json.loads(final)["data"]
    assert (data["kind"], data["outcome"], data["outputTokens"]) == ("final", "cut", 4)
    assert (data["countSource"], data["colour"]) == ("measured", "blue")


async def test_a_row_counts_once(tmp_path: Path):
    spool = await opened(tmp_path)
    row = meter().open_row()
    await spool.commit(row)
    await spool.commit(row)
    await spool.stop()
    assert len(rows(tmp_path)) == 1


async def test_many_rows_at_once(tmp_path: Path):
    spool = await opened(tmp_path)
    await asyncio.gather(*(spool.commit(meter(f"r{n}").open_row()) for n in range(500)))
    assert spool.stats.commits < 100
    await spool.stop()
    assert [r.data.request_id for _, r in rows(tmp_path)] == [f"r{n}" for n in range(500)]


async def test_two_gateways_do_not_share_a_spool(tmp_path: Path):
    first = await opened(tmp_path)
    second = UsageSpool(tmp_path)
    second.start()
    async with asyncio.timeout(20):
        while second.error is None or "another gateway" not in second.error:
            await asyncio.sleep(0.01)
    with pytest.raises(SpoolUnavailable, match="another gateway uses the spool"):
        await second.commit(meter().open_row())
    await first.stop()
    async with asyncio.timeout(20):  # a successor takes over when the first is gone
        await second.opened()
    await second.commit(meter().open_row())
    await second.stop()


async def test_a_full_disk_is_told_and_finals_are_kept_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spool = await opened(tmp_path)
    open_meter = meter("before")
    await spool.commit(open_meter.open_row())
    full = True
    write = UsageSpool._write

    def refuse(self: UsageSpool, file: SpoolFile, batch: object) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        write(self, file, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(UsageSpool, "_write", refuse)
    with pytest.raises(SpoolUnavailable, match="disk is full"):
        await spool.commit(meter("refused").open_row())
    with pytest.raises(SpoolUnavailable, match="disk is full"):
        await spool.commit(meter("refused-2").open_row())
    open_meter.outcome = "answered"
    spool.put(open_meter.final_row())
    assert "disk is full" in (spool.error or "")
    full = False
    async with asyncio.timeout(20):
        while spool.error is not None:
            await asyncio.sleep(0.05)
    await spool.commit(meter("after").open_row())
    await spool.stop()
    assert [(k, r.data.request_id) for k, r in rows(tmp_path)] == [
        ("open", "before"),
        ("final", "before"),
        ("open", "after"),
    ]


async def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    spool = UsageSpool(tmp_path / "file" / "spool")
    spool.start()
    async with asyncio.timeout(20):
        while spool.error == "the spool is being opened":
            await asyncio.sleep(0.01)
    with pytest.raises(SpoolUnavailable, match="directory"):
        await spool.commit(meter().open_row())
    await spool.stop()


async def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spool = await opened(tmp_path)
    answer = threading.Event()
    write = UsageSpool._write

    def slow(self: UsageSpool, file: SpoolFile, batch: object) -> None:
        answer.wait(20)
        write(self, file, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(UsageSpool, "_write", slow)
    monkeypatch.setattr("shoal.metering.spool.STUCK_SECONDS", 0.05)
    waiting = spool.commit(meter("a").open_row())
    await asyncio.sleep(0.2)
    later = spool.commit(meter("b").open_row())
    spool.check()
    for future in (waiting, later):
        with pytest.raises(SpoolUnavailable, match="has not answered"):
            await future
    with pytest.raises(SpoolUnavailable, match="has not answered"):
        spool.commit(meter("c").open_row())
    answer.set()
    async with asyncio.timeout(20):
        while spool.error is not None:
            await asyncio.sleep(0.01)
    await spool.commit(meter("d").open_row())
    await spool.stop()


def test_rows_are_valid_records():
    it = meter("r1", client_request_id="mine")
    it.count(b'{"prompt_tokens":5,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}', "final")
    it.outcome, it.status = "answered", 200
    for row in (it.open_row(), it.checkpoint_row(), it.final_row()):
        record = UsageRecord.model_validate_json(row[3])
        assert record.id == row[0]
        assert record.data.kind == row[2]
        known = set(record.data.model_dump(by_alias=True))
        assert set(json.loads(row[3])["data"]) <= known  # no field that the contract does not know
    assert (record.data.input_tokens, record.data.output_tokens, record.data.cached_tokens) == (5, 0, 0)
    assert record.time <= datetime.now(UTC)


@pytest.mark.parametrize("usage", [b"", b"null", b"[]", b'{"prompt_tokens":-1}', b'{"prompt_tokens":"7"}'])
def test_usage_that_is_nonsense_is_unknown(usage: bytes):
    it = meter()
    it.count(usage, "final")
    assert it.tokens()["inputTokens"] is None


async def test_records_command(tmp_path: Path):
    spool = await opened(tmp_path)
    for n in range(3):
        it = meter(f"id-{n}", client_request_id=f"client-{n}")
        await spool.commit(it.open_row())
        it.outcome, it.status = "answered", 200
        it.count(b'{"prompt_tokens":5,"completion_tokens":%d}' % n, "final")
        await spool.commit(it.final_row())

    def run(*args: str) -> str:
        result = CliRunner().invoke(command, ["records", "--path", str(tmp_path), *args])
        assert result.exit_code == 0, result.output
        return result.output

    table = run().splitlines()  # while the gateway holds the file
    assert len(table) == 4
    assert "answered" in table[1]
    one = json.loads(run("--request", "client-2", "-o", "json"))
    assert one["data"]["outputTokens"] == 2
    assert len(run("--limit", "1", "-o", "json").splitlines()) == 1
    assert len(run("--all-rows", "-o", "json").splitlines()) == 6
    assert [row["data"]["requestId"] for row in yaml.safe_load(run("-o", "yaml"))] == ["id-0", "id-1", "id-2"]
    rows = list(csv.DictReader(io.StringIO(run("-o", "csv"))))
    assert [(row["requestId"], row["outputTokens"], row["replica"]) for row in rows] == [
        ("id-0", "0", ""), ("id-1", "1", ""), ("id-2", "2", ""),
    ]  # fmt: skip
    assert rows[0]["time"]
    await spool.stop()


def test_records_command_without_a_spool(tmp_path: Path):
    result = CliRunner().invoke(command, ["records", "--path", str(tmp_path)])
    assert result.exit_code == 1
    assert "no spool at" in result.output
