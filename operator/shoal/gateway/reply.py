"""The answer of one request: head, body and errors."""

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from shoal.core.translation import StreamFailure
from shoal.gateway.dialects import Dialect
from shoal.net.asgi import DirectExchange, HeaderLines, Headers, Send, header_lines, header_pairs
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.tracing import RequestSpans
    from shoal.requestlog.capture import Capture

_JSON: Final = ((b"content-type", b"application/json"),)
_JSON_LINES: Final = header_lines(_JSON)
_EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # without it, nginx and similar proxies buffer the chunks
    (b"x-accel-buffering", b"no"),
)
_EVENT_STREAM_LINES: Final = header_lines(_EVENT_STREAM)
_COMMENT: Final = b": waiting for a replica\n\n"
_COMMENT_SECONDS: Final = 5.0
_SLICE: Final = 64 * 1024
"""Bytes of a non-streaming answer written at a time."""


class Stopping(Protocol):
    """Whether this gateway is stopping: then connections are closed after their answer."""

    @property
    def stopping(self) -> bool: ...


class Quota(Protocol):
    """The limits of the request's tenant."""

    def header_lines(self) -> HeaderLines: ...


class Events(Protocol):
    """The events of a stream that has begun."""

    def error(self, failure: StreamFailure) -> bytes:
        """The last ones, of a stream that failed."""
        ...


class Reply:
    __slots__ = (
        "_client_id",
        "_dialect",
        "_direct",
        "_id",
        "_process",
        "_send",
        "events",
        "log",
        "part",
        "quota",
        "spans",
        "started",
    )

    def __init__(
        self,
        direct: DirectExchange | None,
        send: Send,
        id: str,
        client_id: str | None,
        process: Stopping,
        *,
        dialect: Dialect | None = None,
    ) -> None:
        """`dialect`: the API whose shape errors have; None: OpenAI's."""
        self._send = send
        self._direct = direct
        self.part = None if direct is None else direct.part
        """Writes a part of a stream that has begun, without a coroutine (`DirectExchange.part`); None: use `write`."""
        self._id = id
        self._dialect = dialect
        self._client_id = client_id
        self._process = process
        self.quota: Quota | None = None
        """The quota whose headers are added to the answer; None: no headers."""
        self.log: Capture | None = None
        """Captures the request for the tenant's request log; None: not logged."""
        self.spans: RequestSpans | None = None
        """Spans of the request's trace; None: not traced."""
        self.events: Events | None = None
        """Of a stream in the API of `dialect`, once the client gets a first one."""
        self.started = False
        """The status was sent: an error can only be an event now."""

    async def json(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """A whole JSON answer."""
        if self._direct is not None and status == 200 and len(body) <= _SLICE and not self._process.stopping:
            self.started = True
            if self._direct.whole(_JSON_LINES + header_lines(headers) + self._own_lines(), body):
                return
        await self.page(status, body, (*_JSON, *headers))

    async def page(self, status: int, body: bytes, headers: Headers) -> None:
        """A whole answer with the given content headers."""
        await self._start(status, ((b"content-length", str(len(body)).encode()), *headers))
        if len(body) > _SLICE:
            # The server waits between two slices for a slow client: the part that was not sent still counts as held by
            # the gateway.
            rest = memoryview(body)
            while len(rest) > _SLICE:
                await self._send({"type": "http.response.body", "body": bytes(rest[:_SLICE]), "more_body": True})
                rest = rest[_SLICE:]
            body = bytes(rest)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def error(self, error: ApiError) -> None:
        """An error as a status, or as an event if the status was already sent."""
        if self.log is not None:
            self.log.error = error.code
        if self.spans is not None:
            self.spans.failed(error)
        if self.started:
            await self._send({"type": "http.response.body", "body": self.error_event(error), "more_body": False})
        else:
            body = error.body() if self._dialect is None else self._dialect.error(error, self._id)
            await self.json(error.status, body, error.headers)

    def error_event(self, error: ApiError) -> bytes:
        """An error as the end of a stream."""
        if self._dialect is None:
            return error.event()
        events = self._dialect.events(self._id, "") if self.events is None else self.events
        return events.error(error.failure(self._id))

    async def begin_stream(self, headers: Headers = ()) -> None:
        """Sends the head of a stream, once; `headers` are ignored if it was already sent."""
        if not self.started:
            await self._start(200, (*_EVENT_STREAM, *headers))

    async def begin_stream_with(self, data: bytes, headers: Headers) -> None:
        """`begin_stream`, and a first part."""
        if self._direct is not None and not self.started and not self._process.stopping:
            self.started = True
            if self._direct.begin(_EVENT_STREAM_LINES + header_lines(headers) + self._own_lines(), data):
                return
            self.started = False
        await self.begin_stream(headers)
        await self.write(data)

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def drained(self) -> None:
        """Returns when the client takes more of what `part` wrote, or has left."""
        if self._direct is not None:
            await self._direct.drained()

    async def end(self) -> None:
        """Ends a stream."""
        if self._direct is None or not self._direct.end():
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def comment(self) -> None:
        """Keeps the connection alive for client and proxies. Raises TimeoutError if the client does not accept it."""
        async with asyncio.timeout(_COMMENT_SECONDS):
            await self.begin_stream()
            await self.write(_COMMENT)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        close = ((b"connection", b"close"),) if self._process.stopping else ()
        own = header_pairs(self._own_lines())
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own, *close]})

    def _own_lines(self) -> HeaderLines:
        """The request's ids, and what is left of its tenant's limits."""
        own = self._id.encode()
        client = own if self._client_id is None else self._client_id.encode()
        ids = b"x-request-id: %b\r\nx-shoal-request-id: %b\r\n" % (client, own)
        if self._dialect is not None and self._dialect.id_header:
            ids += b"%b: %b\r\n" % (self._dialect.id_header, own)
        return ids if self.quota is None else ids + self.quota.header_lines()
