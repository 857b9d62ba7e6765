"""The ledger's tables: their migrations, their copies, their retention."""

import asyncio
import contextlib
import csv
import io
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from click.testing import CliRunner
from sqlalchemy import Connection, func, inspect, select

from shoal.ledger import ingest, schema
from shoal.ledger.backup import BackupError, backup, restore
from shoal.ledger.database import Busy, Database, DatabaseUnavailable
from shoal.ledger.maintenance import retain_once, retry_quarantined_once
from shoal.ledger.sums import Changes, GatewayKey, GatewaySums, HourKey, HourlySums
from shoal.metering.record import StoredRow
from shoal.runtime.ledger import command
from tests.support.ledger import NOON, NOW_MS, check_balance, record, server, store, url, usage_row
from tests.support.postgres import Postgres

__all__ = ["server", "url"]

_DAY = timedelta(days=1)


def opened(url: str, stack: contextlib.ExitStack) -> Connection:
    """As a ledger does that follows another: PostgreSQL notices a moment late that the session before is over."""
    ends = time.monotonic() + 30
    while True:
        try:
            return Database(url).open(stack)
        except Busy:
            if time.monotonic() > ends:
                raise
            time.sleep(0.02)


def test_migrations_make_what_the_schema_says(url: str) -> None:
    database = Database(url)
    with contextlib.ExitStack() as stack:
        connection = database.open(stack)
        with connection.begin():
            assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
            indexes = {i["name"] for t in schema.metadata.tables for i in inspect(connection).get_indexes(t)}
    assert {index.name for table in schema.metadata.tables.values() for index in table.indexes} <= indexes


def test_estimates_of_before_are_summed_up(url: str) -> None:
    """Migration 0002: of tables that an older ledger filled."""
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        rows = [
            usage_row(record("e1", countSource="estimated", inputTokens=50, outputTokens=None)),
            usage_row(record("e2", countSource="estimated", inputTokens=7, outputTokens=None)),
            usage_row(record("r1")),
        ]
        changes = Changes()
        for row in rows:
            changes.add(row)
        with connection.begin():
            ingest.store(connection, rows, changes, NOW_MS)
            connection.exec_driver_sql("ALTER TABLE hours DROP COLUMN estimated_input")
            connection.exec_driver_sql("ALTER TABLE usage DROP COLUMN documents")
            without_units(connection)
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            hours = schema.hours.c
            found = connection.execute(select(hours.billed, hours.estimated_input).order_by(hours.billed)).all()
    assert [tuple(row) for row in found] == [(False, 57), (True, 0)]


def test_requests_of_before_have_no_documents(url: str) -> None:
    """Migration 0003."""
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            ingest.store(connection, [usage_row(record("old"))], Changes(), NOW_MS)
            connection.exec_driver_sql("ALTER TABLE usage DROP COLUMN documents")
            without_units(connection)
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0002_from_0001'")
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            ingest.store(connection, [usage_row(record("new", documents=3))], Changes(), NOW_MS)
            found = connection.execute(select(schema.usage.c.request, schema.usage.c.documents)).all()
    assert dict(tuple(row) for row in found) == {"old": None, "new": 3}


def without_route(connection: Connection) -> None:
    """Takes away the column and the table of migrations 0005 and 0006."""
    connection.exec_driver_sql("DROP TABLE price_lists")
    connection.exec_driver_sql("ALTER TABLE usage DROP COLUMN route")


def without_units(connection: Connection) -> None:
    """Takes away the columns and tables of migrations 0004 to 0006."""
    without_route(connection)
    parts = ("image_tokens", "audio_tokens", "accepted_tokens")
    for table, names in (
        ("usage", ("images", "audio_ms", "audio_source", *parts)),
        ("hours", ("documents", "images", "audio_ms", *parts)),
    ):
        for name in names:
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {name}")


