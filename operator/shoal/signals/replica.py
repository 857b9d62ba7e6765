"""What agents say (`GET /v1/replica`): a stream to each engine pod."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from shoal.api import replica as api
from shoal.api.meta import JsonObject
from shoal.api.names import REPLICA_PATH
from shoal.net.stream import Follower, ListenerIdentity, PeerStreams, StreamBroken, StreamPeer

__all__ = ["ListenerIdentity", "ReplicaStream", "ReplicaStreams", "StreamBroken", "StreamPeer", "read_once"]

_KNOWN_KEYS = frozenset(f.alias or name for name, f in api.ReplicaKeys.model_fields.items()) | set(
    api.ReplicaKeys.model_fields
)

Changed = Callable[[str, api.ReplicaKeys | None], None]
"""Called with a pod's uid and its report; None when nothing is known."""


class ReplicaStream(Follower):
    """Listens to one agent. `keys` is None while it is not known."""

    path = REPLICA_PATH
    field = "keys"
    what = "agent"
    longest = 4 * 1024 * 1024

    def __init__(
        self, peer: StreamPeer, session: aiohttp.ClientSession, changed: Changed, identity: ListenerIdentity
    ) -> None:
        super().__init__(peer, session, identity)
        self.keys: api.ReplicaKeys | None = None
        self._changed = changed
        self._reported: dict[str, Any] = {}

    def _keep(self, content: JsonObject, *, full: bool) -> None:
        if full:
            self._reported = {}
        # What this version does not know is not kept: a peer that makes up keys would fill the memory with them.
        self._reported.update({key: value for key, value in content.items() if key in _KNOWN_KEYS})
        # One validation of everything costs less than one of the change and a copy.
        self.keys = api.ReplicaKeys.model_validate(self._reported)
        if self.keys.adapters is not None:
            self._reported["adapters"] = self.keys.adapters  # dozens, that seldom change: validated once

    def _notify(self, content: JsonObject | None) -> None:
        self._changed(self.peer.uid, self.keys)

    def _forget(self) -> None:
        self.keys = None


class ReplicaStreams(PeerStreams[ReplicaStream]):
    """A stream to every agent that is named."""

    def __init__(self, changed: Changed, identity: ListenerIdentity = ListenerIdentity()) -> None:  # noqa: B008 - immutable
        super().__init__(lambda peer, session: ReplicaStream(peer, session, changed, identity))

    def keys(self) -> dict[str, api.ReplicaKeys]:
        """Pod uid -> what its live stream says. A uid that is absent has no live stream."""
        return {stream.peer.uid: stream.keys for stream in self.live() if stream.keys is not None}


async def read_once(peer: StreamPeer, session: aiohttp.ClientSession, *, seconds: float) -> api.ReplicaKeys:
    """What one agent knows now: the first message of its stream. Raises StreamBroken when it cannot be had in time."""
    try:
        async with asyncio.timeout(seconds):
            stream = ReplicaStream(peer, session, lambda _uid, _keys: None, ListenerIdentity())
            listening = stream.listen()
            try:
                async for _ in listening:
                    if stream.keys is not None:
                        return stream.keys
            finally:
                await listening.aclose()
    except (aiohttp.ClientError, TimeoutError, OSError) as failure:
        raise StreamBroken(f"{type(failure).__name__}: {failure}") from failure
    raise StreamBroken("the agent ended the stream")
