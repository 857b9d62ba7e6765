"""Which replica serves a request."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.api.replica import Phase
from shoal.core.routing.affinity import favourite

_TURNED_AWAY: frozenset[Phase | None] = frozenset({"stalled", "draining"})


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine pod as the API server tells of it."""

    uid: str
    namespace: str
    name: str
    model: str
    """`namespace/name` of its Model."""
    model_uid: str
    ip: str | None
    ready: bool
    deleting: bool
    install_key: str | None
    """Fingerprint of the install key that its keys come from."""
    gpu_class: str | None
    node: str | None
    mtls: bool = False
    """Engine and agent speak mutual TLS."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ReplicaSignal:
    """What a live stream says of a replica. Absent means that there is no live stream."""

    phase: Phase | None
    engine_boot: str | None


class Choice(NamedTuple):
    replica: Replica
    fallback: bool
    """Chosen without a live stream: all streams of the model are down."""


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

    Only Ready replicas that are not being deleted count; among them only those with a live stream that are neither
    draining nor stalled. If no stream of the model is live, the Ready ones serve all the same (streams.md, rule 1): an
    agent that is down must not take a serving engine with it. `leaving` are uids of pods that were draining when their
    streams ended: those never serve on hearsay.
    """
    # One pass, because every request makes it.
    found: list[Replica] = []
    unheard: list[Replica] = []
    live = False
    for replica in replicas:
        if not replica.ready or replica.deleting or not replica.ip:
            continue
        said = signals.get(replica.uid)
        if said is None:
            unheard.append(replica)
            continue
        live = True
        if said.phase not in _TURNED_AWAY:
            found.append(replica)
    if found:
        return Usable(found, fallback=False)
    if live:
        return NoReplica("turned-away")
    if not unheard:
        return NoReplica("not-ready" if replicas else "none")
    hearsay = [r for r in unheard if r.uid not in leaving]
    return Usable(hearsay, fallback=True) if hearsay else NoReplica("turned-away")


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

    `tried` are uids that have failed this request; `turn` is a growing number that spreads equals.
    """
    if isinstance(found, NoReplica):
        return found
    left = [r for r in found.replicas if r.uid not in tried] if tried else found.replicas
    if not left:
        return NoReplica("tried")
    if head is None or len(left) == 1:
        return Choice(least_busy(left, in_flight, rotation), found.fallback)
    uids = [r.uid for r in left]
    return Choice(favourite(head, left, uids, [in_flight.get(uid, 0) for uid in uids]), found.fallback)


def least_busy(replicas: Sequence[Replica], in_flight: Mapping[str, int], rotation: int) -> Replica:
    """The one of at least one replica with the fewest requests in flight."""
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