def test_documents_of_before_are_summed_up(url: str) -> None:
    """Migration 0004: of tables that an older ledger filled. A later row of the same request still balances."""
    none: dict[str, Any] = {"inputTokens": None, "cachedTokens": None, "outputTokens": None, "reasoningTokens": None}
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        rows = [
            usage_row(record("ranked", documents=3)),
            usage_row(record("ranked too", documents=4)),
            usage_row(record("guessed", documents=50, countSource="estimated")),
            usage_row(record("refused", documents=600, countSource="none", outcome="refused", attempts=0, **none)),
            usage_row(record("chat")),
        ]
        changes = Changes()
        for row in rows:
            changes.add(row)
        with connection.begin():
            ingest.store(connection, rows, changes, NOW_MS)
            without_units(connection)
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0003_from_0001'")
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            hours = schema.hours.c
            found = connection.execute(
                select(hours.billed, hours.documents).where(hours.documents > 0).order_by(hours.billed)
            ).all()
            check_balance(connection)
    assert [tuple(row) for row in found] == [(False, 50), (True, 7)]


def test_requests_of_before_have_no_route(url: str) -> None:
    """Migration 0005."""
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            ingest.store(connection, [usage_row(record("old"))], Changes(), NOW_MS)
            without_route(connection)
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0004_from_0001'")
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            ingest.store(connection, [usage_row(record("new", route="chat/front"))], Changes(), NOW_MS)
            found = connection.execute(select(schema.usage.c.request, schema.usage.c.route)).all()
    assert dict(tuple(row) for row in found) == {"old": None, "new": "chat/front"}


def test_rows_are_in_the_order_of_their_columns() -> None:
    assert list(StoredRow._fields) == schema.usage.columns.keys()
    assert [*HourKey._fields, *HourlySums._fields] == schema.hours.columns.keys()
    assert [*GatewayKey._fields, *GatewaySums._fields, "heard_at"] == schema.gateways.columns.keys()


def test_migrating_again_changes_nothing(url: str) -> None:
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            connection = opened(url, stack)
            with connection.begin():
                assert connection.execute(select(func.count()).select_from(schema.usage)).scalar_one() == 0


def test_tables_of_a_newer_version_are_left_alone(url: str) -> None:
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(DatabaseUnavailable, match="a newer ledger made them: run that one"),
    ):
        opened(url, stack)


async def test_a_release_is_rolled_back_where_the_newer_tables_only_have_more(url: str) -> None:
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            for table in ("hours", "usage", "records"):
                connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN novel BIGINT NOT NULL DEFAULT 7")
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999_from_0001'")
    async with store(url) as rig:
        for _ in range(2):
            await rig.take(*(record(f"r{n}") for n in range(150)), record("cut", "open"))
        assert await rig.count(schema.usage) == 151
        await rig.balanced()
    with contextlib.ExitStack() as stack:
        connection = opened(url, stack)
        with connection.begin():
            version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999_from_9998'")
    assert version == "9999_from_0001", "it is the newer one's to say"
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(DatabaseUnavailable, match="a newer ledger made them: run that one"),
    ):
        opened(url, stack)


def test_a_second_ledger_is_refused_until_the_first_has_gone(url: str) -> None:
    with contextlib.ExitStack() as first:
        Database(url).open(first)
        with contextlib.ExitStack() as second, pytest.raises(Busy, match="another ledger"):
            Database(url).open(second)
    with contextlib.ExitStack() as second:
        opened(url, second)


async def test_a_second_ledger_stands_by_and_takes_over(url: str) -> None:
    async with store(url) as first:
        await first.take(record("r1"))
        from tests.support.ledger import Rig, until

        second = Rig(url)
        second.store.start()
        try:
            await until(lambda: "another ledger" in (second.store.error or ""))
            with pytest.raises(DatabaseUnavailable, match="another ledger"):
                await second.take(record("r2"))
            await first.store.stop()
            await until(lambda: second.store.error is None)
            assert await second.take(record("r1"), record("r2")) == (1, 1, 0)
            await second.balanced()
        finally:
            await second.store.stop()


# --- copies ---------------------------------------------------------------------------------------------------------


