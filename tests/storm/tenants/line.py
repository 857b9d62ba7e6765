"""The wire between gateways and ledger, which can end at the worst moment: the ledger has committed a batch, and its
answer is on the way."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from shoal.api import names

_CHUNK: Final = 65536
_BATCH: Final = f"POST {names.RECORDS_PATH} ".encode()
_CONNECT_SECONDS: Final = 2.0

AtAnswer = Callable[[], None]


class Line:
    """Passes bytes on. `at_next_answer` arms it: the next answer to a batch never arrives."""

    def __init__(self, host: str, ledger: str) -> None:
        self.host = host
        self._ledger = ledger
        self._armed: AtAnswer | None = None
        self._server: asyncio.Server | None = None
        self._struck = asyncio.Event()
        self._links: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{names.LEDGER_PORT}"

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._link, self.host, names.LEDGER_PORT)

    async def down(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def at_next_answer(self, strike: AtAnswer, within: float) -> bool:
        """Calls `strike` when the ledger has answered a batch, of which the gateway never hears; False when nothing was
        answered in that time."""
        self._struck.clear()
        self._armed = strike
        try:
            async with asyncio.timeout(within):
                await self._struck.wait()
        except TimeoutError:
            return False
        finally:
            self._armed = None
        return True

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                back, forth = await asyncio.open_connection(self._ledger, names.LEDGER_PORT)
        except (OSError, TimeoutError):
            writer.transport.abort()
            self._links.discard(task)
            return
        link = _Link(reader, writer, back, forth)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(link.ask())
                group.create_task(link.answer(self._lost))
        except* (OSError, _Ended):
            pass
        finally:
            link.cut()
            self._links.discard(task)

    def _lost(self) -> bool:
        """Whether the answer that is here now is lost."""
        strike, self._armed = self._armed, None
        if strike is None:
            return False
        strike()
        self._struck.set()
        return True


class _Ended(Exception):
    """One side has closed the connection."""


class _Link:
    """One connection, both ways."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        forth: asyncio.StreamWriter,
    ) -> None:
        self._reader, self._writer, self._back, self._forth = reader, writer, back, forth
        self._batch = False

    async def ask(self) -> None:
        while data := await self._reader.read(_CHUNK):
            self._batch = self._batch or _BATCH in data
            self._forth.write(data)
            await self._forth.drain()
        raise _Ended

    async def answer(self, lost: Callable[[], bool]) -> None:
        while data := await self._back.read(_CHUNK):
            if self._batch and lost():
                raise _Ended
            self._batch = False
            self._writer.write(data)
            await self._writer.drain()
        raise _Ended

    def cut(self) -> None:
        for writer in (self._writer, self._forth):
            with contextlib.suppress(OSError):
                writer.transport.abort()
