"""The whole gateway with a ledger: records arrive while it serves, at its end, and when the ledger comes back."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.metering.spoolreader import SpoolReader
from tests.support.fake_ledger import FakeLedger, until
from tests.support.full_spool import fill
from tests.support.gateway_process import ask, readyz, serving
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally


async def test_records_arrive_while_it_serves_and_the_rest_at_its_end(tmp_path: Path):
    async def slow(request: EngineRequest) -> None:
        if request.body.get("stream"):
            await asyncio.sleep(0.3)
        await serve_normally(request)

    async with FakeLedger().running() as ledger, aiohttp.ClientSession() as session:
        async with serving(tmp_path, ScriptedEngine(slow), ledger_url=ledger.url) as process:
            async with ask(session, process) as answer:
                assert answer.status == 200
            await until(lambda: len(ledger.of("final")) == 1)
            (final,) = ledger.of("final")
            assert (final.data.gateway, final.data.output_tokens) == (process.identity.boot, 3)
            assert (await readyz(session, process))[1] == {"status": "ok"}
            async with session.get(f"http://127.0.0.1:{process.ops.port}/metrics") as metrics:
                text = await metrics.text()
            for line in ("shoal_gateway_ledger_ok 1.0", "shoal_gateway_unshipped_rows 0.0"):
                assert line in text
            asked = asyncio.create_task(ask(session, process, stream=True).__aenter__())
            await until(lambda: process.gateway.in_flight == 1)
            process.stop()
            await (await asked).read()
        # It is gone now, and nothing of it is left to ship.
        assert len(ledger.of("final")) == 2
        reader = SpoolReader(tmp_path / "spool")
        assert all(row.shipped for row in reader.newest(1000))
        reader.close()


async def test_a_ledger_that_is_away_is_told_and_does_not_stop_serving(tmp_path: Path):
    ledger = FakeLedger()
    await ledger.up()
    await ledger.down()
    engine = ScriptedEngine()
    async with aiohttp.ClientSession() as session:
        async with serving(tmp_path, engine, ledger_url=ledger.url, ship_seconds=0.3) as process:
            async with ask(session, process) as answer:
                assert answer.status == 200
            await until(lambda: process.shipper is not None and process.shipper.error is not None)
            status, said = await readyz(session, process)
            assert status == 200
            assert "the ledger is not reachable" in said["ledger"]
            assert "rows wait in the spool" in said["ledger"]
            process._refresh_gauges()
            value = process.metrics.registry.get_sample_value
            assert value("shoal_gateway_ledger_ok") == 0
            assert (value("shoal_gateway_unshipped_rows") or 0) >= 1
            assert (value("shoal_gateway_ship_failures") or 0) >= 1
        await ledger.up()
        (tmp_path / "again").mkdir()
        async with serving(tmp_path / "again", engine, ledger_url=ledger.url, spool_dir=tmp_path / "spool") as process:
            await until(lambda: len(ledger.records) == 2)
            assert not ledger.again
    await ledger.down()


@pytest.mark.parametrize("when_full", ["Refuse", "Serve"])
async def test_a_full_spool_is_told(tmp_path: Path, when_full: str):
    settings: dict[str, Any] = {"spool_max_bytes": 16 * 1024 * 1024, "when_spool_full": when_full}
    async with aiohttp.ClientSession() as session, serving(tmp_path, ScriptedEngine(), **settings) as process:
        await fill(process.spool)
        full = process.spool.error or ""
        assert "wait for the ledger" in full
        status, said = await readyz(session, process)
        async with ask(session, process) as answer:
            if when_full == "Refuse":
                assert (status, said) == (503, {"status": "not ready", "missing": ["spool"], "spool": full})
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "cannot_record_usage"
            else:
                assert (status, said["status"]) == (200, "ok")
                assert said["spool"] == f"{full}; requests are served, their usage may be lost"
                assert answer.status == 200
