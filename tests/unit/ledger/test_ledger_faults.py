"""A ledger that is killed, and databases that are away, full or slow: nothing acknowledged is lost, nothing double."""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from sqlalchemy import func, select

from shoal.api import keys
from shoal.ledger import database as ledger_database
from shoal.ledger import maintenance, schema
from shoal.ledger.bulk import COPY_FROM
from shoal.ledger.database import Database, lock_file
from shoal.ledger.store import DatabaseUnavailable
from tests.support.controlplane import free_ports
from tests.support.ledger import INSTALL_KEY, NOON, check_balance, chunks, record, served, server, store, until, url
from tests.support.postgres import Postgres
from tests.support.rolekeys import give

__all__ = ["server", "url"]


class Mortal:
    """`shoal ledger run` in a process of its own, on a port that stays the same."""

    def __init__(self, url: str, folder: Path) -> None:
        self.port, ops = free_ports(2)
        (folder / "keys").mkdir()
        give(folder / "keys", INSTALL_KEY, "ledger")
        self._log = folder / "log"
        self._environment = os.environ | {
            "SHOAL_LEDGER_DATABASE_URL": url,
            "SHOAL_LEDGER_HOST": "127.0.0.1",
            "SHOAL_LEDGER_PORT": str(self.port),
            "SHOAL_LEDGER_OPS_HOST": "127.0.0.1",
            "SHOAL_LEDGER_OPS_PORT": str(ops),
            "SHOAL_LEDGER_KEYS_DIR": str(folder / "keys"),
            "SHOAL_LEDGER_PRICES_DIR": str(folder / "prices"),
            "SHOAL_LEDGER_RECONCILE": "false",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "shoal", "ledger", "run"]
            self.process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.mark.timeout(400)
async def test_killed_again_and_again_while_it_takes_batches(url: str, tmp_path: Path) -> None:
    dice = random.Random(3)  # noqa: S311
    ledger = Mortal(url, tmp_path)
    headers = {"Authorization": f"Bearer {keys.derive(INSTALL_KEY, 'gateway', keys.LEDGER)}"}
    acknowledged = 0
    sent = 0

    async def ship(gateway: int, session: aiohttp.ClientSession) -> None:
        nonlocal acknowledged, sent
        rows = [
            record(f"g{gateway}-{n:04}", kind, gateway=f"gw-{gateway}")
            for n in range(400)
            for kind in ("open", "checkpoint:1", "attempt:1", "final")
        ]
        for batch in chunks(rows, 40):
            while True:
                sent += 1
                try:
                    async with session.post(
                        f"http://127.0.0.1:{ledger.port}/v1/records", data=orjson.dumps(batch), headers=headers
                    ) as answer:
                        if answer.status == 200:
                            taken = await answer.json()
                            assert taken["new"] + taken["known"] == 40, taken
                            acknowledged += 1
                            break
                        assert answer.status == 503, await answer.text()
                except (aiohttp.ClientError, TimeoutError):  # a gateway sends it again, too
                    pass
                await asyncio.sleep(0.05)

    async def reaper(shipping: list[asyncio.Task[None]]) -> int:
        kills = 0
        while kills < 4 and not all(task.done() for task in shipping):
            before = acknowledged
            await until(lambda before=before: acknowledged > before + 3 or all(t.done() for t in shipping), 60)
            await asyncio.sleep(dice.random() * 0.1)
            ledger.kill()
            kills += 1
            ledger.start()
        return kills

    ledger.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            shipping = [asyncio.create_task(ship(g, session)) for g in range(4)]
            kills = await reaper(shipping)
            await asyncio.wait_for(asyncio.gather(*shipping), 300)
        assert ledger.kill(signal.SIGTERM) == 0, "asked to stop it stops"
    finally:
        if ledger.process is not None and ledger.process.poll() is None:
            ledger.kill()
    assert kills >= 3
    assert acknowledged == 160
    found = Database(url)
    with found.reading.connect() as connection:
        check_balance(connection)
        assert connection.execute(select(func.sum(schema.hours.c.requests))).scalar_one() == 1600
        assert connection.execute(select(func.count()).select_from(schema.records)).scalar_one() == 3200
        assert connection.execute(select(func.count()).select_from(schema.usage)).scalar_one() == 3200
    found.close()


