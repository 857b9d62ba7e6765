"""A choice among replicas, from what is known of them to the one that is picked, as a gateway makes it."""

from collections.abc import Collection, Mapping, Sequence

from shoal.core.routing.choice import Choice, NoReplica, ReplicaSignal, pick, usable
from shoal.core.routing.replica import Replica


def choose(
    replicas: Sequence[Replica],
    heard: Mapping[str, ReplicaSignal],
    in_flight: Mapping[str, int],
    *,
    tried: Collection[str] = (),
    leaving: Collection[str] = (),
    turn: int = 0,
    head: int | None = None,
) -> Choice | NoReplica:
    return pick(usable(replicas, heard, leaving), in_flight, tried=tried, rotation=turn, head=head)
