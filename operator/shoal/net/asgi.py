"""What the server and the application agree on: ASGI's words, and shortcuts of our own."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, Protocol

from shoal.net.tls import TLSCredentials, refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]
HeaderLines = bytes
"""Headers as they are on the wire: `name: value` and CRLF for each. Made in one step, they cost half of the pairs."""

DISCONNECT: Final = "shoal.on_disconnect"
"""Key of the scope where the request leaves what to call when its client goes, if the server offers the key. ASGI's own
way is to await `receive()`, which costs a task per request. The server puts GONE there when the client has left."""
GONE: Final = object()
CALLER: Final = "shoal.caller"
"""Key of the scope where a server of mutual TLS puts the role in the client's certificate, None where it showed none.
Without the key the connection is plain."""
DIRECT: Final = "shoal.direct"
"""Key of the scope where the server may leave a `DirectExchange`."""


class DirectExchange(Protocol):
    """Takes a body that is there and writes to the client, without a coroutine. ASGI's messages do the same for 8 %
    more CPU per request, and a stream needs a task that wakes up for each of its chunks."""

    def body(self) -> bytes | None:
        """Takes the request's body, if all of it has arrived. None, and nothing is taken: read it by messages."""
        ...

    def whole(self, headers: HeaderLines, body: bytes) -> bool:
        """Writes a whole answer with status 200. False, and nothing is written: the client does not take what was
        written before, so send the answer as messages."""
        ...

    def begin(self, headers: HeaderLines, data: bytes) -> bool:
        """Writes the head of a stream, with status 200, and its first part, which is not empty. False, and nothing is
        written: as for `whole`."""
        ...

    def part(self, data: bytes) -> bool:
        """Writes a part of a stream that has begun. False: the client does not take what was written, so await
        `drained` before the next part."""
        ...

    def end(self) -> bool:
        """Ends a stream that has begun. False, and nothing is written: as for `whole`."""
        ...

    async def drained(self) -> None:
        """Returns when the client takes more, or has left."""
        ...


def header_lines(headers: Headers) -> HeaderLines:
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def header_pairs(lines: HeaderLines) -> Headers:
    return tuple((name, value) for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n")[:-1]))


def unproved(credentials: TLSCredentials | None, scope: Scope, role: str) -> str | None:
    """Why a caller with a key of `role` is refused on this connection; None: it is served."""
    return refusal(credentials, role, secured=CALLER in scope, shown=scope.get(CALLER))
