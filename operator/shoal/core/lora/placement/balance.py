"""Moves adapters from replicas with much load to replicas with little.

Each move reduces the sum of the squares of the costs, so the moves end. The adapter with the highest rendezvous score
at the lighter replica moves first. The source keeps the adapter until the target has loaded it.
"""

from shoal.core.lora.placement.board import ReplicaSlots
from shoal.core.lora.placement.fill import Draft
from shoal.core.lora.placement.rendezvous import digest, score
from shoal.core.lora.placement.types import Move
from shoal.core.lora.placement.wanted import CopyDemand

LIGHT = 0.75
"""Share of the mean cost below which a replica, such as a new one, gets adapters of others."""
HEAVY = 1.5
"""Multiple of the mean cost above which a replica gives adapters away."""
_GAIN = 0.9
"""The target must stay below this share of the source's former cost: a smaller gain is not worth a load."""


def balance(draft: Draft) -> None:
    """Makes as many moves as the budget allows, one after the other."""
    wants = {w.adapter.uid: w for w in draft.wants}
    places = draft.board.counting
    while len(places) > 1:
        mean = sum(p.cost for p in places) / len(places)
        light, heavy = min(places, key=lambda p: p.cost), max(places, key=lambda p: p.cost)
        if not (light.cost < LIGHT * mean or heavy.cost > HEAVY * mean) or light.spare <= 0:
            return
        want = _mover(draft, wants, heavy, light)
        if want is None:
            return
        if draft.budget < 1.0:
            draft.waits = True
            return
        _move(draft, want, heavy, light)


def _mover(draft: Draft, wants: dict[str, CopyDemand], heavy: ReplicaSlots, light: ReplicaSlots) -> CopyDemand | None:
    choice: tuple[bool, int, str] | None = None
    for uid, held in heavy.has.items():
        if held.why != "traffic" or uid in light.has or held.cost <= 0.0 or len(draft.homes[uid]) > wants[uid].copies:
            continue
        if light.cost + held.cost > _GAIN * heavy.cost:
            continue
        name = digest(wants[uid].adapter.key)
        there = score(name, light.digest)
        choice = max(choice or (False, -1, ""), (there > score(name, heavy.digest), there, uid))
    return wants[choice[2]] if choice else None


def _move(draft: Draft, want: CopyDemand, heavy: ReplicaSlots, light: ReplicaSlots) -> None:
    uid = want.adapter.uid
    held = heavy.has[uid]
    light.take(uid, "traffic", held.cost)
    if held.next and light.free > 0:
        light.join(uid)
    heavy.cost -= held.cost
    held.cost = 0.0
    homes = draft.homes[uid]
    homes.remove(heavy.replica.uid)
    draft.homes[uid] = [light.replica.uid, *homes, heavy.replica.uid]
    draft.budget -= 1.0
    draft.moves.append(Move(uid, heavy.replica.uid, light.replica.uid, "replicas are loaded unevenly"))
