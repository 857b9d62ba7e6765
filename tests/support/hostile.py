"""Servers of tenants who mean harm: they send whoever fetches from them elsewhere, lie, and never end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]


@dataclass
class Server:
    """Answers every request by `answer`, and keeps the headers that it was sent, and the paths."""

    answer: Answer
    asked: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    port: int = 0

    def url(self, path: str = "/x.tar", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.raw_path)
        return await self.answer(request)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Server"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        server = TestServer(app)
        await server.start_server(host="127.0.0.1")
        self.port = server.port or 0
        try:
            yield self
        finally:
            await server.close()


@asynccontextmanager
async def listening() -> AsyncGenerator[tuple[int, list[bytes]]]:
    """A port inside, whatever it speaks, and how each connection to it began."""
    began: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began.append(await reader.read(1))
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], began


def redirecting(location: str | Callable[[], str], status: int = 307) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        where = location if isinstance(location, str) else location()
        return web.Response(status=status, headers={"Location": where})

    return answer


def telling(body: bytes, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        span = request.http_range
        if span.start is None:
            return web.Response(body=body, headers={"ETag": '"v1"', **headers})
        stop = min(span.stop or len(body), len(body))
        spanned = {"Content-Range": f"bytes {span.start}-{stop - 1}/{len(body)}", "ETag": '"v1"', **headers}
        return web.Response(status=206, body=body[span.start : stop], headers=spanned)

    return answer


def endless(
    piece: bytes, pause: float = 0.0, *, claims: int | None = None, sent: Callable[[int], None] = lambda _: None
) -> Answer:
    """Never ends; `claims` is the size that it names. `sent` hears of each piece."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"v1"'})
        if claims is not None:
            response.headers["Content-Range"] = f"bytes {request.http_range.start or 0}-{claims - 1}/{claims}"
            response.set_status(206)
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            while True:
                await response.write(piece)
                sent(len(piece))
                await asyncio.sleep(pause)
        except ConnectionError:
            return response

    return answer
