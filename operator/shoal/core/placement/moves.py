"""Moves to cheaper classes: one more replica there, and the dear one goes when it is ready. At a bounded pace."""

from collections.abc import Sequence
from decimal import Decimal

from shoal.core.placement.case import Case, rank
from shoal.core.placement.room import Room
from shoal.core.placement.types import Candidate, Moves, Unplannable


def move(cases: Sequence[Case], rooms: dict[str, Room], moves: Moves) -> None:
    """Goes on with the moves that have begun, and begins others where room is really free.

    Costs only ever fall: nothing moves back, so a fleet that nobody touches comes to rest.
    """
    wanted = _wanted(cases, rooms)
    under_way = sum(case.moving_from is not None for case in cases)
    for case in cases:  # asked for in an earlier plan, not bound yet
        if case.quiet or case.demand.frozen or case.moving_from is not None:
            continue
        try:
            under_way += _go_on(case, rooms, wanted, moves)
        except Exception as error:
            raise Unplannable(case.demand.uid) from error
    if under_way >= moves.in_flight:
        return
    found: list[tuple[Decimal, tuple[object, ...], Case, Candidate, Candidate]] = []
    for case in cases:
        if case.quiet and len(case.demand.candidates) > 1:
            try:
                step = _step(case, rooms, wanted, moves)
            except Exception as error:
                raise Unplannable(case.demand.uid) from error
            if step is not None and _at_rest(case):
                saving, dear, cheap = step
                found.append((-saving, rank(case.demand), case, dear, cheap))
    found.sort(key=lambda entry: entry[:2])
    for _, _, case, dear, cheap in found:
        if under_way >= moves.in_flight:
            return
        if rooms[cheap.gpu_class].take(cheap.gpus):
            _begin(case, dear, cheap)
            under_way += 1


def _begin(case: Case, dear: Candidate, cheap: Candidate) -> None:
    case.ask(cheap.gpu_class)
    case.moving_from, case.moving_to = dear.gpu_class, cheap.gpu_class


def _wanted(cases: Sequence[Case], rooms: dict[str, Room]) -> set[str]:
    """Classes on which a Model waits, or would run if there were room: no room there is free for a move."""
    return {
        candidate.gpu_class
        for case in cases
        if case.missing or case.waiting
        for candidate in case.demand.candidates
        if (room := rooms.get(candidate.gpu_class)) is not None and room.largest >= candidate.gpus
    }


def _go_on(case: Case, rooms: dict[str, Room], wanted: set[str], moves: Moves) -> bool:
    if case.missing or case.waiting or case.asked:
        return False
    for cheap in case.order:
        standing = case.demand.standing.get(cheap.gpu_class)
        if standing is None or standing.replicas <= max(standing.bound, case.replicas(cheap.gpu_class)):
            continue
        if cheap.gpu_class in case.demand.setbacks:
            continue
        found = _dearest(case, cheap, moves)
        room = rooms.get(cheap.gpu_class)
        if found is None or room is None or cheap.gpu_class in wanted:
            continue
        _, dear = found
        if case.may_have_more(cheap, instead_of=dear) and room.take(cheap.gpus):
            _begin(case, dear, cheap)
            return True
    return False


def _step(
    case: Case, rooms: dict[str, Room], wanted: set[str], moves: Moves
) -> tuple[Decimal, Candidate, Candidate] | None:
    for cheap in case.order:
        room = rooms.get(cheap.gpu_class)
        if room is None or not room.fits(cheap.gpus) or cheap.gpu_class in wanted:
            continue
        if cheap.gpu_class in case.demand.setbacks:
            continue
        found = _dearest(case, cheap, moves)
        if found is not None and case.may_have_more(cheap, instead_of=found[1]):
            return (*found, cheap)
    return None


def _dearest(case: Case, cheap: Candidate, moves: Moves) -> tuple[Decimal, Candidate] | None:
    """(saving per hour, class): the dearest class in use, where a move saves enough; else None.

    A class without a price is neither cheap nor dear: what is saved is not known.
    """
    for dear in reversed(case.order):
        if dear.hourly_cost is None or cheap.hourly_cost is None or not case.kept.get(dear.gpu_class):
            continue
        saving = dear.hourly_cost - cheap.hourly_cost
        return (saving, dear) if saving > 0 and saving * 100 >= dear.hourly_cost * moves.min_saving_percent else None
    return None


def _at_rest(case: Case) -> bool:
    """All its replicas are ready and none is going."""
    return all(s.settled and s.ready >= s.replicas and not s.terminating for s in case.demand.standing.values())
