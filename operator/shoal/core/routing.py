"""Which replica serves a request."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.api.replica import Phase

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

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a live stream says of a replica. Absent means that there is no live stream."""

    phase: Phase | None
    engine_boot: str | None


class Choice(NamedTuple):
    replica: Replica
    fallback: bool
    """Chosen without a live stream: all streams of the model are down."""


@dataclass(frozen=True, slots=True)
class NoReplica:
    reason: Literal["none", "not-ready", "turned-away", "tried"]

    @property
    def message(self) -> str:
        return _NO_REPLICA[self.reason]


_NO_REPLICA = {
    "none": "it has no replica",
    "not-ready": "no replica is ready yet",
    "turned-away": "its replicas are draining or stalled",
    "tried": "no replica could take the request",
}


def choose(
    replicas: Sequence[Replica],
    heard: Mapping[str, Heard],
    in_flight: Mapping[str, int],
    *,
    tried: Collection[str] = (),
    turn: int = 0,
) -> Choice | NoReplica:
    """The replica with the fewest requests of this gateway in flight.

    Only Ready replicas that are not being deleted count; among them only those with a live stream that are neither
    draining nor stalled. If no stream of the model is live, the Ready ones serve all the same (streams.md, rule 1): an
    agent that is down must not take a serving engine with it. `tried` are uids that have failed this request; `turn`
    is a growing number that spreads equals.
    """
    if not replicas:
        return NoReplica("none")
    ready = [r for r in replicas if r.ready and not r.deleting and r.ip]
    if not ready:
        return NoReplica("not-ready")
    live = [r for r in ready if r.uid in heard]
    usable = [r for r in live if heard[r.uid].phase not in _TURNED_AWAY] if live else ready
    if not usable:
        return NoReplica("turned-away")
    left = [r for r in usable if r.uid not in tried] if tried else usable
    if not left:
        return NoReplica("tried")
    if len(left) == 1:
        return Choice(left[0], not live)
    loads = [in_flight.get(r.uid, 0) for r in left]
    fewest = min(loads)
    equals = [r for r, load in zip(left, loads, strict=True) if load == fewest]
    return Choice(equals[turn % len(equals)], not live)
