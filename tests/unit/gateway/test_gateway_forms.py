"""A large form on its way to the engine: it is held once, is written as fast as the engine takes it, and is answered
whether an engine takes part of it, nothing of it, or answers before it has it all."""

import asyncio
import contextlib
import hashlib
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.api import identity
from shoal.gateway.connections import Pool
from shoal.gateway.upstream import AbortHandle, ConnectionLost, PartedBody, UpstreamAddress
from shoal.net.tls import TLSCredentials
from tests.support.gateway import API_KEY, MODEL, GatewayUnderTest, gateway, replica, tenant
from tests.support.mutual import InstallationPKI, model, process
from tests.support.recordings import TYPE, asked, read_form, wav
from tests.support.routes import put, target
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

MIB = 1024 * 1024
PATH = "/v1/audio/transcriptions"
ANSWER = b'{"text":"a fox","usage":{"type":"duration","seconds":1}}'
BUSY = json.dumps({"error": {"message": "Too long.", "type": "invalid_request_error", "code": "too_long"}}).encode()
LARGE = asked(wav(15 * MIB / 32_000))


async def listen(request: EngineRequest) -> None:
    await request.answer(200, ANSWER)


class HalfEngine(ScriptedEngine):
    """`half` gets the connection when the head of a form has come; nothing of the form was read."""

    def __init__(self, half: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        super().__init__(listen)
        self.half = half
        self.forms = 0

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.forms += 1
                await self.half(reader, writer)


async def take_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def send(it: GatewayUnderTest, body: bytes = LARGE, path: str = PATH, key: str = API_KEY) -> tuple[int, bytes]:
    """Status and body of the answer. The client holds nothing of the form but the form."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
    try:
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % (path.encode(), key.encode(), TYPE, len(body))
        )
        view = memoryview(body)
        for at in range(0, len(body), 65_536):
            writer.write(view[at : at + 65_536])
            await writer.drain()
        async with asyncio.timeout(60):
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), rest
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def listening(tmp_path: Path, *engines: ScriptedEngine, **settings: Any):
    async with gateway(tmp_path, *engines, **settings) as it:
        it.model(capabilities=frozenset({"transcribe"}))
        yield it


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_a_form_is_held_once(tmp_path: Path) -> None:
    """From the first byte that the client sends until the engine has answered."""
    got = hashlib.sha256()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)  # what is written without regard to the engine is held by now
        while not (data := await reader.read(65_536)).endswith(b"--\r\n"):
            got.update(data)
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER))
        writer.write(ANSWER)

    async with listening(tmp_path, HalfEngine(take)) as it:
        assert (await send(it, asked(wav(20))))[0] == 200  # what is made once is made
        tracemalloc.start()
        try:
            assert await send(it) == (200, ANSWER)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1.25 * len(LARGE) + MIB, f"{peak / len(LARGE):.2f} times the form"
        assert it.app.body_budget.held == 0


async def test_a_file_as_large_as_openai_takes_goes_through_without_a_setting(tmp_path: Path) -> None:
    async def take(request: EngineRequest) -> None:
        await request.answer(200 if largest in request.raw else 400, ANSWER)

    head = wav(0)
    largest = wav((25 * MIB - len(head)) / 32_000)
    assert len(largest) == 25 * MIB
    async with listening(tmp_path, ScriptedEngine(take)) as it:
        assert await send(it, asked(largest, language="en")) == (200, ANSWER)
        beyond = asked(wav(27 * MIB / 32_000))
        status, body = await send(it, beyond)
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        # A body that is no form is not larger for it.
        status, body = await send(it, bytes(17 * MIB), "/v1/chat/completions")
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        assert it.app.body_budget.held == 0


async def test_many_large_forms_at_once_keep_within_the_memory(tmp_path: Path) -> None:
    """What does not fit gets a 503 that says to try again, and another tenant's form is taken meanwhile."""
    may = asyncio.Event()

    async def wait(request: EngineRequest) -> None:
        await may.wait()
        await request.answer(200, ANSWER)

    form, bounds = asked(wav(3 * MIB / 32_000)), {"max_form_bytes": 4 * MIB, "max_body_bytes": MIB}
    async with listening(tmp_path, ScriptedEngine(wait), max_held_body_bytes=14 * MIB, **bounds) as it:
        it.tenants["zeta"] = tenant("zeta", "sk-zeta")
        it.changed()
        held = [asyncio.create_task(send(it, form)) for _ in range(2)]
        await until(lambda: it.app.body_budget.held >= 6 * MIB)
        status, body = await send(it, form)
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        assert it.app.body_budget.held <= 7 * MIB
        other = asyncio.create_task(send(it, form, key="sk-zeta"))
        await until(lambda: it.app.body_budget.held >= 9 * MIB)
        may.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await other)[0] == 200
        assert it.app.body_budget.held == 0


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "mutual TLS"])
async def test_what_the_engine_does_not_take_is_not_copied(tls: bool) -> None:
    pki, context, credentials, name = InstallationPKI(), None, TLSCredentials(), None
    if tls:
        credentials, name = pki.credentials(process("gateway")), identity.model_server_name("uid")
        context = pki.credentials(model("uid")).server()
    may, got, wanted = asyncio.Event(), hashlib.sha256(), hashlib.sha256(LARGE)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await may.wait()
        left = len(LARGE)
        while left:
            data = await reader.read(min(left, 65_536))
            got.update(data)
            left -= len(data)
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    view = memoryview(LARGE)
    body = PartedBody(LARGE[:100], view[100 : 10 * MIB], view[10 * MIB :])
    pool = Pool(credentials=credentials)
    head = b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    tracemalloc.start()
    try:
        at = UpstreamAddress("127.0.0.1", port, name)
        sending = asyncio.create_task(pool.start(at, head, body, AbortHandle()))
        await asyncio.sleep(0.5)
        may.set()
        async with asyncio.timeout(20):
            answer = await sending
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status == 200
    answer.release()
    assert got.digest() == wanted.digest()
    assert peak < 3 * MIB, f"{peak / MIB:.1f} MiB besides the form"
    pool.close()
    server.close()


