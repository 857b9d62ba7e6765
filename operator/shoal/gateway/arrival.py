"""What is known of a request before its body is read."""

from collections.abc import Mapping
from typing import Final

from shoal.api.names import HEADER_HOPS
from shoal.core.fields.table import ALIASES
from shoal.core.routing.external import hops_of
from shoal.gateway import ids
from shoal.gateway.carrier import CARRIER, Carrier
from shoal.gateway.dialects import DIALECTS
from shoal.net.asgi import Scope

_HOPS: Final = HEADER_HOPS.encode()
_NO_HEADERS: Final[Mapping[bytes, bytes]] = {}


class Arrival:
    __slots__ = ("carrier", "client_id", "content_type", "dialect", "engine_path", "headers", "hops", "id", "path")

    def __init__(self, scope: Scope) -> None:
        self.path: str = ALIASES.get(scope["path"], scope["path"])
        self.dialect = DIALECTS.get(self.path)
        """The client speaks another API than the engine's."""
        self.engine_path = self.path if self.dialect is None else self.dialect.engine_path
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.content_type = self.headers.get(b"content-type")
        self.id = ids.uuid7()
        self.client_id = ids.client_request_id(self.headers.get(b"x-request-id"))
        self.hops = hops_of(self.headers.get(_HOPS))
        """Gateways of Shoal that have sent the request on, without this one."""
        self.carrier: Carrier | None = scope.get(CARRIER)
        """The proxy that carries the request; None: the gateway does it itself."""

    def forget_headers(self) -> None:
        """Frees what an accepted request needs no more: it may have to wait."""
        self.headers = _NO_HEADERS
