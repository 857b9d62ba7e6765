"""What the spool has reaches the ledger: at least once, whatever dies, and is marked only when the ledger has it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from datetime import datetime, timedelta
from pathlib import Path

import orjson
import pytest
import structlog
from aiohttp import web

from shoal.api import keys
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from shoal.metering.spoolreader import SpoolReader
from tests.support.fake_ledger import FakeLedger, until
from tests.support.gateway import INSTALL_KEY
from tests.support.records import meter


def said(*install_keys: bytes) -> Callable[[], list[str]]:
    return lambda: [keys.derive(key, "gateway", keys.LEDGER) for key in install_keys]


OURS = said(INSTALL_KEY)


@contextlib.asynccontextmanager
async def shipping(
    directory: Path,
    ledger: FakeLedger,
    install_keys: Callable[[], list[str]] = OURS,
    *,
    kind: type[Shipper] = Shipper,
    **spool_options,
) -> AsyncGenerator[tuple[UsageSpool, Shipper], None]:
    spool = UsageSpool(directory, **spool_options)
    spool.start()
    shipper = kind(spool, ledger.url, install_keys)
    task = asyncio.create_task(shipper.run())
    await spool.opened()
    try:
        yield spool, shipper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await spool.stop()


@contextlib.asynccontextmanager
async def unshipped(directory: Path, **spool_options) -> AsyncGenerator[UsageSpool, None]:
    spool = UsageSpool(directory, **spool_options)
    spool.start()
    await spool.opened()
    try:
        yield spool
    finally:
        await spool.stop()


def stored(directory: Path) -> list[tuple[str, bool]]:
    reader = SpoolReader(directory)
    found = [(row.record.id, row.shipped) for row in reader.newest(100_000)]
    reader.close()
    return found


async def request(spool: UsageSpool, id: str) -> None:
    it = meter(id)
    await spool.commit(it.open_row())
    it.count(b'{"prompt_tokens":5,"completion_tokens":2}', "final")
    it.outcome, it.status = "answered", 200
    spool.put(it.final_row())


async def test_rows_go_out_as_they_were_written(tmp_path: Path):
    async with FakeLedger().running() as ledger, shipping(tmp_path, ledger) as (spool, shipper):
        await asyncio.gather(*(request(spool, f"r{n}") for n in range(300)))
        await until(lambda: len(ledger.of("final")) == 300)
        await until(lambda: not shipper.unshipped)
        assert not ledger.again
        assert len(ledger.of("open")) == 300
        reader = SpoolReader(tmp_path)
        rows = reader._connection.execute("SELECT body FROM records ORDER BY seq").fetchall()
        reader.close()
        assert b",".join(batch[1:-1] for batch in ledger.batches) == b",".join(body for (body,) in rows)
        assert "zstd" in ledger.encodings
        assert shipper.stats.rows == 600
        assert shipper.behind_seconds() == 0


async def test_one_row_is_not_compressed_and_not_kept_waiting(tmp_path: Path):
    async with FakeLedger().running() as ledger, shipping(tmp_path, ledger) as (spool, _):
        await spool.commit(meter("only").open_row())
        await until(lambda: bool(ledger.records))
        assert ledger.encodings == [""]
        assert orjson.loads(ledger.batches[0])[0]["id"] == "only:open"


async def test_marked_only_after_the_answer(tmp_path: Path):
    """The ledger has committed and its answer is lost: the rows are sent again, under the same key."""
    never = asyncio.Event()
    ledger = FakeLedger(before_answer=never.wait)
    async with ledger.running():
        async with unshipped(tmp_path) as spool:
            await request(spool, "r1")
        async with shipping(tmp_path, ledger) as (spool, shipper):
            await until(lambda: len(ledger.records) == 2)
            spool.check()
            assert spool.shipped == 0
            assert shipper.unshipped > 0
        assert stored(tmp_path) == [("r1:open", False), ("r1:final", False)]
        never.set()
        async with shipping(tmp_path, ledger) as (_spool, shipper):
            await until(lambda: not shipper.unshipped)
        assert sorted(ledger.again) == ["r1:final", "r1:open"]
        assert len(ledger.records) == 2
        assert ("r1:final", True) in stored(tmp_path)


async def everything_arrives_after_a_kill(directory: Path, kind: type[Shipper]) -> bool:
    """A gateway ships to a ledger that does not take it, and is gone; the next one ships to a ledger that does."""
    down = True
    async with FakeLedger(refuse=lambda: 503 if down else None).running() as ledger:
        async with unshipped(directory) as spool:
            await request(spool, "r1")
        async with shipping(directory, ledger, kind=kind) as (spool, shipper):
            await until(lambda: shipper.stats.failures > 0)
            spool.check()
        down = False
        async with shipping(directory, ledger) as (_spool, shipper):
            await until(lambda: not shipper.unshipped)
    return {record.id for record in ledger.records.values()} == {"r1:open", "r1:final"}


async def test_what_the_ledger_did_not_take_is_not_marked(tmp_path: Path):
    assert await everything_arrives_after_a_kill(tmp_path, Shipper)


async def test_the_check_above_finds_a_shipper_that_marks_too_early(tmp_path: Path):
    class MarksFirst(Shipper):
        async def _ship(self, session, batch, compressed):
            self._spool.mark(batch.last)
            await super()._ship(session, batch, compressed)

    assert not await everything_arrives_after_a_kill(tmp_path, MarksFirst)


CHILD = """
import asyncio, sys
from pathlib import Path
from shoal.api import keys
from shoal.gateway.ids import uuid7
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from tests.support.gateway import INSTALL_KEY
from tests.support.records import meter

