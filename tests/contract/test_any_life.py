"""The life of every engine: its start, its load, who leaves and who waits, its stop and its death."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.engine.port import LoRADisabled
from tests.contract.conftest import Client
from tests.support.behaviour import WORDS
from tests.support.engines import (
    ADMIN_KEY,
    API_KEY,
    MAX_QUEUED,
    MAX_RUNNING,
    SERVED,
    EngineProcess,
    Kind,
    running_engine,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"model": SERVED, "prompt": "go on", "max_tokens": 3000, "ignore_eos": True}
HEADERS = {"authorization": f"Bearer {API_KEY}"}


def test_the_port_is_closed_until_the_engine_says_that_it_is_there(any_engine: EngineProcess):
    assert tuple(any_engine.states) == WORDS[any_engine.kind].differences.starting


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_client_that_leaves_frees_its_place(any_client: Client, path: str, stream: bool):
    body = LONG | ({"messages": [{"role": "user", "content": "go on"}]} if path == CHAT else {})
    words = any_client.words
    aborted = await ended(any_client)
    if stream:
        async with any_client.session.post(
            any_client.engine.url + path, json=body | {"stream": True}, headers=HEADERS
        ) as response:
            for _ in range(8):
                await response.content.readline()
            await any_client.settle(1)
    else:
        task = any_client.background(path, body)
        await any_client.settle(1)
        task.cancel()
    await any_client.settle(0)
    assert await ended(any_client) - aborted == words.differences.leaving_is_counted


async def ended(client: Client) -> float:
    """Requests that the engine counts as given up."""
    text = (await client.get("/metrics", key=None)).body.decode()
    names = ("sglang:num_aborted_requests_total{", 'vllm:request_success_total{engine="0",finished_reason="abort"')
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))


async def test_counters_grow_by_what_usage_says(any_client: Client):
    names = [any_client.words.counter(name) for name in ("prompt_tokens", "generation_tokens")]
    before = [await any_client.metric(name) for name in names]
    body = {"prompt": "count these tokens twice", "max_tokens": 5, "ignore_eos": True}
    usages = [(await any_client.post(COMPLETIONS, body)).json["usage"] for _ in range(2)]
    expected = [sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")]
    # A counter may be written a moment after the answer.
    async with asyncio.timeout(10):
        while [await any_client.metric(name) - b for name, b in zip(names, before, strict=True)] != expected:
            await asyncio.sleep(0.05)


async def test_when_the_counters_of_a_running_request_move(any_client: Client):
    name = any_client.words.counter("generation_tokens")
    before = await any_client.metric(name)
    async with any_client.session.post(
        any_client.engine.url + COMPLETIONS, json=LONG | {"stream": True}, headers=HEADERS
    ) as response:
        for _ in range(60):
            await response.content.readline()
        moved = await any_client.metric(name) > before
    assert moved == any_client.words.differences.live_counters
    await any_client.settle(0)


async def test_what_is_beyond_the_batch_waits_and_what_is_beyond_the_queue_is_refused(any_client: Client):
    words = any_client.words
    for at in range(MAX_RUNNING + MAX_QUEUED):
        any_client.background(COMPLETIONS, LONG | {"prompt": f"fill {at}"})
        async with asyncio.timeout(60):
            while await any_client.running() + await any_client.waiting() <= at:
                await asyncio.sleep(0.02)
    await any_client.settle(MAX_RUNNING, MAX_QUEUED)
    for path in (COMPLETIONS, CHAT):
        more = LONG | {"prompt": "too many", "messages": [{"role": "user", "content": "too many"}]}
        whole = await any_client.post(path, more)
        assert (whole.status, words.code(whole.json)) == (503, 503)
        stream = await any_client.post(path, more | {"stream": True})
        assert stream.status == words.differences.full_queue_stream
        error = stream.json if stream.status == 503 else stream.events[0]["error"]
        assert words.code(error) == 503
    # The probe says nothing of it.
    assert (await any_client.get(words.differences.ready_path)).status == 200
    # One that leaves makes room for one that waits.
    any_client.tasks[0].cancel()
    await any_client.settle(MAX_RUNNING, MAX_QUEUED - 1)
    for task in any_client.tasks:
        task.cancel()
    await any_client.settle(0)


async def test_metrics_are_open_and_name_the_model(any_client: Client):
    text = (await any_client.get("/metrics", key=None)).body.decode()
    assert f'model_name="{SERVED}"' in text
    assert f"{any_client.words.prefix}:{any_client.words.running}{{" in text


# --- engines of their own -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def client_of(engine: EngineProcess) -> AsyncGenerator[Client]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield Client(engine, session)


async def test_what_was_begun_is_finished_after_sigterm(any_kind: Kind, tmp_path: Path):
    words = WORDS[any_kind]
    poll = ["--sim-drain-poll-seconds", "0.5"] if any_kind.startswith("sim") else []
    with running_engine(any_kind, tmp_path, *poll) as engine:
        async with client_of(engine) as client:
            body = LONG | {"max_tokens": 1500, "stream": True}
            async with client.session.post(engine.url + COMPLETIONS, json=body, headers=HEADERS) as stream:
                await stream.content.readline()
                engine.process.send_signal(signal.SIGTERM)
                late = {"prompt": "late", "max_tokens": 2}
                wanted = words.differences.late_request
                async with asyncio.timeout(30):
                    while engine.ready_state() != str(words.differences.probe_while_draining) or (
                        (await client.post(COMPLETIONS, late)).status != wanted
                    ):
                        await asyncio.sleep(0.05)
                rest = (await stream.content.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert json.loads(rest.split("\n\n")[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert await asyncio.to_thread(engine.process.wait, 200) == 0


async def test_sigterm_while_the_model_loads(any_kind: Kind, tmp_path: Path):
    slow = ["--sim-load-seconds", "8"] if any_kind.startswith("sim") else []
    swallowed = "swallowed" in WORDS[any_kind].differences.sigterm_while_loading
    with running_engine(any_kind, tmp_path, *slow, wait=False) as engine:
        async with asyncio.timeout(200):
            while not loading(engine):
                await asyncio.sleep(0.02)
        assert engine.ready_state() == "refused"
        engine.process.send_signal(signal.SIGTERM)
        if swallowed:
            with pytest.raises(subprocess.TimeoutExpired):
                await asyncio.to_thread(engine.process.wait, 3)
        # Who repeats it ends every engine.
        async with asyncio.timeout(60):
            while engine.process.poll() is None:
                await asyncio.sleep(1)
                engine.process.send_signal(signal.SIGTERM)


def loading(engine: EngineProcess) -> bool:
    """Whether it reads the model now, as far as its log tells. vLLM's first lines can come long before."""
    text = engine.log.read_text(errors="replace")
    return any(word in text for word in ("Starting to load model", '"loading"', "Load weight begin"))


