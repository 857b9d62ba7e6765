"""An agent's adapters beside every engine: swapped under load, and through kills."""

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

from shoal.agent.adapters import service
from shoal.api.adapters import AdapterSettings, DesiredAdapter
from shoal.api.loraadapter import engine_name
from shoal.artifacts import Settings, StoreCredentials, open_source
from shoal.core import drain
from shoal.core.lora.lifecycle import leases, unload
from tests.contract.conftest import Client
from tests.support.adapters import ALL, make_adapter
from tests.support.agentpod import KEYS, Pod, Stream, make_quick
from tests.support.behaviour import WORDS
from tests.support.engines import ADMIN_KEY, API_KEY, LORA_LOADED, LORA_RANK, LORA_SLOTS, Kind, running_engine
from tests.support.lora_calls import ask, loaded, rest, streaming, text
from tests.support.sources import LOCAL

POOL = AdapterSettings(
    pool="chat/tiny", slots=LORA_SLOTS, cached=LORA_LOADED, max_rank=LORA_RANK, target_modules=ALL, max_bytes=1 << 20
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)
    # The seconds of the rules are tested where the rules are.
    monkeypatch.setattr(drain, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(unload, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.02)


async def published(folder: Path, seed: int) -> DesiredAdapter:
    """An adapter in `folder`, as an operator would tell of it."""
    make_adapter(folder, seed=seed)
    uri = f"file://{folder}"
    async with open_source(uri, StoreCredentials(), Settings(network=LOCAL)) as source:
        digest = (await source.manifest()).digest
    return DesiredAdapter(name=engine_name("chat/acme", digest), revision=digest, uri=uri)


@asynccontextmanager
async def agent(folder: Path, client: Client) -> AsyncGenerator[tuple[Pod, Stream]]:
    """An agent beside the engine, and a gateway that listens to it. Its end is a kill, as far as the engine knows."""
    pod = Pod(folder, engine_url=client.engine.url, pool=POOL, kind=client.words.kind)
    pod.keys.write_text(json.dumps(KEYS | {"engine": API_KEY, "admin": ADMIN_KEY}))
    pod.boot("boot-1")
    async with pod.running(), pod.stream(caller="gw-0", boot="g") as stream:
        while stream.state.get("adapters") is None:
            assert await stream.message() is not None
        yield pod, stream


@asynccontextmanager
async def engine_with_lora(kind: Kind, folder: Path) -> AsyncGenerator[Client]:
    with running_engine(kind, folder, *WORDS[kind].lora) as engine:
        async with aiohttp.ClientSession() as session:
            yield Client(engine, session)


async def until_state(stream: Stream, name: str, state: str | None) -> None:
    def now() -> Any:
        held: Any = stream.state.get("adapters") or {}
        return held.get(name, {}).get("state")

    while now() != state:
        assert await stream.message() is not None


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_revision_takes_over_under_load_and_the_old_one_goes_with_its_last_stream(
    any_kind: Kind, tmp_path: Path
) -> None:
    old, new = await published(tmp_path / "v1", 1), await published(tmp_path / "v2", 2)
    async with engine_with_lora(any_kind, tmp_path / "engine") as client, agent(tmp_path, client) as (pod, stream):
        await pod.floor(old)
        status, lease = await pod.ensure(stream, old)
        assert status == 200, lease
        first = await text(client, **client.words.select(old.name))
        assert first != await text(client)
        async with streaming(client, 200, **client.words.select(old.name)) as answer:
            await pod.ack(stream, 1, runningByAdapter={old.name: 1})
            await pod.floor(old, new)
            assert (await pod.ensure(stream, new))[0] == 200
            assert await text(client, **client.words.select(new.name)) not in (first, await text(client))
            await pod.floor(new)
            await pod.ack(stream, 1, runningByAdapter={old.name: 1})
            assert old.name in await loaded(client)
            await rest(answer)
        await pod.ack(stream, 0)
        await until_state(stream, old.name, "retiring")
        await pod.ack(stream, 0)
        await until_state(stream, old.name, None)
        assert await loaded(client) == [new.name]
        await until(lambda: not pod.files.path(old.name).exists())
        # Nothing brings it back: its files are gone from where an engine would look.
        assert (await ask(client, **client.words.select(old.name))).status == client.words.differences.never_loaded


async def test_an_agent_killed_while_it_retires_leaves_the_running_stream_alone_and_the_next_one_goes_on(
    any_kind: Kind, tmp_path: Path
) -> None:
    one = await published(tmp_path / "v1", 1)
    async with engine_with_lora(any_kind, tmp_path / "engine") as client:
        async with agent(tmp_path, client) as (pod, stream):
            await pod.floor(one)
            await until_state(stream, one.name, "loaded")
            # A request that no gateway tells of: the engine holds the unload up until it has ended.
            answer = await client.session.post(
                client.engine.url + "/v1/completions",
                json=client.words.select(one.name)
                | {"prompt": "one two", "max_tokens": 300, "ignore_eos": True, "stream": True},
                headers={"Authorization": f"Bearer {API_KEY}"},
            )
            await answer.content.readany()
            await pod.floor()
            await until_state(stream, one.name, "retiring")
            await pod.ack(stream, 0)
            await until(lambda: not pod.files.path(one.name).exists())
        async with agent(tmp_path, client) as (pod, stream):
            held: Any = stream.state["adapters"]
            assert held.get(one.name, {}).get("state") in (None, "retiring")
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            await pod.ack(stream, 0)
            await until_state(stream, one.name, None)
            assert await loaded(client) == []
            assert (await pod.ensure(stream, one, seconds=30))[0] == 200
            assert await loaded(client) == [one.name]


async def test_an_agent_killed_while_it_loads_finds_the_adapter_or_loads_it(any_kind: Kind, tmp_path: Path) -> None:
    one = await published(tmp_path / "v1", 1)
    async with engine_with_lora(any_kind, tmp_path / "engine") as client:
        if any_kind.startswith("sim"):
            await client.admin("/sim/faults", {"kind": "load_slow", "delay_seconds": 1.0, "count": 1})
        async with agent(tmp_path, client) as (pod, stream):
            await pod.floor(one)
            await until_state(stream, one.name, "loading")
        async with agent(tmp_path, client) as (pod, stream):
            assert (await pod.ensure(stream, one, seconds=30))[0] == 200
            assert await text(client, **client.words.select(one.name)) != await text(client)
            assert await loaded(client) == [one.name]


async def test_an_engine_killed_while_it_loads_is_told_to_who_waits(any_kind: Kind, tmp_path: Path) -> None:
    one = await published(tmp_path / "v1", 1)
    async with engine_with_lora(any_kind, tmp_path / "engine") as client, agent(tmp_path, client) as (pod, stream):
        asked = asyncio.create_task(pod.ensure(stream, one, seconds=30))
        await until_state(stream, one.name, "loading")
        os.killpg(client.engine.process.pid, signal.SIGKILL)
        status, answer = await asked
        # On an engine as small as this the load may have been quicker than the kill.
        assert status == 200 or (status, answer["reason"]) == (503, "EngineNotReady")
        await stream.until(phase="loading")
        status, refusal = await pod.ensure(stream, one)
        assert (status, refusal["reason"], refusal["message"]) == (503, "EngineNotReady", "the engine does not serve")
