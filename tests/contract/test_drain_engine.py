"""A drain beside every engine: what says that it is idle, and that it is stalled."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.engine.port import EngineClient, Loads
from tests.contract.conftest import Client
from tests.support.agentpod import KEYS, Pod
from tests.support.behaviour import words_of
from tests.support.engines import ADMIN_KEY, API_KEY, MAX_RUNNING, SERVED, EngineProcess, Kind, running_engine

HEADERS = {"Authorization": f"Bearer {API_KEY}"}
LONG = 1500


@pytest.fixture
async def asking(any_client: Client) -> AsyncGenerator[EngineClient]:
    async with aiohttp.ClientSession() as session:
        agent, url = any_client.words.kind.agent, any_client.engine.url
        yield agent.connect(session, url, api_key=API_KEY, admin_key=ADMIN_KEY, max_running=MAX_RUNNING).client


@asynccontextmanager
async def streaming(url: str, tokens: int = LONG) -> AsyncGenerator[aiohttp.ClientResponse]:
    """An answer that has begun."""
    body = {"model": SERVED, "prompt": "one two", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with (
        aiohttp.ClientSession(headers=HEADERS, timeout=timeout) as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        await response.content.readany()
        yield response


@asynccontextmanager
async def drained(folder: Path, engine: EngineProcess, **seconds: Any) -> AsyncGenerator[Pod]:
    """An agent beside the engine, which it saw start."""
    pod = Pod(folder, engine_url=engine.url, kind=words_of(engine).kind, max_running=MAX_RUNNING, **seconds)
    pod.keys.write_text(json.dumps(KEYS | {"engine": API_KEY, "admin": ADMIN_KEY}))
    async with pod.running(), pod.stream("operator-key") as stream:
        await stream.message()
        while not pod.drain.has_observed:
            await asyncio.sleep(0.01)
        pod.boot("boot-1")
        await stream.until(phase="ready")
        yield pod


async def until(get: Callable[[], Any], test: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(60):
        while not test(await get()):
            await asyncio.sleep(0.05)


async def test_a_stream_is_an_active_request_from_its_first_to_its_last_byte(
    any_client: Client, asking: EngineClient
) -> None:
    # Whom another test left in the middle, the engine forgets seconds later.
    await until(asking.counters, lambda now: now.active == 0)
    before = await asking.counters()
    async with streaming(any_client.engine.url, 600) as response:
        during = await asking.counters()
        assert (during.active, during.requests) == (1, (before.requests or 0) + 1)
        await response.read()
    await until(asking.counters, lambda after: (after.active, after.requests) == (0, during.requests))


async def test_tokens_show_as_progress_while_they_are_computed(any_client: Client, asking: EngineClient) -> None:
    async with streaming(any_client.engine.url) as response:
        first = await asking.loads()
        assert first.computed is not None
        assert first.max_running == 4
        await until(asking.loads, lambda now: (now.computed or 0) > (first.computed or 0))
        await until(asking.loads, lambda now: (now.kv_tokens_used or 0) > (first.kv_tokens_used or 0))
        response.close()


async def test_an_idle_engine_goes_on_saying_so_where_it_says_when(any_client: Client, asking: EngineClient) -> None:
    first: Loads = await asking.loads()
    assert (first.published is not None) == any_client.words.tells_its_age
    if first.published is None:
        return
    await until(asking.loads, lambda now: now.published > first.published)


@pytest.mark.timeout(600)
async def test_the_hook_waits_for_the_answer_and_sigterm_then_finds_nothing_to_do(
    any_kind: Kind, tmp_path: Path
) -> None:
    with running_engine(any_kind, tmp_path / "engine") as process:
        async with drained(tmp_path, process) as pod, streaming(process.url) as response:
            hook = asyncio.create_task(pod.hook())
            done, _ = await asyncio.wait([hook], timeout=2.5)
            assert not done, "the hook returned while an answer was being given"
            body = await response.read()
            assert body.endswith(b"data: [DONE]\n\n")
            text = await asyncio.wait_for(hook, 60)
            assert text == "idle: no gateway has anything in flight here, and the engine is idle"
            os.kill(process.process.pid, signal.SIGTERM)
            code = await asyncio.to_thread(process.process.wait, 60)
    assert code == 0


@pytest.mark.timeout(600)
async def test_sigterm_under_load_lets_the_answer_finish(any_kind: Kind, tmp_path: Path) -> None:
    """What is left when the agent dies during a drain, or drainSeconds are over."""
    with running_engine(any_kind, tmp_path / "engine") as process:
        async with streaming(process.url) as response:
            os.kill(process.process.pid, signal.SIGTERM)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.to_thread(process.process.wait, 60) == 0


@pytest.mark.timeout(600)
async def test_an_engine_that_hangs_under_a_request_is_stalled_and_needs_no_drain(
    any_kind: Kind, tmp_path: Path
) -> None:
    with running_engine(any_kind, tmp_path / "engine") as process:
        async with drained(tmp_path, process, stall_seconds=8) as pod, streaming(process.url):
            await hang(process)
            async with asyncio.timeout(60):
                while not pod.stalled_file.exists():
                    await asyncio.sleep(0.1)
            text = await asyncio.wait_for(pod.hook(), 30)
            assert text == "stalled: the engine makes no progress"


async def hang(process: EngineProcess) -> None:
    """The simulator has a fault for it; of a real engine the scheduler is stopped, as by a GPU that never answers."""
    if process.kind.startswith("sim"):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as session:
            await session.post(process.url + "/sim/faults", json={"kind": "stall"})
            # It strikes with the next request, which waits for its first token for ever.
            body = {"model": SERVED, "prompt": "z", "max_tokens": 2, "stream": True}
            headers = {"Authorization": f"Bearer {API_KEY}"}

            async def ask() -> None:
                async with session.post(process.url + "/v1/completions", json=body, headers=headers) as answer:
                    await answer.read()

            asking = asyncio.create_task(ask())
            try:
                await until(lambda: faults(session, process), lambda now: now["stalled"])
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        return
    found = schedulers(process.process.pid, words_of(process).core)
    assert found
    for scheduler in found:
        os.kill(scheduler, signal.SIGSTOP)


async def faults(session: aiohttp.ClientSession, process: EngineProcess) -> dict[str, Any]:
    async with session.get(process.url + "/sim/faults") as answer:
        return await answer.json()


def schedulers(pid: int, title_part: str) -> list[int]:
    """Descendants whose title says so."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        title = Path(f"/proc/{child}/cmdline").read_bytes()
        found += [int(child)] if title_part.encode() in title else []
        found += schedulers(int(child), title_part)
    return found
