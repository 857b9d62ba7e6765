"""Listening side of a stream (streams.md): one connection per peer, kept up whatever happens.

A stream that is down, silent for 12 s, out of sequence or from another process means that what it said is unknown.
`replica.py` and `demand.py` say what the messages mean.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

import aiohttp
import orjson
import pydantic
import structlog

from shoal.api import replica as api
from shoal.api.identity import model_server_name, server_name
from shoal.api.meta import JsonObject
from shoal.api.names import (
    AGENT_PORT,
    AGENT_TLS_PORT,
    HEADER_BOOT,
    HEADER_CALLER,
    OPS_PORT,
    OPS_TLS_PORT,
)
from shoal.net.tls import NoCertificate, TLSCredentials, dial

log = structlog.get_logger()

CONNECT_SECONDS: Final = 5.0
BACKOFF_FIRST: Final = 0.25
BACKOFF_MOST: Final = 10.0
STEADY_SECONDS: Final = 10.0
"""A stream that was up for so long connects again without delay's growth."""
LONGEST_MESSAGE: Final = 8 * 1024 * 1024
"""Bytes. A full message of 50,000 Models has less."""
BOOT_LETTERS: Final = 512
STARTS_PER_SECOND: Final = 1000.0
STARTS_AT_ONCE: Final = 50
"""When more peers than these become known at once, their connections are spread."""


class StreamBroken(Exception):
    """Why a stream ended."""


class AwaitsCertificate(StreamBroken):
    """The peer was not called: this process has no certificate yet."""


@dataclass(frozen=True, slots=True)
class StreamPeer:
    """Who is listened to."""

    uid: str
    """Of the pod."""
    name: str
    host: str
    key: str
    port: int = AGENT_PORT
    other_keys: tuple[str, ...] = ()
    """Tried in turn after the peer refused the one before: it may not know the newest install key yet."""
    server_name: str | None = None
    """Name that its certificate must have before anything is sent to it; None: it speaks plain HTTP."""
    credentials: TLSCredentials | None = field(default=None, repr=False, compare=False)
    """Of this process, towards peers that have a `server_name`."""

    @property
    def base_url(self) -> str:
        """Without a path."""
        return f"http{'s' if self.server_name else ''}://{_bracketed(self.host)}:{self.port}"


def agent_peer(
    uid: str,
    name: str,
    host: str,
    key: str,
    *,
    model_uid: str,
    mtls: bool,
    credentials: TLSCredentials | None,
    other_keys: tuple[str, ...] = (),
    port: int = AGENT_PORT,
) -> StreamPeer:
    """The agent of an engine pod, by what the pod says of its transport. `port` is that of plain HTTP."""
    if not mtls:
        return StreamPeer(uid, name, host, key, port, other_keys)
    return StreamPeer(uid, name, host, key, AGENT_TLS_PORT, other_keys, model_server_name(model_uid), credentials)


def gateway_peer(
    uid: str,
    name: str,
    host: str,
    key: str,
    *,
    mtls: bool,
    credentials: TLSCredentials | None,
    other_keys: tuple[str, ...] = (),
    port: int = OPS_PORT,
) -> StreamPeer:
    """A gateway, by what its pod says of its transport. `port` is that of plain HTTP."""
    if not mtls:
        return StreamPeer(uid, name, host, key, port, other_keys)
    return StreamPeer(uid, name, host, key, OPS_TLS_PORT, other_keys, server_name("gateway"), credentials)


@dataclass(frozen=True, slots=True)
class ListenerIdentity:
    """Who listens, as it says in its requests."""

    name: str = ""
    """Of its pod."""
    boot: str = ""


