"""Which replica of a pool holds which adapter.

1. Pinned, on as many replicas as its `minCopies` says, never more on one than its engine lets be pinned.
2. Warm, likewise, as long as host memory has places; one place stays free.
3. `next` revisions, beside those that answer until gateways were sent to them.
4. What was asked for in the last half hour: a copy each, more where the load is more than one copy's share
   (`ceil(load / V)`, V the mean load of a replica), in up to seven eighths of the places. It stays where it is, else
   goes where it is loaded already, else where rendezvous hashing with a bound on the load says.
5. Replicas that have too little to do get adapters of those that have most.

What 4 and 5 cause to be loaded is limited per minute: what a replica lacks meanwhile is loaded by the first request.
All else is on no floor: its first request loads it, and the agent's LRU keeps it as long as there is room.
"""

from collections.abc import Mapping

from shoal.api import reasons
from shoal.core.lora.placement.balance import balance
from shoal.core.lora.placement.board import PoolBoard
from shoal.core.lora.placement.fill import Draft, fill
from shoal.core.lora.placement.traffic import HALF_LIFE, learn
from shoal.core.lora.placement.types import AdapterPlacement, Plan, PlannedAdapter, PoolMemory, PoolSnapshot, Why
from shoal.core.lora.placement.wanted import CopyDemand, CopyDemands, wanted
from shoal.core.scaling.messages import count

MOVES_PER_MINUTE = 6.0
"""Loads per minute and replica that a plan causes for the sake of traffic and balance: each holds up decoding there."""
_BURST = 2.0
"""Such loads per replica that may come at once."""
PACE_SECONDS = 5.0
"""Requests alone are no reason to plan sooner after the last plan."""
_AWAY_SECONDS = 60.0
"""A replica that has not been ready for so long has no copies; until then it is expected back with its floor."""


def place(snapshot: PoolSnapshot, memory: PoolMemory | None, now: float) -> tuple[Plan, PoolMemory]:
    """What each replica should hold at `now` (monotonic seconds), and what to remember until the next plan. Without a
    memory a new term begins: what replicas hold is taken for their floors as far as it may be on one."""
    asked = learn(snapshot, memory, now)
    away = {r.uid: memory.away.get(r.uid, now) if memory else now for r in snapshot.replicas if not r.ready}
    board = PoolBoard(
        snapshot.replicas, snapshot.limits, [uid for uid, since in away.items() if now - since >= _AWAY_SECONDS]
    )
    before = _previous_homes(snapshot, board, memory)
    fewer: Mapping[str, float] = memory.fewer if memory else {}
    copies = {uid: len(places) for uid, places in before.items()} if memory is None else dict(memory.copies)
    for uid, adapter in snapshot.adapters.items():
        if adapter.next is not None and uid in before:
            copies[uid] = max(copies.get(uid, 0), sum(p in board.places for p in before[uid]))
    wants = wanted(snapshot, asked, copies, fewer, len(board.counting) or len(board.places), now)
    by_weight = sorted(wants.wants, key=lambda w: (-w.weight, w.adapter.uid))
    began = now if memory is None else memory.began
    known = not asked.stale and now - began >= HALF_LIFE
    draft = Draft(board, by_weight, before, _budget(memory, len(board.places), now), not asked.stale, known)
    fill(draft, wants.wants)
    if not asked.stale:
        balance(draft)
    remembered = _homes(draft, snapshot)
    plan = Plan(
        desired=_desired(draft, wants, snapshot),
        adapters=_verdicts(draft, wants),
        moves=tuple(draft.moves),
        replan_after=_replan_after(draft, wants, away, now),
        stale=asked.stale,
    )
    still = {w.adapter.uid: w.fewer_since for w in wants.wants if w.fewer_since is not None}
    return plan, PoolMemory(
        now=now,
        began=began,
        homes=remembered,
        copies={w.adapter.uid: w.copies for w in wants.wants if w.adapter.uid in remembered},
        traffic=asked.traffic,
        reports=asked.reports,
        budget=draft.budget,
        away=away,
        switching=frozenset(uid for uid, a in snapshot.adapters.items() if a.next is not None),
        fewer=still,
    )


def _previous_homes(
    snapshot: PoolSnapshot, board: PoolBoard, memory: PoolMemory | None
) -> Mapping[str, tuple[str, ...]]:
    """Homes of the last plan; in a new term, what ready replicas have. Where an adapter is about to be replaced by a
    newer revision, every replica that has it: the newer one is loaded beside it, and it goes as it leaves the floor."""
    if memory is None:
        found = {uid: tuple(p.replica.uid for p in board.having(a)) for uid, a in snapshot.adapters.items()}
        return {uid: places for uid, places in found.items() if places}
    homes = dict(memory.homes)
    for uid, adapter in snapshot.adapters.items():
        if adapter.next is not None and adapter.current is not None:
            known = homes.get(uid, ())
            homes[uid] = known + tuple(p.replica.uid for p in board.having(adapter) if p.replica.uid not in known)
    return homes


