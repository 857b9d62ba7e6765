"""Which replica serves a request."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.api.replica import Phase
from shoal.core.routing.affinity import favourite
from shoal.core.routing.replica import Replica
from shoal.core.routing.score import Pick

_TURNED_AWAY: frozenset[Phase | None] = frozenset({"stalled", "draining"})


@dataclass(frozen=True, slots=True)
class ReplicaSignal:
    """What a live agent stream reports of a replica; absent without a live stream."""

    phase: Phase | None
    engine_boot: str | None


def has_ended(boot: str | None, answers: bool, signal: ReplicaSignal | None) -> bool:
    """Whether a replica has ended that was answering when a proxy broke the answer off: else its client has left, or
    something between was lost. `boot`: of the engine that was answering, None where no agent reported it; `answers`:
    connections to it are taken now; `signal`: what its agent says now.

    The agent has to agree, if only by the end of its stream: a replica that just this gateway does not reach has not
    ended. One whose agent names another engine has, though that takes connections already."""
    if boot is None:
        return False
    if signal is not None and signal.engine_boot is not None and signal.engine_boot != boot:
        return True
    return not answers and (signal is None or signal.phase != "ready")


class Choice(NamedTuple):
    replica: Replica
    fallback: bool
    """Chosen without a live stream, because all streams of the Model are down."""
    pick: Pick | None = None
    """Why, if the replica was chosen by its score (score.py)."""
    among: int = 1
    """Replicas that could take the request."""


class Usable(NamedTuple):
    replicas: Sequence[Replica]
    fallback: bool


@dataclass(frozen=True, slots=True)
class NoReplica:
    reason: Literal["none", "not-ready", "turned-away", "tried", "queue", "no-adapters", "no-lease", "refused"]

    @property
    def message(self) -> str:
        return _NO_REPLICA[self.reason]


_NO_REPLICA = {
    "none": "it has no replica",
    "not-ready": "no replica is ready yet",
    "turned-away": "its replicas are draining or stalled",
    "tried": "no replica could take the request",
    "queue": "others wait already",
    "no-adapters": "no replica is ready for adapters",
    "no-lease": "its adapter is not loaded yet",
    "refused": "no replica takes its adapter now",
}


def usable(
    replicas: Sequence[Replica], signals: Mapping[str, ReplicaSignal], leaving: Collection[str] = ()
) -> Usable | NoReplica:
    """The replicas that may get requests.

    Only Ready replicas that are not being deleted count; of these only those with a live stream that are neither
    draining nor stalled. If no stream of the Model is live, all Ready ones serve (streams.md, rule 1): an agent that is
    down must not take a serving engine with it. `leaving`: uids of pods that were draining when their streams ended;
    those get nothing without a live stream.
    """
    # One pass: every request comes through here.
    found: list[Replica] = []
    stale: list[Replica] = []
    live = False
    for replica in replicas:
        if not replica.ready or replica.deleting or not replica.ip:
            continue
        signal = signals.get(replica.uid)
        if signal is None:
            stale.append(replica)
            continue
        live = True
        if signal.phase not in _TURNED_AWAY:
            found.append(replica)
    if found:
        return Usable(found, fallback=False)
    if live:
        return NoReplica("turned-away")
    if not stale:
        return NoReplica("not-ready" if replicas else "none")
    allowed = [r for r in stale if r.uid not in leaving]
    return Usable(allowed, fallback=True) if allowed else NoReplica("turned-away")


def pick(
    found: Usable | NoReplica,
    in_flight: Mapping[str, int],
    *,
    tried: Collection[str] = (),
    rotation: int = 0,
    head: int | None = None,
) -> Choice | NoReplica:
    """The usable replica to which the prompt's `head` belongs (affinity.py), within its share of the load; without a
    head the one with the fewest requests of this gateway in flight.

    `tried`: uids that have failed this request; `rotation`: a growing number that spreads requests over equals.
    """
    if isinstance(found, NoReplica):
        return found
    left = [r for r in found.replicas if r.uid not in tried] if tried else found.replicas
    if not left:
        return NoReplica("tried")
    if head is None or len(left) == 1:
        return Choice(least_busy(left, in_flight, rotation), found.fallback, among=len(left))
    uids = [r.uid for r in left]
    home = favourite(head, left, uids, [in_flight.get(uid, 0) for uid in uids])
    return Choice(home, found.fallback, among=len(left))


def least_busy(replicas: Sequence[Replica], in_flight: Mapping[str, int], rotation: int) -> Replica:
    """The replica with the fewest requests in flight; `replicas` is not empty."""
    if len(replicas) == 1:
        return replicas[0]
    equals: list[Replica] = []
    fewest = 0
    for replica in replicas:
        load = in_flight.get(replica.uid, 0)
        if not equals or load < fewest:
            equals, fewest = [replica], load
        elif load == fewest:
            equals.append(replica)
    return equals[rotation % len(equals)]
