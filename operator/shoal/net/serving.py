"""How servers begin to listen, are swept, and stop; and sockets that one server serves besides its port.

A process that has no order of its own in which ports open and close uses `serving`. `GatewayProcess` and
`LedgerProcess` have one, and use `run_server` and `listening`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from shoal.net.server import HTTPServer

SWEEP_SECONDS: Final = 1.0
KEEP_ALIVE_SECONDS: Final = 75
"""How long a port for other processes keeps a connection that has no request: longer than their pauses between two."""
_POLL_SECONDS: Final = 0.01


class CannotListen(OSError):
    """Another process has the port, or the address is not this machine's."""


async def run_server(server: HTTPServer) -> None:
    """Serves until `server.should_exit`. Raises CannotListen."""
    try:
        await server.serve()
    except SystemExit:
        # uvicorn exits this way when it cannot listen; a task group would not handle it.
        raise CannotListen(f"cannot listen on {server.config.host}:{server.config.port}") from None


async def listening(server: HTTPServer) -> None:
    """Returns when it listens."""
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag and no event
        await asyncio.sleep(_POLL_SECONDS)


@contextlib.asynccontextmanager
async def serving(*servers: HTTPServer) -> AsyncGenerator[None]:
    """These servers listen within. At the end all stop together, and what is in flight has each server's
    `stop_seconds`. Raises CannotListen."""
    running = [asyncio.create_task(run_server(server)) for server in servers]
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


async def _sweep(servers: tuple[HTTPServer, ...]) -> None:
    """Drops, again and again, who holds a connection and does not use it (`BoundedProtocol.sweep`)."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for server in servers:
            server.sweep()
