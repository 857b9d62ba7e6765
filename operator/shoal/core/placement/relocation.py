"""A rollout of a Model with one replica, on a class without a GPU for its successor: where another class has room, the
successor starts there, and the replica goes when the successor is ready. Replaced in place, it would go first, and
every request would wait for a cold start.

The pod is replaced anyway, by its owner's change: an annotation that forbids evictions (`ReplicaState.keeps`) does not
forbid it, as it forbids no rollout of a Deployment."""

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan
from shoal.core.placement.types import Candidate


def relocate(plan: ModelPlan, capacities: dict[str, ClassCapacity]) -> None:
    """Marks the replica that is to be replaced on another class, if there is one. Called before `fill`.

    More replicas are replaced in place one after the other: the rest of them serves meanwhile, and moving all of them
    would need as much room again.
    """
    demand = plan.demand
    if not demand.lacks_surge or demand.frozen or demand.wanted != 1:
        return
    for gpu_class in sorted(demand.lacks_surge):
        state = demand.replica_states.get(gpu_class)
        if state is None or (state.bound, state.ready) != (1, 1) or plan.candidate(gpu_class) is None:
            continue
        if any(_takes(plan, capacities, candidate) for candidate in plan.order):
            node = next(node for node, held in state.by_node.items() if held.pods)
            plan.relocated = gpu_class
            plan.unhealthy = plan.unhealthy | {(gpu_class, node): 1}
            return


def _takes(plan: ModelPlan, capacities: dict[str, ClassCapacity], candidate: Candidate) -> bool:
    """Whether the successor runs on the class already, or could be bound there now. One that runs and does not become
    ready counts: its revision may be at fault, and then the former one goes on serving, as in any rollout."""
    name = candidate.gpu_class
    if name in plan.demand.lacks_surge or not plan.may_have_more(candidate):
        return False
    state = plan.demand.replica_states.get(name)
    if state is not None and state.bound:
        return True
    capacity = capacities.get(name)
    return (
        name not in plan.demand.backoffs
        and (state is None or not state.held_back)
        and capacity is not None
        and capacity.fits(candidate.gpus)
        and candidate.gpus >= capacity.block
    )
