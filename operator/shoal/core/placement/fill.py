"""What one Model gets, those of higher rank having been served."""

from collections.abc import Sequence

from shoal.core.placement.case import Case, Stock
from shoal.core.placement.outrank import Outranker
from shoal.core.placement.room import Room
from shoal.core.placement.types import Candidate


def fill(case: Case, rooms: dict[str, Room], outranker: Outranker) -> None:
    """Keeps what runs, asks for what is missing where there is room, and lets go what is not needed any more."""
    if not case.demand.frozen and _is_quiet(case, rooms):
        case.quiet = True
        return
    case.begin()
    if case.demand.frozen:
        _freeze(case, rooms)
        return
    _take_stock(case, rooms)
    _reserve_surge(case, rooms)
    left = _keep(case, case.demand.wanted)
    left = _ask(case, rooms, left)
    left = _wait(case, rooms, left)
    while left:
        eviction = outranker.find(case)
        if eviction is None:
            break
        outranker.evict(case, eviction)
        _ask_soon(case, rooms, eviction.gpu_class, eviction.node)
        left = _wait(case, rooms, left - 1)  # one that goes may make room for several
    case.missing = left
    _hold(case)


def _freeze(case: Case, rooms: dict[str, Room]) -> None:
    total = 0
    for gpu_class, standing in case.demand.standing.items():
        case.kept[gpu_class] = standing.replicas
        total += standing.replicas
        room = rooms.get(gpu_class)
        for _ in range(standing.replicas - standing.bound):
            if room is None or not room.take(standing.gpus, exists=True):
                break
    case.missing = max(0, case.demand.wanted - total)


def _is_quiet(case: Case, rooms: dict[str, Room]) -> bool:
    """The common case, found out cheaply: as many as wanted, all bound where they may be."""
    demand = case.demand
    if case.evicted or case.sick:
        return False
    total = interruptible = 0
    kept: dict[str, int] = {}
    for gpu_class, standing in demand.standing.items():
        replicas, on = standing.replicas, standing.on
        if not replicas and not on and not standing.pods:
            continue
        candidate = case.candidate(gpu_class)
        room = rooms.get(gpu_class)
        if candidate is None or room is None:
            return False
        if candidate.max_replicas is not None and replicas > candidate.max_replicas:
            return False
        bound = 0
        for node, held in on.items():
            if held.pods and node not in room.index:
                return False
            bound += held.pods
        if bound != replicas or standing.pods > replicas:
            return False
        if gpu_class in demand.setbacks and standing.ready < replicas:
            return False
        kept[gpu_class] = replicas
        total += replicas
        if candidate.interruptible:
            interruptible += replicas
    if total != demand.wanted or interruptible * 100 > demand.wanted * demand.interruptible_percent:
        return False
    case.kept = kept
    return True


def _take_stock(case: Case, rooms: dict[str, Room]) -> None:
    for gpu_class, standing in case.demand.standing.items():
        gone = sum(n for (of, _), n in case.evicted.items() if of == gpu_class)
        stock = case.stock[gpu_class] = Stock(max(0, standing.replicas - gone))
        room = rooms.get(gpu_class)
        for node, pods, held in case.left_after_eviction(gpu_class):
            ready = min(held.ready, pods)
            stock.evicted_ready += held.ready - ready  # one that is not ready goes before one that is
            sick = pods if room is None or node not in room.index else min(pods, case.sick.get((gpu_class, node), 0))
            sick_ready = max(0, ready - (pods - sick))
            stock.stranded += sick
            stock.stranded_ready += sick_ready
            stock.sound += pods - sick
            stock.sound_ready += ready - sick_ready


def _reserve_surge(case: Case, rooms: dict[str, Room]) -> None:
    """The pod that a rollout has asked for beyond `replicas` takes its GPUs too."""
    for gpu_class, standing in case.demand.standing.items():
        room = rooms.get(gpu_class)
        for _ in range(standing.pods - max(standing.replicas, standing.bound)):
            if room is None or not room.take(standing.gpus, exists=True):
                break


def _keep(case: Case, left: int) -> int:
    """What runs stays, the cheapest first where it is too many. Returns how many replicas are still to be found.

    Where the Model has a setback only what is ready counts.
    """
    for candidate in case.order:
        stock = case.stock.get(candidate.gpu_class)
        if stock is None:
            continue
        here = stock.sound_ready if candidate.gpu_class in case.demand.setbacks else stock.sound
        keep = min(here, left, case.may_have_more(candidate))
        if keep:
            case.kept[candidate.gpu_class] = keep
            left -= keep
    return left


def _keep_set_back(case: Case, left: int) -> int:
    """What is not ready on a class with a setback stays, where no other class has room: it may still come."""
    for candidate in case.order:
        stock = case.stock.get(candidate.gpu_class)
        if stock is not None and candidate.gpu_class in case.demand.setbacks:
            have = case.kept.get(candidate.gpu_class, 0)
            keep = min(stock.sound - have, left, case.may_have_more(candidate))
            if keep > 0:
                case.kept[candidate.gpu_class] = have + keep
                left -= keep
    return left