async def test_a_dead_scheduler_ends_the_engine_and_everybodys_requests(any_kind: Kind, tmp_path: Path):
    words = WORDS[any_kind]
    with running_engine(any_kind, tmp_path) as engine:
        async with client_of(engine) as client:
            whole = client.background(COMPLETIONS, LONG)
            await client.settle(1)
            body = LONG | {"stream": True}
            async with client.session.post(engine.url + COMPLETIONS, json=body, headers=HEADERS) as stream:
                await stream.content.readline()
                await kill_core(client, any_kind)
                with contextlib.suppress(aiohttp.ClientError):
                    rest = (await stream.content.read()).decode()
                    assert '"error"' in rest
            with contextlib.suppress(aiohttp.ClientError):
                assert (await whole).status == 500
        code = await asyncio.to_thread(engine.process.wait, 60)
        assert (code == 0) == (words.differences.death_code == "0")


async def kill_core(client: Client, kind: Kind) -> None:
    """Ends the process that computes."""
    if kind.startswith("sim"):
        fault = {"kind": "core_death"}
        assert (await client.admin("/sim/faults", fault)).status == 200
        with contextlib.suppress(aiohttp.ClientError):
            await client.post(COMPLETIONS, {"prompt": "x"})
        return
    group = os.getpgid(client.engine.process.pid)
    found = await asyncio.to_thread(
        subprocess.run, ["ps", "-eo", "pid=,pgid=,args="], capture_output=True, text=True, check=True
    )
    for line in found.stdout.splitlines():
        pid, pgid, name = line.split(None, 2)
        if int(pgid) == group and WORDS[kind].core in name:
            os.kill(int(pid), signal.SIGKILL)


async def test_an_engine_without_adapters_loads_none_and_answers_for_none(any_kind: Kind, tmp_path: Path):
    words = WORDS[any_kind]
    with running_engine(any_kind, tmp_path) as engine:
        async with client_of(engine) as client:
            answer = await client.load_adapter("a", "/nowhere")
            assert answer.status == words.differences.load_without_adapters
            # To the agent that is no fault of the adapter.
            connection = words.kind.agent.connect(client.session, engine.url, api_key=API_KEY, admin_key=ADMIN_KEY)
            with pytest.raises(LoRADisabled):
                await connection.adapters.load("a", "/nowhere", seconds=60)
            asked = await client.post(COMPLETIONS, words.select("a") | {"prompt": "x", "max_tokens": 2})
            assert asked.status == words.differences.never_loaded
            assert (await client.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})).status == 200


async def test_a_wrong_argument_is_refused(any_kind: Kind, tmp_path: Path):
    with running_engine(any_kind, tmp_path, "--no-such-argument", wait=False) as engine:
        assert await asyncio.to_thread(engine.process.wait, 200) == 2
        assert "unrecognized arguments: --no-such-argument" in engine.tail()
