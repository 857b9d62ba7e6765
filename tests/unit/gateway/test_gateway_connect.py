"""How long a gateway waits for a connection to an engine."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Generator
from typing import Final

import pytest

from shoal.gateway.connections import Pool
from shoal.gateway.upstream import AbortHandle, ConnectFailed, UpstreamAddress
from tests.support.scripted_engine import ScriptedEngine

CONNECT_SECONDS: Final = 0.4
"""Seconds."""


async def ask(port: int) -> None:
    pool = Pool(connect_timeout=CONNECT_SECONDS)
    try:
        answer = await pool.start(
            UpstreamAddress("127.0.0.1", port), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", AbortHandle()
        )
        answer.release()
    finally:
        pool.close()


@contextlib.contextmanager
def a_port_that_takes_no_connection() -> Generator[int]:
    """Its backlog is full: the kernel drops what comes, and nobody hears of it."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]


async def test_an_engine_that_takes_no_connection_is_given_up_after_the_time() -> None:
    with a_port_that_takes_no_connection() as port:
        began = time.monotonic()
        with pytest.raises(ConnectFailed, match=r"no connection within 0\.4 s"):
            await ask(port)
        assert time.monotonic() - began >= CONNECT_SECONDS


async def test_pauses_of_the_gateway_itself_are_not_held_against_the_engine() -> None:
    async with ScriptedEngine().running() as engine:
        asking = asyncio.create_task(ask(engine.port))
        for _ in range(3):
            await asyncio.sleep(0)  # it has begun to connect
            time.sleep(CONNECT_SECONDS)  # noqa: ASYNC251  # as a collection of garbage, or a node without CPU to spare
        await asking
