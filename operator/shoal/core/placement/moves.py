"""Moves to cheaper classes, at a bounded pace: one replica is added on the cheaper class, and the replica on the more
expensive class goes when it is ready."""

from collections.abc import Sequence
from decimal import Decimal

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan, rank
from shoal.core.placement.types import Candidate, Moves, Unplannable


def move(plans: Sequence[ModelPlan], capacities: dict[str, ClassCapacity], moves: Moves) -> None:
    """Continues the moves that have begun, and begins others where GPUs are free that no Model waits for.

    Costs only fall and nothing moves back, so a fleet without changes comes to rest.
    """
    wanted = _wanted(plans, capacities)
    under_way = sum(plan.moving_from is not None for plan in plans)
    for plan in plans:  # moves whose replica an earlier plan requested and no node has bound yet
        if plan.unchanged or plan.demand.frozen or plan.moving_from is not None:
            continue
        try:
            under_way += _go_on(plan, capacities, wanted, moves)
        except Exception as error:
            raise Unplannable(plan.demand.uid) from error
    if under_way >= moves.in_flight:
        return
    found: list[tuple[Decimal, tuple[object, ...], ModelPlan, Candidate, Candidate]] = []
    for plan in plans:
        if plan.unchanged and len(plan.demand.candidates) > 1:
            try:
                step = _step(plan, capacities, wanted, moves)
            except Exception as error:
                raise Unplannable(plan.demand.uid) from error
            if step is not None and _at_rest(plan):
                saving, expensive, cheap = step
                found.append((-saving, rank(plan.demand), plan, expensive, cheap))
    found.sort(key=lambda entry: entry[:2])
    for _, _, plan, expensive, cheap in found:
        if under_way >= moves.in_flight:
            return
        if _begin(plan, capacities[cheap.gpu_class], expensive, cheap):
            under_way += 1


def _begin(plan: ModelPlan, capacity: ClassCapacity, expensive: Candidate, cheap: Candidate) -> bool:
    if capacity.take(cheap.gpus):
        plan.request(cheap.gpu_class)
    elif _expected(plan, capacity, cheap) and capacity.take_coming(cheap.gpus):
        plan.add_node(cheap.gpu_class)
    else:
        return False
    plan.moving_from, plan.moving_to = expensive.gpu_class, cheap.gpu_class
    return True


def _expected(plan: ModelPlan, capacity: ClassCapacity, cheap: Candidate) -> bool:
    """Whether a node may come for the replica that moves: the class has no outage, or the node was announced."""
    state = plan.demand.replica_states.get(cheap.gpu_class)
    return not capacity.supply.outage or (state is not None and state.announced > 0)


def _wanted(plans: Sequence[ModelPlan], capacities: dict[str, ClassCapacity]) -> set[str]:
    """Classes on which a Model waits, or would run if there were capacity: GPUs there are not free for a move."""
    return {
        candidate.gpu_class
        for plan in plans
        if plan.missing or plan.waiting
        for candidate in plan.demand.candidates
        if (capacity := capacities.get(candidate.gpu_class)) is not None and capacity.largest >= candidate.gpus
    }


def _go_on(plan: ModelPlan, capacities: dict[str, ClassCapacity], wanted: set[str], moves: Moves) -> bool:
    if plan.missing or plan.waiting or plan.requested:
        return False
    for cheap in plan.order:
        state = plan.demand.replica_states.get(cheap.gpu_class)
        if state is None or state.replicas <= max(state.bound, plan.replicas(cheap.gpu_class)):
            continue
        if cheap.gpu_class in plan.demand.backoffs:
            continue
        found = _most_expensive(plan, cheap, moves)
        capacity = capacities.get(cheap.gpu_class)
        if found is None or capacity is None or cheap.gpu_class in wanted:
            continue
        _, expensive = found
        if plan.may_have_more(cheap, instead_of=expensive) and _begin(plan, capacity, expensive, cheap):
            return True
    return False


def _step(
    plan: ModelPlan, capacities: dict[str, ClassCapacity], wanted: set[str], moves: Moves
) -> tuple[Decimal, Candidate, Candidate] | None:
    for cheap in plan.order:
        capacity = capacities.get(cheap.gpu_class)
        if capacity is None or cheap.gpu_class in wanted:
            continue
        if not capacity.fits(cheap.gpus) and not (capacity.coming and capacity.may_come(cheap.gpus)):
            continue
        if cheap.gpu_class in plan.demand.backoffs:
            continue
        found = _most_expensive(plan, cheap, moves)
        if found is not None and plan.may_have_more(cheap, instead_of=found[1]):
            return (*found, cheap)
    return None


def _most_expensive(plan: ModelPlan, cheap: Candidate, moves: Moves) -> tuple[Decimal, Candidate] | None:
    """(saving per hour, class) of the most expensive class in use, where a move saves enough; else None.

    A class without a price is left out: the saving is not known. So is one where a pod may not be evicted: which of the
    class's pods goes is not this plan's choice.
    """
    for expensive in reversed(plan.order):
        if expensive.hourly_cost is None or cheap.hourly_cost is None or not plan.kept.get(expensive.gpu_class):
            continue
        if (state := plan.demand.replica_states.get(expensive.gpu_class)) is not None and state.keeps:
            continue
        saving = expensive.hourly_cost - cheap.hourly_cost
        return (
            (saving, expensive)
            if saving > 0 and saving * 100 >= expensive.hourly_cost * moves.min_saving_percent
            else None
        )
    return None


def _at_rest(plan: ModelPlan) -> bool:
    """All replicas of the Model are ready and none is going."""
    return all(s.settled and s.ready >= s.replicas and not s.terminating for s in plan.demand.replica_states.values())
