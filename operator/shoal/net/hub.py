"""Serving side of a stream (streams.md): numbers the messages and passes them to many readers, of which none can delay
another. A reader that was cut off connects again and begins with the full state.

Agents (`GET /v1/replica`, field `keys`), gateways (`GET /v1/demand`, field `models`; `GET /v1/prefixes`, field `sent`)
and the ledger (`GET /v1/totals`) serve streams. The owner of the state encodes it; this module handles readers,
numbers, the shape of a message, and the writing of server-sent events (`EventStream`).
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from shoal.net.asgi import DISCONNECT, GONE, Receive, Scope, Send
from shoal.net.errors import Problem

QUEUE: Final = 32
"""Messages that a reader may lag behind before it is dropped. It connects again and gets the full state."""
READERS: Final = 64
"""Readers at a time; gateways, operators and a ledger are far fewer."""

_END: Final = b""


class TooManyReaders(Exception):
    """The bound on readers is reached."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who reads. `name` and `boot` are empty where the caller did not say them."""

    role: str
    name: str = ""
    """Of its pod."""
    boot: str = ""
    """Its boot id."""


ANONYMOUS: Final = Caller("")


class HubReader:
    """One connection's messages, encoded. `next` returns None when the stream has ended for this reader."""

    def __init__(self, caller: Caller = ANONYMOUS) -> None:
        self.caller = caller
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)
        self._ended = False

    def offer(self, message: bytes) -> bool:
        """Queues a message; False when the reader is too slow, and has been ended."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end()
            return False
        return True

    def end(self) -> None:
        """Ends the stream for this reader at once; what it has not read is dropped."""
        self._ended = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(_END)

    async def next(self, seconds: float) -> bytes | None:
        """The next message; None at the end. Raises TimeoutError after `seconds` without one."""
        try:
            async with asyncio.timeout(seconds):
                message = await self._queue.get()
        except TimeoutError:
            # One that came in the same turn of the loop goes before the heartbeat, which names its `seq`.
            if self._queue.empty():
                raise
            message = self._queue.get_nowait()
        return None if self._ended else message


class StreamHub:
    """`field` is what a message calls its content; `full` makes the content of a full message, as JSON. Without a field
    the content is a JSON object whose members are the message's own. `boot` is its process's, by default a random
    one. `first` makes the content of a reader's first message, by default `full`."""

    def __init__(
        self,
        field: str,
        full: Callable[[], bytes],
        boot: str | None = None,
        *,
        first: Callable[[Caller], bytes] | None = None,
    ) -> None:
        self.boot: Final = boot or uuid.uuid4().hex
        self.seq = 0
        """Of the last message with content."""
        self.dropped = 0
        """Readers that were too slow, since the start."""
        self._field = field.encode()
        self._full = full
        self._first = first
        self._readers: set[HubReader] = set()
        self._closed = False

    def __iter__(self) -> Iterator[HubReader]:
        """The readers."""
        return iter(tuple(self._readers))

    @property
    def readers(self) -> int:
        return len(self._readers)

    def publish(self, content: bytes) -> int:
        """Sends a change, given as JSON, to every reader. Returns its `seq`."""
        return self._send(content, full=False)

    def restate(self) -> int:
        """Sends the full state to every reader: what it knew before is void. Returns its `seq`."""
        return self._send(self._full(), full=True)

    def _send(self, content: bytes, *, full: bool) -> int:
        self.seq += 1
        message = self._message(content, full=full)
        for reader in tuple(self._readers):
            if not reader.offer(message):
                self._readers.discard(reader)
                self.dropped += 1
        return self.seq

    @contextlib.contextmanager
    def reader(self, caller: Caller = ANONYMOUS) -> Generator[HubReader]:
        """A reader whose first message is the full state. Raises TooManyReaders."""
        if len(self._readers) >= READERS:
            raise TooManyReaders
        reader = HubReader(caller)
        content = self._full() if self._first is None else self._first(caller)
        reader.offer(self._message(content, full=True))
        if self._closed:
            reader.end()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def heartbeat(self) -> bytes:
        """Says that the sender lives and nothing has changed since `seq`. For a reader whose `next` has just raised
        TimeoutError: it has read everything up to here."""
        return b'data: {"boot":"%b","seq":%d}\n\n' % (self.boot.encode(), self.seq)

    def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        for reader in tuple(self._readers):
            reader.end()

    def _message(self, content: bytes, *, full: bool = False) -> bytes:
        return b'data: {"boot":"%b","seq":%d,%b%b}\n\n' % (
            self.boot.encode(),
            self.seq,
            b'"full":true,' if full else b"",
            b'"%b":%b' % (self._field, content) if self._field else content[1:-1],
        )


class EventStream(Response):
    """An answer that is a hub's messages, until the hub or the client ends it. Where nothing happens for
    `heartbeat_seconds`, a heartbeat is sent. `during` is entered before the first byte and left at the end. Sending it
    raises Problem where the hub has too many readers."""

    def __init__(
        self,
        hub: StreamHub,
        caller: Caller,
        heartbeat_seconds: float,
        during: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
        del self.headers["content-length"]
        self._hub = hub
        self._caller = caller
        self._heartbeat_seconds = heartbeat_seconds
        self._during = during or contextlib.nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._hub.reader(self._caller) as reader, self._during:
                if scope.get(DISCONNECT) is GONE:
                    return
                scope[DISCONNECT] = reader.end
                await self._write(reader, send)
        except TooManyReaders:
            raise Problem(503, "too many readers", {"retry-after": "2"}) from None

    async def _write(self, reader: HubReader, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            try:
                message = await reader.next(self._heartbeat_seconds)
            except TimeoutError:
                message = self._hub.heartbeat()
            if message is None:
                break
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
