"""What the spool has reaches the ledger: at least once, whatever dies, and is marked only when the ledger has it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import orjson

from shoal.api import keys
from shoal.ledger.shipper import Shipper
from shoal.ledger.spool import Spool
from shoal.ledger.spoolreader import SpoolReader
from tests.support.fake_ledger import FakeLedger, until
from tests.support.gateway import INSTALL_KEY
from tests.support.records import meter


def said(*install_keys: bytes) -> Callable[[], list[str]]:
    return lambda: [keys.derive(key, "gateway", keys.LEDGER) for key in install_keys]


OURS = said(INSTALL_KEY)


@contextlib.asynccontextmanager
async def shipping(
    directory: Path, ledger: FakeLedger, install_keys: Callable[[], list[str]] = OURS, **spool_options
) -> AsyncGenerator[tuple[Spool, Shipper], None]:
    spool = Spool(directory, **spool_options)
    spool.start()
    shipper = Shipper(spool, ledger.url, install_keys)
    task = asyncio.create_task(shipper.run())
    await spool.opened()
    try:
        yield spool, shipper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await spool.stop()


@contextlib.asynccontextmanager
async def unshipped(directory: Path, **spool_options) -> AsyncGenerator[Spool, None]:
    spool = Spool(directory, **spool_options)
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


async def request(spool: Spool, id: str) -> None:
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
