"""A server that stops: clients with keep-alive connections, or new ones, leave by their own next request, and see no
reset."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from shoal.net.server import HTTPServer, make_server
from tests.support.sources import localhost_tls

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(linger: float, **options: Any) -> AsyncGenerator[tuple[HTTPServer, "asyncio.Task[None]"]]:
    server = make_server(
        app, host="127.0.0.1", port=0, keep_alive=60, stop_seconds=20, linger_seconds=linger, **options
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, task
    finally:
        server.should_exit = True
        await task


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes = REQUEST) -> bytes:
    """The head of the answer to one more request; b"": the connection was closed."""
    writer.write(request)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
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


@pytest.mark.parametrize("sent", [b"", REQUEST[:9]])
async def test_a_new_connection_is_answered_after_the_stop_has_begun(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client's pool makes it ahead of the request."""
    monkeypatch.setattr("shoal.net.server._ON_ITS_WAY_SECONDS", 0.1)
    async with serving(5) as (server, task), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        await asyncio.sleep(0.1)
        server.begin_closing()
        server.should_exit = True
        await asyncio.sleep(0.5)
        assert not task.done()
        assert b"connection: close" in await asked(reader, writer, REQUEST[len(sent) :])
        assert await reader.read() == b""
        writer.close()
        await task


async def test_the_answer_on_a_new_connection_ends_it_without_a_linger_too() -> None:
    async with serving(0) as (server, task), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(0.1)
        server.should_exit = True
        await asyncio.sleep(0.2)
        assert b"connection: close" in await asked(reader, writer)
        writer.close()
        await task


@pytest.mark.parametrize("sent", [b"", REQUEST[:9]])
async def test_clients_that_connect_and_say_nothing_do_not_hold_the_stop(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.net.server._ON_ITS_WAY_SECONDS", 0.1)
    async with serving(0.3) as (server, task), asyncio.timeout(10):
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
        for _, writer in silent:
            writer.write(sent)
        await asyncio.sleep(0.1)
        server.should_exit = True
        await task  # otherwise it takes `stop_seconds`, which are more than this test has
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()


async def test_a_handshake_that_ends_after_the_stop_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.net.server._ON_ITS_WAY_SECONDS", 0.1)
    _, authority = localhost_tls(tmp_path)
    trusting = ssl.create_default_context(cafile=authority)
    files = {"tls_cert": tmp_path / "tls.crt", "tls_key": tmp_path / "tls.key"}
    async with serving(1, **files) as (server, task), asyncio.timeout(10):
        first, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
        late, late_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(0.1)
        server.should_exit = True
        await asyncio.sleep(0.2)
        await late_writer.start_tls(trusting, server_hostname="localhost")
        await task
        assert await first.read() == b""
        assert await late.read() == b""
        writer.close()
        late_writer.close()
