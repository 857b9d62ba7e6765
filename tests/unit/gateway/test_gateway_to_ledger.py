"""Gateway and ledger together: what one writes the other understands, and counts the same."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from shoal.api import keys
from shoal.ledger import schema
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from tests.support.fake_ledger import until
from tests.support.gateway import GatewayUnderTest, gateway, lines
from tests.support.ledger import INSTALL_KEY, Served, served
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}


async def usage(ledger: Served) -> list[dict]:
    found = await ledger.process.store.read(lambda c: c.execute(select(schema.usage)).all())
    return [dict(row._mapping) for row in found]


def ship(spool: UsageSpool, ledger: Served) -> Shipper:
    return Shipper(spool, ledger.url, lambda: [keys.derive(INSTALL_KEY, "gateway", keys.LEDGER)])


async def through(tmp_path: Path, engine: ScriptedEngine, traffic: Callable[[GatewayUnderTest], Awaitable[None]]):
    """Requests through a gateway into a ledger; returns the ledger's rows when it has all."""
    (folder := tmp_path / "ledger").mkdir()
    async with (
        served(f"sqlite:///{folder}/ledger.sqlite", folder) as ledger,
        gateway(tmp_path, engine, engine) as it,
    ):
        shipper = ship(it.spool, ledger)
        task = asyncio.create_task(shipper.run())
        await traffic(it)
        await until(lambda: it.app.in_flight == 0)
        assert await shipper.drain(20), shipper.error
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert shipper.stats.quarantined == 0
        return await usage(ledger)


async def test_every_kind_of_row_is_understood(tmp_path: Path):
    lost: list[str] = []

    async def behave(request: EngineRequest) -> None:
        if request.body.get("seed") == 1 and not lost:
            lost.append("")
            await asyncio.sleep(0.7)  # it had it: this is no idle connection that it closed
            request.writer.transport.abort()
        elif request.body.get("seed") == 2:
            await request.begin_stream()
            await request.chunk(request.delta("x", 2))
            await request.gone.wait()
        else:
            await serve_normally(request)

    async def traffic(it: GatewayUnderTest) -> None:
        assert (await it.post(CHAT)).status == 200
        assert (await it.post({**CHAT, "seed": 1})).status == 200
        response = await it.post({**CHAT, "stream": True, "seed": 2})
        await anext(lines(response))
        await it.records("checkpoint")
        response.close()
        await it.records(count=3)

    rows = await through(tmp_path, ScriptedEngine(behave), traffic)
    assert all(row["ended"] for row in rows)
    told = sorted((row["attempt"], row["outcome"] or "", row["count_source"], row["output_tokens"]) for row in rows)
    assert told[:3] == [(0, "answered", "final", 3), (0, "answered", "final", 3), (0, "cancelled", "continuous", 2)]
    assert told[3:] == [(1, "", "estimated", None)]
    assert {row["gateway"] for row in rows} == {"boot-of-the-gateway"}


CHILD = """
import asyncio, faulthandler, sys
from pathlib import Path
from shoal.gateway.ids import uuid7
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from tests.support.records import meter

async def requests(spool):
    while True:
        it = meter(uuid7())
        await spool.commit(it.open_row())
        it.count(b'{"prompt_tokens":7,"completion_tokens":1}', "continuous")
        spool.put(it.checkpoint_row())
        await asyncio.sleep(0.001)
        it.count(b'{"prompt_tokens":7,"completion_tokens":2}', "final")
        it.outcome = "answered"
        await spool.commit(it.final_row())
        print(it.id, flush=True)

async def main():
    spool = UsageSpool(Path(sys.argv[1]), keep_seconds=0.0)
    spool.start()
    await spool.opened()
    async with asyncio.TaskGroup() as group:
        group.create_task(Shipper(spool, sys.argv[2], lambda: [sys.argv[3]]).run())
        for _ in range(4):
            group.create_task(requests(spool))
        while True:
            await asyncio.sleep(0.05)
            spool.check()

faulthandler.dump_traceback_later(240)  # before the test's own timeout: where it stands
asyncio.run(main())
"""


@pytest.mark.timeout(300)  # each of its rows waits for the disk, and so does whatever else writes there
async def test_a_gateway_that_is_killed_again_and_again_is_billed_for_each_request_once(tmp_path: Path):
    """The ledger itself, not a fake: final rows that the gateway acknowledged are there, once, and the sums agree."""
    async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as ledger:
        key = keys.derive(INSTALL_KEY, "gateway", keys.LEDGER)
        acknowledged: set[str] = set()
        for lives in (40, 90, 170):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, str(tmp_path / "spool"), ledger.url, key, stdout=asyncio.subprocess.PIPE
            )
            assert child.stdout is not None
            async for line in child.stdout:
                if len(id := line.decode().strip()) == 36:
                    acknowledged.add(id)
                if len(acknowledged) >= lives and child.returncode is None:
                    child.send_signal(signal.SIGKILL)
            await child.wait()
        spool = UsageSpool(tmp_path / "spool")
        spool.start()
        await spool.opened()
        shipper = ship(spool, ledger)
        task = asyncio.create_task(shipper.run())
        assert await shipper.drain(20), shipper.error
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await spool.stop()
        rows = await usage(ledger)
        assert all(row["ended"] for row in rows)
        answered = {row["request"] for row in rows if row["outcome"] == "answered"}
        assert acknowledged <= answered
        assert len(rows) == len({row["request"] for row in rows})
        hours = await ledger.process.store.read(lambda c: c.execute(select(schema.hours)).all())
        assert sum(row.requests for row in hours) == len(rows)
        assert sum(row.output_tokens for row in hours) == sum(row["output_tokens"] or 0 for row in rows)
        assert json.dumps(sorted({row["outcome"] for row in rows})) in ('["answered", "cut"]', '["answered"]')
