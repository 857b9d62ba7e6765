"""This gateway's view of the replicas: their agents' reports, and the requests that this gateway has in flight on
each."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from shoal.api.replica import ReplicaKeys
from shoal.core.hold.capacity import Allowance, OwnInFlight, allowance
from shoal.core.routing.choice import Choice, NoReplica, ReplicaSignal, Usable, least_busy, pick, usable
from shoal.core.routing.prefixes import marks_of
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.score import Pick, ReplicaScores
from shoal.gateway.demand import DemandState
from shoal.gateway.directory import ClusterSnapshot
from shoal.gateway.firsttokens import FirstTokens
from shoal.gateway.prepared import Prepared
from shoal.gateway.residency import Residency
from shoal.gateway.upstream import AbortHandle
from shoal.metering.meter import Meter
from shoal.net.installkey import KeyRing
from shoal.net.stream import agent_peer
from shoal.net.tls import TLSCredentials
from shoal.signals.replica import ListenerIdentity, ReplicaStreams, StreamPeer

SHORT_ANSWER: Final = 4
"""Tokens of a whole answer whose end tells when its first token was there."""


class ReplicaPool:
    def __init__(
        self,
        key_ring: KeyRing,
        identity: ListenerIdentity = ListenerIdentity(),  # noqa: B008 - immutable
        demand: DemandState | None = None,
        credentials: TLSCredentials | None = None,
        *,
        scores: ReplicaScores | None = None,
        prompt_sent: Callable[[str, bytes], None] | None = None,
    ) -> None:
        """`scores`: what requests cost where; None: replicas are chosen without. `prompt_sent`: called with a pod's uid
        and the marks of a prompt that goes there, if it was chosen by score."""
        self._key_ring = key_ring
        self._credentials = credentials
        self.demand = demand or DemandState()
        self.changed: list[Callable[[str], None]] = []
        """Each is called with a pod's uid after its report changed."""
        self.emptied: Callable[[str], None] = lambda _uid: None
        """Called with a pod's uid when its last request in flight has ended."""
        self._prompt_sent = prompt_sent
        self.residency = Residency()
        self.first_tokens = FirstTokens(self.demand)
        self.streams = ReplicaStreams(self.update, identity)
        self.live: dict[str, ReplicaSignal] = {}
        """Signals by pod uid; absent: no live stream."""
        self.attempts: defaultdict[str, set[AbortHandle]] = defaultdict(set)
        """Abort handles by pod uid, of the requests that are at the pod."""
        self.leaving: set[str] = set()
        """Pods whose streams ended while they drained: their engines may stop at any moment."""
        self._deaths: dict[str, tuple[str, float]] = {}
        """By pod uid: the boot id of the engine that died under a request, and when (time.monotonic)."""
        self.scores = scores
        self._reports: dict[str, ReplicaKeys] = {}
        self._in_flight: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._at_report: dict[str, tuple[int, int]] = {}
        """In flight when the last report came: requests, and the tokens of those that had waited."""
        self._sequence = 0
        self._snapshot: ClusterSnapshot | None = None
        self._usable: dict[str, Usable | NoReplica] = {}
        """By uid of the Model: cached result of `usable` for that snapshot."""
        self._live_by_uid: dict[str, Mapping[str, Replica]] = {}
        """By uid of the Model: its live replicas by pod uid, cached on demand."""

    def update(self, uid: str, keys: ReplicaKeys | None) -> None:
        """Stores a stream's report; None: the stream is down."""
        if keys is None:
            last = self.live.pop(uid, None)
            if last is not None and last.phase == "draining":
                self.leaving.add(uid)
            self._reports.pop(uid, None)
            self._at_report.pop(uid, None)
            if self.scores is not None:
                self.scores.down(uid)
            self._invalidate()
            self.residency.update(uid, None)
            self.first_tokens.down(uid)
        else:
            before = self.live.get(uid)
            if before is None or before.phase != keys.phase:
                self.leaving.discard(uid)
                self._invalidate()
                self.first_tokens.reported(uid, keys.phase)
            self.live[uid] = ReplicaSignal(keys.phase, keys.engine_boot)
            self._reports[uid] = keys
            self.residency.update(uid, keys.adapters)
            in_flight = self._in_flight.get(uid, 0)
            self._at_report[uid] = (in_flight, self._tokens.get(uid, 0))
            if self.scores is not None:
                self.scores.reported(uid, keys, in_flight, time.monotonic())
            if keys.phase == "stalled" and (before is None or before.phase != "stalled"):
                # Requests without an answer yet are better sent elsewhere than left until the engine restarts.
                for attempt in list(self.attempts.get(uid, ())):
                    attempt.give_up()
        for changed in self.changed:
            changed(uid)

    def follow(self, snapshot: ClusterSnapshot) -> None:
        """Connects streams to the agents of exactly the pods in the snapshot."""
        self.leaving &= snapshot.owners.keys()
        self.first_tokens.keep(snapshot.owners)
        if self.scores is not None:
            self.scores.keep(snapshot.owners)
        for uid in [uid for uid, there in self.attempts.items() if not there and uid not in snapshot.owners]:
            del self.attempts[uid]
        for uid in self._deaths.keys() - snapshot.owners.keys():
            del self._deaths[uid]
        peers: list[StreamPeer] = []
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
        self,
        snapshot: ClusterSnapshot,
        model: ServedModel,
        tried: Collection[str],
        prompt: Prompt | None = None,
    ) -> Choice | NoReplica:
        """Chooses the replica for one request: the one that it costs least, or, where no load is known, by the
        prompt's head. Call `enter` right after it, without an await between."""
        self.next_turn()
        found = self._usable_of(snapshot, model)
        if isinstance(found, NoReplica):
            return found
        if self.scores is not None and prompt is not None and len(found.replicas) > 1 and not found.fallback:
            best = self.cheapest(found.replicas, prompt, tried)
            if best is not None:
                return Choice(best.replica, False, best)
        head = None if prompt is None else prompt.head
        return pick(found, self._in_flight, tried=tried, rotation=self._sequence, head=head)

    def next_turn(self) -> None:
        """The next choice looks at other replicas, of many, and begins elsewhere among equal ones."""
        self._sequence += 1

    def cheapest(
        self,
        replicas: Sequence[Replica],
        prompt: Prompt,
        tried: Collection[str] = (),
        *,
        waits: Mapping[str, float] | None = None,
        home: str | None = None,
        alone: bool = False,
    ) -> Pick | None:
        """The replica with the lowest score (core/routing/score.py); None: no load is known."""
        if self.scores is None:
            return None
        left = [r for r in replicas if r.uid not in tried] if tried else replicas
        return self.scores.pick(
            left,
            self._in_flight,
            prompt,
            time.monotonic(),
            rotation=self._sequence,
            waits=waits,
            home=home,
            alone=alone,
        )

    def began(self, pick: Pick) -> None:
        """The answer of a request has begun at the replica that was chosen by its score."""
        if self.scores is not None:
            self.scores.began(pick, time.monotonic())

    def answered(self, replica: Replica, pick: Pick | None, meter: Meter, prepared: Prepared) -> None:
        """Learns from a complete answer. The first token of an answer that is not a stream comes at its end, so only
        the shortest of those tell how fast the replica reads prompts."""
        if self.scores is None:
            return
        counts = meter.tokens()
        prompt, answer = counts["inputTokens"], counts["outputTokens"]
        if meter.count_source != "final" or prompt is None:
            return
        first = meter.first_byte if prepared.stream or (answer or 0) <= SHORT_ANSWER else None
        cached, now = counts["cachedTokens"], time.monotonic()
        if pick is not None:
            ended = now if prepared.stream else None
            self.scores.answered(pick, first=first, prompt=prompt, cached=cached, answer=answer, ended=ended)
        elif first is not None:
            self.scores.observe(replica, prompt=prompt, cached=cached or 0, seconds=first - meter.sent_at, now=now)

    def usable(self, snapshot: ClusterSnapshot, model: ServedModel) -> list[Replica]:
        """The replicas that may get requests and whose engine key is known."""
        found = self._usable_of(snapshot, model)
        if isinstance(found, NoReplica):
            return []
        return [r for r in found.replicas if self._key_ring.key_for(r.install_key, r.model_uid) is not None]

    def live_replicas(self, snapshot: ClusterSnapshot, model: ServedModel) -> Mapping[str, Replica] | NoReplica:
        """The replicas that may get requests and have a live stream, by uid; `no-adapters` if all streams of the Model
        are down."""
        found = self._usable_of(snapshot, model)
        if isinstance(found, NoReplica):
            return found
        if found.fallback:
            return NoReplica("no-adapters")
        known = self._live_by_uid.get(model.uid)
        if known is None:
            known = self._live_by_uid[model.uid] = {r.uid: r for r in found.replicas}
        return known

    def starting(self, snapshot: ClusterSnapshot, model: ServedModel) -> list[Replica] | None:
        """The pods that may become the first replica of a Model that has none; None: it has one, or those that it has
        take no requests now."""
        found = self._usable_of(snapshot, model)
        if not isinstance(found, NoReplica) or found.reason == "turned-away":
            return None
        return [pod for pod in snapshot.replicas_of(model) if not pod.deleting]

    def serves_adapters(self, snapshot: ClusterSnapshot, model: ServedModel) -> bool:
        """Whether any live replica reports its adapters."""
        found = self.live_replicas(snapshot, model)
        if isinstance(found, NoReplica):
            return False
        return any((report := self._reports.get(uid)) is not None and report.adapters is not None for uid in found)

    def report(self, uid: str) -> ReplicaKeys | None:
        """The last report of a pod's agent; None: its stream is not live."""
        return self._reports.get(uid)

    def free_slots(self, uid: str) -> int | None:
        """A pod's GPU slots for adapters without a lease, as its agent reports them; None: not reported."""
        report = self._reports.get(uid)
        if (
            report is None
            or report.adapters is None
            or report.adapter_slots is None
            or report.adapter_slots_leased is None
        ):
            return None
        return max(0, report.adapter_slots - report.adapter_slots_leased)

    def next_sequence(self) -> int:
        """An increasing number that spreads requests among equal replicas."""
        self._sequence += 1
        return self._sequence

    def least_busy(self, replicas: Sequence[Replica]) -> Replica:
        """The replica with the fewest requests of this gateway. Call `enter` right after it, without an await
        between."""
        self._sequence += 1
        return least_busy(replicas, self._in_flight, self._sequence)

    def allowance(self, replica: Replica, *, kv_percent: int, share: float) -> Allowance:
        """How much the hold queue may release to a replica in one round."""
        uid = replica.uid
        at_report = self._at_report.get(uid, (0, 0))
        own = OwnInFlight(self._in_flight.get(uid, 0), self._tokens.get(uid, 0), *at_report)
        return allowance(self._reports.get(uid), own, kv_percent=kv_percent, share=share)

    def enter(self, replica: Replica, tokens: int = 0, pick: Pick | None = None) -> None:
        """Counts a request as in flight; `tokens` is its estimated size, if it waited before; `pick` is the choice, if
        it was by score."""
        uid = replica.uid
        if pick is not None and self.scores is not None:
            self.scores.sent(pick)
            if pick.prompt.points and self._prompt_sent is not None:
                self._prompt_sent(uid, marks_of(pick.prompt.points))
        self._in_flight[uid] = self._in_flight.get(uid, 0) + 1
        if tokens:
            self._tokens[uid] = self._tokens.get(uid, 0) + tokens
        self.demand.sent(replica.model_uid)

    def leave(self, replica: Replica, tokens: int = 0) -> None:
        """A request left the replica. `tokens` as passed to `enter`."""
        uid = replica.uid
        left = self._in_flight[uid] - 1
        if left:
            self._in_flight[uid] = left
        else:
            del self._in_flight[uid]
            self.emptied(uid)
        if tokens and not self._take_tokens(uid, tokens):
            del self._tokens[uid]
        self.demand.ended(replica.model_uid)

    def note_death(self, uid: str, boot: str | None) -> None:
        """The pod's engine has died under a request."""
        if boot is not None and self._deaths.get(uid, ("", 0.0))[0] != boot:
            self._deaths[uid] = boot, time.monotonic()

    def was_dead(self, uid: str, boot: str | None, seconds: float) -> bool:
        """Whether the pod's engine had died already when it got a request `seconds` ago: the request is then not the
        reason."""
        found = self._deaths.get(uid)
        return found is not None and found[0] == boot and found[1] <= time.monotonic() - seconds

    def in_flight(self, uid: str) -> int:
        return self._in_flight.get(uid, 0)

    def _usable_of(self, snapshot: ClusterSnapshot, model: ServedModel) -> Usable | NoReplica:
        """`usable`, cached: every request needs it, and a Model may have hundreds of replicas."""
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._invalidate()
        found = self._usable.get(model.uid)
        if found is None:
            found = self._usable[model.uid] = usable(snapshot.replicas_of(model), self.live, self.leaving)
        return found

    def _invalidate(self) -> None:
        self._usable.clear()
        self._live_by_uid.clear()

    def _take_tokens(self, uid: str, tokens: int) -> int:
        left = self._tokens[uid] = self._tokens[uid] - tokens
        return left
