"""An engine that does what a test says: raw HTTP over asyncio, so that it can also break off anywhere."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

USAGE = {
    "prompt_tokens": 7,
    "total_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


@dataclass
class EngineRequest:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    gone: asyncio.Event
    """Set when the caller closes the connection."""
    raw: bytes = b""
    """The body as it came."""

    @property
    def model(self) -> str:
        return self.body["model"]

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
        await self.write(head.encode() + body)

    async def begin_stream(self) -> None:
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    def delta(self, text: str, tokens: int) -> bytes:
        usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}
        return self._event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}], usage=usage)

    def closing(self, usage: dict[str, Any] | None = None) -> bytes:
        return self._event(choices=[], usage=usage or USAGE)

    def _event(self, **rest: Any) -> bytes:
        event = {
            "id": self.body.get("rid"),
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.model,
            **rest,
        }
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


Behaviour = Callable[[EngineRequest], Awaitable[None]]


async def serve_normally(request: EngineRequest) -> None:
    """Three tokens: a, b, c."""
    if request.path == "/v1/embeddings":
        given = request.body["input"]
        several = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
        body = {
            "data": [{"embedding": [0.1, 0.2], "index": index, "object": "embedding"} for index in range(several)],
            "model": "/shoal/models/model",  # SGLang tells its path here
            "object": "list",
            "usage": {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0},
        }
        await request.answer(200, json.dumps(body, separators=(",", ":")).encode())
    elif request.body.get("stream"):
        await request.begin_stream()
        for n, text in enumerate("abc", 1):
            await request.chunk(request.delta(text, n))
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()
    else:
        message = {"role": "assistant", "content": 'abc "model":"chat/llama" "usage":{'}
        body = {
            "id": request.body.get("rid"),
            "object": "chat.completion",
            "created": 1,
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": USAGE,
        }
        await request.answer(200, json.dumps(body, separators=(",", ":")).encode())


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers["content-length"]))
    parts: list[bytes] = []
    while size := int(await reader.readline(), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(parts)


@dataclass
class ScriptedEngine:
    behave: Behaviour = serve_normally
    port: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    connections: int = 0
    keep_alive: float = 5.0
    ready: int = 200
    """What it answers to a GET of `ready_path`; those are not among `requests`."""
    ready_path: str = "/ready"
    _handlers: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def dead(self) -> bool:
        """Its process has ended."""
        return self._server is None

    def die(self) -> None:
        """Its process ends by force: no connection lives on, and nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self._writers.add(writer)
        try:
            await self._requests(reader, writer)
        finally:
            self._handlers.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            while True:
                async with asyncio.timeout(self.keep_alive):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET "):
                    status = self.ready if head.split(" ")[1] == self.ready_path else 404
                    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode())
                    continue
                lines = head.split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
                body = await _body(reader, headers)
                decoded = {} if headers.get("content-type", "").startswith("multipart/") else json.loads(body)
                path = lines[0].split(" ")[1]
                request = EngineRequest(path, headers, decoded, writer, asyncio.Event(), raw=body)
                self.requests.append(request)
                watch = asyncio.create_task(self._watch(reader, request))
                try:
                    await self.behave(request)
                finally:
                    watch.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watch
                if writer.is_closing():
                    break

    async def _watch(self, reader: asyncio.StreamReader, request: EngineRequest) -> None:
        while not reader.at_eof() and reader.exception() is None:
            await asyncio.sleep(0.005)
        request.gone.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["ScriptedEngine", None]:
        self._server = server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._server = None
            handlers = list(self._handlers)
            for handler in handlers:
                handler.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)
