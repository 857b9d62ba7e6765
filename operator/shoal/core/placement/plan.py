"""The plan of the whole fleet in one pass: the same snapshot gives the same plan.

1. Models in order (priority, age, uid): each keeps what runs, then takes free GPUs, the cheapest class first; then
   waits for GPUs of terminating pods; then preempts Models of lower priority. Preempted Models come later in the order,
   so each Model is decided once.
2. With the GPUs still free after that, a few replicas may move to cheaper classes.

The nodes of new replicas are an assumption, made again in each plan: the scheduler binds the pods.
"""

from collections.abc import Callable, Generator, Iterable, Mapping

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.fill import fill
from shoal.core.placement.messages import PlacementMessages
from shoal.core.placement.modelplan import ModelPlan, rank
from shoal.core.placement.moves import move
from shoal.core.placement.preemption import Preemptor
from shoal.core.placement.types import BROKEN, ClassSupply, ClassUse, Demand, Moves, Placement, Unplannable


def plan(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], *, moves: Moves | None = None
) -> dict[str, Placement]:
    """uid -> where the Model's replicas go. No GPU is given away twice; a replica whose GPUs are not free yet is
    counted as `waiting`. `moves` None: the default pace."""
    return dict(part for part in parts(demands, supplies, moves=moves) if part is not None)


def parts(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], *, moves: Moves | None = None
) -> Generator[tuple[str, Placement] | None, None, dict[str, ClassUse]]:
    """`plan` in steps, (uid, Placement) one Model after the other; returns what is left of each class. None: a point
    during the decisions at which the caller may do other work. Decisions end before the first Placement; messages, two
    thirds of the work, follow.

    Raises Unplannable for a Model whose part ends in an unexpected error.
    """
    pace = moves or Moves()
    plans, capacities = yield from _decide_steps(demands, supplies, pace)
    messages = PlacementMessages(plans, capacities, pace)
    for model_plan in plans:
        try:
            placement = messages.placement(model_plan)
        except Exception as error:
            raise Unplannable(model_plan.demand.uid) from error
        yield model_plan.demand.uid, placement
    return {name: capacities[name].use() for name in sorted(capacities)}


def _decide_steps(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], moves: Moves
) -> Generator[None, None, tuple[list[ModelPlan], dict[str, ClassCapacity]]]:
    plans = [ModelPlan(demand) for demand in sorted(demands, key=rank)]
    yield
    mix = _Mix(plans)
    capacities = {supply.name: ClassCapacity(supply, mix.of(supply.name)) for supply in supplies}
    _mark_unhealthy(plans, capacities)
    preemptor = Preemptor(plans, capacities)
    for model_plan in plans:
        try:
            fill(model_plan, capacities, preemptor)
        except Exception as error:
            raise Unplannable(model_plan.demand.uid) from error
        yield
    move(plans, capacities, moves)
    yield
    return plans, capacities


class _Mix:
    """The demanded replica sizes of each class. Counted when first needed: most plans need none."""

    def __init__(self, plans: list[ModelPlan]) -> None:
        self._plans = plans
        self._sizes: dict[str, dict[int, int]] | None = None

    def of(self, gpu_class: str) -> Callable[[], Mapping[int, int]]:
        return lambda: self._all().get(gpu_class, {})

    def _all(self) -> dict[str, dict[int, int]]:
        if self._sizes is None:
            self._sizes = {}
            for model_plan in self._plans:
                for candidate in model_plan.demand.candidates:
                    found = self._sizes.setdefault(candidate.gpu_class, {})
                    found[candidate.gpus] = found.get(candidate.gpus, 0) + model_plan.demand.wanted
        return self._sizes


def _mark_unhealthy(plans: list[ModelPlan], capacities: dict[str, ClassCapacity]) -> None:
    """Marks replicas on nodes where pods hold more GPUs than the node offers. Which pods have the unhealthy GPUs is not
    known, so the least important replicas are replaced, until the rest fits."""
    left = {
        (capacity.supply.name, node): gpus
        for capacity in capacities.values()
        for node, gpus in capacity.unhealthy.items()
    }
    if not left:
        return
    for model_plan in plans:  # of replicas whose GPU is known to be the one, nothing has to be guessed
        for gpu_class, state in model_plan.demand.replica_states.items():
            for node, held in state.by_node.items():
                if (of := (gpu_class, node.removesuffix(BROKEN))) in left and node.endswith(BROKEN):
                    left[of] -= held.pods * state.gpus
    for model_plan in reversed(plans):
        for gpu_class, state in model_plan.demand.replica_states.items():
            for node, held in state.by_node.items():
                short = left.get((gpu_class, node), 0)
                pods = min(held.pods, -(-short // state.gpus)) if short > 0 and state.gpus else 0
                if pods:
                    model_plan.unhealthy = model_plan.unhealthy | {(gpu_class, node): pods}
                    left[gpu_class, node] = short - pods * state.gpus
