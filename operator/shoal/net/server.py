"""uvicorn, with the bounds that a public port needs and a stop that cuts nobody off."""

import asyncio
import contextlib
import select
import ssl
from collections.abc import Callable, Generator, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shoal.net.asgi import CALLER, DIRECT, DISCONNECT, GONE, Headers
from shoal.net.tls import TLSCredentials

_STUCK_SECONDS: Final = 30.0
_LEAST_RATE: Final = 512.0
"""Bytes a second that a client must take while more waits for it. One that takes a byte now and then keeps a place at
its replica, and memory here, for as long as it likes."""
_MOST_PIPELINED: Final = 64
"""Requests on one connection that wait for the answer before them. One read could bring thousands."""
_ON_ITS_WAY_SECONDS: Final = 1.0
_CLOSED_BY_PEER: Final[int] = getattr(select, "POLLRDHUP", 0)
"""Only Linux has it."""


class Heads:
    """Bytes of heads that have not come to their end, over all connections of a server."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0

    @property
    def full(self) -> bool:
        return self.limit is not None and self.held > self.limit


class Closing:
    """Whether a server is about to stop. From then on an answer ends its connection, so that clients with keep-alive
    connections leave by their own next request."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = False


class _Direct:
    """The `DirectAnswer` of one POST."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def whole(self, headers: Headers, body: bytes) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        parts = self._head(headers)
        parts += (b"\r\ncontent-length: %d\r\n\r\n" % len(body), body)
        cycle.transport.write(b"".join(parts))
        cycle.response_started = True
        self._complete()
        return True

    def begin(self, headers: Headers, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        parts = self._head(headers)
        parts.append(b"\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))
        cycle.transport.write(b"".join(parts))
        cycle.response_started = cycle.chunked_encoding = True
        return True

    def part(self, data: bytes) -> bool:
        cycle = self._cycle
        if cycle.disconnected:
            return True
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not cycle.flow.write_paused

    def end(self) -> bool:
        cycle = self._cycle
        if cycle.flow.write_paused:
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"0\r\n\r\n")
            self._complete()
        return True

    async def drained(self) -> None:
        if not self._cycle.disconnected:
            await self._cycle.flow.drain()

    def _head(self, headers: Headers) -> list[bytes]:
        """The head without its last line, which says how long the body is."""
        cycle = self._cycle
        parts = [b"HTTP/1.1 200 OK"]
        for name, value in (*cycle.default_headers, *headers):
            parts += (b"\r\n", name, b": ", value)
        if not cycle.keep_alive:
            parts.append(b"\r\nconnection: close")
        return parts

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class BoundedProtocol(HttpToolsProtocol):
    """Bounds a request's head in bytes and time, the heads of all connections together, the requests that wait on one
    connection, and the number of connections; uvicorn itself has no such bounds."""

    max_head_bytes = 32 * 1024
    head_seconds = 60.0
    max_connections = 16384
    heads = Heads()
    closing = Closing()
    linger_seconds = 0.0

    credentials: TLSCredentials | None = None
    """Of a port that speaks mutual TLS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._caller = None if self.credentials is None else self.credentials.role(transport.get_extra_info)
        self._head_bytes = self._head_held = 0
        self._head_since: float | None = self.loop.time()
        self._stuck_since: float | None = None
        self._stuck_bytes = 0
        self._idle_since: float | None = None
        self._body_since = 0.0
        self._running: RequestResponseCycle | None = None
        """Of the request that is being answered; `cycle` is that of the last one that was read."""
        if len(self.connections) > self.max_connections:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        if self._head_since is None:
            self._head_bytes = len(data)  # in case a head begins in this read
        else:
            self._head_bytes += len(data)
            # A body may come in the same read as its head, so one read is allowed on top.
            if self._head_bytes - len(data) > self.max_head_bytes or len(data) > self.max_head_bytes + 256 * 1024:
                self._refuse(431, "The head of the request is too large.", "head_too_large")
                return
        super().data_received(data)
        held = 0 if self._head_since is None else self._head_bytes
        if held != self._head_held:
            self._hold_head(held)

    def _hold_head(self, held: int) -> None:
        """`held`: bytes of this connection's head, which has not come to its end."""
        self.heads.held += held - self._head_held
        self._head_held = held
        if held and self.heads.full:
            self._refuse(503, "The gateway holds too many unfinished requests. Try again.", "overloaded")

    def on_message_begin(self) -> None:
        if self._head_since is None:
            self._head_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_since = None
        self._body_since = self.loop.time()
        self.scope[DISCONNECT] = None  # pyright: ignore[reportGeneralTypeIssues]
        if self.credentials is not None:
            self.scope[CALLER] = self._caller  # pyright: ignore[reportGeneralTypeIssues]
        # Only where what was read could hold so much: the sum costs 3 % of a small request.
        if (
            self._head_bytes > self.max_head_bytes
            and sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > self.max_head_bytes
        ):
            self._refuse(431, "The head of the request is too large.", "head_too_large")
            return
        if len(self.pipeline) >= _MOST_PIPELINED:
            # An answer now would come before those that are due first.
            self.transport.abort()
            raise ConnectionAbortedError("too many pipelined requests")
        super().on_headers_complete()
        if self.closing.begun:
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._running = self.cycle
        if self.scope["method"] == "POST":
            self.scope[DIRECT] = _Direct(self.cycle)  # pyright: ignore[reportGeneralTypeIssues]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # uvicorn pauses reading at 64 KiB of a body and goes on at the next `receive()`, which does not come for a body
        # that is whole. Unless the transport reads, it does not notice that the client leaves.
        if not self.pipeline:
            self.flow.resume_reading()

    def eof_received(self) -> None:
        """The client sends nothing any more, so the transport closes, and drops what is written from now on. What was
        written before keeps it open for as long as the client does not take it, so the request ends here. A client that
        closed only its sending side looks like one that left."""
        self._client_left()
        self.flow.resume_writing()

    @property
    def unread(self) -> bool:
        """Whether the transport reads nothing while a request is being answered: the client has sent another one, or
        the application does not take its body."""
        cycle = self._running
        return (
            self.flow.read_paused
            and cycle is not None
            and not cycle.response_complete
            and not self.transport.is_closing()
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._hold_head(0)
        self._client_left()

    def _client_left(self) -> None:
        # uvicorn marks `cycle` only: of pipelined requests the last one, which may never begin.
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            scope = cast(dict[str, Any], cycle.scope)
            gone: Callable[[], None] | None = scope.get(DISCONNECT)
            scope[DISCONNECT] = GONE
            if gone is not None:
                gone()

    def on_response_complete(self) -> None:
        """uvicorn's, without its timer per answer: `sweep` looks at the idle connections, for 3 % less CPU."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._running = cycle
            self._start_asgi_task(cycle, app)
        else:
            self._idle_since = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not a valid HTTP request.", "invalid_http")

    def shutdown(self) -> None:
        """The server stops. uvicorn closes what is idle; a connection that is new, or whose head is half there, has a
        request on its way to us, so it gets a moment: its answer says `connection: close`. An idle connection stays
        open for `linger_seconds`, since its client may be writing right now, and would see a reset."""
        if self._head_since is not None:
            self.loop.call_later(_ON_ITS_WAY_SECONDS, super().shutdown)
        elif self._idle_since is not None and self.linger_seconds:
            self.loop.call_later(self.linger_seconds, super().shutdown)
        else:
            super().shutdown()

    def sweep(self, now: float) -> None:
        """Closes what is idle; drops clients that do not finish their head, and those that take nothing any more of
        what was written, or next to nothing: such a one keeps a place at its replica."""
        if self._idle_since is not None and now - self._idle_since > self.timeout_keep_alive:
            self.transport.close()
        if self._head_since is not None and now - self._head_since > self.head_seconds:
            self.transport.abort()
        cycle = self.cycle
        if (
            cycle is not None  # pyright: ignore[reportUnnecessaryComparison] - None before the first request
            and cycle.more_body
            and now - self._body_since > self.head_seconds
        ):
            if not cycle.response_started:
                self._refuse(408, f"The body did not arrive within {self.head_seconds:g} s.", "request_timeout")
            elif cycle.response_complete and self._head_since is None:
                # The answer went out before the body had come. Such a connection is never idle again by itself.
                self.transport.close()
        left = self.transport.get_write_buffer_size()
        # A transport that closes waits for the last byte, however few are left.
        if not self.flow.write_paused and not (left and self.transport.is_closing()):
            self._stuck_since = None
            return
        if self._stuck_since is None or left > self._stuck_bytes:
            self._stuck_since, self._stuck_bytes = now, left
            return
        passed = now - self._stuck_since
        if passed <= (_STUCK_SECONDS if self.transport.is_closing() else self.head_seconds):
            return
        if self._stuck_bytes - left < _LEAST_RATE * passed:
            self.transport.abort()
        else:
            self._stuck_since, self._stuck_bytes = now, left

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.transport.is_closing():
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = orjson.dumps({"error": error})
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, HTTPStatus(status).phrase.encode(), len(body), body)
        )
        self.transport.close()


class _Config(uvicorn.Config):
    """`mutual` instead of files: a context that is kept up to date."""

    mutual: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        if self.mutual is not None:
            self.ssl = self.mutual


class HTTPServer(uvicorn.Server):
    """A server whose signals are the caller's business: it stops when `should_exit` is set, and not by force."""

    def __init__(self, config: uvicorn.Config, closing: Closing) -> None:
        self._exit = asyncio.Event()
        self._closing = closing
        super().__init__(config)

    def begin_closing(self) -> None:
        """Lets each connection end with its next answer; new ones are accepted until the server stops."""
        self._closing.begun = True
        for connection in self.server_state.connections:
            cycle = cast(BoundedProtocol, connection).cycle
            if cycle is not None and not cycle.response_started:  # pyright: ignore[reportUnnecessaryComparison]
                cycle.keep_alive = False

    @property
    def should_exit(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it stops. Can be set."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()
        else:
            self._exit.clear()

    async def main_loop(self) -> None:
        """uvicorn's, which wakes ten times a second to see whether it should stop."""
        tenths = 0
        while not await self.on_tick(tenths):
            tenths += 10
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    @property
    def port(self) -> int:
        """The port that it listens on, once `started`."""
        return self.servers[0].sockets[0].getsockname()[1]

    def sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        unread: list[BoundedProtocol] = []
        for connection in cast(list[BoundedProtocol], list(self.server_state.connections)):
            connection.sweep(now)
            if connection.unread:
                unread.append(connection)
        if unread:
            _drop_closed(unread)


def _drop_closed(connections: Iterable[BoundedProtocol]) -> None:
    """Drops the connections that their clients have closed. The kernel tells it, since the transports do not read."""
    by_file = {c.transport.get_extra_info("socket").fileno(): c for c in connections}
    poll = select.poll()
    for file in by_file:
        poll.register(file, _CLOSED_BY_PEER)
    for file, events in poll.poll(0):
        if events:
            by_file[file].transport.abort()


def make_server(
    app: Any,
    *,
    host: str,
    port: int,
    keep_alive: int,
    backlog: int = 2048,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    max_head_bytes: int = 32 * 1024,
    head_seconds: float = 60.0,
    max_connections: int = 16384,
    max_unfinished_bytes: int | None = None,
    stop_seconds: int | None = None,
    linger_seconds: float = 0.0,
    credentials: TLSCredentials | None = None,
    certificate_required: bool = False,
) -> HTTPServer:
    """A server on httptools. `stop_seconds` bounds how long a stop waits for what is in flight, and `linger_seconds`
    for requests on idle connections;
    `max_unfinished_bytes` bounds the heads that have not come to their end, over all connections. With `credentials` it
    speaks mutual TLS, and the scope tells the caller's role; people come without a certificate, unless
    `certificate_required`."""
    closing = Closing()
    protocol = type(
        "Protocol",
        (BoundedProtocol,),
        {"max_head_bytes": max_head_bytes, "head_seconds": head_seconds, "max_connections": max_connections}
        | {"credentials": credentials, "heads": Heads(max_unfinished_bytes)}
        | {"closing": closing, "linger_seconds": linger_seconds},
    )
    config = _Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        backlog=backlog,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=stop_seconds,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    if credentials is not None:
        config.mutual = credentials.server(optional=not certificate_required)
    return HTTPServer(config, closing)
