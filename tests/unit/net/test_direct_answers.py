"""Answers written without ASGI's messages are, for the client, those written with them; so are bodies taken without."""

import asyncio
from typing import Any

import pytest

from shoal.net.asgi import DIRECT, DISCONNECT, GONE, header_lines, header_pairs
from shoal.net.server import HTTPServer
from tests.unit.net.test_server_bounds import serving

HEADERS = ((b"content-type", b"text/event-stream"), (b"x-request-id", b"one"))
LINES = header_lines(HEADERS)
PARTS = (b"data: 1\n\n", b"data: 2\n\n")


def test_lines_are_the_same_headers_as_pairs() -> None:
    assert LINES == b"content-type: text/event-stream\r\nx-request-id: one\r\n"
    assert header_pairs(LINES) == HEADERS
    assert header_pairs(header_lines(())) == ()


async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    direct = scope.pop(DIRECT)
    if scope["path"] == "/direct":
        assert direct.begin(LINES, PARTS[0])
        assert direct.part(PARTS[1])
        assert direct.end()
    elif scope["path"] == "/mixed":
        assert direct.begin(LINES, PARTS[0])
        await send({"type": "http.response.body", "body": PARTS[1], "more_body": False})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})
        for part in PARTS:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def asked(server: HTTPServer, *paths: str) -> list[tuple[set[bytes], bytes]]:
    """The head's lines but the date, and the body, of each answer to requests that are sent at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for path in paths:
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
    answers: list[tuple[set[bytes], bytes]] = []
    for _ in paths:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        answers.append(({line for line in head.split(b"\r\n") if not line.startswith(b"date")}, body))
    if any(b"connection: close" in head for head, _ in answers):
        assert await reader.read() == b""
    writer.close()
    return answers


@pytest.mark.parametrize("path", ["/direct", "/mixed"])
async def test_a_stream_is_the_same_with_and_without_messages(path: str) -> None:
    async with serving(app) as server, asyncio.timeout(30):
        plain, direct, after = await asked(server, "/messages", path, "/messages")
        assert direct == plain == after


async def test_a_stream_of_a_server_that_is_about_to_stop_ends_the_connection() -> None:
    async with serving(app) as server, asyncio.timeout(30):
        server.begin_closing()
        [plain], [direct] = await asked(server, "/messages"), await asked(server, "/direct")
        assert b"connection: close" in direct[0]
        assert direct == plain


async def test_a_client_that_takes_nothing_gets_the_end_of_its_stream_when_it_does() -> None:
    written, refused = 0, asyncio.Event()

    async def flood(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        nonlocal written
        direct = scope.pop(DIRECT)
        part = bytes(64 * 1024)
        assert direct.begin(LINES, part)
        written = 1
        while True:
            written += 1
            if not direct.part(part):
                break
        assert not direct.end()
        refused.set()
        await direct.drained()
        assert direct.end()

    async with serving(flood) as server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        await refused.wait()
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            more = await reader.read(1 << 20)
            assert more
            got += more
        assert got.count(b"\r\n10000\r\n") == written
        writer.close()


async def test_a_body_is_taken_at_once_if_it_is_whole_and_read_by_messages_if_not() -> None:
    took: list[tuple[bytes | None, list[bytes]]] = []

    async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
        direct = scope.pop(DIRECT)
        whole, parts = direct.body(), list[bytes]()
        while whole is None:
            message = await receive()
            parts.append(message["body"])
            if not message["more_body"]:
                break
        took.append((whole, parts))
        assert direct.begin(LINES, b"x")
        assert direct.end()
        assert (await receive())["type"] == "http.disconnect"

    async with serving(echo) as server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n"
        for first, rest in ((b"\r\nwhole!", b""), (b"\r\nin ", b"two"), (b"expect: 100-continue\r\n\r\nasked!", b"")):
            writer.write(head + first)
            if rest:
                while server.server_state.total_requests == len(took) and not server.server_state.tasks:
                    await asyncio.sleep(0.01)
                writer.write(rest)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    assert took == [(b"whole!", []), (None, [b"in ", b"two"]), (None, [b"asked!"])]


async def test_a_body_is_not_taken_when_its_client_has_left() -> None:
    took = asyncio.get_running_loop().create_future()

    async def late(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
        direct, connection = scope.pop(DIRECT), scope
        while connection[DISCONNECT] is not GONE:
            await asyncio.sleep(0.01)
        took.set_result(direct.body())

    async with serving(late) as server, asyncio.timeout(30):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok")
        writer.close()
        assert await took is None
