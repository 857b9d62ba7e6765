"""A client that leaves is noticed, whatever it has sent and whatever it has not read."""

import asyncio
import contextlib
import inspect
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from shoal.net.asgi import DISCONNECT, GONE
from shoal.net.server import BoundedProtocol, HTTPServer
from tests.support.mutual import InstallationPKI, process
from tests.support.waiting import until_async
from tests.unit.net.test_server_bounds import serving

LARGE = 256 * 1024


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The gateway and the ledger run on uvloop, the other servers on asyncio's own loop."""

    def run(loop: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test(**given))

    its = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    cast(Any, run).__signature__ = its.replace(parameters=[*its.parameters.values(), loop])
    run.__name__ = test.__name__
    return pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])(
        run
    )


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def secured(request: pytest.FixtureRequest) -> bool:
    return request.param


class Holding:
    """An application that reads a body and answers nothing."""

    def __init__(self, *, reads: bool = True) -> None:
        self.reads = reads
        self.held = asyncio.Event()
        self.gone = asyncio.Event()
        self.requests = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.requests += 1
        while self.reads:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            if not message["more_body"]:
                break
        if scope[DISCONNECT] is GONE:
            self.gone.set()
        else:
            scope[DISCONNECT] = self.gone.set
        self.held.set()
        await self.gone.wait()


@asynccontextmanager
async def served(app: Any, secured: bool) -> AsyncGenerator[HTTPServer]:
    credentials = InstallationPKI().credentials(process("gateway")) if secured else None
    async with asyncio.timeout(30), serving(app, credentials=credentials) as server:
        yield server


async def client(
    server: HTTPServer, secured: bool, **options: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    trusting = None
    if secured:
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting, **options)


def connections(server: HTTPServer) -> set[BoundedProtocol]:
    return cast(set[BoundedProtocol], server.server_state.connections)


def post(size: int, sent: int | None = None) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        size,
        b"x" * (size if sent is None else sent),
    )


async def swept(server: HTTPServer, gone: asyncio.Event) -> None:
    while not gone.is_set():
        server.sweep()
        await asyncio.sleep(0.01)
    await until_async(lambda: not server.server_state.connections)


@pytest.mark.parametrize("size", [10, LARGE, 4 * LARGE])
@pytest.mark.parametrize("reset", [False, True])
@on_both_loops
async def test_it_is_noticed_at_once_however_large_its_body_was(size: int, reset: bool, secured: bool) -> None:
    app = Holding()
    async with served(app, secured) as server:
        _, writer = await client(server, secured)
        writer.write(post(size))
        await app.held.wait()
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await app.gone.wait()
        await until_async(lambda: not server.server_state.connections)


@on_both_loops
async def test_one_that_closes_its_sending_side_has_left() -> None:
    app = Holding()
    async with served(app, secured=False) as server:
        reader, writer = await client(server, secured=False)
        writer.write(post(LARGE))
        writer.write_eof()
        await app.gone.wait()
        assert await reader.read() == b""
        writer.close()
        await until_async(lambda: not connections(server))


@on_both_loops
async def test_it_is_noticed_while_its_body_is_read(secured: bool) -> None:
    app = Holding()
    async with served(app, secured) as server:
        _, writer = await client(server, secured)
        writer.write(post(LARGE, sent=LARGE - 1))
        await until_async(lambda: app.requests == 1)
        writer.close()
        await app.gone.wait()
        assert not app.held.is_set()
        await until_async(lambda: not connections(server))


@on_both_loops
async def test_it_is_noticed_while_nobody_reads_its_body(secured: bool) -> None:
    app = Holding(reads=False)
    async with served(app, secured) as server:
        _, writer = await client(server, secured)
        # More than the server reads, and no more than the kernel takes: what the client could not send yet would come
        # before the end.
        writer.write(post(LARGE, sent=100 * 1024))
        await app.held.wait()
        await until_async(lambda: any(c.unread for c in connections(server)))
        writer.transport.abort()  # with TLS, `close` would wait for the server
        await swept(server, app.gone)


@pytest.mark.parametrize("following", [10, 100 * 1024])
@on_both_loops
async def test_it_is_noticed_though_another_request_of_it_waits(following: int, secured: bool) -> None:
    app = Holding()
    async with served(app, secured) as server:
        _, writer = await client(server, secured)
        writer.write(post(10) + post(following))
        await app.held.wait()
        writer.transport.abort()
        await swept(server, app.gone)
        assert app.requests == 1


@on_both_loops
async def test_one_that_stays_is_kept_though_its_connection_is_not_read(secured: bool) -> None:
    answered = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answered.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(app, secured) as server:
        reader, writer = await client(server, secured)
        writer.write(post(0) + post(LARGE) + post(0))
        await until_async(lambda: any(c.unread for c in connections(server)))
        for _ in range(10):
            server.sweep()
            await asyncio.sleep(0.01)
        answered.set()
        for _ in range(3):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()
        await until_async(lambda: not connections(server))


@on_both_loops
async def test_what_it_did_not_read_does_not_keep_its_request() -> None:
    """An answer that comes slowly, and a client that closes its sending side and takes nothing."""
    app = Streaming()
    async with served(app, secured=False) as server:
        writer = await unreading(server)
        writer.write(post(2))
        await app.full.wait()
        writer.write_eof()
        await app.gone.wait()
        writer.transport.abort()
        await until_async(lambda: not connections(server))


@on_both_loops
async def test_what_it_did_not_read_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is left, and though the answer is whole."""
    monkeypatch.setattr("shoal.net.server._STUCK_SECONDS", 0.05)
    app = Streaming(ends=True)
    async with served(app, secured=False) as server:
        writer = await unreading(server)
        writer.write(post(2))
        await app.full.wait()
        (connection,) = connections(server)
        assert connection.transport.get_write_buffer_size() > 0
        assert not connection.flow.write_paused
        while server.server_state.connections:
            server.sweep()
            await asyncio.sleep(0.01)
        writer.close()


class Streaming:
    """Writes until the client's side takes no more, and keeps less than a full buffer back; then `ends` the answer, or
    goes on with it, without writing, until the client leaves."""

    def __init__(self, *, ends: bool = False) -> None:
        self.ends = ends
        self.full = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        scope[DISCONNECT] = self.gone.set
        head = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        cycle = receive.__self__
        while cycle.transport.get_write_buffer_size() == 0:
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await asyncio.sleep(0)
        if self.ends:
            await send({"type": "http.response.body", "body": b""})
        self.full.set()
        if not self.ends:
            await self.gone.wait()


async def unreading(server: HTTPServer) -> asyncio.StreamWriter:
    """A client that reads nothing."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", server.port))
    _, writer = await asyncio.open_connection(sock=plain)
    cast(asyncio.ReadTransport, writer.transport).pause_reading()
    return writer
