"""The replicas as this gateway sees them: what their agents say, and how much of ours is in flight on each."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from shoal.api.replica import ReplicaKeys
from shoal.core.hold.room import Allowance, Ours, allowance
from shoal.core.resolve import ServedModel
from shoal.core.routing import Choice, Heard, NoReplica, Replica, Usable, least_busy, pick, usable
from shoal.gateway.demand import DemandBook
from shoal.gateway.directory import Snapshot
from shoal.gateway.residency import Residency
from shoal.gateway.upstream import AbortHandle
from shoal.net.tls import Credentials
from shoal.serving.installkey import KeyRing
from shoal.signals.replica import Me, Peer, ReplicaStreams
from shoal.signals.stream import agent_peer


class Fleet:
    def __init__(
        self,
        key_ring: KeyRing,
        me: Me = Me(),  # noqa: B008 - immutable
        book: DemandBook | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._key_ring = key_ring
        self._credentials = credentials
        self.book = book or DemandBook()
        self.changed: list[Callable[[str], None]] = []
        """Each hears the uid of a pod after what is known of it changed."""
        self.emptied: Callable[[str], None] = lambda _uid: None
        """Hears the uid of a pod at which nothing of ours is in flight any more."""
        self.acknowledged: Callable[[str, Collection[str], float], None] = lambda _uid, _names, _at: None
        """Hears which adapters an agent has heard to run at its pod, and when that was put down."""
        self.residency = Residency()
        self.streams = ReplicaStreams(self.heard_of, me)
        self.heard: dict[str, Heard] = {}
        """By pod uid; absent: no live stream."""
        self.attempts: defaultdict[str, set[AbortHandle]] = defaultdict(set)
        """By pod uid: the requests that are there, for as long as they are."""
        self.leaving: set[str] = set()
        """Pods whose streams ended while they drained: their engines may be stopped at any moment."""
        self._said: dict[str, ReplicaKeys] = {}
        self._in_flight: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._reported: dict[str, tuple[int, int]] = {}
        """What was in flight when the last report came: requests, and tokens of those that had waited."""
        self._turn = 0
        self._snapshot: Snapshot | None = None
        self._usable: dict[str, Usable | NoReplica] = {}
        """By uid of the Model: what `usable` found in that snapshot since it last could have changed."""
        self._by_uid: dict[str, Mapping[str, Replica]] = {}
        """The same by uid of the pod, where somebody asked; without those that are not heard."""

    def heard_of(self, uid: str, keys: ReplicaKeys | None) -> None:
        """Takes what a stream says; None when it is down."""
        if keys is None:
            last = self.heard.pop(uid, None)
            if last is not None and last.phase == "draining":
                self.leaving.add(uid)
            self._said.pop(uid, None)
            self._reported.pop(uid, None)
            self._forget()
            self.residency.heard(uid, None)
        else:
            before = self.heard.get(uid)
            if before is None or before.phase != keys.phase:
                self.leaving.discard(uid)
                self._forget()
            self.heard[uid] = Heard(keys.phase, keys.engine_boot)
            self._said[uid] = keys
            self.residency.heard(uid, keys.adapters)
            self._reported[uid] = (self._in_flight.get(uid, 0), self._tokens.get(uid, 0))
            if keys.phase == "stalled" and (before is None or before.phase != "stalled"):
                # Who has seen nothing of an answer yet is better off elsewhere than until the engine is restarted.
                for attempt in list(self.attempts.get(uid, ())):
                    attempt.give_up()
        for changed in self.changed:
            changed(uid)

    def follow(self, snapshot: Snapshot) -> None:
        """Listens to the agents of exactly the pods in the snapshot."""
        self.leaving &= snapshot.owners.keys()
        for uid in [uid for uid, there in self.attempts.items() if not there and uid not in snapshot.owners]:
            del self.attempts[uid]
        peers: list[Peer] = []
        for pods in snapshot.replicas.values():
            for pod in pods:
                key = self._key_ring.key_for(pod.install_key, pod.model_uid)
                if pod.ip and key:
                    peers.append(
                        agent_peer(
                            pod.uid,
                            pod.key,
                            pod.ip,
                            key,
                            model_uid=pod.model_uid,
                            mtls=pod.mtls,
                            credentials=self._credentials,
                        )
                    )
        self.streams.set_peers(peers)

    def choose(
        self, snapshot: Snapshot, model: ServedModel, tried: Collection[str], head: int | None = None
    ) -> Choice | NoReplica:
        """The replica for one request; `head` is that of its prompt. Call `enter` right after it, with no await
        between."""
        self._turn += 1
        return pick(self._found(snapshot, model), self._in_flight, tried=tried, turn=self._turn, head=head)

    def usable(self, snapshot: Snapshot, model: ServedModel) -> list[Replica]:
        """The replicas that may get requests and whose key is known."""
        found = self._found(snapshot, model)
        if isinstance(found, NoReplica):
            return []
        return [r for r in found.replicas if self._key_ring.key_for(r.install_key, r.model_uid) is not None]

    def heard_replicas(self, snapshot: Snapshot, model: ServedModel) -> Mapping[str, Replica] | NoReplica:
        """The replicas that may get requests and are heard, by uid; `no-adapters` where all streams of the Model are
        down."""
        found = self._found(snapshot, model)
        if isinstance(found, NoReplica):
            return found
        if found.fallback:
            return NoReplica("no-adapters")
        known = self._by_uid.get(model.uid)
        if known is None:
            known = self._by_uid[model.uid] = {r.uid: r for r in found.replicas}
        return known

    def serves_adapters(self, snapshot: Snapshot, model: ServedModel) -> bool:
        """Whether any replica that is heard says which adapters it has."""
        found = self.heard_replicas(snapshot, model)
        if isinstance(found, NoReplica):
            return False
        return any((said := self._said.get(uid)) is not None and said.adapters is not None for uid in found)

    def said(self, uid: str) -> ReplicaKeys | None:
        """What the agent of a pod says; None: it is not heard."""
        return self._said.get(uid)

    def free_slots(self, uid: str) -> int | None:
        """GPU slots for adapters that no lease covers at a pod, as its agent says; None: it does not say."""
        said = self._said.get(uid)
        if said is None or said.adapters is None or said.adapter_slots is None or said.adapter_slots_leased is None:
            return None
        return max(0, said.adapter_slots - said.adapter_slots_leased)

    def next_turn(self) -> int:
        """A growing number that spreads equals."""
        self._turn += 1
        return self._turn

    def least_busy(self, replicas: Sequence[Replica]) -> Replica:
        """The one with the fewest requests of ours; call `enter` right after it, with no await between."""
        self._turn += 1
        return least_busy(replicas, self._in_flight, self._turn)

    def allowance(self, replica: Replica, *, kv_percent: int, share: float) -> Allowance:
        """What may go there in one round of those that wait."""
        uid = replica.uid
        at_report = self._reported.get(uid, (0, 0))
        ours = Ours(self._in_flight.get(uid, 0), self._tokens.get(uid, 0), *at_report)
        return allowance(self._said.get(uid), ours, kv_percent=kv_percent, share=share)

    def enter(self, replica: Replica, tokens: int = 0) -> None:
        """Counts a request as in flight; `tokens` is what it is assumed to hold, if it waited before."""
        uid = replica.uid
        self._in_flight[uid] = self._in_flight.get(uid, 0) + 1
        if tokens:
            self._tokens[uid] = self._tokens.get(uid, 0) + tokens
        self.book.sent(replica.model_uid)

    def leave(self, replica: Replica, tokens: int = 0) -> None:
        """It is there no more. `tokens` as `enter` was told."""
        uid = replica.uid
        left = self._in_flight[uid] - 1
        if left:
            self._in_flight[uid] = left
        else:
            del self._in_flight[uid]
            self.emptied(uid)
        if tokens and not self._take_tokens(uid, tokens):
            del self._tokens[uid]
        self.book.ended(replica.model_uid)

    def in_flight(self, uid: str) -> int:
        return self._in_flight.get(uid, 0)

    def _found(self, snapshot: Snapshot, model: ServedModel) -> Usable | NoReplica:
        """`usable`, looked up: every request asks, and a Model may have hundreds of replicas."""
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._forget()
        found = self._usable.get(model.uid)
        if found is None:
            found = self._usable[model.uid] = usable(snapshot.replicas_of(model), self.heard, self.leaving)
        return found

    def _forget(self) -> None:
        self._usable.clear()
        self._by_uid.clear()

    def _take_tokens(self, uid: str, tokens: int) -> int:
        left = self._tokens[uid] = self._tokens[uid] - tokens
        return left
