"""The request log in a whole gateway process: what operators get, what is swept, what a stop and SIGKILL leave."""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp

from shoal.requestlog.store import Folder, LogFile
from tests.support.gateway import tenant
from tests.support.gateway_process import FakeApiServer, ask, readyz, serving
from tests.support.requestlog import ADMIN, PEER, echo, entries
from tests.support.scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "the canary sings"}]


async def log_in_full(server: FakeApiServer, **logging: object) -> None:
    spec = tenant(logging={"mode": "Full", **logging})
    await server.change("tenants", spec.model_dump(mode="json", by_alias=True, exclude_none=True))


async def test_a_gateway_logs_shows_sweeps_and_keeps_what_ended_when_it_stops(tmp_path: Path):
    folder, server = Folder(tmp_path / "logs"), FakeApiServer()
    today = datetime.now(UTC).date()
    for tenant_name, ago in (("acme", 8), ("acme", 6), ("gone", 31)):
        day = (today - timedelta(days=ago)).isoformat()
        folder.create(LogFile(tenant_name, day, "gateway-1-1.jsonl.zst", 0)).close()
    part = tmp_path / "logs" / "tenant=acme" / f"date={today - timedelta(days=6)}" / ".gateway-1-1.jsonl.zst.part"
    part.write_bytes(b"half")
    engine = ScriptedEngine(echo)
    async with serving(tmp_path, engine, server, log_dir=folder.root, pod_name="gw-0") as process:
        quiet = tenant("quiet", "sk-test-quiet")
        await server.change("tenants", quiet.model_dump(mode="json", by_alias=True, exclude_none=True))
        await log_in_full(server, retentionDays=7)
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(30):
                while not process.logs.logger.writer.stats.entries:
                    async with ask(session, process, messages=MESSAGES) as answer:
                        assert answer.status == 200
                    await asyncio.sleep(0.1)
            url = f"http://127.0.0.1:{process.ops.port}"
            async with session.get(f"{url}/v1/logs", params={"tenant": "acme"}, headers=ADMIN) as response:
                page = await response.json()
            assert page["data"][0]["request"]["messages"] == MESSAGES
            async with session.get(f"{url}/v1/logs", params={"tenant": "acme"}) as response:
                assert response.status == 401
                assert "logging" not in await response.json()
            assert page["logging"] == "On"
            for name, logging in (("quiet", "Off"), ("gone", "NoTenant")):
                async with session.get(f"{url}/v1/logs", params={"tenant": name}, headers=ADMIN) as response:
                    assert (await response.json())["logging"] == logging
            async with session.get(f"{url}/v1/logs", params={"tenant": "gone"}, headers=PEER) as response:
                assert "logging" not in await response.json(), "gateways do not ask each other for it"
            async with asyncio.timeout(60):  # retention is that of the Tenant; without one, thirty days
                while len(folder.dates("acme")) != 2 or "gone" in folder.tenants():
                    await asyncio.sleep(0.05)
            assert not part.exists()
            async with session.get(f"{url}/metrics") as response:
                metrics = await response.text()
            assert "shoal_gateway_request_log_entries_total" in metrics
            assert "canary" not in metrics
            before = len(engine.requests)
            async with ask(session, process, messages=MESSAGES, user="the-last") as answer:
                assert answer.status == 200
    assert len(engine.requests) == before + 1
    assert entries(folder.root)[-1]["user"] == "the-last"


async def test_a_log_that_cannot_be_written_is_noted_and_the_gateway_stays_ready(tmp_path: Path):
    (tmp_path / "logs").write_text("no folder")
    server = FakeApiServer()
    async with serving(tmp_path, ScriptedEngine(echo), server, log_dir=tmp_path / "logs") as process:
        await log_in_full(server)
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            while "requestLog" not in (await readyz(session, process))[1]:
                async with ask(session, process, messages=MESSAGES) as answer:
                    assert answer.status == 200
                await asyncio.sleep(0.1)
            status, said = await readyz(session, process)
    assert status == 200
    assert said["requestLog"].startswith("entries are dropped: ")


_CHILD = """
import sys, time
from pathlib import Path
from tests.unit.requestlog.test_requestlog_files import Rig
rig = Rig(Path(sys.argv[1]))
for number in range(50):
    rig.put(text=str(number))
while rig.room.held:
    time.sleep(0.02)
print("written", flush=True)
rig.put(text="too late")
time.sleep(60)
"""


def test_what_was_written_survives_sigkill(tmp_path: Path):
    environment = {"PYTHONPATH": "operator:.", "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        child.kill()
    texts = [entry["request"]["messages"][0]["content"] for entry in entries(tmp_path)]
    assert texts[:50] == [str(number) for number in range(50)]
