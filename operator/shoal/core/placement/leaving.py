"""Which pods go first when a Deployment shrinks."""

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan


def leaving(plan: ModelPlan, gpu_class: str, capacity: ClassCapacity | None) -> tuple[tuple[str, int], ...]:
    """(node, pods), sorted by node. Chosen first are pods evicted for a higher priority; then those on nodes that take
    no pods; then those that are not ready; then those on the node with most free GPUs."""
    state = plan.demand.replica_states.get(gpu_class)
    if state is None or plan.demand.frozen:
        return ()
    going: dict[str, int] = {node: n for (of, node), n in plan.evicted.items() if of == gpu_class}
    more = state.bound - sum(going.values()) - plan.kept.get(gpu_class, 0) - plan.held.get(gpu_class, 0)
    if more > 0 and state.settled:

        def order(node: str) -> tuple[bool, bool, int, str]:
            known = capacity is not None and node in capacity.index
            free = capacity.free[capacity.index[node]] if capacity is not None and known else 0
            held = state.by_node[node]
            sound = known and not plan.unhealthy.get((gpu_class, node))
            return (sound, held.ready >= held.pods, -free, node)

        for node in sorted(state.by_node, key=order):
            take = min(more, state.by_node[node].pods - going.get(node, 0))
            if take > 0:
                going[node] = going.get(node, 0) + take
                more -= take
    return tuple(sorted(going.items()))


def others(plan: ModelPlan, gpu_class: str, capacity: ClassCapacity | None) -> tuple[tuple[str, int], ...]:
    """(node, GPUs) of a class whose nodes an autoscaler removes: what is held there by pods that are not of this
    variant, or is given to them by this plan. GPUs of terminating pods do not count. See `VariantPlan.others`."""
    state = plan.demand.replica_states.get(gpu_class)
    if state is None or capacity is None or not capacity.supply.coming_gpus:
        return ()
    found: dict[str, int] = {}
    for node, pods, _ in plan.left_after_eviction(gpu_class):
        i = capacity.index.get(node)
        if i is not None:
            found[node] = max(0, capacity.allocatable[i] - capacity.soon[i] - pods * state.gpus)
    return tuple(sorted(found.items()))


def forced(plan: ModelPlan, gpu_class: str, capacity: ClassCapacity | None) -> tuple[tuple[str, int], ...]:
    """(node, pods) of `leaving` that no other pods can replace: see `VariantPlan.forced`."""
    state = plan.demand.replica_states.get(gpu_class)
    found: dict[str, int] = {}
    for node, going in leaving(plan, gpu_class, capacity):
        known = capacity is not None and node in capacity.index
        unhealthy = plan.unhealthy.get((gpu_class, node), 0)
        held = state.by_node[node].pods if state is not None and node in state.by_node else 0
        bad = held if not known else min(held, unhealthy)
        must = min(going, plan.evicted.get((gpu_class, node), 0) + bad)
        if must:
            found[node] = must
    return tuple(sorted(found.items()))
