"""The spool's room is bounded: what is told when it is used up, and that it goes on by itself."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import structlog

from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from tests.support.fake_ledger import FakeLedger, until
from tests.support.full_spool import fill
from tests.support.gateway import gateway
from tests.support.records import meter
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.metering.test_shipper import OURS, shipping, stored

MIB = 1024 * 1024
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}


async def recovered(spool: UsageSpool) -> None:
    async with asyncio.timeout(30):
        while spool.error is not None:
            spool.check()
            await asyncio.sleep(0.02)


async def test_when_only_the_reserve_is_left_new_requests_are_refused_until_it_is_shipped(tmp_path: Path):
    down = True
    ledger = FakeLedger(refuse=lambda: 503 if down else None)
    async with ledger.running(), shipping(tmp_path, ledger, max_bytes=16 * MIB) as (spool, shipper):
        running = meter("running")
        await spool.commit(running.open_row())
        with structlog.testing.capture_logs() as logs:
            taken = await fill(spool)
            assert taken > 100
            assert "wait for the ledger" in (spool.error or "")
            assert spool.refusing == spool.error
            # What is under way still ends on disk: that is what the reserve is for.
            running.outcome = "answered"
            spool.put(running.final_row())
            await spool.flush()
            assert ("running:final", False) in stored(tmp_path)
            down = False
            await until(lambda: not shipper.unshipped, 60)
            await recovered(spool)
        events = [e["event"] for e in logs]
        assert events.count("the spool cannot keep more requests") == 1
        assert events.count("the spool has space again") == 1
        await spool.commit(meter("after").open_row())
        assert len(ledger.of("final")) == taken + 1
        assert spool.stats.dropped == 0
        assert spool.path.stat().st_size <= 16 * MIB


async def test_serving_on_keeps_rows_in_memory_and_counts_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.metering.spool._MAX_KEPT_ROWS", 10)
    async with FakeLedger().running() as ledger, shipping(tmp_path, ledger, when_full="Serve") as (spool, shipper):
        full = True
        write = UsageSpool._write

        def refuse(self: UsageSpool, file, batch) -> None:
            if full:
                raise OSError("no space left on device")
            write(self, file, batch)

        monkeypatch.setattr(UsageSpool, "_write", refuse)
        for n in range(12):
            it = meter(f"r{n}")
            await spool.commit(it.open_row())  # never refused
            it.outcome = "answered"
            spool.put(it.final_row())
            await asyncio.sleep(0.01)
        assert spool.error == "no space left on device"
        assert spool.refusing is None
        await until(lambda: spool.stats.lost >= 1)
        full = False
        await recovered(spool)
        await spool.flush()
        await until(lambda: not shipper.unshipped)
        assert spool.stats.lost == 2
        assert spool.stats.dropped == 14  # the open rows first: a final row says all that they do
        assert sorted(r.data.request_id for r in ledger.of("final")) == sorted(f"r{n}" for n in range(2, 12))


@pytest.mark.parametrize("when_full", ["Refuse", "Serve"])
async def test_what_the_client_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_full):
    async with gateway(tmp_path, ScriptedEngine(), when_spool_full=when_full) as it:
        full = True
        write = UsageSpool._write

        def refuse(self: UsageSpool, file, batch) -> None:
            if full:
                raise OSError("no space left on device")
            write(self, file, batch)

        monkeypatch.setattr(UsageSpool, "_write", refuse)
        for _ in range(2):
            response = await it.post(CHAT)
            if when_full == "Refuse":
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "cannot_record_usage"
                assert response.headers["retry-after"]
            else:
                assert response.status == 200
        full = False
        async with asyncio.timeout(30):
            while it.spool.error is not None:
                await asyncio.sleep(0.02)
        assert (await it.post(CHAT)).status == 200
        finals = await it.records(count=2 if when_full == "Refuse" else 3)
        assert [record.data.outcome for record in finals if record.data.outcome == "answered"]


# --- a real volume --------------------------------------------------------------------------------------------------


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting needs root")
    at = tmp_path / "volume"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", at], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@contextlib.asynccontextmanager
async def small(volume: Path, url: str) -> AsyncGenerator[tuple[UsageSpool, Shipper], None]:
    spool = UsageSpool(volume / "spool")
    spool.start()
    await spool.opened()
    shipper = Shipper(spool, url, OURS)
    task = asyncio.create_task(shipper.run())
    try:
        yield spool, shipper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await spool.stop()


async def test_a_small_volume_never_runs_full(volume: Path):
    """80 % of it is the most that is used, so that what ships it can always be written down."""
    down = True
    ledger = FakeLedger(refuse=lambda: 503 if down else None)
    async with ledger.running(), small(volume, ledger.url) as (spool, shipper):
        taken = await fill(spool)
        assert spool.limit_bytes == int(24 * MIB * 0.8)
        assert spool.stats.failures == 0  # the disk itself refused nothing
        down = False
        await until(lambda: not shipper.unshipped, 60)
        await recovered(spool)
        await spool.commit(meter("after").open_row())
        assert len(ledger.of("final")) == taken


async def test_a_volume_that_something_else_fills(volume: Path):
    async with FakeLedger().running() as ledger, small(volume, ledger.url) as (spool, shipper):
        running = meter("running")
        await spool.commit(running.open_row())
        other = volume / "other"
        with contextlib.suppress(OSError), other.open("wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        await fill(spool)
        assert "full" in (spool.error or "") or "disk I/O error" in (spool.error or "")
        running.outcome = "answered"
        spool.put(running.final_row())
        other.unlink()
        await recovered(spool)
        await spool.flush()
        await until(lambda: not shipper.unshipped)
        assert ("shoal", "running:final") in ledger.records
        assert spool.stats.dropped == 0
