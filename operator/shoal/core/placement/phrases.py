"""Parts of the planner's sentences."""

from collections.abc import Sequence

from shoal.core.placement.case import Case, interruptible_limit, price
from shoal.core.placement.room import Room
from shoal.core.placement.types import Candidate


def room_sentence(room: Room | None, size: int) -> str:
    """What room a class has for replicas of `size` GPUs, in figures."""
    if room is None or not (room.supply.matching if room.supply.matching is not None else room.supply.nodes):
        return "no node has the class's labels"
    matching = room.supply.matching if room.supply.matching is not None else len(room.supply.nodes)
    if not room.names:
        if room.supply.capacity == 0:
            return f"its {matching} node(s) have none of the resource"
        return f"none of its {matching} node(s) takes pods"
    offered = sum(node.allocatable for node in room.supply.nodes)
    capacity = max(offered, room.supply.capacity or 0)
    if room.largest < size:
        return f"no node has {gpus(size)}, the largest has {room.largest}"
    promised = room.free_at_first - sum(room.free)
    text = f"{room.free_at_first} of {capacity} GPUs free"
    if promised:
        text += f", {promised} promised to replicas that are starting"
    if room.block > size:
        text += f", kept while a replica of {gpus(room.block)} waits for its block"
    most = room.most_free()
    if sum(room.free) and most < size:
        text += f", at most {most} on one node"
    if offered < capacity:
        text += f", {capacity - offered} on nodes that take no pods or not healthy"
    return text


def gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def limit(case: Case, candidate: Candidate) -> str | None:
    """Why the spec allows no more replicas on a class."""
    if candidate.max_replicas is not None and case.wants_on(candidate.gpu_class) >= candidate.max_replicas:
        return f"maxReplicas {candidate.max_replicas} reached" if candidate.max_replicas else "maxReplicas is 0"
    if candidate.interruptible and not case.may_have_more(candidate):
        demand = case.demand
        return (
            f"interruptible, and interruptiblePercent {demand.interruptible_percent} allows "
            f"{interruptible_limit(demand)} of {demand.wanted} replicas on such classes"
        )
    return None


def placed(case: Case) -> str:
    """Replicas that have their GPUs; those that go are not among them."""
    parts: list[str] = []
    if case.demand.frozen:
        return ", ".join(f"{n} on {name}" for name, n in sorted(case.kept.items()) if n)
    for candidate in case.order:
        name = candidate.gpu_class
        count = case.kept.get(name, 0) + case.asked.get(name, 0)
        if name == case.moving_to:
            count -= case.asked.get(name, 0)
        if count:
            parts.append(f"{count} on {name}")
    return ", ".join(parts)


def with_gpus(case: Case, placed: str) -> str:
    used = {c.gpus for c in case.order if case.wants_on(c.gpu_class)}
    if len(used) == 1:
        return f"{placed}, {gpus(used.pop())} each"
    return placed


def set_back(case: Case) -> str:
    """Classes that are cheaper than what is used, and that are left out after a bad experience."""
    used = [price(c) for c in case.order if case.wants_on(c.gpu_class) and c.gpu_class not in case.demand.setbacks]
    left = [c for c in case.order if c.gpu_class in case.demand.setbacks and not case.wants_on(c.gpu_class)]
    worse = sorted(c.gpu_class for c in left if used and price(c) < max(used))
    return "".join(f"; not on {name}: {case.demand.setbacks[name]}" for name in worse)


def staying(case: Case) -> str:
    """Replicas that are to go and serve on; empty where there is none."""
    known = {c.gpu_class for c in case.order}
    retired = {name: n for name, n in case.held.items() if name not in known}
    stranded = case.replacing - sum(retired.values())
    over = sum(case.held.values()) - case.replacing - sum(case.yielding.values())
    parts = [f"{n} on {name}, not usable any more, stays" for name, n in sorted(retired.items())]
    if stranded:
        parts.append(f"{stranded} on a node that takes no pods stays")
    if over:
        parts.append(f"{over} more than the spec allows there stays")
    return " and ".join(parts)


def listing(shown: Sequence[str], *, of: int) -> str:
    more = [f"and {of - len(shown)} more"] if of > len(shown) else []
    return "; ".join([*shown, *more])
