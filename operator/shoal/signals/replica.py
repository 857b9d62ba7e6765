"""Client of `GET /v1/replica`: one stream per engine pod, kept up whatever happens (streams.md).

A stream that is down, silent for 12 s, out of sequence or from another agent means that what it said is unknown.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import aiohttp
import pydantic
import structlog

from shoal.api import replica as api
from shoal.api.names import AGENT_PORT

log = structlog.get_logger()

_CONNECT_SECONDS: Final = 5.0
_BACKOFF_FIRST: Final = 0.25
_BACKOFF_MOST: Final = 10.0


Changed = Callable[[str, api.ReplicaKeys | None], None]


class StreamBroken(Exception):
    """Why a stream ended."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent to listen to."""

    uid: str
    """Of the pod."""
    name: str
    host: str
    key: str
    port: int = AGENT_PORT


class ReplicaStream:
    """Listens to one agent until cancelled. `keys` is None while it is not known."""

    def __init__(self, peer: Peer, session: aiohttp.ClientSession, changed: Changed) -> None:
        self.peer = peer
        self.keys: api.ReplicaKeys | None = None
        self.failures = 0
        self._session = session
        self._changed = changed
        self._boot: str | None = None
        self._seq = -1

    async def run(self) -> None:
        """Connects again and again, with back-off. Raises nothing but cancellation."""
        delay = _BACKOFF_FIRST
        reason: str | None = None
        while True:
            heard = False
            try:
                async for _ in self.listen():
                    heard = True
                error = "the agent ended the stream"
            except StreamBroken as broken:
                error = str(broken)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            self._lose()
            self.failures += 1
            if heard:
                delay = _BACKOFF_FIRST
                reason = None
            if error != reason:
                log.info("replica stream down", pod=self.peer.name, reason=error)
                reason = error
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects
            delay = min(delay * 2, _BACKOFF_MOST)

    async def listen(self) -> AsyncGenerator[None, None]:
        """One connection: yields after each message that changed `keys`, or did not. Raises StreamBroken."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=api.SILENCE_SECONDS)
        headers = {"authorization": f"Bearer {self.peer.key}", "accept": "text/event-stream"}
        url = f"http://{_bracketed(self.peer.host)}:{self.peer.port}/v1/replica"
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise StreamBroken(f"the agent answered with status {response.status}")
            self._boot, self._seq = None, -1
            async for line in response.content:
                if line.startswith(b"data:"):
                    self._take(line[5:])
                    yield

    def _take(self, data: bytes) -> None:
        try:
            message = api.ReplicaMessage.model_validate_json(data)
        except pydantic.ValidationError as error:
            raise StreamBroken(f"a message is not understood ({error.error_count()} errors)") from None
        if message.full:
            self._boot, self._seq = message.boot, message.seq
            self._set(message.keys or api.ReplicaKeys())
            return
        if self._boot is None or self.keys is None:
            raise StreamBroken("the stream did not begin with the full state")
        if message.boot != self._boot:
            raise StreamBroken("the agent restarted")
        if message.seq != self._seq + (message.keys is not None):
            raise StreamBroken(f"a message is missing: {self._seq} is followed by {message.seq}")
        self._seq = message.seq
        if message.keys is not None:
            update = {name: getattr(message.keys, name) for name in message.keys.model_fields_set}
            self._set(self.keys.model_copy(update=update))

    def _set(self, keys: api.ReplicaKeys) -> None:
        if keys != self.keys:
            self.keys = keys
            self._changed(self.peer.uid, keys)

    def _lose(self) -> None:
        if self.keys is not None:
            self.keys = None
            self._changed(self.peer.uid, None)


async def read_once(peer: Peer, session: aiohttp.ClientSession, *, seconds: float) -> api.ReplicaKeys:
    """What one agent knows now: the first message of its stream. Raises StreamBroken when it cannot be had in time."""
    try:
        async with asyncio.timeout(seconds):
            found: list[api.ReplicaKeys] = []
            stream = ReplicaStream(peer, session, lambda _, keys: found.append(keys) if keys is not None else None)
            listening = stream.listen()
            try:
                async for _ in listening:
                    if found:
                        return found[0]
            finally:
                await listening.aclose()
    except (aiohttp.ClientError, TimeoutError, OSError) as failure:
        raise StreamBroken(f"{type(failure).__name__}: {failure}") from failure
    raise StreamBroken("the agent ended the stream")


class ReplicaStreams:
    """A stream to every peer that is named. `changed` hears what is known of a pod by its uid, None when nothing is."""

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self._streams: dict[str, tuple[ReplicaStream, asyncio.Task[None]]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        # Agents are in the cluster: never through the proxy of the environment (trust_env is off by default).
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False
        )

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Starts and ends streams so that exactly these peers are listened to."""
        session = self._session
        if session is None:
            raise RuntimeError("the streams are not started")
        wanted = {peer.uid: peer for peer in peers}
        for uid, (stream, task) in list(self._streams.items()):
            if wanted.get(uid) != stream.peer:
                task.cancel()
                self._ended.add(task)
                task.add_done_callback(self._ended.discard)
                del self._streams[uid]
                self._changed(uid, None)
        for uid, peer in wanted.items():
            if uid not in self._streams:
                stream = ReplicaStream(peer, session, self._changed)
                self._streams[uid] = (stream, asyncio.create_task(stream.run(), name=f"replica {peer.name}"))

    def keys(self) -> dict[str, api.ReplicaKeys]:
        """Pod uid -> what its live stream says. A uid that is absent has no live stream."""
        return {uid: stream.keys for uid, (stream, _) in self._streams.items() if stream.keys is not None}

    @property
    def wanted(self) -> int:
        return len(self._streams)

    async def close(self) -> None:
        if self._session is None:
            return
        self.set_peers(())
        await asyncio.gather(*self._ended, return_exceptions=True)
        await self._session.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
