"""Clients' connections: kept while they are used, closed when they are idle; and many deadlines on one timer."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.gateway.deadlines import Deadlines
from tests.support.gateway import API_KEY, gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
ASKED = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
BODY = json.dumps(ASKED).encode()
REQUEST = HEAD % (API_KEY.encode(), len(BODY)) + BODY


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


async def test_an_idle_connection_is_closed_after_the_keep_alive_time_and_not_before(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it, asyncio.timeout(20):
        patient, patient_writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        patient_writer.write(REQUEST)
        assert (await answer(patient)).startswith(b"HTTP/1.1 200 OK\r\n")
        it.server.sweep()
        patient_writer.write(REQUEST)
        assert (await answer(patient)).startswith(b"HTTP/1.1 200 OK\r\n")

        it.server.config.timeout_keep_alive = 0  # for connections from now on
        hasty, hasty_writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        hasty_writer.write(REQUEST)
        assert (await answer(hasty)).startswith(b"HTTP/1.1 200 OK\r\n")
        await asyncio.sleep(0.01)
        it.server.sweep()
        assert await hasty.read() == b""

        patient_writer.write(REQUEST)
        assert (await answer(patient)).startswith(b"HTTP/1.1 200 OK\r\n")
        patient_writer.close()
        hasty_writer.close()


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        ids = [b"first", b"second", b"third"]
        writer.write(b"".join(REQUEST.replace(b"host: x", b"host: x\r\nx-request-id: " + i) for i in ids))
        for i in ids:
            assert b"x-request-id: " + i + b"\r\n" in await answer(reader)
        writer.close()


async def test_answers_that_the_client_does_not_take_do_not_pile_up_in_memory(tmp_path: Path):
    size, count = 1024 * 1024, 24

    async def large(request: EngineRequest) -> None:
        await request.answer(200, b'{"model":"chat/llama","x":"%s"}' % (b"x" * size))

    engine = ScriptedEngine(large)
    async with gateway(tmp_path, engine) as it, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        for _ in range(count):
            writer.write(REQUEST)
        (connection,) = it.server.server_state.connections
        seen = -1
        while seen != len(engine.requests) or not seen:
            seen = len(engine.requests)
            await asyncio.sleep(0.3)
        assert connection.transport.get_write_buffer_size() < 3 * size
        assert seen < count
        for _ in range(count):
            assert len(await answer(reader)) > size
        writer.close()


async def test_a_stream_that_the_client_does_not_take_waits_in_the_engine_and_arrives_whole(tmp_path: Path):
    size, count = 32 * 1024, 800
    written = 0

    async def long(request: EngineRequest) -> None:
        nonlocal written
        await request.begin_stream()
        for number in range(count):
            await request.chunk(request.delta("x" * size, number + 1))
            written += 1
        await request.chunk(request.closing() + b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(long)) as it, asyncio.timeout(60):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", it.server.port))
        reader, writer = await asyncio.open_connection(sock=client, limit=64 * 1024)
        body = json.dumps({**ASKED, "stream": True}).encode()
        writer.write(HEAD % (API_KEY.encode(), len(body)) + body)
        before = -1
        while written != before or not written:
            before = written
            await asyncio.sleep(0.3)
        assert written < count / 2, "the gateway reads the engine's answer ahead of its client"
        (connection,) = it.server.server_state.connections
        # What one read of the engine's answer brings (asyncio: 256 KiB) on top of the 64 KiB that the transport takes.
        assert connection.transport.get_write_buffer_size() < (256 + 64) * 1024 + size
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += await reader.read(1 << 20)
        assert got.count(b"x" * size) == count
        assert b"data: [DONE]" in got
        writer.close()
        [record] = await it.records()
        assert record.data.outcome == "answered"


async def test_http_1_0_gets_its_answer_and_a_close(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        writer.write(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        got = await reader.read()
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in got
        writer.close()


async def test_each_request_has_its_own_deadline_though_they_share_a_timer():
    deadlines = Deadlines(1.0)
    never = asyncio.Event()
    ended: list[str] = []

    async def run(name: str, seconds: float | None) -> None:
        try:
            with deadlines.start():
                await (never.wait() if seconds is None else asyncio.sleep(seconds))
        except TimeoutError:
            ended.append(f"{name} timed out")
        else:
            ended.append(f"{name} done")

    async with asyncio.TaskGroup() as group:
        group.create_task(run("first", None))
        group.create_task(run("quick", 0.0))
        await asyncio.sleep(0.1)
        group.create_task(run("late", None))
        group.create_task(run("late and quick", 0.0))
    assert ended == ["quick done", "late and quick done", "first timed out", "late timed out"]


async def test_the_time_stands_still_in_a_pause_and_can_be_shortened_only():
    class Clock:
        """A loop whose time is the test's."""

        now = 0.0

        def __init__(self) -> None:
            self.timers: dict[object, tuple[float, Callable[[], None]]] = {}

        def time(self) -> float:
            return self.now

        def call_at(self, at: float, callback: Callable[[], None]) -> Any:
            key = object()
            self.timers[key] = (at, callback)
            return SimpleNamespace(cancel=lambda: self.timers.pop(key, None))

        def until(self, now: float) -> None:
            self.now = now
            for key in [key for key, (at, _) in self.timers.items() if at <= now]:
                self.timers.pop(key)[1]()

    clock, deadlines = Clock(), Deadlines(10.0)
    deadlines.loop = cast(asyncio.AbstractEventLoop, clock)
    paused, shortened, longer = deadlines.start(), deadlines.start(), deadlines.start()
    with paused, shortened, longer:
        clock.until(4.0)
        paused.pause()
        shortened.shorten(3.0)
        longer.shorten(60.0)
        clock.until(6.9)
        assert not shortened.passed
        clock.until(7.0)
        assert (shortened.passed, shortened.seconds) == (True, 3.0)
        clock.until(10.0)
        assert (longer.passed, longer.seconds) == (True, 10.0)
        clock.until(100.0)
        paused.restart()
        clock.until(105.9)
        assert not paused.passed
        clock.until(106.0)
        assert (paused.passed, paused.seconds) == (True, 10.0)


async def test_a_task_that_somebody_else_cancels_is_cancelled_and_not_timed_out():
    deadlines = Deadlines(60.0)

    async def run() -> None:
        with deadlines.start():
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
