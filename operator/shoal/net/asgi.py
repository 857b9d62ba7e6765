"""What the server and the application agree on: ASGI's words, and two shortcuts of our own."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from shoal.net.tls import TLSCredentials, refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

DISCONNECT: Final = "shoal.on_disconnect"
"""Key of the scope where the request leaves what to call when its client goes, if the server offers the key. ASGI's own
way is to await `receive()`, which costs a task per request. The server puts GONE there when the client has left."""
GONE: Final = object()
CALLER: Final = "shoal.caller"
"""Key of the scope where a server of mutual TLS puts the role in the client's certificate, None where it showed none.
Without the key the connection is plain."""
ANSWER: Final = "shoal.answer"
"""Key of the scope where the server may leave `answer(headers, body)`: a whole answer with status 200 in one write, or
False when the client must be waited for first. ASGI's two messages do the same for 7 % more CPU per request."""


def unproved(credentials: TLSCredentials | None, scope: Scope, role: str) -> str | None:
    """Why a caller with a key of `role` is refused on this connection; None: it is served."""
    return refusal(credentials, role, secured=CALLER in scope, shown=scope.get(CALLER))
