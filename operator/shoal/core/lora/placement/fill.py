"""Assigns copies to replicas: first guaranteed copies, then existing ones, then missing ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.lora.placement.board import PoolBoard, ReplicaSlots
from shoal.core.lora.placement.types import Move, Residency, Why
from shoal.core.lora.placement.wanted import CopyDemand

BOUND = 1.25
"""A replica above this multiple of the mean load gets no further adapter (Mirrokni, Thorup and Zadimoghaddam,
"Consistent hashing with bounded loads", 2018)."""

_RESIDENT: tuple[tuple[Residency, Why], ...] = (("Pinned", "pinned"), ("Warm", "warm"))


@dataclass(slots=True)
class Draft:
    """A plan while it is made."""

    board: PoolBoard
    wants: list[CopyDemand]
    """Adapters with most requests first."""
    before: Mapping[str, tuple[str, ...]]
    """Homes in the last plan: by adapter, the replicas that should hold it."""
    budget: float
    """Loads for traffic and balance that this plan may cause."""
    all_live: bool
    """No gateway is stale; otherwise no copy goes."""
    popularity_known: bool
    """Enough requests were seen to compare adapters: only then may existing copies give way to others with more
    requests, and to full replicas."""
    homes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By adapter; homes that should stay come first."""
    moves: list[Move] = field(default_factory=list[Move])
    weights: dict[str, float] = field(init=False)
    _lightest: dict[str, tuple[float, str] | None] = field(default_factory=dict[str, tuple[float, str] | None])
    waits: bool = False
    """A load waits for the budget."""

    def __post_init__(self) -> None:
        self.weights = {w.adapter.uid: w.weight for w in self.wants}

    def copies(self, want: CopyDemand) -> list[ReplicaSlots]:
        places = self.board.places
        return [places[uid] for uid in self.homes.get(want.adapter.uid, ())]

    def counted(self, want: CopyDemand) -> int:
        return sum(p.counts for p in self.copies(want))

    def previous(self, want: CopyDemand) -> list[ReplicaSlots]:
        """Homes in the last plan that may still get adapters, without the homes in this plan."""
        places, now = self.board.places, self.homes.get(want.adapter.uid, ())
        return [places[uid] for uid in self.before.get(want.adapter.uid, ()) if uid in places and uid not in now]

    def put(self, want: CopyDemand, place: ReplicaSlots, why: Why, cost: float) -> None:
        place.take(want.adapter.uid, why, cost)
        self._lightest.pop(place.replica.uid, None)
        self.homes.setdefault(want.adapter.uid, []).append(place.replica.uid)

    def drop(self, uid: str, place: ReplicaSlots) -> None:
        place.leave(uid)
        self._lightest.pop(place.replica.uid, None)
        self.homes[uid].remove(place.replica.uid)

    def lightest(self, place: ReplicaSlots, but: str) -> tuple[float, str] | None:
        """(weight, uid) of the adapter planned there for traffic with the least requests, other than `but`."""
        if but or place.replica.uid not in self._lightest:
            weights = self.weights
            rest = [(weights[uid], uid) for uid, held in place.has.items() if held.why == "traffic" and uid != but]
            if but:
                return min(rest, default=None)
            self._lightest[place.replica.uid] = min(rest, default=None)
        return self._lightest[place.replica.uid]


def fill(draft: Draft, wants: tuple[CopyDemand, ...]) -> None:
    """Plans all copies in `wants`, which is in order of precedence, as far as there are places."""
    for residency, why in _RESIDENT:
        sure = [w for w in wants if w.guaranteed and w.adapter.residency == residency]
        # Existing copies first: a new adapter displaces none.
        for want in sure:
            _must_keep(draft, want, why)
        for want in sure:
            _must_add(draft, want, why)
        _beside(draft, sure)
    for want in draft.wants:
        _keep(draft, want)
    _beside(draft, draft.wants)
    _add(draft)


def _must_keep(draft: Draft, want: CopyDemand, why: Why) -> None:
    missing = want.guaranteed
    for place in draft.previous(want):
        if missing and place.fits(why):
            draft.put(want, place, why, want.cost if place.counts else 0.0)
            missing -= place.counts


def _must_add(draft: Draft, want: CopyDemand, why: Why) -> None:
    missing = want.guaranteed - draft.counted(want)
    if not missing:
        return
    for place in (*draft.board.having(want.adapter), *draft.board.ranked(want.adapter.key)):
        if missing and want.adapter.uid not in place.has and place.fits(why):
            draft.put(want, place, why, want.cost)
            draft.moves.append(Move(want.adapter.uid, None, place.replica.uid, f"it is {why}"))
            missing -= 1


