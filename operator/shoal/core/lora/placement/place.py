"""The plan of a pool: which replica holds which adapters.

1. Pinned adapters, on `minCopies` replicas each, within the number that an engine allows to be pinned.
2. Warm adapters, likewise, while host memory has places; one place stays free.
3. `next` revisions, beside the current ones until gateways were sent to them.
4. Adapters with requests in the last half hour: one copy each, more where the load exceeds one copy's share
   (`ceil(load / V)`, V the mean load of a replica), in up to seven eighths of the places. A copy stays where it is,
   else goes where the adapter is loaded already, else where rendezvous hashing with bounded loads puts it.
5. Replicas with little load get adapters of those with most.

Loads caused by 4 and 5 are limited per minute; adapters that a replica lacks meanwhile are loaded by their first
request. All other adapters are in no plan: their first request loads them, and the agent's LRU keeps them while there
is room.
"""

from collections.abc import Mapping

from shoal.api import reasons
from shoal.core.lora.placement.balance import balance
from shoal.core.lora.placement.board import PoolBoard
from shoal.core.lora.placement.fill import Draft, fill
from shoal.core.lora.placement.traffic import HALF_LIFE, learn
from shoal.core.lora.placement.types import (
    Adapter,
    AdapterPlacement,
    Plan,
    PlannedAdapter,
    PoolMemory,
    PoolSnapshot,
    Switch,
    Why,
)
from shoal.core.lora.placement.wanted import CopyDemand, CopyDemands, wanted
from shoal.core.scaling.messages import count

MOVES_PER_MINUTE = 6.0
"""Loads per minute and replica that a plan causes for traffic and balance: each load pauses decoding there."""
_BURST = 2.0
"""Such loads per replica that may come at once."""
PACE_SECONDS = 5.0
"""Seconds between two plans that only requests cause."""
_AWAY_SECONDS = 60.0
"""Seconds after which a replica that is not ready has no copies; until then it is expected back with its adapters."""


def place(snapshot: PoolSnapshot, memory: PoolMemory | None, now: float) -> tuple[Plan, PoolMemory]:
    """The adapters of each replica at `now` (monotonic seconds), and the memory for the next plan. `memory` None: a new
    term begins, and what replicas have loaded counts as the last plan where possible."""
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


def may_switch(adapter: Adapter, plan: Plan, snapshot: PoolSnapshot) -> Switch:
    """Whether gateways may be sent to the next revision: every ready replica that should hold `next` has loaded it. If
    no ready replica should (there is none, or no place is left), its first request loads it, like an adapter on
    demand."""
    revision = adapter.next
    if revision is None:
        return Switch(now=False)
    missing = tuple(
        r.uid
        for r in snapshot.replicas
        if r.ready
        and not r.draining
        and (r.resident is None or revision.name not in r.resident)
        and any(e.name == revision.name for e in plan.desired.get(r.uid, ()))
    )
    return Switch(now=not missing, missing=missing)


def _previous_homes(
    snapshot: PoolSnapshot, board: PoolBoard, memory: PoolMemory | None
) -> Mapping[str, tuple[str, ...]]:
    """Homes of the last plan; in a new term, the replicas that have loaded the adapter. For an adapter with a next
    revision, all replicas that have it: the next revision is loaded beside it."""
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
    """Homes of this plan, and of the last plan on draining replicas: requests there must not lose their adapter."""
    leaving = {r.uid for r in snapshot.replicas if r.draining}
    homes = {uid: tuple(places) for uid, places in draft.homes.items() if places}
    if leaving:
        for uid, places in draft.before.items():
            if uid in snapshot.adapters and (stay := tuple(p for p in places if p in leaving)):
                homes[uid] = homes.get(uid, ()) + stay
    return homes


def _desired(draft: Draft, wants: CopyDemands, snapshot: PoolSnapshot) -> dict[str, tuple[PlannedAdapter, ...]]:
    desired: dict[str, list[PlannedAdapter]] = {r.uid: [] for r in snapshot.replicas}
    free = {uid: p.limits.pinned - p.pinned for uid, p in draft.board.places.items()}
    for want in wants.wants:
        adapter = want.adapter
        for place in draft.copies(want):
            uid = place.replica.uid
            held = place.has[adapter.uid]
            pinned = held.why == "pinned"
            if adapter.current is not None and held.why != "next":
                desired[uid].append(PlannedAdapter(adapter.uid, adapter.current.name, pinned, held.why))
            elif adapter.next is not None:
                desired[uid].append(PlannedAdapter(adapter.uid, adapter.next.name, pinned, held.why))
            if held.next and adapter.next is not None:
                pinned = pinned and free[uid] > 0
                free[uid] -= pinned
                desired[uid].append(PlannedAdapter(adapter.uid, adapter.next.name, pinned, "next"))
    _leaving(draft.before, snapshot, desired)
    return {uid: tuple(entries) for uid, entries in desired.items()}


def _leaving(
    before: Mapping[str, tuple[str, ...]], snapshot: PoolSnapshot, desired: dict[str, list[PlannedAdapter]]
) -> None:
    """Draining replicas keep the adapters they have, and get no new ones."""
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
