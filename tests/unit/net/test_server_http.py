"""The server speaks HTTP/1.1 as clients expect it: bodies in any framing, older clients, paths, and applications that
fail."""

import asyncio
from typing import Any

import pytest

from shoal.net.asgi import DISCONNECT
from shoal.net.server import HTTPServer
from tests.unit.net.test_server_bounds import closed, serving


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with what it understood."""
    body, more = b"", scope["method"] == "POST"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    parts = (scope["method"].encode(), scope["path"].encode(), scope["raw_path"], scope["query_string"], body)
    text = b"|".join(parts)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


async def said(server: HTTPServer, *parts: bytes) -> bytes:
    """All that the server sends to a client that sends these parts, one after the other, and keeps the connection
    open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.02)
    try:
        return await closed(reader)
    finally:
        writer.close()


CLOSE = b"host: x\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("target", "understood"),
    [
        (b"/v1/models", b"/v1/models|/v1/models|"),
        (b"/v1/models/a%2Fb%20c?limit=3&x=%41", b"/v1/models/a/b c|/v1/models/a%2Fb%20c|limit=3&x=%41"),
        (b"//two", b"//two|//two|"),
        (b"http://elsewhere:80/v1/models?x", b"/v1/models|/v1/models|x"),
        (b"/" + b"a" * 400 + b"?q", b"/" + b"a" * 400 + b"|/" + b"a" * 400 + b"|q"),
    ],
)
async def test_paths_and_queries(target: bytes, understood: bytes) -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        answer = await said(server, b"GET " + target + b" HTTP/1.1\r\n" + CLOSE + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\nGET|" + understood + b"|")


async def test_a_body_in_chunks_of_any_size() -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        head = b"POST / HTTP/1.1\r\n" + CLOSE + b"transfer-encoding: chunked\r\n\r\n"
        small = b"".join(b"1\r\n%c\r\n" % (97 + n % 26) for n in range(3000))
        answer = await said(server, head + small[:7001], small[7001:], b"5\r\nthere\r\n0\r\n\r\n")
        expected = bytes(97 + n % 26 for n in range(3000))
        assert answer.endswith(b"|" + expected + b"there")


async def test_a_client_that_waits_to_be_told_sends_its_body() -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_its_answer_and_the_end(more: bytes) -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        answer = await said(server, b"GET /a HTTP/1.0\r\n" + more + b"\r\n")
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"GET|/a|/a||")


async def test_a_client_that_sends_all_of_its_body_first_reads_the_refusal_of_it() -> None:
    """The answer goes out after the head. A connection closed with bytes that nobody read is reset, and a reset takes
    the answer from the client."""

    async def refuse(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"3"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"big"})

    async with serving(refuse) as server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (16 << 20))
        for _ in range(256):
            writer.write(bytes(65_536))
            await writer.drain()
        answer = await closed(reader)
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.endswith(b"\r\n\r\nbig")
        writer.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)


async def test_a_head_is_answered_without_a_body_and_the_connection_goes_on() -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        answer = await said(server, b"HEAD /a HTTP/1.1\r\nhost: x\r\n\r\nGET /b HTTP/1.1\r\n" + CLOSE + b"\r\n")
        first, _, second = answer.partition(b"\r\n\r\n")
        assert b"content-length: 12" in first
        assert second.startswith(b"HTTP/1.1 200 OK\r\n")
        assert second.endswith(b"GET|/b|/b||")


async def test_an_upgrade_to_another_protocol_is_ignored() -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        asked = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(asked)
        assert (await reader.readuntil(b"GET|/a|/a||")).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 no http\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"]
)
async def test_what_is_not_http_is_refused(sent: bytes) -> None:
    async with serving(echo) as server, asyncio.timeout(20):
        answer = await said(server, sent)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"invalid_http" in answer


@pytest.mark.parametrize("how", ["raises", "returns", "begins", "too long", "bad header"])
async def test_an_application_that_fails_leaves_no_client_waiting(how: str) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        if how == "raises":
            raise ValueError("a secret of the request")
        if how == "returns":
            return
        headers = [(b"content-length", b"2"), *([(b"x", b"a\r\nb: c")] if how == "bad header" else [])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if how == "too long":
            await send({"type": "http.response.body", "body": b"abc"})

    async with serving(app) as server, asyncio.timeout(20):
        answer = await said(server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        if how in ("raises", "returns"):
            assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"secret" not in answer
        assert b"\r\nb: c" not in answer
        assert not server.server_state.tasks


async def test_a_client_that_leaves_is_told_of_once() -> None:
    """First the end of what it sends is noticed, then that the connection is lost."""
    left, go, problems = list[int](), asyncio.Event(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))

    async def app(scope: dict[str, Any], _receive: Any, _send: Any) -> None:
        scope[DISCONNECT] = lambda: left.append(1)
        await go.wait()

    async with serving(app) as server, asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        assert left == [1]
        assert problems == []
        go.set()