def _more(want: CopyDemand) -> Why:
    """Reason of copies beyond those for the residency."""
    return "next" if not want.known and want.adapter.next is not None else "traffic"


def _keep(draft: Draft, want: CopyDemand) -> None:
    """Keeps existing copies. A surplus copy goes only once the remaining ones are loaded; otherwise requests would find
    no copy for a while."""
    adapter = want.adapter
    why = _more(want)
    for place in draft.previous(want):
        copies = draft.copies(want)
        counted = sum(p.counts for p in copies)
        there = sum(p.settled(adapter) for p in copies if p.counts)
        if draft.all_live and min(counted, there) >= want.copies:
            draft.moves.append(Move(adapter.uid, place.replica.uid, None, "fewer copies are enough"))
        elif place.fits(why) or (place.free > 0 and (not draft.popularity_known or adapter.next is not None)):
            # Beside a current revision that is loaded, the next one is a second entry; else it is the only one.
            here: Why = "traffic" if place.settled(adapter) else why
            draft.put(want, place, here, want.cost if place.counts and counted < want.copies else 0.0)


def _beside(draft: Draft, wants: list[CopyDemand]) -> None:
    """Places next revisions beside current ones."""
    for want in wants:
        uid = want.adapter.uid
        if want.adapter.next is None or want.adapter.current is None:
            continue
        for place in draft.copies(want):
            held = place.has[uid]
            if not held.next and held.why != "next" and (place.free > 0 or _give_way(draft, place, None, uid)):
                place.join(uid)


def _add(draft: Draft) -> None:
    """Adds missing copies: where the adapter is loaded already, else in rendezvous order."""
    counting = draft.board.counting
    bound = BOUND * sum(p.cost for p in counting) / max(1, len(counting))
    for want in draft.wants:
        if _more(want) == "next":
            _complete(draft, want, bound)
    full = False
    for want in draft.wants:
        if _more(want) == "next" or draft.counted(want) >= want.asked:
            continue
        full = full or not any(p.spare > 0 for p in draft.board.candidates)
        _complete(draft, want, bound, full=full)


def _complete(draft: Draft, want: CopyDemand, bound: float, *, full: bool = False) -> None:
    why = _more(want)
    because = "a newer revision" if why == "next" else "it is asked for"
    for _ in range(want.asked - draft.counted(want)):
        place = _having(draft, want, why)
        if place is None and why == "traffic":
            if draft.budget < 1.0:
                draft.waits = draft.waits or not full
                return
            place = _outweighed(draft, want) if full else _belongs(draft, want, why, bound)
            draft.budget -= place is not None
        elif place is None:
            place = _belongs(draft, want, why, bound) or _outweighed(draft, want)
        if place is None:
            return
        draft.put(want, place, why, want.cost)
        draft.moves.append(Move(want.adapter.uid, None, place.replica.uid, because))


def _having(draft: Draft, want: CopyDemand, why: Why) -> ReplicaSlots | None:
    there = [p for p in draft.board.having(want.adapter) if want.adapter.uid not in p.has]
    for place in there:
        if place.fits(why):
            return place
    return next((p for p in there if _give_way(draft, p, want.weight)), None)


def _belongs(draft: Draft, want: CopyDemand, why: Why, bound: float) -> ReplicaSlots | None:
    """The first replica in rendezvous order with a place and a load within `bound`, else the least loaded one."""
    crowded: ReplicaSlots | None = None
    for place in draft.board.ranked(want.adapter.key):
        if want.adapter.uid in place.has or not place.fits(why):
            continue
        if place.cost + want.cost <= bound:
            return place
        if crowded is None or place.cost < crowded.cost:
            crowded = place
    return crowded


def _outweighed(draft: Draft, want: CopyDemand) -> ReplicaSlots | None:
    """The adapter's first replica in rendezvous order, if an adapter there with fewer requests can be dropped."""
    for place in draft.board.ranked(want.adapter.key):
        if want.adapter.uid not in place.has:
            return place if _give_way(draft, place, want.weight or None) else None
    return None


def _give_way(draft: Draft, place: ReplicaSlots, weight: float | None, but: str = "") -> bool:
    """Drops the adapter with the least requests, if they weigh less than `weight` (None: always)."""
    if weight is not None and not draft.popularity_known:
        return False
    lightest = draft.lightest(place, but)
    if lightest is None or (weight is not None and lightest[0] >= weight):
        return False
    draft.drop(lightest[1], place)
    draft.moves.append(Move(lightest[1], place.replica.uid, None, "another one needs the place more"))
    return True
