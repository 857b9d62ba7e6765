"""What the agent reads of every engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from shoal.agent.drain import Drain
from shoal.agent.observe import EngineObserver
from shoal.agent.stalls import StallTracker
from shoal.agent.stream import AgentStream
from shoal.engine.port import Counters, EngineClient, EngineRefused
from tests.contract.conftest import Client
from tests.support.behaviour import WORDS
from tests.support.engines import ADMIN_KEY, API_KEY, MAX_RUNNING, SERVED, START_SECONDS, Kind, running_engine


@pytest.fixture
async def asking(any_client: Client) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as session:
        agent, url = any_client.words.kind.agent, any_client.engine.url
        yield agent.connect(session, url, api_key=API_KEY, admin_key=ADMIN_KEY, max_running=MAX_RUNNING).client


def completion(tokens: int) -> dict[str, object]:
    return {"model": SERVED, "prompt": "one two three", "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def test_an_idle_engine_is_known_to_be_idle(any_client: Client, asking: EngineClient):
    assert await asking.ready() is True
    loads = await asking.loads()
    waiting = 0 if any_client.words.tells_waiting_tokens else None
    assert (loads.running, loads.waiting, loads.waiting_tokens) == (0, 0, waiting)
    assert loads.kv_tokens_used is not None
    assert (loads.kv_tokens_total, loads.max_running) == (any_client.words.kv_tokens, MAX_RUNNING)
    assert (loads.published is not None) == any_client.words.tells_its_age


async def test_a_running_request_shows_in_the_load(any_client: Client, asking: EngineClient):
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(any_client.engine.url + "/v1/completions", json=completion(2000)) as response,
        asyncio.timeout(60),
    ):
        await response.content.readany()
        while (loads := await asking.loads()).running != 1:
            await asyncio.sleep(0.02)
        while not (loads := await asking.loads()).kv_tokens_used:
            await asyncio.sleep(0.02)
        assert loads.kv_tokens_used < any_client.words.kv_tokens
        while ((await asking.loads()).computed or 0) <= (loads.computed or 0):
            await asyncio.sleep(0.02)


async def settled(asking: EngineClient) -> Counters:
    """Counters that have taken in every earlier request: engines count a request only some time after its answer."""
    seen = [await asking.counters()]
    async with asyncio.timeout(30):
        while len(seen) < 5 or any(one != seen[-1] for one in seen[-5:]):
            await asyncio.sleep(0.2)
            seen.append(await asking.counters())
    return seen[-1]


async def test_a_canary_has_the_same_answer_each_time(any_client: Client, asking: EngineClient):
    first = await asking.greedy("The capital of France is", 8, 60)
    assert first
    assert await asking.greedy("The capital of France is", 8, 60) == first


async def test_the_capture_of_graphs_is_told_or_unknown(any_client: Client, asking: EngineClient):
    """On a CPU none are captured. SGLang says so; of vLLM only its log does."""
    counters = await asking.counters()
    assert counters.graph_seconds == (0 if any_client.words.tells_its_age else None)


async def test_the_counters_grow_by_what_was_asked(any_client: Client, asking: EngineClient):
    before = await settled(asking)
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(any_client.engine.url + "/v1/completions", json=completion(10) | {"stream": False}) as response,
    ):
        usage = (await response.json())["usage"]
    expected = (
        (before.prompt_tokens or 0) + usage["prompt_tokens"],
        (before.generation_tokens or 0) + usage["completion_tokens"],
        (before.requests or 0) + 1,
    )
    async with asyncio.timeout(30):
        while True:
            after = await asking.counters()
            if (after.prompt_tokens, after.generation_tokens, after.requests) == expected:
                break
            await asyncio.sleep(0.05)


async def test_a_wrong_key_learns_what_the_engine_keeps_open(any_client: Client):
    async with aiohttp.ClientSession() as session:
        agent, url = any_client.words.kind.agent, any_client.engine.url
        stranger = agent.connect(session, url, api_key="wrong", admin_key=None)
        assert await stranger.client.ready() is True
        if any_client.words.load_wants_key:
            with pytest.raises(EngineRefused) as caught:
                await stranger.client.loads()
            assert caught.value.status == 401
        with pytest.raises(EngineRefused) as caught:
            await stranger.adapters.loaded()
        assert caught.value.status == 401


async def test_a_replicas_life_is_told_from_the_start_of_its_process_to_after_its_end(any_kind: Kind, tmp_path: Path):
    """An engine whose probe does not show a drain is ready to its end: the agent's own hook tells of the drain."""
    words = WORDS[any_kind]
    hub = AgentStream()
    observer = EngineObserver(hub, Drain(900), StallTracker(180, tmp_path / "stalled"), tmp_path)
    (tmp_path / "stage.json").write_text('{"state": "done"}')
    (tmp_path / "boot").write_text("boot-1")
    phases: list[object] = []
    tells = words.differences.probe_while_draining == 503

    async def until(phase: str) -> None:
        async with asyncio.timeout(START_SECONDS[any_kind]):
            while hub.published.get("phase") != phase:
                await observer.observe(engine_client)
                if not phases or phases[-1] != hub.published.get("phase"):
                    phases.append(hub.published.get("phase"))
                await asyncio.sleep(0.02)

    async with aiohttp.ClientSession() as session:
        with running_engine(any_kind, tmp_path / "engine", wait=False) as process:
            connection = words.kind.agent.connect(session, process.url, api_key=API_KEY, admin_key=ADMIN_KEY)
            engine_client = connection.client
            await until("ready")
            # A stream keeps the engine from leaving at once.
            headers = {"Authorization": f"Bearer {API_KEY}"}
            async with session.post(process.url + "/v1/completions", json=completion(400), headers=headers) as response:
                await response.content.readany()
                os.kill(process.process.pid, signal.SIGTERM)
                if tells:
                    await until("draining")
                await response.read()
            await until("loading")
    assert phases == ["loading", "ready", *(["draining"] if tells else []), "loading"]
    assert hub.published.get("running") is None
