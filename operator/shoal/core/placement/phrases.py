"""Parts of the sentences in `messages.py`."""

from collections.abc import Mapping, Sequence

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan, interruptible_limit, price
from shoal.core.placement.types import Candidate


def capacity_text(capacity: ClassCapacity | None, size: int) -> str:
    """How many GPUs of a class are free for replicas of `size` GPUs, in numbers."""
    if capacity is not None and capacity.supply.coming and not capacity.names:
        return coming_text(capacity, size)
    if capacity is None or not (
        capacity.supply.matching if capacity.supply.matching is not None else capacity.supply.nodes
    ):
        return "no node has the class's labels"
    matching = capacity.supply.matching if capacity.supply.matching is not None else len(capacity.supply.nodes)
    if not capacity.names:
        if capacity.supply.capacity == 0:
            return f"its {matching} node(s) have none of the resource"
        return f"none of its {matching} node(s) takes pods"
    offered = sum(node.allocatable for node in capacity.supply.nodes)
    in_all = max(offered, capacity.supply.capacity or 0)
    if capacity.largest < size:
        return f"no node has {gpus(size)}, the largest has {capacity.largest}"
    promised = capacity.free_at_first - sum(capacity.free)
    text = f"{capacity.free_at_first} of {in_all} GPUs free"
    if promised:
        text += f", {promised} promised to replicas that are starting"
    if capacity.block > size:
        text += f", kept while a replica of {gpus(capacity.block)} waits for its block"
    most = capacity.most_free()
    if sum(capacity.free) and most < size:
        text += f", at most {most} on one node"
    if capacity.supply.coming:
        text += f"; {coming_text(capacity, size)}"
    if offered < in_all:
        text += f", {in_all - offered} on nodes that take no pods or not healthy"
    return text


