"""Whose pods go first when a Deployment shrinks."""

from shoal.core.placement.case import Case
from shoal.core.placement.room import Room


def leaving(case: Case, gpu_class: str, room: Room | None) -> tuple[tuple[str, int], ...]:
    """(node, pods), sorted. First those that make room for a higher priority; then those on nodes that take no pods;
    then those that are not ready; then those whose going makes the largest block."""
    standing = case.demand.standing.get(gpu_class)
    if standing is None or case.demand.frozen:
        return ()
    going: dict[str, int] = {node: n for (of, node), n in case.evicted.items() if of == gpu_class}
    more = standing.bound - sum(going.values()) - case.kept.get(gpu_class, 0) - case.held.get(gpu_class, 0)
    if more > 0 and standing.settled:

        def order(node: str) -> tuple[bool, bool, int, str]:
            known = room is not None and node in room.index
            free = room.free[room.index[node]] if room is not None and known else 0
            held = standing.on[node]
            sound = known and not case.sick.get((gpu_class, node))
            return (sound, held.ready >= held.pods, -free, node)

        for node in sorted(standing.on, key=order):
            take = min(more, standing.on[node].pods - going.get(node, 0))
            if take > 0:
                going[node] = going.get(node, 0) + take
                more -= take
    return tuple(sorted(going.items()))


def forced(case: Case, gpu_class: str, room: Room | None) -> tuple[tuple[str, int], ...]:
    """(node, pods) of `leaving` that no other pods can stand in for: see `VariantPlan.forced`."""
    standing = case.demand.standing.get(gpu_class)
    found: dict[str, int] = {}
    for node, going in leaving(case, gpu_class, room):
        known = room is not None and node in room.index
        sick = case.sick.get((gpu_class, node), 0)
        held = standing.on[node].pods if standing is not None and node in standing.on else 0
        bad = held if not known else min(held, sick)
        must = min(going, case.evicted.get((gpu_class, node), 0) + bad)
        if must:
            found[node] = must
    return tuple(sorted(found.items()))
