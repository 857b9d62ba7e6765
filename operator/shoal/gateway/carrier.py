"""A proxy that carries one request: it speaks with the client and with the replica, and the gateway decides."""

from typing import Final, Protocol

from shoal.gateway.upstream import Upstream, UpstreamAddress

CARRIER: Final = "shoal.carrier"
"""Key of the scope where a request has its carrier. Without one the gateway speaks with client and replica itself."""


class Carrier(Upstream, Protocol):
    """`start` may be called once: the proxy takes one replica. Until then the client can get nothing but an
    error, so a waiting stream gets no comments."""

    @property
    def limited(self) -> bool:
        """Whether the proxy takes only some replicas."""
        ...

    @property
    def sent(self) -> bool:
        """Whether the proxy has the request."""
        ...

    @property
    def broke_off(self) -> bool:
        """Whether the proxy ended the request in the midst of the replica's answer. It does not say why."""
        ...

    def takes(self, target: UpstreamAddress) -> bool:
        """Whether the proxy can send the request to a replica."""
        ...
