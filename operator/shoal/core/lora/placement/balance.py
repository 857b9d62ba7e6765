"""Adapters move from replicas that have too much to do for them to those that have too little.

Each move makes the sum of the squares of the costs smaller, so that it comes to an end. The one that belongs to the
lighter replica by rendezvous goes first. The replica that gives keeps the adapter until the other one has loaded it.
"""

from shoal.core.lora.placement.board import ReplicaSlots
from shoal.core.lora.placement.fill import Draft
from shoal.core.lora.placement.rendezvous import digest, score
from shoal.core.lora.placement.types import Move
from shoal.core.lora.placement.wanted import CopyDemand

LIGHT = 0.75
"""Share of the mean cost below which a replica gets adapters of others: one that has just come."""
HEAVY = 1.5
"""Times the mean cost beyond which it gives some."""
_GAIN = 0.9
"""The one that gets is afterwards below this share of what the other one had: less is not worth a load."""


def balance(draft: Draft) -> None:
    """As many moves as the budget has, one after the other."""
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
