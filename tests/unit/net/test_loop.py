"""A connection that ends as it is made must not close the file of another one later."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import shoal
from shoal.net.loop import Loop, run


class LeavesAtOnce(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class Echo(asyncio.Protocol):
    """What clients reach."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def connected() -> tuple[socket.socket, socket.socket]:
    """A connection to somebody else: our end, and the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=10)
        ours.setblocking(False)
        return ours, listener.accept()[0]


@contextlib.asynccontextmanager
async def echo() -> AsyncGenerator[int]:
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def test_a_socket_that_python_throws_away_closes_no_connection_of_a_client() -> None:
    async def main() -> None:
        assert isinstance(asyncio.get_running_loop(), Loop)
        async with echo() as port, asyncio.timeout(20):
            ours, theirs = connected()
            number = ours.fileno()
            await asyncio.get_running_loop().create_connection(LeavesAtOnce, sock=ours)
            await asyncio.sleep(0)
            # The file is closed, so one of the next connections gets its number.
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            del ours
            gc.collect()
            for reader, writer in clients:
                writer.write(b"hello")
                assert await reader.readexactly(5) == b"hello", number
                writer.close()
            theirs.close()

    run(main())


def test_a_connection_goes_on_without_its_socket() -> None:
    async def main() -> None:
        async with echo() as port, asyncio.timeout(20):
            ours = socket.create_connection(("127.0.0.1", port), timeout=10)
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            assert ours.fileno() == -1
            gc.collect()
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            await writer.wait_closed()

    run(main())


def test_no_process_runs_on_the_loop_that_does_not_do_so() -> None:
    package = Path(shoal.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if "uvloop" in path.read_text()}
    assert found == {"net/loop.py"}
