"""How a gateway stops: what it drops is only what HTTP lets a server drop."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.gateway.process import GatewayProcess
from tests.support.gateway import API_KEY, lines
from tests.support.gateway_process import POD, FakeApiServer, ask, readyz, serving
from tests.support.scripted_engine import EngineRequest, ScriptedEngine


async def refused(process: GatewayProcess, port: int) -> None:
    """Waits until the gateway takes no more connections."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.02)


async def test_a_stop_finishes_streams_and_takes_no_more(tmp_path: Path):
    going = asyncio.Event()

    async def slow(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await going.wait()
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with serving(tmp_path, ScriptedEngine(slow)) as process, aiohttp.ClientSession() as session:
        response = await ask(session, process, stream=True)
        assert response.status == 200
        port = process.server.port
        process.stop()
        process.stop()  # a second SIGTERM changes nothing
        status, why = await readyz(session, process)
        assert (status, why["stopping"]) == (503, "asked to stop")
        await refused(process, port)
        going.set()
        assert [line async for line in lines(response)][-1] == b"[DONE]"


async def test_until_it_is_out_of_the_endpoints_a_stopping_gateway_serves_and_sends_connections_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shoal.gateway.process.LINGER_SECONDS", 1.0)
    async with (
        serving(tmp_path, ScriptedEngine(), settle_seconds=8.0) as process,
        aiohttp.ClientSession() as session,
        aiohttp.ClientSession() as newcomer,
    ):
        async with ask(session, process) as before:
            assert (before.status, before.headers.get("connection")) == (200, None)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", process.server.port)
        process.stop()
        assert (await readyz(session, process))[0] == 503
        for client in (session, newcomer):
            async with ask(client, process) as answer:
                assert (answer.status, answer.headers.get("connection")) == (200, "close")
        async with ask(newcomer, process, stream=True) as answer:
            assert (answer.status, answer.headers.get("connection")) == (200, "close")
            assert [line async for line in lines(answer)][-1] == b"[DONE]"
        async with ask(newcomer, process, model="nobody") as answer:
            assert (answer.status, answer.headers.get("connection")) == (404, "close")
        async with asyncio.timeout(20):
            assert await idle.read() == b""  # an end, no reset
        idle_writer.close()


async def test_a_request_that_is_on_its_way_when_the_port_closes_is_answered(tmp_path: Path):
    body = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
        % (
            API_KEY.encode(),
            len(body),
        )
    )
    async with serving(tmp_path, ScriptedEngine()) as process:
        port = process.server.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head[:40])
        process.stop()
        await refused(process, port)
        writer.write(head[40:] + body)
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answer
        writer.close()


async def test_a_connection_on_which_nothing_comes_does_not_hold_a_stop_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shoal.gateway.process.LINGER_SECONDS", 1.0)
    async with serving(tmp_path, ScriptedEngine()) as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.server.port)
        process.stop()
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


def pod(*, ready: bool) -> dict[str, Any]:
    status = {**POD["status"], "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    return {**POD, "status": status}


async def until_held(process: GatewayProcess, count: int) -> None:
    async with asyncio.timeout(20):
        while process.gateway.holds.waiting != count:
            await asyncio.sleep(0.01)


async def test_a_stop_keeps_what_waits_until_it_is_served(tmp_path: Path):
    server = FakeApiServer()
    async with serving(tmp_path, ScriptedEngine(), server) as process, aiohttp.ClientSession() as session:
        await server.change("pods", pod(ready=False))
        async with asyncio.timeout(20):
            while any(r.ready for r in process.directory.snapshot.replicas["chat/llama", "uid-llama"]):
                await asyncio.sleep(0.01)
        asked = [asyncio.create_task(ask(session, process, stream=stream)) for stream in (False, True)]
        await until_held(process, 2)
        process.stop()
        await refused(process, process.server.port)
        assert (await readyz(session, process))[0] == 503
        assert process.demand.held_count("uid-llama") == 2  # and tells the operators so
        assert process.gateway.holds.waiting == 2
        await server.change("pods", pod(ready=True))
        whole, stream = [await each for each in asked]
        assert (whole.status, (await whole.json())["model"]) == (200, "llama")
        assert [line async for line in lines(stream)][-1] == b"[DONE]"


async def test_a_stop_ends_when_what_waits_is_due(tmp_path: Path):
    server = FakeApiServer()
    async with (
        serving(tmp_path, ScriptedEngine(), server, hold_seconds=1.0) as process,
        aiohttp.ClientSession() as session,
    ):
        await server.change("pods", pod(ready=False))
        async with asyncio.timeout(20):
            while any(r.ready for r in process.directory.snapshot.replicas["chat/llama", "uid-llama"]):
                await asyncio.sleep(0.01)
        asked = asyncio.create_task(ask(session, process))
        await until_held(process, 1)
        process.stop()
        late = await asked
        assert (late.status, late.headers["connection"]) == (503, "close")
        assert 1 <= int(late.headers["retry-after"]) <= 60