async def test_a_database_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    from tests.support.postgres import postgres

    with postgres("fsync=off") as own:
        url = own.database()
        async with served(url, tmp_path) as ledger, ledger.totals() as message:
            await message()
            assert (await ledger.send(record("r1")))[0] == 200
            own.stop()
            status, answer = await ledger.send(record("r2"))
            assert status == 503
            assert answer["headers"]["retry-after"] == "1"
            assert answer["error"]["message"].startswith("the database: ")
            await until(lambda: "database" in ledger.process.missing())
            status, _ = await ledger.send(record("r2"))
            assert status == 503
            own.start()
            await until(lambda: not ledger.process.missing(), 60)
            status, answer = await ledger.send(record("r1"), record("r2"))
            assert (status, answer["new"], answer["known"]) == (200, 1, 1)
    assert not own.folder.exists()


async def test_silence_does_not_count_while_gateways_can_send_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "CLOSE_SECONDS", 0.05)
    url, now = f"sqlite:///{tmp_path}/ledger.sqlite", 0.0
    async with store(url) as rig:
        await rig.take(record("r1", "open"))
    active = lock_file(tmp_path / "ledger.sqlite")
    async with served(url, tmp_path, ready=False) as ledger:
        process = ledger.process
        process.liveness = maintenance.GatewayLiveness(60.0, lambda: now)
        await until(lambda: "another ledger" in (process.store.error or ""))
        now = 3_600.0  # for an hour the other ledger heard the gateways, and this one stood by
        await asyncio.sleep(1.2)
        os.close(active)
        await until(lambda: process.metrics.open_rows is not None)
        assert (process.metrics.open_rows, process.metrics.closed_rows) == (1, 0)
        process.store._error = "the disk is full"
        now = 7_200.0
        await asyncio.sleep(0.2)
        process.store._error = process.metrics.open_rows = None
        await until(lambda: process.metrics.open_rows is not None)
        assert (process.metrics.open_rows, process.metrics.closed_rows) == (1, 0)
        now += 60
        await until(lambda: process.metrics.closed_rows == 1)


async def test_one_session_that_the_server_ends_costs_one_refusal(server: Postgres) -> None:
    url = server.database()
    async with store(url) as rig:
        await rig.take(record("r1"))

        def end(connection: Any) -> None:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            )

        await asyncio.to_thread(_as_another, url, end)
        with pytest.raises(DatabaseUnavailable, match="the database: "):
            await rig.take(record("r2"))
        await until(lambda: rig.store.error is None)
        assert await rig.take(record("r1"), record("r2")) == (1, 1, 0)
        await rig.balanced()


def _as_another(url: str, work: Any) -> None:
    other = Database(url)
    with other.reading.connect() as connection, connection.begin():
        work(connection)
    other.close()


async def test_a_full_disk_is_told_nothing_is_acknowledged_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    real = ledger_database._set_up_writer

    def bounded(connection: Any, entry: object) -> None:
        real(connection, entry)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 20 if full and pages else 1 << 30}")

    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    async with store(url) as rig:
        await rig.take(record("r0"))
    monkeypatch.setattr(ledger_database, "_set_up_writer", bounded)
    async with store(url) as rig:
        kept, refused = 0, ""
        while not refused:
            kept += 1
            try:
                await rig.take(*(record(f"r{kept}-{n}") for n in range(20)))
            except DatabaseUnavailable as error:
                refused = str(error)
        assert refused == "the database: database or disk is full"
        await until(lambda: rig.store.error is None)  # it tries again by itself
        full = False
        for number in range(1, kept + 1):
            while True:
                try:
                    new, known, _ = await rig.take(*(record(f"r{number}-{n}") for n in range(20)))
                    break
                except DatabaseUnavailable:
                    await asyncio.sleep(0.2)
            assert (new, known) == ((20, 0) if number == kept else (0, 20))
        await rig.balanced()


