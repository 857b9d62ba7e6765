"""The prompts that other gateways sent (`GET /v1/prefixes`): a stream to each gateway pod."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import aiohttp

from shoal.api.meta import JsonObject
from shoal.api.names import PREFIXES_PATH
from shoal.api.prefixes import read_sent
from shoal.net.stream import Follower, ListenerIdentity, PeerStreams, StreamPeer


class Sent(Protocol):
    def __call__(self, prompts: Sequence[tuple[str, bytes]], *, full: bool) -> None:
        """Called with uid of the replica's pod and marks of each prompt; `full`: of some time, as the first message."""


class PrefixStream(Follower):
    """Listens to one gateway. What it said stays true when the stream is down: the prompts were sent."""

    path = PREFIXES_PATH
    field = "sent"
    what = "gateway's prefix"
    longest: ClassVar[int] = 4 * 1024 * 1024

    def __init__(
        self, peer: StreamPeer, session: aiohttp.ClientSession, sent: Sent, identity: ListenerIdentity
    ) -> None:
        super().__init__(peer, session, identity)
        self._sent = sent

    def _keep(self, content: JsonObject, *, full: bool) -> None:
        self._sent(read_sent(content), full=full)

    def _notify(self, content: JsonObject | None) -> None:
        pass

    def _forget(self) -> None:
        pass


class PrefixStreams(PeerStreams[PrefixStream]):
    """A stream to every gateway that is named."""

    def __init__(self, sent: Sent, identity: ListenerIdentity) -> None:
        super().__init__(lambda peer, session: PrefixStream(peer, session, sent, identity))
