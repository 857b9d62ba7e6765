"""The client's side of one request: its answer's head, body and errors."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from shoal.gateway.errors import ApiError
from shoal.serving.asgi import ANSWER, Headers, Scope, Send

if TYPE_CHECKING:
    from shoal.gateway.requestlog.capture import Capture
    from shoal.gateway.tracing import RequestSpans

_JSON: Final = (b"content-type", b"application/json")
_EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx and its kind would hold the chunks back otherwise
    (b"x-accel-buffering", b"no"),
)
_COMMENT: Final = b": waiting for a replica\n\n"
_COMMENT_SECONDS: Final = 5.0
_SLICE: Final = 64 * 1024
"""Of an answer that is not a stream: written at a time."""


class Stopping(Protocol):
    """Whether this gateway is about to stop: then a connection is not to be used again."""

    @property
    def stopping(self) -> bool: ...


class Quota(Protocol):
    """The limits of the tenant that asks."""

    def headers(self) -> Headers: ...


class Reply:
    __slots__ = ("_answer", "_client_id", "_id", "_process", "_send", "log", "quota", "spans", "started")

    def __init__(self, scope: Scope, send: Send, id: str, client_id: str | None, process: Stopping) -> None:
        self._send = send
        # Taken out of the scope: left there it would be a cycle, and work for the collector.
        self._answer: Callable[[Headers, bytes], bool] | None = scope.pop(ANSWER, None)
        self._id = id
        self._client_id = client_id
        self._process = process
        self.quota: Quota | None = None
        """Whose headers go out with the answer; None: nobody's."""
        self.log: Capture | None = None
        """What the tenant's request log keeps of it; None: nothing."""
        self.spans: RequestSpans | None = None
        """Of its trace; None: it is not traced."""
        self.started = False
        """The status is out: an error can only be an event now."""

    async def json(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """A whole answer."""
        if self._answer is not None and status == 200 and len(body) <= _SLICE and not self._process.stopping:
            self.started = True
            if self._answer((_JSON, *headers, *self._ids()), body):
                return
        await self.page(status, body, (_JSON, *headers))

    async def page(self, status: int, body: bytes, headers: Headers) -> None:
        """A whole answer, whose `headers` say what it is."""
        await self._start(status, ((b"content-length", str(len(body)).encode()), *headers))
        if len(body) > _SLICE:
            # The server waits between two of them for a client that does not take them: what is not sent is still ours
            # to count.
            rest = memoryview(body)
            while len(rest) > _SLICE:
                await self._send({"type": "http.response.body", "body": bytes(rest[:_SLICE]), "more_body": True})
                rest = rest[_SLICE:]
            body = bytes(rest)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def error(self, error: ApiError) -> None:
        """By status, or by an event when the status is already out."""
        if self.log is not None:
            self.log.error = error.code
        if self.spans is not None:
            self.spans.failed(error)
        if self.started:
            await self._send({"type": "http.response.body", "body": error.event(), "more_body": False})
        else:
            await self.json(error.status, error.body(), error.headers)

    async def begin_stream(self, headers: Headers = ()) -> None:
        """The head of a stream, once; `headers` are lost if it is out already."""
        if not self.started:
            await self._start(200, (*_EVENT_STREAM, *headers))

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def comment(self) -> None:
        """Tells client and proxies that somebody is here. Raises TimeoutError when the client does not take it."""
        async with asyncio.timeout(_COMMENT_SECONDS):
            await self.begin_stream()
            await self.write(_COMMENT)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        close = ((b"connection", b"close"),) if self._process.stopping else ()
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._ids(), *close]})

    def _ids(self) -> Headers:
        ids = (
            (b"x-request-id", (self._client_id or self._id).encode()),
            (b"x-shoal-request-id", self._id.encode()),
        )
        return ids if self.quota is None else (*ids, *self.quota.headers())