async def test_a_damaged_file_is_no_fault_of_the_records(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with store(f"sqlite:///{path}") as rig:
        await rig.take(record("before"))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'hours'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    async with store(f"sqlite:///{path}") as rig:
        with pytest.raises(DatabaseUnavailable, match="the database: database disk image is malformed"):
            await rig.take(record("r1"))
        await until(lambda: rig.store.error is None)
        assert await rig.count(schema.aside) == 0, "gateways keep it for the ledger that a backup restores"


async def test_a_missing_table_is_no_fault_of_the_records(url: str) -> None:
    def rename(old: str, new: str) -> Any:
        return lambda c: c.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}").rowcount

    many = [record(f"r{n}") for n in range(COPY_FROM)]
    async with store(url) as rig:
        await rig.store.write(rename("hours", "elsewhere"))
        for batch in (many[:1], many):
            with pytest.raises(DatabaseUnavailable, match="hours"):
                await rig.take(*batch)
            await until(lambda: rig.store.error is None)
        assert await rig.count(schema.aside) == 0
        await rig.store.write(rename("elsewhere", "hours"))  # the restore of a backup has come so far
        assert await rig.take(*many) == (len(many), 0, 0)
        await rig.balanced()


async def test_a_commit_that_takes_too_long_is_not_acknowledged_and_not_double(url: str) -> None:
    async with store(url, answer_seconds=1.0) as rig:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(_: Any) -> None:
            loop.call_soon_threadsafe(started.set)
            import time

            time.sleep(3.0)

        blocked = asyncio.create_task(rig.store.write(slow))
        await started.wait()
        with pytest.raises(DatabaseUnavailable, match="did not answer in time"):
            await rig.take(record("r1"))
        with pytest.raises(DatabaseUnavailable, match="did not answer in time"):
            await blocked
        # It was committed after all, when the database could: nobody was told so, and again it is known.
        await until(lambda: rig.store.stats.new == 1)
        assert await rig.take(record("r1")) == (0, 1, 0)
        await rig.balanced()


async def test_a_question_that_never_ends_is_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_database, "STATEMENT_SECONDS", 1)
    endless = (
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 1000000000) SELECT count(*) FROM n"
    )
    async with store(url, readers=1) as rig:
        with pytest.raises(DatabaseUnavailable, match=r"the database: (interrupted|canceling statement)"):
            await rig.store.read(lambda c: c.exec_driver_sql(endless).scalar())
        assert await rig.count(schema.usage) == 0, "its reader serves others again"


async def test_what_waits_is_committed_at_the_stop(url: str) -> None:
    async with store(url) as rig:
        taking = [asyncio.create_task(rig.take(record(f"r{n}"))) for n in range(50)]
        await asyncio.sleep(0)
        await rig.store.stop()
        assert await asyncio.gather(*taking) == [(1, 0, 0)] * 50
        with pytest.raises(DatabaseUnavailable, match="the ledger stops"):
            await rig.take(record("late"))


async def test_without_the_transaction_a_failure_would_leave_half_a_batch(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: the sums fail after the records were written, and nothing of both may stay."""
    from shoal.ledger import bulk

    real = bulk.insert
    broken = True

    def insert(connection: Any, table: Any, rows: Any, conflict: str) -> Any:
        if broken and table is schema.hours and rows:
            raise OSError(28, "No space left on device")
        return real(connection, table, rows, conflict)

    monkeypatch.setattr(bulk, "insert", insert)
    async with store(url) as rig:
        with pytest.raises(DatabaseUnavailable, match="No space left"):
            await rig.take(record("r1", at=NOON))
        broken = False
        await until(lambda: rig.store.error is None)
        assert await rig.count(schema.records) == 0
        assert await rig.take(record("r1", at=NOON)) == (1, 0, 0)
        await rig.balanced()