def _ask(case: Case, rooms: dict[str, Room], left: int) -> int:
    rolling = [c for c in case.order if left and _is_rolling(case, c.gpu_class)]
    for candidate in rolling:
        # The GPUs of the pod that a rollout replaces are for the pod that replaces it: no reason to go elsewhere.
        room = rooms.get(candidate.gpu_class)
        standing = case.demand.standing[candidate.gpu_class]
        ours = min(left, case.may_have_more(candidate), standing.replicas - standing.bound, standing.terminating)
        while room and ours > 0 and left:
            if room.take(candidate.gpus):
                case.ask(candidate.gpu_class)
            elif room.take_soon(candidate.gpus):
                case.wait(candidate.gpu_class)
            else:
                break
            ours -= 1
            left -= 1
    setbacks = case.demand.setbacks
    left = _take_room(case, rooms, [c for c in case.order if c.gpu_class not in setbacks], left)
    if setbacks:
        left = _keep_set_back(case, left)
        left = _take_room(case, rooms, [c for c in case.order if c.gpu_class in setbacks], left)
    return left


def _take_room(case: Case, rooms: dict[str, Room], candidates: Sequence[Candidate], left: int) -> int:
    for candidate in candidates:
        room = rooms.get(candidate.gpu_class)
        more = min(left, case.may_have_more(candidate)) if left and room else 0
        while room and more and room.take(candidate.gpus):
            case.ask(candidate.gpu_class)
            more -= 1
            left -= 1
    return left


def _is_rolling(case: Case, gpu_class: str) -> bool:
    standing = case.demand.standing.get(gpu_class)
    return standing is not None and not standing.settled and standing.replicas > standing.bound


def _wait(case: Case, rooms: dict[str, Room], left: int) -> int:
    """Asks for GPUs that come free by themselves: where it asked before, then cheapest-first."""
    if not left:
        return 0
    standing = case.demand.standing

    def asked_before(gpu_class: str) -> bool:
        found = standing.get(gpu_class)
        return found is not None and found.replicas > found.bound

    for candidate in sorted(case.order, key=lambda c: not asked_before(c.gpu_class)):
        room = rooms.get(candidate.gpu_class)
        more = min(left, case.may_have_more(candidate)) if room else 0
        while room and more and room.take_soon(candidate.gpus):
            case.wait(candidate.gpu_class)
            more -= 1
            left -= 1
    return left


def _ask_soon(case: Case, rooms: dict[str, Room], gpu_class: str, node: int) -> None:
    candidate = case.candidate(gpu_class)
    if candidate is not None:
        rooms[gpu_class].take_soon_on(node, candidate.gpus)
        case.wait(gpu_class)


def _hold(case: Case) -> None:
    """Of the replicas that shall go, those that serve stay until as many are ready in their place."""
    short = case.demand.wanted
    for gpu_class, kept in case.kept.items():
        short -= min(kept, case.stock[gpu_class].sound_ready)
    order = [c.gpu_class for c in case.order]
    others = sorted(c for c in case.stock if c not in order)
    for gpu_class in order:
        stock = case.stock.get(gpu_class)
        if stock is not None:
            kept = case.kept.get(gpu_class, 0)
            over = min(stock.sound_ready - kept, stock.replicas - kept)
            held = _held(case, gpu_class, over, short)
            short -= held
            cheaper = _starting_before(case, gpu_class)
            if held and cheaper is not None:
                case.moving_from, case.moving_to = gpu_class, cheaper
    for gpu_class in [*others, *order]:
        stock = case.stock.get(gpu_class)
        if stock is None:
            continue
        have = case.kept.get(gpu_class, 0) + case.held.get(gpu_class, 0)
        ready = stock.stranded_ready + (stock.sound_ready if gpu_class in others else 0)
        held = _held(case, gpu_class, min(ready, stock.replicas - have), short)
        short -= held
        case.replacing += held
        if gpu_class in others:
            continue
        # A Deployment does not make the replacement while it counts a pod on a lost node among its replicas.
        starting = case.wants_on(gpu_class) - min(case.kept.get(gpu_class, 0), stock.sound_ready) + case.missing
        silent = min(stock.stranded - stock.stranded_ready, stock.replicas - have - held)
        silent = _held(case, gpu_class, silent, starting)
        case.replacing += silent
        # Nor does it make any while it has as many pods as it should: it grows first, and shrinks when they are bound.
        new = case.wants_on(gpu_class) - case.kept.get(gpu_class, 0)
        if new > 0:
            rest = min(stock.stranded - held - silent, stock.replicas - have - held - silent)
            case.replacing += _held(case, gpu_class, rest, rest)
    _yield_later(case, short)


def _yield_later(case: Case, short: int) -> None:
    """An evicted replica that serves goes when the one that starts in its place, on GPUs that it has got, is ready; at
    once where the Model has no such place. Who takes its GPUs waits so much longer, and nobody stops serving."""
    starting = sum(case.asked.values()) + sum(
        kept - min(kept, case.stock[gpu_class].sound_ready) for gpu_class, kept in case.kept.items()
    )
    for gpu_class in sorted(case.stock):
        stock = case.stock[gpu_class]
        held = _held(case, gpu_class, min(stock.evicted_ready, starting), short)
        if held:
            case.yielding[gpu_class] = held
            short -= held
            starting -= held


def _starting_before(case: Case, gpu_class: str) -> str | None:
    """A cheaper class that has replicas which are not ready yet."""
    for candidate in case.order:
        if candidate.gpu_class == gpu_class:
            return None
        stock = case.stock.get(candidate.gpu_class)
        if stock is not None and case.kept.get(candidate.gpu_class, 0) > stock.sound_ready:
            return candidate.gpu_class
    return None


def _held(case: Case, gpu_class: str, replicas: int, short: int) -> int:
    """Holds as many as are short, and says how many."""
    held = min(replicas, short)
    if held <= 0:
        return 0
    case.held[gpu_class] = case.held.get(gpu_class, 0) + held
    return held
