"""Requests on one connection that come before the answer to the one before: an answer is never mixed with an error
about a later request."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.net.server import HTTPServer
from tests.unit.net.test_server_bounds import closed, serving

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhello"
ANSWER = b"one two"


class Halting:
    """An application that stops in the middle of its answer, or before it, until it is let."""

    def __init__(self, *, begins: bool) -> None:
        self.begins = begins
        self.let, self.halts = asyncio.Event(), asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        if not self.begins:
            self.halts.set()
            await self.let.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
        await send({"type": "http.response.body", "body": ANSWER[:4], "more_body": True})
        self.halts.set()
        await self.let.wait()
        await send({"type": "http.response.body", "body": ANSWER[4:]})


@asynccontextmanager
async def halted(
    *sent: bytes, begins: bool = True
) -> AsyncGenerator[tuple[HTTPServer, Halting, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has sent this, while the first request is being answered."""
    app = Halting(begins=begins)
    async with serving(app, head_seconds=0.2, max_head_bytes=1000) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(sent[0])
            await app.halts.wait()
            for part in sent[1:]:
                writer.write(part)
                await asyncio.sleep(0.05)
            yield server, app, reader, writer
        finally:
            writer.close()


async def late(server: HTTPServer) -> None:
    """The time for heads and bodies passes."""
    await asyncio.sleep(0.3)
    server.sweep()
    await asyncio.sleep(0.05)
    server.sweep()


async def answers(reader: asyncio.StreamReader) -> list[bytes]:
    """Statuses and bodies of all answers until the connection ends."""
    found: list[bytes] = []
    rest = await closed(reader)
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body, rest = rest[:length], rest[length:]
        found.append(head[9:12] + b" " + (body if head[9:12] == b"200" else b""))
    return found


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("together", [True, False])
async def test_a_body_is_not_late_while_its_request_waits_for_its_turn(begins: bool, together: bool) -> None:
    """Nothing of it is read until then."""
    sent = (GET + HALF_BODY,) if together else (GET, HALF_BODY)
    async with halted(*sent, begins=begins) as (server, app, reader, writer):
        await late(server)
        app.let.set()
        writer.write(b"world")
        assert await reader.readuntil(ANSWER)
        assert (await reader.readuntil(ANSWER)).startswith(b"HTTP/1.1 200")
        assert app.bodies == [b"", b"helloworld"]


async def test_a_body_is_late_when_it_does_not_come_in_its_turn() -> None:
    async with halted(GET + HALF_BODY) as (server, app, reader, _writer):
        await late(server)
        app.let.set()
        await reader.readuntil(ANSWER)
        await late(server)
        assert await answers(reader) == [b"408 "]


async def test_a_head_that_comes_too_slowly_does_not_cut_the_answer_before_it() -> None:
    """The connection ends behind the answer."""
    async with halted(GET, GET[:10]) as (server, app, reader, _writer):
        await late(server)
        app.let.set()
        assert await answers(reader) == [b"200 " + ANSWER]


NO_REQUEST = b"nonsense\r\n\r\n"
LARGE_HEAD = b"GET / HTTP/1.1\r\nx: " + b"a" * 2000 + b"\r\n\r\n"


@pytest.mark.parametrize("what", [NO_REQUEST, LARGE_HEAD], ids=["no request", "a large head"])
@pytest.mark.parametrize("together", [True, False])
async def test_an_error_about_a_later_request_is_not_written_into_an_answer(what: bytes, together: bool) -> None:
    sent = (GET, GET + what) if together else (GET, what)
    async with halted(*sent) as (_server, app, reader, _writer):
        app.let.set()
        received = await closed(reader)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert received.count(b"HTTP/1.1") == 1
        assert b"error" not in received


@pytest.mark.parametrize("begins", [True, False])
async def test_an_error_about_a_later_request_does_not_come_before_answers_that_are_due(begins: bool) -> None:
    """Two are due, so it would be taken for one of theirs."""
    async with halted(GET + GET, NO_REQUEST, begins=begins) as (_server, app, reader, _writer):
        app.let.set()
        assert b"400" not in await closed(reader)


@pytest.mark.parametrize("what", [NO_REQUEST, LARGE_HEAD], ids=["no request", "a large head"])
async def test_it_is_written_where_no_answer_is_due(what: bytes) -> None:
    async with halted(GET) as (_server, app, reader, writer):
        app.let.set()
        await reader.readuntil(ANSWER)
        writer.write(what)
        (answer,) = await answers(reader)
        assert answer in (b"400 ", b"431 ")


async def test_a_body_that_is_longer_than_it_says_is_no_request() -> None:
    """Its client learns of it, while no answer has begun."""
    async with halted(GET + NO_REQUEST, begins=False) as (_server, _app, reader, _writer):
        assert await answers(reader) == [b"400 "]
