"""A TCP forwarder between a client and a server that cuts connections, or goes silent."""

import asyncio
import contextlib
from dataclasses import dataclass, field


@dataclass
class Flaky:
    """Forwards to `port` of this machine. Use `async with`; `address` is where clients connect."""

    port: int
    cut_after: int | None = None
    """Bytes of the server's answers per connection, after which the connection is cut."""
    hang_after: int | None = None
    """The same, after which nothing comes any more and the connection stays."""
    connections: int = 0
    carried: int = 0
    """Bytes from the server to clients."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> "Flaky":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await asyncio.gather(self._up(reader, up_writer), self._down(up_reader, writer))
            finally:
                up_writer.close()
                writer.close()
        self._tasks.discard(task)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        while data := await reader.read(1 << 14):
            limit = self.cut_after if self.cut_after is not None else self.hang_after
            if limit is not None and sent + len(data) > limit:
                writer.write(data[: limit - sent])
                await writer.drain()
                self.carried += limit - sent
                if self.hang_after is not None:
                    await asyncio.Event().wait()
                await asyncio.sleep(0.05)  # a client's library may drop what came in the same moment as the break
                writer.transport.abort()
                return
            writer.write(data)
            await writer.drain()
            sent += len(data)
            self.carried += len(data)
        writer.close()
