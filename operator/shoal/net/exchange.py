"""One request of a connection and its answer, for the application: ASGI's `receive` and `send`, and the
`DirectExchange`.

`BoundedProtocol` (server.py) makes one for each request, and gives it what arrives.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol

import structlog

from shoal.net.asgi import DIRECT, ASGIApp, HeaderLines, Headers, Scope

log = structlog.get_logger()

HIGH_WATER: Final = 64 * 1024
"""Bytes of a body that are kept while the application does not take them. Above, reading pauses."""
_BAD_NAME: Final = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\\[\]={} \t"]')
_BAD_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus if status.value >= 200
}


class Flow:
    """Pauses of a connection's two directions."""

    __slots__ = ("_transport", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._writable: asyncio.Event | None = None
        self.read_paused = False
        self.write_paused = False
        """The client does not take what was written."""

    async def drain(self) -> None:
        """Returns when the client takes more."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._writable is not None:
            self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()


class ServedDefaults(Protocol):
    """What answers of a server have in common."""

    @property
    def default_headers(self) -> Iterable[tuple[bytes, bytes]]: ...


class ClientConnection(Protocol):
    """The connection of a request."""

    @property
    def app(self) -> ASGIApp: ...
    @property
    def flow(self) -> Flow: ...
    @property
    def tasks(self) -> set[asyncio.Task[None]]: ...
    @property
    def server_state(self) -> ServedDefaults: ...

    def linger(self) -> None:
        """Ends, and leaves a client that still sends its body the time to read the answer."""
        ...

    def on_response_complete(self) -> None:
        """The answer was written to its end."""
        ...


class HTTPExchange:
    """One request and its answer."""

    __slots__ = (
        "_arrived",
        "_body",
        "_chunked",
        "_connection",
        "_expects_continue",
        "_left",
        "_news",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "task",
        "transport",
    )

    def __init__(
        self,
        connection: "ClientConnection",
        transport: asyncio.Transport,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._connection = connection
        self.transport = transport
        self.scope = scope
        self.keep_alive = keep_alive
        """The connection takes another request after the answer."""
        self._expects_continue = expects_continue
        self.task: asyncio.Task[None] | None = None
        """Runs the application, while it does."""
        self.disconnected = False
        """The client has left: nothing is written any more."""
        self._body: bytes | bytearray = b""
        self.more_body = True
        """The request's body is not whole yet."""
        self._news = False
        """`receive` has something to say."""
        self._arrived: asyncio.Event | None = None
        """Wakes `receive`; most requests are whole before they are asked for, and need none."""
        self.response_started = self.response_complete = False
        self._chunked = False
        self._left = 0
        """Bytes of the answer that its content-length has promised, beyond those sent."""

    async def run(self) -> None:
        """Lets the application answer."""
        connection = self._connection
        try:
            await connection.app(self.scope, self.receive, self.send)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                # Of the error nothing but its kind: its text may have parts of the request.
                log.error("a request failed", error=type(error).__name__)
            await self._fail()
        else:
            if not self.response_complete and not self.disconnected:
                log.error("a request was not answered")
                await self._fail()
        finally:
            self.scope.pop(DIRECT, None)  # it is this object: a cycle would be work for the garbage collector
            if self.task is not None:
                connection.tasks.discard(self.task)
                self.task = None

    async def _fail(self) -> None:
        if self.response_started:
            self.transport.close()
            return
        text = b"Internal Server Error"
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(text)),
            (b"connection", b"close"),
        ]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": text})

    # --- what arrives -----------------------------------------------------------------------------------------------

    def feed(self, part: bytes) -> int:
        """Adds a part of the body; returns how much is kept."""
        if not self._body:
            self._body = part
        else:
            # Parts may be of one byte each, so they are not kept as they came.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += part
        self.wake()
        return len(self._body)

    def end_body(self) -> None:
        """The body is whole."""
        self.more_body = False
        self.wake()

    def leave(self) -> None:
        """The client has left."""
        self.disconnected = True
        self.wake()

    def wake(self) -> None:
        self._news = True
        if self._arrived is not None:
            self._arrived.set()

    async def receive(self) -> Mapping[str, Any]:
        """ASGI's: the next part of the body, or that the client has left."""
        if self._expects_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        if not self.disconnected and not self.response_complete:
            self._connection.flow.resume_reading()
            if not self._news:
                if self._arrived is None:
                    self._arrived = asyncio.Event()
                await self._arrived.wait()
                self._arrived.clear()
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}

    # --- the answer as messages -------------------------------------------------------------------------------------

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI's: the next part of the answer."""
        if not self.disconnected:
            await self._connection.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started:
            if kind != "http.response.start":
                raise RuntimeError(f"the answer begins with {kind}")
            self._start(message["status"], message.get("headers", ()))
        elif self.response_complete or kind != "http.response.body":
            raise RuntimeError(f"{kind} after the answer's {'end' if self.response_complete else 'head'}")
        else:
            self._go_on(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, status: int, headers: Headers) -> None:
        self.response_started = True
        self._expects_continue = False
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status]
        framed = closes = False
        for name, value in (*self._connection.server_state.default_headers, *headers):
            if _BAD_NAME.search(name) or _BAD_VALUE.search(value):
                raise RuntimeError("an invalid header")
            lower = name.lower()
            if lower == b"content-length" and not framed:
                self._left, framed = int(value), True
            elif lower == b"transfer-encoding" and value.lower() == b"chunked":
                self._left, framed, self._chunked = 0, True, True
            elif lower == b"connection" and b"close" in [each.strip() for each in value.lower().split(b",")]:
                self.keep_alive, closes = False, True
            parts += (b"\r\n", lower, b": ", value)
        if not self.keep_alive and not closes:
            parts.append(b"\r\nconnection: close")
        if not framed and self.scope["method"] != "HEAD" and status not in (204, 304):
            self._chunked = True
            parts.append(b"\r\ntransfer-encoding: chunked")
        parts.append(b"\r\n\r\n")
        self.transport.write(b"".join(parts))

    def _go_on(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._left = 0
        elif self._chunked:
            self.transport.write(
                (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
            )
        else:
            if len(body) > self._left:
                raise RuntimeError("the answer is longer than its content-length")
            self._left -= len(body)
            self.transport.write(body)
        if not more:
            if self._left:
                raise RuntimeError("the answer is shorter than its content-length")
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self.wake()
        if not self.keep_alive:
            if self.more_body:
                self._connection.linger()
            else:
                self.transport.close()
        self._connection.on_response_complete()

    # --- the same without messages (DirectExchange) -----------------------------------------------------------------

    def body(self) -> bytes | None:
        if self.more_body or self._expects_continue or self.disconnected:
            return None
        self._connection.flow.resume_reading()
        self._news = False
        body, self._body = self._body, b""
        return bytes(body)

    def whole(self, headers: HeaderLines, body: bytes) -> bool:
        if self._connection.flow.write_paused:
            return False
        if self.disconnected:
            return True
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (self._head(headers), len(body), body))
        self.response_started = True
        self._complete()
        return True

    def begin(self, headers: HeaderLines, data: bytes) -> bool:
        if self._connection.flow.write_paused:
            return False
        if self.disconnected:
            return True
        head = self._head(headers)
        self.transport.write(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (head, len(data), data))
        self.response_started = self._chunked = True
        return True

    def part(self, data: bytes) -> bool:
        if self.disconnected:
            return True
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._connection.flow.write_paused

    def end(self) -> bool:
        if self._connection.flow.write_paused:
            return False
        if not self.disconnected:
            self.transport.write(b"0\r\n\r\n")
            self._complete()
        return True

    async def drained(self) -> None:
        if not self.disconnected:
            await self._connection.flow.drain()

    def _head(self, headers: HeaderLines) -> bytes:
        """The head without its last line, which says how long the body is."""
        head = b"HTTP/1.1 200 OK\r\n"
        for pair in self._connection.server_state.default_headers:
            head += b"%b: %b\r\n" % pair
        return head + headers if self.keep_alive else b"%b%bconnection: close\r\n" % (head, headers)