async def test_an_engine_that_breaks_off_within_a_form_is_replaced(tmp_path: Path) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(MIB)
        writer.transport.abort()

    engines = HalfEngine(break_off), ScriptedEngine(listen)
    async with listening(tmp_path, *engines) as it:
        for _ in range(3):  # whichever is chosen first
            assert await send(it) == (200, ANSWER)
        assert engines[0].forms
        for request in engines[1].requests:
            assert read_form(request.headers["content-type"], request.raw)["file"][2] == wav(15 * MIB / 32_000)
        assert it.app.body_budget.held == 0


async def test_an_engine_that_takes_nothing_is_replaced_and_is_no_dead_one(tmp_path: Path) -> None:
    engines = HalfEngine(take_nothing), ScriptedEngine(listen)
    async with listening(tmp_path, *engines) as it:
        it.pool.write_timeout = 0.3
        for _ in range(2):
            assert await send(it) == (200, ANSWER)
        assert engines[0].forms
        assert it.metric("shoal_gateway_suspects_total", next="sent_again") == 0


async def test_a_write_that_does_not_end_ends_with_the_requests_time(tmp_path: Path) -> None:
    async with listening(tmp_path, HalfEngine(take_nothing), request_seconds=1.0) as it:
        status, answer = await send(it)
        assert (status, json.loads(answer)["error"]["code"]) == (504, "timeout")
        await until(lambda: it.app.body_budget.held == 0)


@pytest.mark.parametrize("closes", [False, True], ids=["connection stays", "connection ends"])
@pytest.mark.parametrize("taken", [0, MIB])
async def test_an_engine_may_refuse_before_it_has_the_form(tmp_path: Path, taken: int, closes: bool) -> None:
    """It does not read the rest; a connection with half of a form takes no other request."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(taken)
        writer.write(b"HTTP/1.1 413 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BUSY))
        writer.write(BUSY)
        await writer.drain()
        if closes:
            writer.write_eof()
        await reader.read(-1 if closes else 1)
        await take_nothing(reader, writer)

    engine = HalfEngine(refuse)
    async with listening(tmp_path, engine) as it:
        it.pool.write_timeout = 90.0  # longer than the client waits
        for number in (1, 2):
            status, answer = await send(it)
            assert (status, json.loads(answer)["error"]["code"]) == (413, "too_long")
            assert (engine.forms, engine.connections) == (number, number)
        assert it.app.body_budget.held == 0
        assert {r.data.outcome for r in await it.records(count=2)} == {"rejected"}


async def test_a_client_that_leaves_ends_the_write(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        while await reader.read(65_536):
            await asyncio.sleep(0.05)
        gone.set()

    async with listening(tmp_path, engine := HalfEngine(wait)) as it:
        sending = asyncio.create_task(send(it))
        await until(lambda: engine.forms == 1)
        sending.cancel()
        async with asyncio.timeout(20):
            await gone.wait()
        (record,) = await it.records()
        assert record.data.outcome == "cancelled"
        await until(lambda: it.app.body_budget.held == 0)


async def test_a_form_that_waits_for_a_replica_is_counted_once_also_with_a_fallback(tmp_path: Path) -> None:
    engine = ScriptedEngine(listen)
    async with listening(tmp_path, engine) as it:
        put(it, {"targets": [target("llama")], "fallback": {"targets": [target("llama")]}})
        it.pods.clear()
        it.fleet.update("pod-1", None)
        it.changed()
        body = asked(wav(15 * MIB / 32_000), model="front")
        waiting = asyncio.create_task(send(it, body))
        await until(lambda: MODEL.uid in it.app.holds.queues)
        assert it.app.body_budget.held == len(body)
        assert 0 <= it.app.holds.queues[MODEL.uid].held.bytes - len(body) < 1024
        it.pods["chat/llama-1"] = replica(1)
        it.changed()
        it.hear(1)
        assert await waiting == (200, ANSWER)
        request = engine.requests[0]
        assert read_form(request.headers["content-type"], request.raw)["file"][2] == wav(15 * MIB / 32_000)
        await until(lambda: it.app.body_budget.held == 0)


async def test_a_large_json_body_that_nobody_takes_is_lost_like_a_form() -> None:
    pool = Pool(write_timeout=0.2)
    async with HalfEngine(take_nothing).running() as engine:
        at = UpstreamAddress("127.0.0.1", engine.port)
        with pytest.raises(ConnectionLost, match="took nothing"):
            await pool.start(at, b"POST / HTTP/1.1\r\n\r\n", LARGE, AbortHandle())
    pool.close()
