"""Which replica serves a request for an adapter.

Replicas are tried in this order. Within each group the least busy one is chosen. In group 1 a prompt with a head goes
to the replica to which the head belongs (affinity.py), within that replica's share of the load:

1. replicas that have the adapter loaded, a slot for it, and capacity; by their scores (score.py), where those are
   known. Where a request costs more than loading at the best of them, it goes to a replica of group 2 if it costs less
   there with the load;
2. replicas that must load it first and have a slot and capacity: a load is better than the queue of a full engine;
3. replicas that have it loaded and a slot, however busy;
4. replicas that must load it first and have a slot;
5. replicas that have it loaded and must wait for a slot;
6. all others.

Capacity is what the hold queue goes by (`core/hold/capacity.py`): space in the engine's batch and KV cache. A replica
for which this gateway holds a lease has a slot for the adapter. A lease counts as `LEASE_WORTH` requests fewer, so
another replica gets the adapter only when that evens out load: there the adapter takes a slot from another one.

Two kinds of replica are never chosen: those without a live stream, whose adapters are unknown, and those that do not
report `adapters`, because their engine has just started and its desired adapters are not loaded yet, or it serves none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from shoal.core.routing.affinity import favourite
from shoal.core.routing.basis import AdapterStep
from shoal.core.routing.choice import NoReplica
from shoal.core.routing.replica import Replica
from shoal.core.routing.score import Pick

LEASE_WORTH: Final = 4
"""Requests in flight that a lease outweighs."""
LOAD_WEIGHT: Final = 2.0
"""Weight of the seconds of a load: it takes a slot that another adapter could use."""

Cheapest = Callable[[Sequence[Replica], Mapping[str, float] | None], Pick | None]
"""The replica with the lowest score; seconds to wait for the adapter by uid."""

State = Literal["staging", "loading", "loaded", "retiring", "failed"]


@dataclass(frozen=True, slots=True)
class AdapterCandidate:
    """A replica that could serve requests for one adapter."""

    replica: Replica
    loaded: bool
    """The adapter is loaded there: requests may go there under a lease."""
    leased: bool
    """This gateway holds a lease."""
    slot: bool
    """This gateway holds a lease, or the replica has a slot that no known lease covers, or that this gateway gives
    back."""
    has_capacity: bool
    in_flight: int
    """All requests of this gateway at the replica."""
    state: State | None = None

    @property
    def busy(self) -> int:
        return self.in_flight - (LEASE_WORTH if self.leased else 0)


class AdapterChoice(NamedTuple):
    replica: Replica
    leased: bool
    """Whether the request can go now; else the gateway needs a lease first."""
    pick: Pick | None = None
    """Why, if the replica was chosen by its score."""
    step: AdapterStep = "ready"
    """Else: how far down the groups it was found."""


def choose_for_adapter(
    have: Sequence[AdapterCandidate],
    without_adapter: Callable[[], Iterable[AdapterCandidate]],
    prefer: Callable[[Sequence[Replica]], Replica],
    rotation: int = 0,
    head: int | None = None,
    cheapest: Cheapest = lambda _replicas, _waits: None,
    load_seconds: float = 1.0,
) -> AdapterChoice | NoReplica:
    """The replica for one request, by the rule above.

    `have`: replicas with the adapter loaded. `without_adapter`: gives the other replicas; called only if none of `have`
    is suitable. `prefer`: picks the adapter's home among equals, the same at every gateway, so that the adapter is not
    loaded everywhere. `rotation`: a growing number that spreads requests over equals. `head`: the prompt's
    (affinity.py). `cheapest`: the replica with the lowest score (score.py), if it is known. `load_seconds`: of an
    adapter.
    """
    best = [h for h in have if h.slot and h.has_capacity]
    if best:
        among = _with_lease(best)
        pick = cheapest([h.replica for h in among], None)
        if pick is not None:
            wait = LOAD_WEIGHT * load_seconds
            if pick.seconds > wait:
                elsewhere = [h for h in without_adapter() if h.slot and h.has_capacity and h.state != "failed"]
                if elsewhere:
                    waits = {h.replica.uid: wait for h in elsewhere}
                    among = [*among, *elsewhere]
                    pick = cheapest([h.replica for h in among], waits) or pick
            return AdapterChoice(pick.replica, next(h.leased for h in among if h.replica is pick.replica), pick)
        return _least_busy(best, rotation) if head is None else _favourite(among, head)
    rest = list(without_adapter())
    for found, loaded in (
        ([h for h in rest if h.slot and h.has_capacity], False),
        ([h for h in have if h.slot], True),
        ([h for h in rest if h.slot], False),
        (have, True),
        (rest, False),
    ):
        if found:
            choice = _least_busy(found, rotation) if loaded else _to_load(found, prefer)
            return choice._replace(step="adapter-full" if loaded else "adapter-load")
    return NoReplica("no-adapters")


def _least_busy(candidates: Sequence[AdapterCandidate], rotation: int) -> AdapterChoice:
    fewest = min(h.busy for h in candidates)
    equals = [h for h in candidates if h.busy == fewest]
    home = equals[rotation % len(equals)]
    return AdapterChoice(home.replica, home.leased)


def _with_lease(candidates: Sequence[AdapterCandidate]) -> Sequence[AdapterCandidate]:
    """The replicas with a lease, while one of them has fewer requests than a lease is worth: on a further replica the
    adapter takes a slot from another one."""
    return [h for h in candidates if h.leased and h.in_flight < LEASE_WORTH] or candidates


def _favourite(among: Sequence[AdapterCandidate], head: int) -> AdapterChoice:
    home = favourite(head, among, [h.replica.uid for h in among], [h.in_flight for h in among])
    return AdapterChoice(home.replica, home.leased)


def _to_load(candidates: Sequence[AdapterCandidate], prefer: Callable[[Sequence[Replica]], Replica]) -> AdapterChoice:
    """Where the adapter is being loaded already, else its home; replicas where loading failed come last."""
    coming = [h for h in candidates if h.state in ("staging", "loading", "retiring")]
    fresh = coming or [h for h in candidates if h.state != "failed"] or list(candidates)
    return AdapterChoice(prefer([h.replica for h in fresh]), False)
