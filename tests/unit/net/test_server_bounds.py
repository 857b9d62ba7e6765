"""What one client, or many that send nothing to its end, may hold of a server that is open to everybody."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.net.asgi import DISCONNECT
from shoal.net.server import BoundedProtocol, HTTPServer, make_server

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Slow:
    """An application that answers when it is let, and counts whom it was asked by."""

    def __init__(self) -> None:
        self.asked = 0
        self.let = asyncio.Event()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self.asked += 1
        await self.let.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(app: Any, **bounds: Any) -> AsyncGenerator[HTTPServer]:
    server = make_server(app, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1, **bounds)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        await task


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server ends the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            received += part
    return received


async def test_requests_that_wait_on_one_connection_are_bounded():
    app = Slow()
    async with serving(app) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET * 2000)  # 54 kB: one read
        assert await closed(reader) == b""
        assert not server.server_state.connections
        assert app.asked == 1
        writer.close()


async def test_without_the_bound_one_read_makes_thousands_of_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.net.server._MOST_PIPELINED", 1 << 30)
    app = Slow()
    async with serving(app) as server, asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET * 2000)
        most = 0
        while most < 1000:
            most = max((len(c.pipeline) for c in server.server_state.connections), default=0)  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        app.let.set()
        writer.close()


@pytest.mark.parametrize("whole", [False, True])
async def test_a_body_that_nobody_waits_for_ends_with_its_connection(whole: bool):
    """A refusal goes out before the body is read; what follows it is discarded, but not for ever."""
    app = Slow()
    app.let.set()
    async with serving(app, head_seconds=0.2) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"x" * (10 if whole else 5))
        await asyncio.sleep(0.05)
        server.sweep()
        assert server.server_state.connections
        await asyncio.sleep(0.2)
        server.sweep()
        assert await closed(reader) == b""
        writer.close()


async def test_a_connection_whose_body_came_late_takes_the_next_request():
    app = Slow()
    app.let.set()
    async with serving(app, head_seconds=0.2) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        await reader.readuntil(b"ok")
        writer.write(b"x" * 10 + GET)
        await reader.readuntil(b"ok")
        await asyncio.sleep(0.3)
        server.sweep()
        writer.write(GET)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_client_that_goes_is_noticed_though_it_has_sent_another_request():
    noticed = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope[DISCONNECT] = noticed.set
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not noticed.is_set():  # until the write to the lost connection fails
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.01)

    async with serving(app) as server, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET * 2)
        await asyncio.sleep(0.05)
        writer.close()
        await noticed.wait()


@pytest.mark.parametrize("limit", [20_000, None])
async def test_heads_that_come_to_no_end_are_bounded_over_all_connections(limit: int | None):
    app = Slow()
    app.let.set()
    async with serving(app, max_unfinished_bytes=limit) as server, asyncio.timeout(20):
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * 3000)
            held.append((reader, writer))
            await asyncio.sleep(0.02)
        refused = [r for r, _ in held if r.at_eof() or b"503" in await _soon(r)]
        assert len(refused) == (4 if limit else 0)

        # Whoever ends a head gets an answer, and what the others hold comes back when they go.
        reader, writer = held[0]
        writer.write(b"\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        for _, other in held:
            other.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * 19_000)
        await asyncio.sleep(0.05)
        writer.write(b"\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def _soon(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(0.2):
            return await reader.read(1000)
    except TimeoutError:
        return b""


AROUND = {
    "trailers": (b"1\r\n{\r\n0\r\n", b"a:b\r\n" * 200),
    "one trailer": (b"1\r\n{\r\n0\r\na:", b"b" * 1000),
    "a trailer without a body": (b"0\r\n", b"a:b\r\n" * 200),
    "a chunk's extension": (b"1\r\n{\r\n1;a=", b"b" * 1000),
}


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("kind", AROUND)
async def test_what_stands_around_a_body_is_bounded(kind: str, answered: bool):
    begin, part = AROUND[kind]
    heads: list[int] = []

    async def app(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if answered:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        heads.append(len(scope["headers"]))

    async with serving(app, max_head_bytes=8000) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + begin)
        sent, ended = 0, asyncio.create_task(closed(reader))
        with contextlib.suppress(ConnectionError):
            while not ended.done() and sent < 100 * len(part):
                writer.write(part)
                await writer.drain()
                sent += len(part)
                await asyncio.sleep(0.002)
        assert sent < 100 * len(part), "the server reads on and on"
        assert (b" 431 " in await ended) is not answered
        while not heads:
            await asyncio.sleep(0.01)
        assert heads == [2]
        writer.close()


async def test_small_chunks_count_from_the_last_byte_of_a_body_and_a_trailer_changes_no_head():
    """Each piece comes in a read of its own, so most of the reads bring nothing of the body."""
    seen: list[tuple[bytes, list[bytes]]] = []

    async def app(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        seen.append((body, [name for name, _ in scope["headers"]]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app, max_head_bytes=100) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        (connection,) = await _connected(server)
        for _ in range(2):
            connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(50):
                for piece in (b"1;a=b", b"\r", b"\n", b"x", b"\r", b"\n"):
                    connection.data_received(piece)
            connection.data_received(b"0\r\nauthorization: y\r\n\r\n")
            await reader.readuntil(b"ok")
        assert seen == [(b"x" * 50, [b"host", b"transfer-encoding"])] * 2
        writer.close()


async def _connected(server: HTTPServer) -> list[BoundedProtocol]:
    while not server.server_state.connections:
        await asyncio.sleep(0.01)
    return [each for each in server.server_state.connections if isinstance(each, BoundedProtocol)]


class Wire:
    """A transport whose client takes as much as the test says."""

    def __init__(self) -> None:
        self.left = 100_000
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("rate", "dropped"), [(0, True), (1, True), (100, True), (600, False), (5000, False)])
def test_a_client_that_takes_next_to_nothing_is_dropped(rate: int, dropped: bool):
    connection = BoundedProtocol.__new__(BoundedProtocol)
    wire = Wire()
    connection.transport = wire  # type: ignore[assignment]
    connection.cycle = None  # type: ignore[assignment]
    connection._idle_since = connection._head_since = connection._stuck_since = None
    connection._stuck_bytes = 0

    class Paused:
        write_paused = True

    connection.flow = Paused()  # type: ignore[assignment]
    for second in range(200):
        connection.sweep(float(second))
        wire.left -= rate
        if wire.left < 16_384:
            wire.left = 100_000  # it has room again, and the answer goes on
    assert wire.aborted is dropped
