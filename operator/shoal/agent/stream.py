"""The stream's hub: one state, many readers, none of whom can hold up another."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from typing import Final

from shoal.agent import changes
from shoal.api.replica import ReplicaKeys, ReplicaMessage

QUEUE: Final = 32
"""Messages that a reader may lag behind before it is dropped. It connects again and gets the full state."""
READERS: Final = 64
"""Readers at a time; gateways, operators and a ledger are far fewer."""

_END: Final = b""


class TooManyReaders(Exception):
    """The bound on readers is reached."""


class Reader:
    """One connection's messages, encoded. `next` returns None when the stream has ended for this reader."""

    def __init__(self) -> None:
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
        async with asyncio.timeout(seconds):
            message = await self._queue.get()
        return None if self._ended else message


class Hub:
    """Holds what was told (`told`), numbers the messages, and hands them to the readers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.boot: Final = uuid.uuid4().hex
        self.seq = 0
        self._told: Mapping[str, object] = {}
        self._told_at = -changes.QUIET_SECONDS
        self._clock = clock
        self._readers: set[Reader] = set()
        self._closed = False
        self.dropped = 0

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def told(self) -> Mapping[str, object]:
        return self._told

    def update(self, now: Mapping[str, object]) -> bool:
        """Takes the state as it is now; tells it if it is time. Returns whether a message went out."""
        changed = changes.difference(self._told, now)
        time_now = self._clock()
        if not changed:
            return False
        if not changes.matters(self._told, now) and time_now - self._told_at < changes.QUIET_SECONDS:
            return False
        self._told, self._told_at = dict(now), time_now
        self.seq += 1
        message = self._encode(ReplicaMessage(boot=self.boot, seq=self.seq, keys=ReplicaKeys.model_validate(changed)))
        for reader in list(self._readers):
            if not reader.offer(message):
                self._readers.discard(reader)
                self.dropped += 1
        return True

    @contextlib.contextmanager
    def reader(self) -> Generator[Reader]:
        """A reader whose first message is the full state. Raises TooManyReaders."""
        if len(self._readers) >= READERS:
            raise TooManyReaders
        reader = Reader()
        known = {name: value for name, value in self._told.items() if value is not None}
        full = ReplicaMessage(boot=self.boot, seq=self.seq, full=True, keys=ReplicaKeys.model_validate(known))
        reader.offer(self._encode(full))
        if self._closed:
            reader.end()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def heartbeat(self) -> bytes:
        """Says that the agent lives and nothing has changed since `seq`."""
        return self._encode(ReplicaMessage(boot=self.boot, seq=self.seq))

    def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        for reader in list(self._readers):
            reader.end()

    @staticmethod
    def _encode(message: ReplicaMessage) -> bytes:
        return b"data: " + message.model_dump_json(exclude_unset=True).encode() + b"\n\n"
