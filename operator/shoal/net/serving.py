"""How servers begin to listen, are swept, and stop.

A process that has no order of its own in which ports open and close uses `serving`. `GatewayProcess` and
`LedgerProcess` have one, and use `run_server` and `listening`.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Final

from shoal.net.server import HTTPServer

SWEEP_SECONDS: Final = 1.0
KEEP_ALIVE_SECONDS: Final = 75
"""How long a port for other processes keeps a connection that has no request: longer than their pauses between two."""
_POLL_SECONDS: Final = 0.01
_CANCELLED_SECONDS: Final = 1.0
"""In which a handler that was cancelled must have come to its end."""


class CannotListen(OSError):
    """Another process has the port, or the address is not this machine's."""


async def run_server(server: HTTPServer, sockets: list[socket.socket] | None = None) -> None:
    """Serves until `server.should_exit`, on these sockets instead of its host and port. Raises CannotListen."""
    try:
        await server.serve(sockets)
    except SystemExit:
        # uvicorn exits this way when it cannot listen; a task group would not handle it.
        raise CannotListen(f"cannot listen on {server.config.host}:{server.config.port}") from None


async def listening(server: HTTPServer) -> None:
    """Returns when it listens."""
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag and no event
        await asyncio.sleep(_POLL_SECONDS)


@contextlib.asynccontextmanager
async def serving(*servers: HTTPServer, sockets: list[socket.socket] | None = None) -> AsyncGenerator[None]:
    """These servers listen within. At the end all stop together: what is in flight has each server's `stop_seconds`,
    then it is cancelled. Raises CannotListen."""
    running = [asyncio.create_task(run_server(server, sockets)) for server in servers]
    sweeping = asyncio.create_task(_sweep(servers))
    try:
        for server, task in zip(servers, running, strict=True):
            started = asyncio.create_task(listening(server))
            await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if task.done():
                await task
        yield
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running, return_exceptions=True)
        sweeping.cancel()
        if left := {task for server in servers for task in server.server_state.tasks}:
            await asyncio.wait(left, timeout=_CANCELLED_SECONDS)


async def _sweep(servers: tuple[HTTPServer, ...]) -> None:
    """Drops, again and again, who holds a connection and does not use it (`BoundedProtocol.sweep`)."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for server in servers:
            server.sweep()
