"""A server that stops: clients with keep-alive connections leave by their own next request, and see no reset."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from shoal.net.server import HTTPServer, make_server

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(linger: float) -> AsyncGenerator[tuple[HTTPServer, "asyncio.Task[None]"]]:
    server = make_server(app, host="127.0.0.1", port=0, keep_alive=60, stop_seconds=20, linger_seconds=linger)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, task
    finally:
        server.should_exit = True
        await task


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of the answer to one more request; b"": the connection was closed."""
    writer.write(REQUEST)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    await reader.readexactly(2)
    return head.lower()


async def test_the_next_answer_of_a_server_that_is_about_to_stop_ends_the_connection() -> None:
    async with serving(0) as (server, _), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert b"connection: close" not in await asked(reader, writer)
        server.begin_closing()
        assert b"connection: close" in await asked(reader, writer)
        assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_is_answered_after_the_stop_has_begun() -> None:
    async with serving(5) as (server, task), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asked(reader, writer)
        server.begin_closing()
        server.should_exit = True
        await asyncio.sleep(0.5)
        assert not task.done()
        assert b"connection: close" in await asked(reader, writer)
        assert await reader.read() == b""
        writer.close()
        await task  # nothing keeps it: it does not wait for the rest of the time


async def test_a_connection_that_stays_idle_is_closed_in_the_end() -> None:
    async with serving(0.3) as (server, task), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asked(reader, writer)
        server.should_exit = True
        await task
        assert await reader.read() == b""
        writer.close()
