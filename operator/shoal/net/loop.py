"""The event loop of the gateway and the ledger: uvloop's, without a fault by which a client gets another one's answer.

aiohttp connects with a socket of its own, and hands it to `create_connection`. From then on libuv owns the file, and
closes it. uvloop 0.23 forgets to say so to the socket where the connection ends in the same moment as it is made, which
happens with TLS when the peer is killed in a handshake. The socket then keeps the number of a file that is closed. When
Python throws the socket away, perhaps minutes later, it closes the file that has this number by then: the connection of
some client, under the gateway's hands. The next client that is accepted gets the number, and so what is written for the
one before.
"""

import socket
from collections.abc import Coroutine
from typing import Any

import uvloop


class Loop(uvloop.Loop):
    """Takes a socket's file from it, whatever comes of the connection."""

    async def create_connection(self, *where: Any, **options: Any) -> Any:
        """As asyncio's. `sock`, where it is given, cannot be used afterwards."""
        sock: socket.socket | None = options.get("sock")
        try:
            return await super().create_connection(*where, **options)
        finally:
            if sock is not None:
                sock.detach()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a process to its end."""
    uvloop.run(main, loop_factory=Loop)
