"""Which replica serves a request for an adapter.

In this order, and within each the least busy one; among those that have it loaded, where the prompt has a head, the one
to which that belongs (affinity.py), within its share of the load:

1. replicas that have it loaded, a slot for it, and room;
2. replicas that would have to load it first, with a slot and room: waiting in the queue of an engine that is full is
   worse than a load, once;
3. replicas that have it and a slot, however busy; 4. those that would have to load it and have a slot;
5. replicas that have it and must wait for a slot; 6. the others.

Room is what the hold goes by (`core/hold/room.py`): the engine's batch and its KV cache have places. A replica for
which this gateway holds a lease has a slot for it. A lease counts as much as `LEASE_WORTH` requests less in flight:
another replica gets the adapter only when that evens out something, for it takes a slot there from another adapter.

Never a replica without a live stream, whose adapters nobody knows, or one whose `adapters` are not said: its engine has
started and its floor is not loaded yet, or it serves none.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from shoal.core.affinity import favourite
from shoal.core.routing import NoReplica, Replica

LEASE_WORTH: Final = 4
"""Requests."""

State = Literal["staging", "loading", "loaded", "retiring", "failed"]


@dataclass(frozen=True, slots=True)
class Home:
    """A replica, as it stands to one adapter."""

    replica: Replica
    loaded: bool
    """Requests may go there under a lease."""
    leased: bool
    """This gateway holds one."""
    slot: bool
    """It holds one, or the replica has a slot that no lease covers, as far as is known."""
    room: bool
    in_flight: int
    """Requests of this gateway, for whatever."""
    state: State | None = None

    @property
    def busy(self) -> int:
        return self.in_flight - (LEASE_WORTH if self.leased else 0)


class AdapterChoice(NamedTuple):
    replica: Replica
    leased: bool
    """The request can go now; else a lease has to be had first."""


def choose_home(
    have: Sequence[Home],
    others: Callable[[], Iterable[Home]],
    prefer: Callable[[Sequence[Replica]], Replica],
    turn: int = 0,
    head: int | None = None,
) -> AdapterChoice | NoReplica:
    """The replica for one request, by the rule above.

    `have` are those with the adapter loaded; `others` gives the rest and is asked only if none of `have` will do;
    `prefer` names one adapter's home among equals, the same at every gateway, so that it is not loaded everywhere;
    `turn` is a growing number that spreads equals that have it; `head` is that of the prompt.
    """
    best = [h for h in have if h.slot and h.room]
    if best:
        return _least_busy(best, turn) if head is None else _favourite(best, head)
    rest = list(others())
    for found, loaded in (
        ([h for h in rest if h.slot and h.room], False),
        ([h for h in have if h.slot], True),
        ([h for h in rest if h.slot], False),
        (have, True),
        (rest, False),
    ):
        if found:
            return _least_busy(found, turn) if loaded else _to_load(found, prefer)
    return NoReplica("no-adapters")


def _least_busy(homes: Sequence[Home], turn: int) -> AdapterChoice:
    fewest = min(h.busy for h in homes)
    equals = [h for h in homes if h.busy == fewest]
    home = equals[turn % len(equals)]
    return AdapterChoice(home.replica, home.leased)


def _favourite(homes: Sequence[Home], head: int) -> AdapterChoice:
    """Among those for which there is a lease, if any of them has less to do than a lease is worth: one more takes a
    slot from another adapter."""
    spare = [h for h in homes if h.leased and h.in_flight < LEASE_WORTH]
    among = spare or homes
    home = favourite(head, among, [h.replica.uid for h in among], [h.in_flight for h in among])
    return AdapterChoice(home.replica, home.leased)


def _to_load(homes: Sequence[Home], prefer: Callable[[Sequence[Replica]], Replica]) -> AdapterChoice:
    """Where it comes already, or else at its home; last where loading it failed."""
    coming = [h for h in homes if h.state in ("staging", "loading", "retiring")]
    fresh = coming or [h for h in homes if h.state != "failed"] or list(homes)
    return AdapterChoice(prefer([h.replica for h in fresh]), False)
