"""The little of HTTP that the simulator needs on top of ASGI."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import parse_qsl

import orjson

_T = TypeVar("_T")
Scope = dict[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]


class ClientGoneError(Exception):
    """The client closed its connection."""


class _Transport(Protocol):
    def abort(self) -> None: ...


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.status: int | None = None
        """Of the answer, once it has begun."""
        self._receive = receive
        self._send = send
        self._more: list[tuple[bytes, bytes]] = []

    def add_header(self, name: str, value: str) -> None:
        """The answer gets this header."""
        self._more.append((name.encode(), value.encode("latin-1")))

    async def body(self) -> bytes:
        """The whole body. Raises ClientGoneError."""
        parts: list[bytes] = []
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(event.get("body", b""))
            if not event.get("more_body"):
                return b"".join(parts)

    async def gone(self) -> None:
        """Returns when the client has gone. Only after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def json(self, content: Any, status: int = 200) -> None:
        await self.answer(orjson.dumps(content), "application/json", status)

    async def answer(self, body: bytes = b"", content_type: str | None = None, status: int = 200) -> None:
        await self._start(status, content_type, [(b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        await self._start(200, "text/event-stream; charset=utf-8", [])

    async def event(self, data: bytes) -> None:
        """One server-sent event."""
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    def break_connection(self) -> None:
        """Resets the connection, as a dying process does."""
        # ASGI has no word for this; uvicorn's `send` belongs to the object that holds the connection.
        owner: Any = getattr(self._send, "__self__", None)
        transport = cast(_Transport | None, getattr(owner, "transport", None))
        if transport is None:
            raise RuntimeError("this server's connections cannot be broken on purpose")
        transport.abort()

    async def _start(self, status: int, content_type: str | None, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        if content_type is not None:
            headers.append((b"content-type", content_type.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._more]})


async def until_gone(exchange: Exchange, work: Awaitable[_T], *, notice_after: float) -> _T:
    """Awaits `work`, and cancels it when the client has been gone for `notice_after` seconds (ClientGoneError)."""

    async def watch() -> None:
        await exchange.gone()
        await asyncio.sleep(notice_after)

    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
