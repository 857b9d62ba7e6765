"""The replicas as this gateway sees them: what their agents say, and how much of ours is in flight on each."""

from collections.abc import Collection

from shoal.api.replica import ReplicaKeys
from shoal.core.resolve import ServedModel
from shoal.core.routing import Choice, Heard, NoReplica, choose
from shoal.gateway.directory import Snapshot
from shoal.gateway.installkey import KeyRing
from shoal.signals.replica import Me, Peer, ReplicaStreams


class Fleet:
    def __init__(self, key_ring: KeyRing, me: Me = Me()) -> None:  # noqa: B008 - immutable
        self._key_ring = key_ring
        self.streams = ReplicaStreams(self.heard_of, me)
        self.heard: dict[str, Heard] = {}
        """By pod uid; absent: no live stream."""
        self._in_flight: dict[str, int] = {}
        self._turn = 0

    def heard_of(self, uid: str, keys: ReplicaKeys | None) -> None:
        """Takes what a stream says; None when it is down."""
        if keys is None:
            self.heard.pop(uid, None)
        else:
            self.heard[uid] = Heard(keys.phase, keys.engine_boot)

    def follow(self, snapshot: Snapshot) -> None:
        """Listens to the agents of exactly the pods in the snapshot."""
        peers: list[Peer] = []
        for pods in snapshot.replicas.values():
            for pod in pods:
                key = self._key_ring.key_for(pod.install_key, pod.model_uid)
                if pod.ip and key:
                    peers.append(Peer(pod.uid, pod.key, pod.ip, key))
        self.streams.set_peers(peers)

    def choose(self, snapshot: Snapshot, model: ServedModel, tried: Collection[str]) -> Choice | NoReplica:
        self._turn += 1
        return choose(snapshot.replicas_of(model), self.heard, self._in_flight, tried=tried, turn=self._turn)

    def enter(self, uid: str) -> None:
        """Counts a request as in flight; call it right after `choose`, with no await between."""
        self._in_flight[uid] = self._in_flight.get(uid, 0) + 1

    def leave(self, uid: str) -> None:
        left = self._in_flight[uid] - 1
        if left:
            self._in_flight[uid] = left
        else:
            del self._in_flight[uid]

    def in_flight(self, uid: str) -> int:
        return self._in_flight.get(uid, 0)