def coming_text(capacity: ClassCapacity, size: int) -> str:
    """What an autoscaler may still add for replicas of `size` GPUs."""
    supply = capacity.supply
    if supply.coming_gpus < size:
        return f"an autoscaler adds nodes with {gpus(supply.coming_gpus)}, fewer than {size}"
    if supply.outage:
        return f"no node is expected: {supply.outage}"
    room = sum(free // size for free in capacity.coming)
    if not room:
        return "all nodes that an autoscaler may add are promised to replicas that wait for them"
    return f"an autoscaler may add up to {sum(free == supply.coming_gpus for free in capacity.coming)} nodes"


def waits_for_nodes(plan: ModelPlan) -> str:
    """Replicas that wait for nodes of an autoscaler, of a plan that has such."""
    parts = [f"{n} on {name}" for name, n in sorted(plan.adding.items())]
    verb = "wait for nodes" if sum(plan.adding.values()) > 1 else "waits for a node"
    return f"{' and '.join(parts)} {verb} that an autoscaler adds"


def held_back(plan: ModelPlan) -> str:
    """Replicas that a quota holds back, and those for which Kueue got no node, of a plan that has such."""
    found: list[str] = []
    queued = {name: n - plan.rejected.get(name, 0) for name, n in sorted(plan.gated.items())}
    if parts := [f"{n} on {name}" for name, n in queued.items() if n]:
        what = "wait for quota and take no GPUs" if sum(queued.values()) > 1 else "waits for quota and takes no GPU"
        found.append(f"{' and '.join(parts)} {what} until then")
    found += [
        f"{n} on {name} {'take no GPUs' if n > 1 else 'takes no GPU'}: {_no_node(plan, name)}; a new pod asks again "
        "once nodes are expected there"
        for name, n in sorted(plan.rejected.items())
    ]
    return "; ".join(found)


def asks_again(plan: ModelPlan) -> str:
    """Replicas whose pods are made anew since Kueue got no node for them, of a plan that has such."""
    return "; ".join(
        f"{n} on {name}: {_no_node(plan, name)}; nodes are expected again, so "
        f"{'new pods ask' if n > 1 else 'a new pod asks'} for them"
        for name, n in sorted(plan.asking_again.items())
    )


def _no_node(plan: ModelPlan, gpu_class: str) -> str:
    return f"Kueue got no node there: {plan.demand.replica_states[gpu_class].rejection}"


def gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def limit(plan: ModelPlan, candidate: Candidate) -> str | None:
    """Why the spec allows no more replicas on a class; None: it does."""
    if candidate.max_replicas is not None and plan.wanted_on(candidate.gpu_class) >= candidate.max_replicas:
        return f"maxReplicas {candidate.max_replicas} reached" if candidate.max_replicas else "maxReplicas is 0"
    if candidate.interruptible and not plan.may_have_more(candidate):
        demand = plan.demand
        return (
            f"interruptible, and interruptiblePercent {demand.interruptible_percent} allows "
            f"{interruptible_limit(demand)} of {demand.wanted} replicas on such classes"
        )
    return None


def placed(plan: ModelPlan) -> str:
    """Replicas that have their GPUs, without those that are to go."""
    parts: list[str] = []
    if plan.demand.frozen:
        return ", ".join(f"{n} on {name}" for name, n in sorted(plan.kept.items()) if n)
    for candidate in plan.order:
        name = candidate.gpu_class
        count = plan.kept.get(name, 0) + plan.requested.get(name, 0)
        if name == plan.moving_to:
            count -= plan.requested.get(name, 0)
        if count:
            parts.append(f"{count} on {name}")
    return ", ".join(parts)


def with_gpus(plan: ModelPlan, placed: str) -> str:
    used = {c.gpus for c in plan.order if plan.wanted_on(c.gpu_class)}
    if len(used) == 1:
        return f"{placed}, {gpus(used.pop())} each"
    return placed


def backed_off(plan: ModelPlan) -> str:
    """Classes in backoff that are cheaper than those in use."""
    used = [price(c) for c in plan.order if plan.wanted_on(c.gpu_class) and c.gpu_class not in plan.demand.backoffs]
    left = [c for c in plan.order if c.gpu_class in plan.demand.backoffs and not plan.wanted_on(c.gpu_class)]
    worse = sorted(c.gpu_class for c in left if used and price(c) < max(used))
    return "".join(f"; not on {name}: {plan.demand.backoffs[name]}" for name in worse)


def outages(plan: ModelPlan, out: Mapping[str, str]) -> str:
    """Classes of which no node is expected: where replicas wait for one all the same, and those that are cheaper than
    the classes in use. `out`: class -> why."""
    if not out:
        return ""
    states = plan.demand.replica_states
    announced = {name: state.announced for name, state in states.items()}
    hopeless = [name for name, n in sorted(plan.adding.items()) if name in out and n > announced.get(name, 0)]
    used = [price(c) for c in plan.order if plan.wanted_on(c.gpu_class)]
    left = [c for c in plan.order if c.gpu_class in out and not plan.wanted_on(c.gpu_class)]
    cheaper = sorted(
        c.gpu_class for c in left if c.gpu_class not in plan.demand.backoffs and used and price(c) < max(used)
    )
    return "".join(f"; none is expected on {name}: {out[name]}" for name in hopeless) + "".join(
        f"; not on {name}: {out[name]}" for name in cheaper
    )


def staying(plan: ModelPlan) -> str:
    """Replicas that are to go and still serve; empty where there is none."""
    known = {c.gpu_class for c in plan.order}
    retired = {name: n for name, n in plan.held.items() if name not in known}
    relocated = plan.relocated in plan.held
    stranded = plan.replacing - sum(retired.values()) - relocated
    over = sum(plan.held.values()) - plan.replacing - sum(plan.yielding.values())
    parts = [f"{n} on {name}, not usable any more, stays" for name, n in sorted(retired.items())]
    if relocated:
        parts.append(f"1 on {plan.relocated}, of the former revision, stays")
    if stranded:
        parts.append(f"{stranded} on a node that takes no pods stays")
    if over:
        parts.append(f"{over} more than the spec allows there stays")
    return " and ".join(parts)


def relocation(plan: ModelPlan) -> str:
    """Why the only replica is replaced on another class, of a plan that does so."""
    return (
        f"a rollout has no GPU on {plan.relocated} for one replica more: the replica there goes when its successor is "
        "ready"
    )


def listing(shown: Sequence[str], *, of: int) -> str:
    more = [f"and {of - len(shown)} more"] if of > len(shown) else []
    return "; ".join([*shown, *more])