class Follower(ABC):
    """Listens to one peer until cancelled. Subclasses keep the content of its messages."""

    path: ClassVar[str]
    field: ClassVar[str]
    """What a message calls its content."""
    what: ClassVar[str]
    """For a person: who the peer is."""
    longest: ClassVar[int] = LONGEST_MESSAGE
    """Bytes of a message."""

    def __init__(self, peer: StreamPeer, session: aiohttp.ClientSession, identity: ListenerIdentity) -> None:
        self.peer = peer
        self.boot: str | None = None
        """Of the peer's process; None while nothing is known of it."""
        self.seq = -1
        """Of the last message that was taken."""
        self.received_at = float("-inf")
        """time.monotonic() of the last message."""
        self.failures = 0
        """How often the stream ended, or did not begin. What this process lacks itself does not count."""
        self._created_at = time.monotonic()
        self._session = session
        self._identity = identity
        self._keys = (peer.key, *peer.other_keys)

    @property
    def live(self) -> bool:
        """Whether what it said is known. The clock decides too: a process that was stopped for a while wakes up with
        streams that nobody has found silent yet."""
        return self.boot is not None and time.monotonic() - self.received_at <= api.SILENCE_SECONDS

    @property
    def awaited(self) -> bool:
        """Whether it is not live, but may be at any moment: it began, or had its last message, less than 12 s ago."""
        last = max(self._created_at, self.received_at)
        return not self.live and time.monotonic() - last <= api.SILENCE_SECONDS

    @abstractmethod
    def _keep(self, content: JsonObject, *, full: bool) -> None:
        """Takes a full state or a change. May raise pydantic.ValidationError."""

    def _keep_more(self, message: JsonObject, *, full: bool) -> None:  # noqa: B027 - most streams have one field
        """Takes what else a message with content carries. May raise pydantic.ValidationError."""

    @abstractmethod
    def _notify(self, content: JsonObject | None) -> None:
        """Says that something changed: what a change brought, or None for everything."""

    @abstractmethod
    def _forget(self) -> None:
        """The peer's state is unknown from now on."""

    async def run(self, delay: float = 0.0) -> None:
        """Connects again and again, with back-off, the first time after `delay` seconds. A certificate of this process
        that came meanwhile ends the back-off. Raises nothing but cancellation."""
        await asyncio.sleep(delay)
        backoff = BACKOFF_FIRST
        reason: str | None = None
        while True:
            began, certificate = time.monotonic(), self._certificate
            called = True
            try:
                async for _ in self.listen():
                    pass
                error = f"the {self.what} ended the stream"
            except AwaitsCertificate as none:
                error, called = str(none), False
            except StreamBroken as broken:
                error = str(broken)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as failure:
                error = f"{type(failure).__name__}: {str(failure)[:500]}"
            except Exception as failure:
                # Whatever a peer says, it is listened to again: without a stream nothing of its Model would go down.
                log.exception(f"{self.what} stream failed", pod=self.peer.name)
                error = type(failure).__name__
            self.lose()
            self.failures += called
            if self.received_at - began > STEADY_SECONDS:
                backoff = BACKOFF_FIRST
                reason = None
            if error != reason:
                log.info(f"{self.what} stream down", pod=self.peer.name, reason=error)
                reason = error
            if await self._pause(_spread(backoff), certificate):
                backoff = BACKOFF_FIRST
                await asyncio.sleep(_spread(backoff))  # all streams of the process have waited for it
            else:
                backoff = min(backoff * 2, BACKOFF_MOST)

    @property
    def _certificate(self) -> int:
        """Version of the certificate with which this process calls; 0: it has none, or needs none."""
        return 0 if self.peer.credentials is None else self.peer.credentials.version

    async def _pause(self, seconds: float, certificate: int) -> bool:
        """Waits for so long. True: for less, because a later certificate than that of version `certificate` came."""
        if self.peer.credentials is None or self.peer.server_name is None:
            await asyncio.sleep(seconds)
            return False
        try:
            async with asyncio.timeout(seconds):
                await self.peer.credentials.newer(certificate)
        except TimeoutError:
            return False
        return True

    async def listen(self) -> AsyncGenerator[None, None]:
        """One connection: yields after each message. Raises StreamBroken, and what aiohttp raises."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=api.SILENCE_SECONDS)
        headers = {
            "authorization": f"Bearer {self._keys[0]}",
            "accept": "text/event-stream",
            HEADER_CALLER: self._identity.name,
            HEADER_BOOT: self._identity.boot,
        }
        try:
            secured = dial(self.peer.credentials, self.peer.server_name)
        except NoCertificate as none:
            if self.peer.credentials is None:  # and none will come
                raise StreamBroken(str(none)) from None
            raise AwaitsCertificate(str(none)) from None
        url = f"{self.peer.base_url}{self.path}"
        async with self._session.get(
            url, headers=headers, timeout=timeout, allow_redirects=False, **secured
        ) as response:
            if response.status != 200:
                if response.status == 401:
                    self._keys = (*self._keys[1:], self._keys[0])
                raise StreamBroken(f"the {self.what} answered with status {response.status}")
            rest = bytearray()  # grows in place: a long message in small reads is copied once
            whole_at = time.monotonic()
            async for chunk in response.content.iter_any():
                *lines, last = chunk.split(b"\n")
                if lines:
                    lines[0] = bytes(rest) + lines[0]
                    rest.clear()
                rest += last
                if len(rest) > self.longest:
                    raise StreamBroken("a message is too long")
                for line in lines:
                    if line.startswith(b"data:"):
                        self.take(line[5:])
                        whole_at = time.monotonic()
                        yield
                # The time for a read begins anew with each byte.
                if time.monotonic() - whole_at > api.SILENCE_SECONDS:
                    raise StreamBroken(f"no whole message came in {api.SILENCE_SECONDS:g} s")

    def take(self, data: bytes) -> None:
        """One message. Raises StreamBroken when it is not the next one."""
        if len(data) > self.longest:
            raise StreamBroken("a message is too long")
        try:
            message: Any = orjson.loads(data)
            boot, seq, content = str(message["boot"])[:BOOT_LETTERS], int(message["seq"]), message.get(self.field)
            if full := bool(message.get("full")):
                self._keep(content or {}, full=True)
                self._keep_more(message, full=True)
                self.boot = boot
            elif self.boot is None:
                raise StreamBroken("the stream did not begin with the full state")
            elif boot != self.boot:
                raise StreamBroken(f"the {self.what} restarted")
            elif seq != self.seq + (content is not None):
                raise StreamBroken(f"a message is missing: {self.seq} is followed by {seq}")
            elif content is not None:
                self._keep(content, full=False)
                self._keep_more(message, full=False)
        except pydantic.ValidationError as error:
            raise StreamBroken(f"a message is not understood ({error.error_count()} errors)") from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            raise StreamBroken("a message is not understood") from None
        self.seq = seq
        self.received_at = time.monotonic()
        if full or content is not None:
            self._notify_safely(None if full else content)

    def lose(self) -> None:
        """The connection is over: nothing is known any more."""
        if self.boot is not None:
            self.boot = None
            self._forget()
            self._notify_safely(None)

    def _notify_safely(self, content: JsonObject | None) -> None:
        try:
            self._notify(content)
        except Exception:
            # A listener must not stop the stream.
            log.exception("listener failed", pod=self.peer.name)


F = TypeVar("F", bound=Follower)


class PeerStreams(Generic[F]):
    """A stream to every peer that is named. `follower` makes the listener of one."""

    def __init__(self, follower: Callable[[StreamPeer, aiohttp.ClientSession], F]) -> None:
        self._follower = follower
        self._streams: dict[str, tuple[F, asyncio.Task[None]]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._next_start = float("-inf")

    def start(self) -> None:
        """Opens the session; `set_peers` needs it."""
        # Peers are in the cluster: never through the proxy of the environment (trust_env is off by default).
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False
        )

    def set_peers(self, peers: Iterable[StreamPeer]) -> None:
        """Starts and ends streams so that exactly these peers are listened to."""
        named = {peer.uid: peer for peer in peers}
        for uid in [uid for uid in self._streams if uid not in named]:
            self.drop(uid)
        for peer in named.values():
            self.put(peer)

    def put(self, peer: StreamPeer) -> None:
        """Listens to a peer; anew, when it is named otherwise than before."""
        if self._session is None:
            raise RuntimeError("the streams are not started")
        found = self._streams.get(peer.uid)
        if found is not None and found[0].peer == peer:
            return
        self.drop(peer.uid)
        now = asyncio.get_running_loop().time()
        self._next_start = max(self._next_start + 1 / STARTS_PER_SECOND, now - STARTS_AT_ONCE / STARTS_PER_SECOND)
        stream = self._follower(peer, self._session)
        running = stream.run(max(0.0, self._next_start - now))
        self._streams[peer.uid] = (stream, asyncio.create_task(running, name=f"{stream.what} {peer.name}"))

    def drop(self, uid: str) -> None:
        """Listens to a peer no longer; what it said is unknown."""
        found = self._streams.pop(uid, None)
        if found is not None:
            stream, task = found
            task.cancel()
            self._ended.add(task)
            task.add_done_callback(self._ended.discard)
            stream.lose()

    def get(self, uid: str) -> F | None:
        """The listener of a peer, if its stream is live."""
        found = self._streams.get(uid)
        return found[0] if found is not None and found[0].live else None

    def awaits(self, uid: str) -> bool:
        """Whether the stream of a peer is not live, but may be at any moment."""
        found = self._streams.get(uid)
        return found is not None and found[0].awaited

    def failures(self, uid: str) -> int:
        """How often the stream of a peer has ended, or did not begin."""
        found = self._streams.get(uid)
        return found[0].failures if found is not None else 0

    def live(self) -> list[F]:
        """The listeners whose streams are live."""
        return [stream for stream, _ in self._streams.values() if stream.live]

    @property
    def count(self) -> int:
        return len(self._streams)

    async def close(self) -> None:
        """Ends all of them."""
        if self._session is None:
            return
        for uid in list(self._streams):
            self.drop(uid)
        await asyncio.gather(*self._ended, return_exceptions=True)
        await self._session.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _spread(seconds: float) -> float:
    """Between half of it and all of it, so that streams which broke together do not all call at once."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