async def requests(spool):
    while True:
        it = meter(uuid7())
        await spool.commit(it.open_row())
        print("ack", "open", it.id, flush=True)
        it.count(b'{"prompt_tokens":7,"completion_tokens":2}', "continuous")
        spool.put(it.checkpoint_row())
        it.outcome = "answered"
        await spool.commit(it.final_row())
        print("ack", "final", it.id, flush=True)
        await asyncio.sleep(0.002)

async def main():
    spool = UsageSpool(Path(sys.argv[1]), keep_seconds=0.0)
    spool.start()
    await spool.opened()
    shipper = Shipper(spool, sys.argv[2], lambda: [keys.derive(INSTALL_KEY, "gateway", keys.LEDGER)])
    async with asyncio.TaskGroup() as group:
        group.create_task(shipper.run())
        for _ in range(4):
            group.create_task(requests(spool))
        while True:
            await asyncio.sleep(0.05)
            spool.check()

asyncio.run(main())
"""


async def test_killed_between_the_ledgers_commit_and_the_mark(tmp_path: Path):
    """SIGKILL when the ledger has a batch and the gateway does not know: it comes again, and counts once."""
    child: asyncio.subprocess.Process | None = None
    taken = 0

    async def kill() -> None:
        nonlocal taken
        taken += 1
        if child is not None and taken % 4 == 0:
            child.kill()
            await child.wait()

    acknowledged: set[str] = set()
    async with FakeLedger(before_answer=kill).running() as ledger:
        for _ in range(3):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, str(tmp_path), ledger.url, stdout=asyncio.subprocess.PIPE
            )
            assert child.stdout is not None
            async for line in child.stdout:
                match line.decode().split():
                    case ["ack", kind, id] if len(id) == 36:
                        acknowledged.add(f"{id}:{kind}")
                    case _:  # a log line, or one that the kill cut off
                        pass
            await child.wait()
        child = None
        async with shipping(tmp_path, ledger) as (_spool, shipper):
            await until(lambda: not shipper.unshipped)
    assert ledger.again, "nothing was sent twice: the kill did not come between"
    sent = {record.id for record in ledger.records.values()}
    assert acknowledged <= sent
    opens = sorted(record.data.request_id for record in ledger.of("open"))
    assert opens == sorted(record.data.request_id for record in ledger.of("final"))


async def test_a_ledger_that_is_away_for_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Requests go on; tries become rare; it is said once; afterwards everything arrives, at full speed."""
    ledger = FakeLedger()
    await ledger.up()
    await ledger.down()
    away, pauses = 0.0, list[float]()
    made = 0

    async with shipping(tmp_path, ledger) as (spool, shipper):

        async def pause(seconds: float) -> None:
            nonlocal away, made
            away += seconds
            pauses.append(seconds)
            for _ in range(20):
                await request(spool, f"r{made}")
                made += 1
            if away > 600:
                await ledger.up()

        monkeypatch.setattr(shipper, "_pause", pause)
        with structlog.testing.capture_logs() as logs:
            await request(spool, "first")
            await until(lambda: away > 600, 60)
            assert "rows wait in the spool" in (shipper.trouble() or "")
            await until(lambda: not shipper.unshipped)
        assert shipper.trouble() is None
        assert len(ledger.of("final")) == made + 1
        assert 60 <= len(pauses) <= 150  # ten seconds apart at the end, less the jitter
        assert max(pauses) <= 10
        assert [e["reason"] for e in logs if e["event"] == "records are not shipped"] == ["the ledger is not reachable"]
        assert max(len(orjson.loads(batch)) for batch in ledger.batches) == 1000
        assert max(map(len, ledger.batches)) <= 1024 * 1024 + 2
        await ledger.down()


