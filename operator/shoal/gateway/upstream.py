"""What the request path needs of the HTTP client towards the engines: errors, start / read / abort, addresses.
`connections.py` is the client."""

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from shoal.net.stream import StreamPeer


class UpstreamError(Exception):
    """The engine could not be reached or was lost. The subclass decides whether the request is retried, so answers of a
    proxy in front of the engine are converted to these errors too."""


class ConnectFailed(UpstreamError):
    """No connection (refused, unreachable, or not within the connect timeout), so the engine got nothing of the
    request."""


class ConnectionLost(UpstreamError):
    """The connection ended before the answer. The engine may have had the request, and the request may have killed
    it."""


class StaleConnection(ConnectionLost):
    """A reused connection ended before any byte of the answer. Engines close idle connections, so the request most
    likely did not reach the engine; but it may have, so its id cannot be used again."""


class GivenUp(UpstreamError):
    """The replica is known to have stalled."""


class BadAnswer(UpstreamError):
    """The answer is not HTTP."""


class Aborted(UpstreamError):
    """The gateway aborted the request itself."""


class BrokenOff(Aborted):
    """The proxy that carries the request broke the answer off: the client left, or the replica was lost."""


class AnswerTooLarge(UpstreamError):
    """The answer is larger than the gateway keeps in memory."""


class UpstreamAddress(NamedTuple):
    """The address of a server. A tuple, because it is a dict key on the request path and a dataclass is hashed by
    Python code."""

    host: str
    port: int
    server_name: str | None = None
    """The name that the server's certificate must have; None: plain HTTP."""


class PartedBody:
    """A request's body in parts, which are written one after the other and never joined: a part may be a view of what
    is held already."""

    __slots__ = ("_size", "parts")

    def __init__(self, *parts: bytes | memoryview) -> None:
        self.parts = parts
        self._size = sum(map(len, parts))

    def __len__(self) -> int:
        """In bytes."""
        return self._size

    def slices(self, most: int) -> Iterator[memoryview]:
        """The body in views of at most `most` bytes."""
        for part in self.parts:
            view = memoryview(part)
            for at in range(0, len(view), most):
                yield view[at : at + most]


RequestBody = bytes | PartedBody


class UpstreamAnswer(Protocol):
    """An answer whose head has arrived."""

    @property
    def status(self) -> int: ...

    @property
    def content_type(self) -> bytes: ...

    @property
    def retry_after(self) -> bytes:
        """The header Retry-After; b"": there is none."""
        ...

    @property
    def encoding(self) -> bytes:
        """The header Content-Encoding; b"": there is none."""
        ...

    async def read(self) -> bytes:
        """The bytes that have arrived; b"" at the end. Raises UpstreamError."""
        ...

    async def relay(self, take: Callable[[bytes], bool], drained: Callable[[], Awaitable[None]]) -> None:
        """Hands bytes to `take` as they arrive, and returns at the end. `take` is called between two steps of the event
        loop, without a task that wakes up. When it returns False, `drained` is awaited before the next call. Raises
        UpstreamError, and what `take` raises."""
        ...

    async def read_all(self, limit: int, grown: Callable[[int], None] = ...) -> bytes:
        """The rest of the body. `grown` is called with the size of each part before it is kept, and may raise. Raises
        UpstreamError."""
        ...

    def release(self) -> None:
        """Releases the connection; call exactly once. After a complete answer it returns to the pool, otherwise it is
        closed."""
        ...


class Upstream(Protocol):
    """The part of the client that the request path uses."""

    async def start(
        self, target: UpstreamAddress, head: bytes, body: RequestBody, abort: "AbortHandle"
    ) -> UpstreamAnswer:
        """Sends a request and returns when the head of the answer has arrived. Raises UpstreamError."""
        ...


class Abortable(Protocol):
    """What a request currently waits for: a connection or a hold queue."""

    handle: "AbortHandle | None"

    def abort(self, error: UpstreamError) -> None: ...


class AbortHandle:
    """Aborts a request at any stage; created before there is a connection."""

    __slots__ = ("_at", "aborted", "answering", "cancel", "given_up", "sent")

    def __init__(self) -> None:
        self.aborted = False
        self.answering = False
        """Part of an answer was sent to the client."""
        self.given_up = False
        """The replica of this attempt stalled, perhaps before there was a connection."""
        self.sent = False
        """Part of the request may have reached the replica of this attempt."""
        self.cancel: Callable[[], bool] | None = None
        """Called when the client leaves once the request was sent. True: the answer is read for its counts, for a
        while. False: the connection is closed."""
        self._at: Abortable | None = None

    def hold(self, at: Abortable) -> None:
        self._at = at
        at.handle = self

    def drop(self) -> None:
        self._at = None

    def abort(self) -> None:
        """The client left. If the engine can be asked to end the request, it then reports what it computed; an external
        target does at the end of its stream. Otherwise, or at a second call, the connection is closed."""
        ask = self.cancel if self.sent and not self.aborted else None
        self.aborted = True
        if ask is None or not ask():
            self.cut()

    def cut(self) -> None:
        """Ends the request at its current stage, without an answer."""
        if self._at is not None:
            self._at.abort(Aborted("the request was cut off"))

    def expire(self) -> None:
        """The answer, or its next part, takes too long: ends the attempt, also after a part of it was sent."""
        self.given_up = not self.answering
        if self._at is not None:
            self._at.abort(GivenUp("the answer takes too long"))

    def give_up(self) -> None:
        """The replica stalled: ends the attempt there, unless part of its answer was sent to the client."""
        if self.answering:
            return
        self.given_up = True
        if self._at is not None:
            self._at.abort(GivenUp("the replica stalled"))


def agent_request(peer: "StreamPeer", path: str, body: bytes) -> tuple[UpstreamAddress, bytes, bytes]:
    """A POST to an agent, as `start` takes it."""
    host = f"[{peer.host}]" if ":" in peer.host else peer.host
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{peer.port}\r\nauthorization: Bearer {peer.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return UpstreamAddress(peer.host, peer.port, peer.server_name), head.encode(), body
