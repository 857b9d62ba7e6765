"""HTTP/1.1 on httptools, with the bounds that a public port needs and a stop that cuts nobody off.

uvicorn listens, and stops; `BoundedProtocol` is a connection, because uvicorn's own has no bounds and costs a small
request more.
"""

import asyncio
import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import Generator, Iterable
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import orjson
import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from shoal.net.asgi import CALLER, DIRECT, DISCONNECT, GONE, ASGIApp
from shoal.net.exchange import HIGH_WATER, Flow, HTTPExchange
from shoal.net.tls import TLSCredentials

_STUCK_SECONDS: Final = 30.0
_LEAST_RATE: Final = 512.0
"""Bytes a second that a client must take while more waits for it. One that takes a byte now and then keeps a place at
its replica, and memory here, for as long as it likes."""
_MOST_PIPELINED: Final = 64
"""Requests on one connection that wait for the answer before them. One read could bring thousands."""
_ON_ITS_WAY_SECONDS: Final = 1.0
_LINGER_SECONDS: Final = 5.0
_MOST_DROPPED: Final = 128 * 1024 * 1024
"""Bytes of a body that are read and dropped after its answer."""
_SHORT_URL: Final = 256
"""Bytes of an URL that is remembered with its parts."""
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
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

    __slots__ = ("begun", "stopped_at")

    def __init__(self) -> None:
        self.begun = False
        self.stopped_at: float | None = None
        """When the server took its last connection, by the loop's clock."""


def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """A request's path, decoded and as it was sent, and its query. Raises ValueError where it has none."""
    parsed = httptools.parse_url(url)
    raw = parsed.path
    path = raw.decode("ascii")
    return unquote(path) if "%" in path else path, raw, parsed.query or b""


_short_target: Final = lru_cache(maxsize=1024)(_target)
"""Clients send few different ones."""