async def test_a_backup_while_the_ledger_writes_is_one_consistent_state(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    async with store(f"sqlite:///{file}") as rig:
        await rig.take(*(record(f"r{n}") for n in range(500)))

        async def goes_on() -> None:
            n = 500
            while True:
                await rig.take(*(record(f"r{n + k}", gateway=f"g{k}") for k in range(20)))
                n += 20

        writing = asyncio.create_task(goes_on())
        said = await asyncio.to_thread(backup, file, tmp_path / "copy.sqlite")
        writing.cancel()
        assert said.startswith(f"copied {file} to")
    copy = Database(f"sqlite:///{tmp_path}/copy.sqlite")
    with copy.reading.connect() as connection:
        check_balance(connection)
        assert connection.execute(select(func.count()).select_from(schema.usage)).scalar_one() >= 500
    copy.close()


async def test_restore_puts_a_backup_in_place(tmp_path: Path) -> None:
    file, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    url = f"sqlite:///{file}"
    async with store(url) as rig:
        await rig.take(record("kept"))
        await asyncio.to_thread(backup, file, copy)
        await rig.take(record("later"))
        with pytest.raises(Busy, match="another ledger uses"):
            restore(file, copy, force=True)
    with pytest.raises(BackupError, match="is there already: --force keeps it as ledger"):
        restore(file, copy)
    restore(file, copy, force=True)
    async with store(url) as rig:
        # What is sent again, because its answer was lost, counts once.
        assert await rig.take(record("kept"), record("later")) == (1, 1, 0)
        await rig.balanced()
    assert (tmp_path / "ledger.sqlite.before").exists()


def test_what_is_no_backup_is_not_put_in_place(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    (tmp_path / "text").write_text("no database at all, but long enough to be read as one " * 100)
    with pytest.raises(BackupError, match="not a sound SQLite database"):
        restore(file, tmp_path / "text")
    import sqlite3

    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE something (x)")
        other.commit()
    with pytest.raises(BackupError, match="is not a ledger's database"):
        restore(file, tmp_path / "other")
    assert not file.exists()
    with pytest.raises(BackupError, match="no database at"):
        backup(tmp_path / "nowhere", tmp_path / "copy")


async def test_postgresql_dumped_and_restored(server: Postgres, tmp_path: Path) -> None:
    url = server.database()
    async with store(url) as rig:
        await rig.take(*(record(f"r{n}", kind) for n in range(50) for kind in ("open", "final", "attempt:1")))
        server.dump(url, tmp_path / "dump")
        await rig.take(record("later"))
    other = server.database()
    server.restore(other, tmp_path / "dump")
    async with store(other) as rig:
        assert await rig.take(*(record(f"r{n}") for n in range(50)), record("later")) == (1, 50, 0)
        await rig.balanced()


# --- retention ------------------------------------------------------------------------------------------------------


async def test_what_is_older_than_the_retention_goes(url: str) -> None:
    async with store(url) as rig:
        for days in (0, 20, 40, 400):
            at = NOON - days * _DAY
            await rig.take(record(f"d{days}", at=at), record(f"open{days}", "open", at=at), {"aside": days})
        await rig.store.write(_age)
        values = {"id": "c", "tenant": "acme", "month": "2020-01", "amount": 1, "currency": "EUR", "note": ""}
        values |= {"made_at": 0, "made_by": "somebody"}
        await rig.store.write(lambda c: c.execute(schema.credits.insert().values(values)).rowcount)

        assert await retain_once(rig.store, 30, 365, NOW_MS) > 0
        requests = {row["request"] for row in await rig.rows(schema.usage)}
        assert requests == {"d0", "d20", "open0", "open20", "open40", "open400"}, "what is open is closed first"
        assert {row["request"] for row in await rig.rows(schema.records)} == {"d0", "d20"}
        assert len(await rig.rows(schema.aside)) == 4
        assert {(NOW_MS - row["hour"]) // 86_400_000 for row in await rig.rows(schema.hours)} == {0, 20, 40}
        assert await rig.count(schema.credits) == 1
        assert await retain_once(rig.store, 30, 365, NOW_MS) == 0
        assert await retain_once(rig.store, 30, 365, time.time_ns() // 1_000_000 + 31 * 86_400_000) > 0
        assert await rig.count(schema.aside) == 0


def _age(connection: Connection) -> None:
    """As if each had come when it was admitted."""
    connection.exec_driver_sql(
        "UPDATE records SET received_at = (SELECT admitted_at FROM usage u"
        " WHERE u.source = records.source AND u.request = records.request AND u.attempt = 0)"
    )


async def test_a_newer_version_counts_what_an_older_one_kept_aside(url: str) -> None:
    async with store(url, keep_days=3650) as rig:
        assert await rig.take(record("r1", outcome="paused"), {"no": "record"}, record("r2")) == (1, 0, 2)
        assert await retry_quarantined_once(rig.store, 3650, rig.changes.append) == 0

        def as_if_known(connection: Connection) -> None:
            (row,) = [r for r in connection.execute(select(schema.aside)) if b"paused" in r.body]
            body = row.body.replace(b"paused", b"failed")  # stands for a version that knows the word
            connection.execute(schema.aside.update().where(schema.aside.c.digest == row.digest).values(body=body))

        await rig.store.write(as_if_known)
        assert await retry_quarantined_once(rig.store, 3650, rig.changes.append) == 1
        assert await rig.count(schema.aside) == 1, "what is no record stays"
        assert (await rig.usage("r1"))["outcome"] == "failed"
        assert await rig.take(record("r1")) == (0, 1, 0)
        await rig.balanced()


# --- commands -------------------------------------------------------------------------------------------------------


def _run(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments), env={"SHOAL_LEDGER_DATABASE_URL": url})


async def test_records_are_printed_while_the_ledger_runs(url: str) -> None:
    async with store(url) as rig:
        await rig.take(record("r1"), record("r2", "open", tenant="globex"), {"no": "record"})
        result = await asyncio.to_thread(_run, url, "records")
        assert result.exit_code == 0, result.output
        assert "r1" in result.output
        assert "r2" in result.output
        result = await asyncio.to_thread(_run, url, "records", "--tenant", "globex", "-o", "json")
        (line,) = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
        assert (line["request"], line["ended"], line["input_tokens"]) == ("r2", False, None)
        result = await asyncio.to_thread(_run, url, "records", "--aside")
        assert "source: Field required" in result.output
        for flag, name, found in ((), "request", ["r1", "r2"]), (("--aside",), "reason", ["id"]):
            result = await asyncio.to_thread(_run, url, "records", *flag, "-o", "yaml")
            assert sorted(row[name][:2] for row in yaml.safe_load(result.output)) == found
            result = await asyncio.to_thread(_run, url, "records", *flag, "-o", "csv")
            assert sorted(row[name][:2] for row in csv.DictReader(io.StringIO(result.output))) == found


def test_commands_that_cannot_be_done_say_why(tmp_path: Path) -> None:
    result = _run(f"sqlite:///{tmp_path}/none.sqlite", "records")
    assert (result.exit_code, result.output.strip()) == (1, f"Error: no database at {tmp_path}/none.sqlite")
    result = _run("postgresql://nobody@/none?host=/nowhere", "backup", str(tmp_path / "copy"))
    assert result.exit_code == 1
    assert "use pg_dump --format=custom" in result.output
    result = _run("postgresql://nobody@/none?host=/nowhere", "migrate")
    assert result.exit_code == 1
    assert "/nowhere" in result.output
    result = _run("mysql://somewhere", "migrate")
    assert "SHOAL_LEDGER_DATABASE_URL: Value error, mysql is not supported: sqlite:////path/file or" in result.output


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("u:ca@nary@host/db", "there is more than one @: in the password write it as %40"),
        ("u:ca@nary:12@host:5432/db", "there is more than one @"),
        ("u:pass@host:canary/db", "the text after the host's colon is not a port"),
    ],
)
def test_no_part_of_a_password_is_repeated(given: str, says: str) -> None:
    """An @ that is not escaped ends the password for whoever reads the URL: the rest would be the host's name."""
    result = _run(f"postgresql://{given}", "migrate")
    assert result.exit_code == 1
    assert says in result.output
    assert "nary" not in result.output


def test_migrate_backup_and_restore_by_command(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    assert "the tables in" in _run(url, "migrate").output
    assert _run(url, "backup", str(tmp_path / "copy")).exit_code == 0
    assert "is there already: give another name" in _run(url, "backup", str(tmp_path / "copy")).output
    assert "--force" in _run(url, "restore", str(tmp_path / "copy")).output
    assert _run(url, "restore", "--force", str(tmp_path / "copy")).exit_code == 0