async def test_either_install_key_will_do(tmp_path: Path):
    """While keys are rotated the ledger may know the newer one not yet, or the older one no longer."""
    new = b"a newer install key............."
    ledger = FakeLedger(install_keys=(INSTALL_KEY,))
    async with ledger.running(), shipping(tmp_path, ledger, said(new, INSTALL_KEY)) as (spool, shipper):
        await request(spool, "r1")
        await until(lambda: len(ledger.records) == 2)
        ledger.install_keys = (new,)
        await request(spool, "r2")
        await until(lambda: len(ledger.records) == 4)
        assert shipper.stats.failures == 0
        ledger.install_keys = (b"another installation's",)
        await request(spool, "r3")
        await until(lambda: shipper.error is not None)
        assert shipper.error == "the ledger knows none of this gateway's install keys"
        ledger.install_keys = (new,)
        await until(lambda: len(ledger.records) == 6)


async def test_what_answers_is_no_ledger(tmp_path: Path):
    async def html(_request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>")

    ledger = FakeLedger()
    ledger.handle = html  # type: ignore[method-assign]
    async with ledger.running(), shipping(tmp_path, ledger) as (spool, shipper):
        await request(spool, "r1")
        await until(lambda: shipper.error is not None)
        assert "not a ledger" in (shipper.error or "")
        assert spool.shipped == 0


async def test_what_was_shipped_goes_and_final_rows_stay_a_while(tmp_path: Path):
    async with FakeLedger().running() as ledger:
        async with shipping(tmp_path, ledger) as (spool, shipper):
            running = meter("running")
            await spool.commit(running.open_row())
            await asyncio.gather(*(request(spool, f"r{n}") for n in range(700)))
            await until(lambda: not shipper.unshipped)
            spool.check()
            await until(lambda: len(stored(tmp_path)) == 701)
            left = {"running:open"} | {f"r{n}:final" for n in range(700)}
            # The mark is written after the rows that it lets go.
            await until(lambda: {id for id, shipped in stored(tmp_path) if shipped} == left)
        async with shipping(tmp_path, ledger, keep_seconds=0.0) as (spool, shipper):
            # The one that ran was closed as cut by the next start, from its open row.
            await until(lambda: any(r.data.outcome == "cut" for r in ledger.of("final")))
            await until(lambda: not shipper.unshipped)

            def gone() -> bool:
                spool.check()
                return not stored(tmp_path)

            await until(gone)
            await request(spool, "later")
            await until(lambda: ("shoal", "later:final") in ledger.records)
        assert not ledger.again


async def test_drained_at_the_end(tmp_path: Path):
    async with FakeLedger().running() as ledger:
        async with shipping(tmp_path, ledger) as (spool, shipper):
            for n in range(50):
                await request(spool, f"r{n}")
            assert await shipper.drain(20)
        assert all(shipped for _, shipped in stored(tmp_path))
        assert len(ledger.records) == 100


async def test_draining_ends_where_the_ledger_is_away(tmp_path: Path):
    ledger = FakeLedger(refuse=lambda: 503)
    async with ledger.running(), shipping(tmp_path, ledger) as (spool, shipper):
        await request(spool, "r1")
        assert not await shipper.drain(0.2)
        assert shipper.unshipped == 2
    assert stored(tmp_path) == [("r1:open", False), ("r1:final", False)]


async def test_a_clock_that_is_set_back_changes_no_order_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Clock(datetime):
        ahead = timedelta(hours=2)

        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + cls.ahead

    monkeypatch.setattr("shoal.metering.meter.datetime", Clock)
    ledger = FakeLedger(refuse=lambda: None if Clock.ahead < timedelta(hours=2) else 503)
    async with ledger.running(), shipping(tmp_path, ledger) as (spool, shipper):
        it = meter("r1")
        await spool.commit(it.open_row())
        await until(lambda: shipper.error is not None)
        assert shipper.behind_seconds() == 0  # the row is from the future
        Clock.ahead = timedelta(hours=-3)
        it.outcome = "answered"
        spool.put(it.final_row())
        await until(lambda: len(ledger.records) == 2)
        opened, final = ledger.records.values()
        assert (opened.id, final.id) == ("r1:open", "r1:final")
        assert final.time < opened.time
        assert final.data.admitted_at == opened.data.admitted_at
        assert final.data.duration_ms is not None
        assert 0 <= final.data.duration_ms < 60_000
