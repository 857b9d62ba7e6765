"""What an engine may put around its answer: trailers, and extensions of chunks."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import pytest

from shoal.gateway.connections import Pool
from shoal.gateway.upstream import AbortHandle, BadAnswer, UpstreamAddress, UpstreamAnswer

HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MOST: Final = 4_000_000
"""Bytes that an engine sends around its answer, where nobody stops it."""
FLOODS: Final = {
    "trailers": (b"2\r\n{}\r\n0\r\n", b"x-a: b\r\n" * 500),
    "one trailer": (b"2\r\n{}\r\n0\r\nx-a: ", b"b" * 4000),
    "a chunk's extension": (b"2\r\n{}\r\n2;x=", b"b" * 4000),
}

Engine = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def answered(engine: Engine) -> AsyncGenerator[UpstreamAnswer]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            await engine(writer)
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    pool = Pool()
    address = UpstreamAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        async with asyncio.timeout(30):
            answer = await pool.start(address, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", AbortHandle())
            yield answer
            answer.release()
    finally:
        pool.close()
        server.close()


async def read(answer: UpstreamAnswer) -> bytes:
    return await answer.read_all(MOST)


async def relayed(answer: UpstreamAnswer) -> bytes:
    taken: list[bytes] = []

    def take(part: bytes) -> bool:
        taken.append(part)
        return True

    async def drained() -> None:
        pass

    await answer.relay(take, drained)
    return b"".join(taken)


async def stuck(answer: UpstreamAnswer) -> bytes:
    """A client that takes nothing for a while: what has arrived of the body waits."""
    await asyncio.sleep(1)
    return await relayed(answer)


@pytest.mark.parametrize("take", [read, relayed, stuck])
@pytest.mark.parametrize("kind", FLOODS)
async def test_what_stands_around_an_answer_is_bounded(
    kind: str, take: Callable[[UpstreamAnswer], Awaitable[bytes]]
) -> None:
    begin, part = FLOODS[kind]
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(begin)
        while sent < MOST:
            writer.write(part)
            await writer.drain()
            sent += len(part)
            await asyncio.sleep(0)  # `drain` alone would not let the loop see that the other side has gone

    async with answered(flood) as answer:
        with pytest.raises(BadAnswer, match="what stands around"):
            await take(answer)
    assert sent < MOST


@pytest.mark.parametrize("take", [read, relayed])
async def test_small_chunks_count_from_the_last_byte_of_a_body(
    take: Callable[[UpstreamAnswer], Awaitable[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece comes in a read of its own, so most of the reads bring nothing of the body."""
    monkeypatch.setattr("shoal.gateway.connections._MAX_HEAD_BYTES", 200)

    async def in_pieces(writer: asyncio.StreamWriter) -> None:
        for _ in range(50):
            for piece in (b"1;a=b", b"\r", b"\n", b"x", b"\r", b"\n"):
                writer.write(piece)
                await asyncio.sleep(0.001)
        writer.write(b"0\r\nretry-after: 7\r\n\r\n")

    async with answered(in_pieces) as answer:
        assert await take(answer) == b"x" * 50
        assert answer.retry_after == b""
