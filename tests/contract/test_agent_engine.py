"""What the agent reads of an engine, on the simulator and on real SGLang."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from shoal.agent.drain import Drain
from shoal.agent.observe import EngineObserver
from shoal.agent.stalls import StallTracker
from shoal.agent.stream import AgentStream
from shoal.engine.port import EngineRefused
from shoal.engine.sglang.client import SGLangClient
from tests.support.engines import ADMIN_KEY, API_KEY, START_SECONDS, EngineProcess, Kind, running_engine


@pytest.fixture
async def asking(engine: EngineProcess):
    async with aiohttp.ClientSession() as session:
        yield SGLangClient(session, engine.url, api_key=API_KEY, admin_key=ADMIN_KEY)


def completion(tokens: int) -> dict[str, object]:
    return {"model": "x", "prompt": "one two three", "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def test_an_idle_engine_is_known_to_be_idle(client: object, asking: SGLangClient):
    assert await asking.ready() is True
    loads = await asking.loads()
    assert (loads.running, loads.waiting, loads.waiting_tokens) == (0, 0, 0)
    assert loads.kv_tokens_used is not None
    assert loads.kv_tokens_total == 20000


async def test_a_running_request_shows_in_the_load(client: object, engine: EngineProcess, asking: SGLangClient):
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(engine.url + "/v1/completions", json=completion(2000)) as response,
        asyncio.timeout(60),
    ):
        await response.content.readany()
        while (loads := await asking.loads()).running != 1:
            await asyncio.sleep(0.02)
        while not (loads := await asking.loads()).kv_tokens_used:
            await asyncio.sleep(0.02)
        assert loads.kv_tokens_used < 20000


async def test_the_counters_grow_by_what_was_asked(client: object, engine: EngineProcess, asking: SGLangClient):
    before = await asking.counters()
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(engine.url + "/v1/completions", json=completion(10) | {"stream": False}) as response,
    ):
        usage = (await response.json())["usage"]
    async with asyncio.timeout(30):
        while True:
            after = await asking.counters()
            if after.generation_tokens is not None and after.generation_tokens > (before.generation_tokens or 0):
                break
            await asyncio.sleep(0.05)
    assert after.prompt_tokens == (before.prompt_tokens or 0) + usage["prompt_tokens"]
    assert after.generation_tokens == (before.generation_tokens or 0) + usage["completion_tokens"]


async def test_the_wrong_key_is_refused(engine: EngineProcess):
    async with aiohttp.ClientSession() as session:
        stranger = SGLangClient(session, engine.url, api_key="wrong", admin_key=None)
        assert await stranger.ready() is True
        with pytest.raises(EngineRefused) as caught:
            await stranger.loads()
        assert caught.value.status == 401


async def test_a_replicas_life_is_told_as_loading_ready_draining_loading(kind: Kind, tmp_path: Path):
    """From the start of the engine's process to after its end."""
    hub = AgentStream()
    observer = EngineObserver(hub, Drain(900), StallTracker(180, tmp_path / "stalled"), tmp_path)
    (tmp_path / "stage.json").write_text('{"state": "done"}')
    (tmp_path / "boot").write_text("boot-1")
    phases: list[object] = []

    async def until(phase: str) -> None:
        async with asyncio.timeout(START_SECONDS[kind]):
            while hub.published.get("phase") != phase:
                await observer.observe(engine_client)
                if not phases or phases[-1] != hub.published.get("phase"):
                    phases.append(hub.published.get("phase"))
                await asyncio.sleep(0.02)

    async with aiohttp.ClientSession() as session:
        with running_engine(kind, tmp_path / "engine", wait=False) as process:
            engine_client = SGLangClient(session, process.url, api_key=API_KEY, admin_key=ADMIN_KEY)
            await until("ready")
            # A stream keeps the engine from leaving at once.
            headers = {"Authorization": f"Bearer {API_KEY}"}
            async with session.post(process.url + "/v1/completions", json=completion(400), headers=headers) as response:
                await response.content.readany()
                os.kill(process.process.pid, signal.SIGTERM)
                await until("draining")
                await response.read()
            await until("loading")
    assert phases == ["loading", "ready", "draining", "loading"]
    assert hub.published.get("running") is None