def _budget(memory: PoolMemory | None, replicas: int, now: float) -> float:
    most = _BURST * replicas
    if memory is None:
        return most
    return min(most, memory.budget + (now - memory.now) * replicas * MOVES_PER_MINUTE / 60)


def _homes(draft: Draft, snapshot: PoolSnapshot) -> dict[str, tuple[str, ...]]:
    """Those of this plan, and those on replicas that drain: what runs there should not lose its adapter."""
    leaving = {r.uid for r in snapshot.replicas if r.draining}
    homes = {uid: tuple(places) for uid, places in draft.homes.items() if places}
    if leaving:
        for uid, places in draft.before.items():
            if uid in snapshot.adapters and (stay := tuple(p for p in places if p in leaving)):
                homes[uid] = homes.get(uid, ()) + stay
    return homes


def _desired(draft: Draft, wants: CopyDemands, snapshot: PoolSnapshot) -> dict[str, tuple[PlannedAdapter, ...]]:
    floors: dict[str, list[PlannedAdapter]] = {r.uid: [] for r in snapshot.replicas}
    free = {uid: p.limits.pinned - p.pinned for uid, p in draft.board.places.items()}
    for want in wants.wants:
        adapter = want.adapter
        for place in draft.copies(want):
            uid = place.replica.uid
            held = place.has[adapter.uid]
            pinned = held.why == "pinned"
            if adapter.current is not None and held.why != "next":
                floors[uid].append(PlannedAdapter(adapter.uid, adapter.current.name, pinned, held.why))
            elif adapter.next is not None:
                floors[uid].append(PlannedAdapter(adapter.uid, adapter.next.name, pinned, held.why))
            if held.next and adapter.next is not None:
                pinned = pinned and free[uid] > 0
                free[uid] -= pinned
                floors[uid].append(PlannedAdapter(adapter.uid, adapter.next.name, pinned, "next"))
    _leaving(draft.before, snapshot, floors)
    return {uid: tuple(entries) for uid, entries in floors.items()}


def _leaving(
    before: Mapping[str, tuple[str, ...]], snapshot: PoolSnapshot, desired: dict[str, list[PlannedAdapter]]
) -> None:
    """Replicas that drain keep what they have, and get nothing new."""
    leaving = {r.uid: r for r in snapshot.replicas if r.draining}
    if not leaving:
        return
    for uid, places in before.items():
        adapter = snapshot.adapters.get(uid)
        if adapter is not None and adapter.current is not None:
            name = adapter.current.name
            for place in leaving.keys() & places:
                if name in (leaving[place].resident or ()):
                    desired[place].append(PlannedAdapter(uid, name, False, "traffic"))


def _verdicts(draft: Draft, wants: CopyDemands) -> dict[str, AdapterPlacement]:
    verdicts: dict[str, AdapterPlacement] = {}
    for want in wants.wants:
        uid = want.adapter.uid
        homes = tuple(draft.homes.get(uid, ()))
        if homes or want.guaranteed:
            verdicts[uid] = _verdict(draft, want, homes)
    return verdicts


def _verdict(draft: Draft, want: CopyDemand, homes: tuple[str, ...]) -> AdapterPlacement:
    why: Why = "pinned" if want.adapter.residency == "Pinned" else "warm"
    have = sum(p.counts and p.has[want.adapter.uid].why == why for p in draft.copies(want))
    if have >= want.guaranteed:
        return AdapterPlacement(want.copies, homes)
    others = [p for p in draft.board.counting if want.adapter.uid not in p.has or p.has[want.adapter.uid].why != why]
    if why == "pinned" and any(p.pinned >= p.limits.pinned for p in others):
        most = min(p.limits.pinned for p in others)
        said = f"each of the others has {most} pinned already, which is all that its {most + 1} slots allow"
        help_ = "raise the pool's slotsPerReplica, or pin fewer"
    else:
        most = min((p.limits.cached for p in others), default=0)
        said = f"each of the others has {most - 1} of its {most} places in host memory taken by such adapters"
        help_ = "raise the pool's cachedPerReplica, or keep fewer"
    word = "pinned" if why == "pinned" else "kept warm"
    message = f"{word} on {have} of {count(want.guaranteed, 'replica')}: {said}; {help_}"
    return AdapterPlacement(want.copies, homes, reasons.NO_ROOM, message)


def _replan_after(draft: Draft, wants: CopyDemands, away: Mapping[str, float], now: float) -> float | None:
    times = [since + _AWAY_SECONDS for since in away.values() if now - since < _AWAY_SECONDS]
    if wants.fades_at is not None:
        times.append(wants.fades_at)
    if draft.waits:
        per_second = max(1, len(draft.board.places)) * MOVES_PER_MINUTE / 60
        times.append(now + max(PACE_SECONDS, (1.0 - draft.budget) / per_second))
    return max(0.05, min(times) - now) if times else None