class BoundedProtocol(asyncio.Protocol):
    """A client's connection. Bounds a request's head in bytes and time, what stands around its body, the heads of all
    connections together, the requests that wait on one connection, and the number of connections."""

    max_head_bytes = 32 * 1024
    head_seconds = 60.0
    max_connections = 16384
    heads = Heads()
    closing = Closing()
    linger_seconds = 0.0

    credentials: TLSCredentials | None = None
    """Of a port that speaks mutual TLS."""

    transport: asyncio.Transport
    flow: Flow

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As uvicorn calls it; `app_state` is not used."""
        self.loop = _loop or asyncio.get_running_loop()
        self.app: ASGIApp = cast(Any, config).loaded_app
        self.timeout_keep_alive = config.timeout_keep_alive
        self.server_state = server_state
        self.connections = server_state.connections
        self.tasks = server_state.tasks
        self._parser: Any = httptools.HttpRequestParser(self)
        # A request behind one that ends the connection is no error: that one is answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self.pipeline: deque[HTTPExchange] = deque()
        """Requests that wait for the answer before them, the next one last."""
        self.cycle: HTTPExchange | None = None
        """The request that was read last."""
        self._running: HTTPExchange | None = None
        """The request that is being answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.connections.add(self)  # pyright: ignore[reportArgumentType] - uvicorn names its own
        self.flow = Flow(self.transport)
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1",
            "server": get_local_addr(self.transport),
            "client": get_remote_addr(self.transport),
            "scheme": "https" if is_ssl(self.transport) else "http",
            "root_path": "",
            DISCONNECT: None,
        }
        """What all requests have in common."""
        if self.credentials is not None:
            self._scope[CALLER] = self.credentials.role(transport.get_extra_info)
        self._head_bytes = self._head_held = 0
        self._head_since: float | None = self.loop.time()
        self._around: int | None = None
        """Of a request that is not whole yet: bytes since its head, or since the last byte of its body. They are
        extensions of a chunk, or a trailer."""
        self._stuck_since: float | None = None
        self._stuck_bytes = 0
        self._idle_since: float | None = None
        self._dropped: int | None = None
        self._body_since = 0.0
        if len(self.connections) > self.max_connections:
            self.transport.abort()
        elif self.closing.stopped_at is not None:
            self.shutdown()  # its handshake was under way when the server stopped

    def data_received(self, data: bytes) -> None:
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > _MOST_DROPPED:
                self.transport.close()
            return
        self._idle_since = None
        if self._head_since is None:
            self._head_bytes = len(data)  # in case a head begins in this read
            if (around := self._around) is not None:
                # Without an end they would be kept here, and the parser copies an unfinished line at each read.
                if around > self.max_head_bytes:
                    text = "What stands around the request's body is too large."
                    self._refuse(431, text, "trailer_too_large")
                    return
                self._around = around + len(data)
        else:
            self._head_bytes += len(data)
            # A body may come in the same read as its head, so one read is allowed on top.
            if self._head_bytes - len(data) > self.max_head_bytes or len(data) > self.max_head_bytes + 256 * 1024:
                self._refuse(431, "The head of the request is too large.", "head_too_large")
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had not asked for another protocol
        except httptools.HttpParserError:
            self._refuse(400, "This is not a valid HTTP request.", "invalid_http")
        held = 0 if self._head_since is None else self._head_bytes
        if held != self._head_held:
            self._hold_head(held)

    def _hold_head(self, held: int) -> None:
        """`held`: bytes of this connection's head, which has not come to its end."""
        self.heads.held += held - self._head_held
        self._head_held = held
        if held and self.heads.full:
            self._refuse(503, "The gateway holds too many unfinished requests. Try again.", "overloaded")

    # --- what the parser reads --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._head_since is None:
            self._head_since = self.loop.time()
        self._url = b""
        self._headers = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._around is not None:
            return  # a trailer: nobody reads it, and it must not count as the head that was checked
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_since = None
        url, headers, parser = self._url, self._headers, self._parser
        # Only where what was read could hold so much: the sum costs 3 % of a small request.
        if (
            self._head_bytes > self.max_head_bytes
            and sum(len(name) + len(value) for name, value in headers) + len(url) > self.max_head_bytes
        ):
            self._refuse(431, "The head of the request is too large.", "head_too_large")
            return
        self._around = 0
        if len(self.pipeline) >= _MOST_PIPELINED:
            # An answer now would come before those that are due first.
            self.transport.abort()
            raise ConnectionAbortedError("too many pipelined requests")
        scope = self._scope.copy()
        method = parser.get_method().decode("ascii")
        path, raw_path, query = _short_target(url) if len(url) <= _SHORT_URL else _target(url)
        scope["method"], scope["headers"] = method, headers
        scope["path"], scope["raw_path"], scope["query_string"] = path, raw_path, query
        keep_alive = parser.should_keep_alive() and not self.closing.begun
        if (version := parser.get_http_version()) != "1.1":
            scope["http_version"] = version
            keep_alive = keep_alive and version != "1.0"
        before = self.cycle
        self.cycle = cycle = HTTPExchange(
            self, self.transport, scope, keep_alive=keep_alive, expects_continue=self._expects_continue
        )
        if method == "POST":
            scope[DIRECT] = cycle
        if before is None or before.response_complete:
            self._start(cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft(cycle)

    def _start(self, cycle: HTTPExchange) -> None:
        self._running = cycle
        self._body_since = self.loop.time()  # before its turn the body was not read
        cycle.task = self.loop.create_task(cycle.run())
        self.tasks.add(cycle.task)

    def on_body(self, body: bytes) -> None:
        self._around = 0
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and cycle.feed(body) > HIGH_WATER:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._around = None
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.end_body()
        # Reading pauses at 64 KiB of a body and goes on at the next `receive()`, which does not come for a body that is
        # whole. Unless the transport reads, it does not notice that the client leaves.
        if not self.pipeline:
            self.flow.resume_reading()

    # --- the client -------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

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
        self.connections.discard(self)  # pyright: ignore[reportArgumentType]
        self._hold_head(0)
        self._client_left()
        self.flow.resume_writing()
        # Each of them knows the connection: a cycle would be work for the garbage collector.
        self._parser = self.cycle = self._running = None
        self.pipeline.clear()

    def _client_left(self) -> None:
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.leave()
            gone = cycle.scope[DISCONNECT]
            cycle.scope[DISCONNECT] = GONE
            if gone is not None and gone is not GONE:
                gone()

    def on_response_complete(self) -> None:
        """An answer was written. `sweep` looks at the idle connections: a timer per answer would cost 3 % more CPU."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._dropped is not None:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start(self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()

    def linger(self) -> None:
        """The answer went out before the body had come. What still comes is dropped for a while: if the connection were
        closed at once, the system would answer it with a reset, which takes the answer from a client that has not read
        it yet."""
        if self.transport.is_closing():
            return
        self._dropped = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def shutdown(self) -> None:
        """The server stops. A connection without a request stays open for `linger_seconds`, since its client may be
        writing right now, and would see a reset: an idle one, a new one, and one whose head is half there. The last
        two have a moment in any case. Their next answer says `connection: close`."""
        now = self.loop.time()
        stopped_at = now if self.closing.stopped_at is None else self.closing.stopped_at
        if self._head_since is not None:
            self.loop.call_at(max(stopped_at + self.linger_seconds, now + _ON_ITS_WAY_SECONDS), self._end)
        elif self._idle_since is not None and self.linger_seconds:
            self.loop.call_at(stopped_at + self.linger_seconds, self._end)
        else:
            self._end()

    def _end(self) -> None:
        """Closes the connection, after its answer if one is due."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def sweep(self, now: float) -> None:
        """Closes what is idle; drops clients that do not finish their head, and those that take nothing any more of
        what was written, or next to nothing: such a one keeps a place at its replica."""
        if self._idle_since is not None and now - self._idle_since > self.timeout_keep_alive:
            self.transport.close()
        cycle = self.cycle
        if self._head_since is not None and now - self._head_since > self.head_seconds:
            if cycle is None or cycle.response_complete:
                self.transport.abort()
            else:
                cycle.keep_alive = False
        if (
            cycle is not None
            and cycle is self._running
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
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and self._around is None):
            pass  # it is about a head, and no answer is due before
        elif cycle is not self._running or cycle.response_started:
            self.transport.abort()  # these words would be taken for another answer, or for a part of one
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
            if cycle is not None and not cycle.response_started:
                cycle.keep_alive = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's: takes no new connection, and returns when those that it has are closed."""
        self._closing.begun = True
        self._closing.stopped_at = asyncio.get_running_loop().time()
        await super().shutdown(sockets)

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
    for requests on connections that have none: idle ones, and new ones;
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
