"""The whole fleet in one pass: the same snapshot gives the same plan.

1. Models in their order (priority, age, uid): each keeps what runs, then asks where there is room, the cheapest class
   first; then for GPUs that come free by themselves; then for those of Models of lower priority. Losers come later in
   the order, so each Model is decided once.
2. What room is left then is really free, and a few replicas may move to cheaper classes.

Which nodes replicas will get is an assumption of the plan, made anew each time: the scheduler binds them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

from shoal.core.placement.case import Case, rank
from shoal.core.placement.fill import fill
from shoal.core.placement.moves import move
from shoal.core.placement.outrank import Outranker
from shoal.core.placement.room import Room
from shoal.core.placement.types import ClassSupply, Demand, Moves, Placement, Unplannable
from shoal.core.placement.words import Words


def plan(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], *, moves: Moves | None = None
) -> dict[str, Placement]:
    """uid -> where its replicas go. No GPU is given away twice; a replica for which GPUs are not free yet is counted as
    `waiting`. `moves` None: the default pace."""
    return dict(part for part in parts(demands, supplies, moves=moves) if part is not None)


def parts(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], *, moves: Moves | None = None
) -> Iterator[tuple[str, Placement] | None]:
    """`plan`, one Model after the other. All is decided before the first; then each is put into words when it is asked
    for: two thirds of the work. None: a stop while it is being decided, where who plans may do something else.

    Raises Unplannable for a Model whose part ends in an error that nobody foresaw.
    """
    pace = moves or Moves()
    cases, rooms = yield from _deciding(demands, supplies, pace)
    words = Words(cases, rooms, pace)
    for case in cases:
        try:
            placement = words.placement(case)
        except Exception as error:
            raise Unplannable(case.demand.uid) from error
        yield case.demand.uid, placement


def decide(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], moves: Moves
) -> tuple[list[Case], dict[str, Room]]:
    """The plan before it is put into words."""
    steps = _deciding(demands, supplies, moves)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _deciding(
    demands: Iterable[Demand], supplies: Iterable[ClassSupply], moves: Moves
) -> Generator[None, None, tuple[list[Case], dict[str, Room]]]:
    cases = [Case(demand) for demand in sorted(demands, key=rank)]
    yield
    mix = _Mix(cases)
    rooms = {supply.name: Room(supply, mix.of(supply.name)) for supply in supplies}
    _mark_sick(cases, rooms)
    outranker = Outranker(cases, rooms)
    for case in cases:
        try:
            fill(case, rooms, outranker)
        except Exception as error:
            raise Unplannable(case.demand.uid) from error
        yield
    move(cases, rooms, moves)
    yield
    return cases, rooms


class _Mix:
    """Which sizes are demanded of each class: counted when a node has to be chosen, most plans need none."""

    def __init__(self, cases: list[Case]) -> None:
        self._cases = cases
        self._sizes: dict[str, dict[int, int]] | None = None

    def of(self, gpu_class: str) -> Callable[[], Mapping[int, int]]:
        return lambda: self._all().get(gpu_class, {})

    def _all(self) -> dict[str, dict[int, int]]:
        if self._sizes is None:
            self._sizes = {}
            for case in self._cases:
                for candidate in case.demand.candidates:
                    found = self._sizes.setdefault(candidate.gpu_class, {})
                    found[candidate.gpus] = found.get(candidate.gpus, 0) + case.demand.wanted
        return self._sizes


def _mark_sick(cases: list[Case], rooms: dict[str, Room]) -> None:
    """Where pods hold more GPUs than the node offers, which of them have the unhealthy ones is not known: the least
    important replicas are replaced, until what is left fits."""
    left = {(room.supply.name, node): gpus for room in rooms.values() for node, gpus in room.sick.items()}
    if not left:
        return
    for case in reversed(cases):
        for gpu_class, standing in case.demand.standing.items():
            for node, held in standing.on.items():
                short = left.get((gpu_class, node), 0)
                pods = min(held.pods, -(-short // standing.gpus)) if short > 0 and standing.gpus else 0
                if pods:
                    case.sick = case.sick | {(gpu_class, node): pods}
                    left[gpu_class, node] = short - pods * standing.gpus
