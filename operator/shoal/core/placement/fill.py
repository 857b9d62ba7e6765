"""The replicas of one Model, by class, after the Models of higher rank have been planned."""

from collections.abc import Sequence

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan, Stock
from shoal.core.placement.preemption import Preemptor
from shoal.core.placement.relocation import relocate
from shoal.core.placement.types import Candidate


def fill(plan: ModelPlan, capacities: dict[str, ClassCapacity], preemptor: Preemptor) -> None:
    """Keeps what runs, requests what is missing where there is capacity, and releases what is not needed any more."""
    relocate(plan, capacities)
    if not plan.demand.frozen and _is_unchanged(plan, capacities):
        plan.unchanged = True
        return
    plan.begin()
    if plan.demand.frozen:
        _freeze(plan, capacities)
        return
    _take_stock(plan, capacities)
    _reserve_surge(plan, capacities)
    left = _keep(plan, plan.demand.wanted)
    left = _hold_back(plan, left)
    left = _leave_rejected(plan, capacities, left)
    left, added = _place(plan, capacities, left)
    plan.passed_over = frozenset(plan.demand.backoffs)
    left = _preempt(plan, capacities, preemptor, left)
    if left and added:
        left = _add_nodes(plan, capacities, left, outages=True)
    # A class in backoff comes after the wait for a node in an outage: that wait costs nothing, and the outage may end.
    # In a backoff the engine most likely crashes again, on a node that is paid for or on GPUs of another Model.
    plan.passed_over = frozenset()
    if left and plan.demand.backoffs:
        if added:
            left = _add_nodes(plan, capacities, left)
        left = _preempt(plan, capacities, preemptor, left)
        if left and added:
            left = _add_nodes(plan, capacities, left, outages=True)
    plan.missing = left
    _hold(plan)


def _preempt(plan: ModelPlan, capacities: dict[str, ClassCapacity], preemptor: Preemptor, left: int) -> int:
    """Takes GPUs of Models of lower priority. Returns how many replicas are still to be found."""
    while left:
        eviction = preemptor.find(plan)
        if eviction is None:
            break
        preemptor.evict(plan, eviction)
        _wait_on(plan, capacities, eviction.gpu_class, eviction.node)
        left = _wait(plan, capacities, left - 1)  # one eviction may free GPUs for several replicas
    return left


def _place(plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int) -> tuple[int, bool]:
    """Where GPUs are or come, without taking any from others. Returns how many replicas are still to be found, and
    whether nodes may come."""
    worse = _worse_than_new_nodes(plan, capacities)
    left = _request(plan, capacities, left, worse)
    added = bool(left) and any(capacity.coming for capacity in capacities.values())
    if added:
        left = _keep_adding(plan, capacities, left)
    passed_over = plan.passed_over
    # A replica whose engine ends again and again may leave for a new node, but not to wait for GPUs that others hold.
    stay = min(left, _startable(plan, worse))
    plan.passed_over = passed_over | worse
    left = stay + _wait(plan, capacities, left - stay)
    if added:
        plan.passed_over = passed_over | frozenset(plan.demand.backoffs)
        left = _add_nodes(plan, capacities, left)
    plan.passed_over = passed_over
    if left and worse:
        left = _request_backed_off(plan, capacities, left, frozenset(plan.demand.backoffs))
        left = _wait(plan, capacities, left)
    return left, added


def _worse_than_new_nodes(plan: ModelPlan, capacities: dict[str, ClassCapacity]) -> frozenset[str]:
    """Classes on which the engine ends again and again, while a node may come of another class that is in no backoff. A
    class where another replica is ready works."""
    demand, states = plan.demand, plan.demand.replica_states
    found = frozenset(name for name in demand.crashes if (state := states.get(name)) is None or not state.ready)

    def may_come(candidate: Candidate) -> bool:
        name = candidate.gpu_class
        capacity, state = capacities.get(name), states.get(name)
        announced = state is not None and state.announced > 0
        return (
            name not in demand.backoffs
            and capacity is not None
            and (not capacity.supply.outage or announced)
            and any(free >= candidate.gpus for free in capacity.coming)
            and plan.may_have_more(candidate) > 0
        )

    return found if found and any(may_come(candidate) for candidate in plan.order) else frozenset()


def _freeze(plan: ModelPlan, capacities: dict[str, ClassCapacity]) -> None:
    total = 0
    for gpu_class, state in plan.demand.replica_states.items():
        plan.kept[gpu_class] = state.replicas
        total += state.replicas
        capacity = capacities.get(gpu_class)
        for _ in range(state.replicas - state.bound - state.held_back):
            if capacity is None or not _take_for_pod(capacity, state.gpus):
                break
    plan.missing = max(0, plan.demand.wanted - total)


def _is_unchanged(plan: ModelPlan, capacities: dict[str, ClassCapacity]) -> bool:
    """The common case, checked cheaply: as many replicas as wanted, all bound on nodes where they may be."""
    demand = plan.demand
    if plan.evicted or plan.unhealthy:
        return False
    total = interruptible = 0
    kept: dict[str, int] = {}
    for gpu_class, state in demand.replica_states.items():
        replicas, on = state.replicas, state.by_node
        if not replicas and not on and not state.pods:
            continue
        candidate = plan.candidate(gpu_class)
        capacity = capacities.get(gpu_class)
        if candidate is None or capacity is None:
            return False
        if candidate.max_replicas is not None and replicas > candidate.max_replicas:
            return False
        bound = 0
        for node, held in on.items():
            if held.pods and node not in capacity.index:
                return False
            bound += held.pods
        if bound != replicas or state.pods > replicas:
            return False
        if gpu_class in demand.backoffs and state.ready < replicas:
            return False
        kept[gpu_class] = replicas
        total += replicas
        if candidate.interruptible:
            interruptible += replicas
    if total != demand.wanted or interruptible * 100 > demand.wanted * demand.interruptible_percent:
        return False
    plan.kept = kept
    return True


def _take_stock(plan: ModelPlan, capacities: dict[str, ClassCapacity]) -> None:
    for gpu_class, state in plan.demand.replica_states.items():
        gone = sum(n for (of, _), n in plan.evicted.items() if of == gpu_class)
        stock = plan.stock[gpu_class] = Stock(max(0, state.replicas - gone))
        capacity = capacities.get(gpu_class)
        for node, pods, held in plan.left_after_eviction(gpu_class):
            ready = min(held.ready, pods)
            stock.evicted_ready += held.ready - ready  # pods that are not ready go first
            unhealthy = (
                pods
                if capacity is None or node not in capacity.index
                else min(pods, plan.unhealthy.get((gpu_class, node), 0))
            )
            unhealthy_ready = max(0, ready - (pods - unhealthy))
            stock.stranded += unhealthy
            stock.stranded_ready += unhealthy_ready
            stock.sound += pods - unhealthy
            stock.sound_ready += ready - unhealthy_ready


def _reserve_surge(plan: ModelPlan, capacities: dict[str, ClassCapacity]) -> None:
    """Takes GPUs for the surge pod that a rollout asked for beyond `replicas`."""
    for gpu_class, state in plan.demand.replica_states.items():
        capacity = capacities.get(gpu_class)
        surge = state.pods - max(state.replicas, state.bound)
        for _ in range(surge - (state.gated - state.held_back)):
            if capacity is None or not _take_for_pod(capacity, state.gpus):
                break


def _take_for_pod(capacity: ClassCapacity, gpus: int) -> bool:
    """Takes GPUs for a pod that exists and is not bound."""
    return capacity.take(gpus, exists=True) or capacity.take_coming(gpus)


def _keep(plan: ModelPlan, left: int) -> int:
    """Keeps running replicas, the cheapest first where there are too many. Returns how many are still to be found.

    On a class in backoff only ready replicas are kept.
    """
    for candidate in plan.order:
        stock = plan.stock.get(candidate.gpu_class)
        if stock is None:
            continue
        here = stock.sound_ready if candidate.gpu_class in plan.demand.backoffs else stock.sound
        keep = min(here, left, plan.may_have_more(candidate))
        if keep:
            plan.kept[candidate.gpu_class] = keep
            left -= keep
    return left


def _hold_back(plan: ModelPlan, left: int) -> int:
    """Leaves replicas that a quota holds back where they are, without GPUs: nobody loses any for a pod that may not
    run, and no other class is used instead. Once the quota has room, they are planned as any other."""
    for candidate in plan.order:
        state = plan.demand.replica_states.get(candidate.gpu_class)
        if state is None or not state.gated or candidate.gpu_class in plan.demand.backoffs:
            continue
        waits = min(state.held_back, state.gated - state.rejected)
        gated = min(left, waits, plan.may_have_more(candidate))
        if gated > 0:
            plan.hold_back(candidate.gpu_class, gated)
            left -= gated
    return left


def _leave_rejected(plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int) -> int:
    """Places replicas on other classes while there are some that got no node of an autoscaler, as Kueue says. What
    finds no place stays where it is, without GPUs, as replicas that wait for quota.

    Kueue asks for no other node for such a pod. So once nodes are expected again on its class, the Deployment shrinks
    by these pods, and the plan after that requests the replicas anew, whose pods ask again. Until the pods are gone, no
    replica is requested there: the Deployment would keep a pod that gets no node."""
    states = plan.demand.replica_states
    expected = frozenset(
        name
        for name, state in states.items()
        if state.rejected
        and name not in plan.demand.backoffs
        and (capacity := capacities.get(name)) is not None
        and not capacity.supply.outage
    )
    rejected = expected | {name for name, state in states.items() if state.rejected and state.held_back}
    if not left or not rejected:
        return left
    plan.passed_over = rejected
    left, _ = _place(plan, capacities, left)
    plan.passed_over = frozenset()
    for candidate in plan.order:
        name = candidate.gpu_class
        if left and name in expected and plan.may_have_more(candidate):
            plan.asking_again = {name: left}
            return 0
        if name in rejected:
            state = states[name]
            rest = state.held_back - plan.gated.get(name, 0)
            stays = min(left, state.rejected, rest, plan.may_have_more(candidate))
            if stays > 0:
                plan.reject(name, stays)
                left -= stays
    return left


def _request_backed_off(
    plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int, classes: frozenset[str], stay: int = 0
) -> int:
    """Keeps replicas that are not ready on `classes`, which are in backoff, where no other class has capacity: they may
    start yet. Then takes free GPUs there, but not for `stay` of the replicas, which run on another such class."""
    for candidate in plan.order:
        if candidate.gpu_class in classes:
            keep = min(left, _not_kept(plan, candidate))
            if keep > 0:
                plan.kept[candidate.gpu_class] = plan.kept.get(candidate.gpu_class, 0) + keep
                left -= keep
    stay = min(left, stay)
    return stay + _take_capacity(plan, capacities, [c for c in plan.order if c.gpu_class in classes], left - stay)


def _startable(plan: ModelPlan, classes: frozenset[str]) -> int:
    """Replicas that are not ready on `classes`, and may stay there."""
    return sum(max(0, _not_kept(plan, candidate)) for candidate in plan.order if candidate.gpu_class in classes)


def _not_kept(plan: ModelPlan, candidate: Candidate) -> int:
    stock = plan.stock.get(candidate.gpu_class)
    left = stock.sound - plan.kept.get(candidate.gpu_class, 0) if stock is not None else 0
    return min(left, plan.may_have_more(candidate))


def _request(plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int, worse: frozenset[str]) -> int:
    """Takes free GPUs, and keeps what starts on classes in backoff. Of the latter, those in `worse` are left out."""
    rolling = [c for c in plan.order if left and _is_rolling(plan, c.gpu_class)]
    for candidate in rolling:
        # The GPUs of a pod that a rollout replaces are for its replacement: no reason to use another class.
        capacity = capacities.get(candidate.gpu_class)
        state = plan.demand.replica_states[candidate.gpu_class]
        ours = min(left, plan.may_have_more(candidate), state.replicas - state.bound, state.terminating)
        while capacity and ours > 0 and left:
            if capacity.take(candidate.gpus):
                plan.request(candidate.gpu_class)
            elif capacity.take_soon(candidate.gpus):
                plan.wait(candidate.gpu_class)
            else:
                break
            ours -= 1
            left -= 1
    backoffs = plan.demand.backoffs
    left = _take_capacity(plan, capacities, [c for c in plan.order if c.gpu_class not in backoffs], left)
    if backoffs:
        classes = frozenset(backoffs) - worse
        left = _request_backed_off(plan, capacities, left, classes, stay=_startable(plan, worse))
    return left


def _take_capacity(
    plan: ModelPlan, capacities: dict[str, ClassCapacity], candidates: Sequence[Candidate], left: int
) -> int:
    for candidate in candidates:
        capacity = capacities.get(candidate.gpu_class)
        more = min(left, plan.may_have_more(candidate)) if left and capacity else 0
        while capacity and more and capacity.take(candidate.gpus):
            plan.request(candidate.gpu_class)
            more -= 1
            left -= 1
    return left


def _is_rolling(plan: ModelPlan, gpu_class: str) -> bool:
    state = plan.demand.replica_states.get(gpu_class)
    return state is not None and not state.settled and state.replicas > state.bound


def _wait(plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int) -> int:
    """Requests replicas on GPUs of terminating pods: first where the Deployment already asked, then cheapest-first."""
    if not left:
        return 0
    states = plan.demand.replica_states

    def asked_before(gpu_class: str) -> bool:
        found = states.get(gpu_class)
        return found is not None and found.replicas > found.bound

    for candidate in sorted(plan.order, key=lambda c: not asked_before(c.gpu_class)):
        capacity = capacities.get(candidate.gpu_class)
        more = min(left, plan.may_have_more(candidate)) if capacity else 0
        while capacity and more and capacity.take_soon(candidate.gpus):
            plan.wait(candidate.gpu_class)
            more -= 1
            left -= 1
    return left


def _keep_adding(plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int) -> int:
    """Keeps pending replicas for which an autoscaler is adding nodes, unless GPUs became free for them: waiting for
    other pods to go instead would begin anew."""
    for candidate in plan.order:
        name = candidate.gpu_class
        state, capacity = plan.demand.replica_states.get(name), capacities.get(name)
        if state is None or capacity is None or name in plan.demand.backoffs:
            continue
        pending = state.replicas - state.bound - plan.requested.get(name, 0)
        if capacity.supply.outage:
            pending = min(pending, state.announced)
        more = min(left, pending, plan.may_have_more(candidate))
        while more > 0 and capacity.take_coming(candidate.gpus):
            plan.add_node(name)
            more -= 1
            left -= 1
    return left


def _add_nodes(plan: ModelPlan, capacities: dict[str, ClassCapacity], left: int, *, outages: bool = False) -> int:
    """Requests replicas for which an autoscaler has to add nodes, cheapest-first: their pods stay pending until then.
    This comes after GPUs that are free or about to be, since a new node takes minutes and costs money, and before
    preemption. `outages`: only classes of which no node is expected, after preemption, so that a node is asked for;
    without it, only the others."""
    for candidate in plan.order:
        capacity = capacities.get(candidate.gpu_class)
        if capacity is None or bool(capacity.supply.outage) != outages:
            continue
        more = min(left, plan.may_have_more(candidate))
        while more > 0 and capacity.take_coming(candidate.gpus):
            plan.add_node(candidate.gpu_class)
            more -= 1
            left -= 1
    return left


def _wait_on(plan: ModelPlan, capacities: dict[str, ClassCapacity], gpu_class: str, node: int) -> None:
    candidate = plan.candidate(gpu_class)
    if candidate is not None:
        capacities[gpu_class].take_soon_on(node, candidate.gpus)
        plan.wait(gpu_class)


def _hold(plan: ModelPlan) -> None:
    """Of the replicas that are to go, keeps those that serve until as many are ready in their place."""
    short = plan.demand.wanted
    for gpu_class, kept in plan.kept.items():
        short -= min(kept, plan.stock[gpu_class].sound_ready)
    order = [c.gpu_class for c in plan.order]
    others = sorted(c for c in plan.stock if c not in order)
    for gpu_class in order:
        stock = plan.stock.get(gpu_class)
        if stock is not None:
            kept = plan.kept.get(gpu_class, 0)
            over = min(stock.sound_ready - kept, stock.replicas - kept)
            held = _held(plan, gpu_class, over, short)
            short -= held
            cheaper = _starting_before(plan, gpu_class)
            if held and cheaper is not None:
                plan.moving_from, plan.moving_to = gpu_class, cheaper
    for gpu_class in [*others, *order]:
        stock = plan.stock.get(gpu_class)
        if stock is None:
            continue
        have = plan.kept.get(gpu_class, 0) + plan.held.get(gpu_class, 0)
        ready = stock.stranded_ready + (stock.sound_ready if gpu_class in others else 0)
        held = _held(plan, gpu_class, min(ready, stock.replicas - have), short)
        short -= held
        plan.replacing += held
        if gpu_class in others:
            continue
        # A Deployment makes no replacement while it counts a pod on a lost node among its replicas.
        starting = plan.wanted_on(gpu_class) - min(plan.kept.get(gpu_class, 0), stock.sound_ready) + plan.missing
        silent = min(stock.stranded - stock.stranded_ready, stock.replicas - have - held)
        silent = _held(plan, gpu_class, silent, starting)
        plan.replacing += silent
        # It makes none either while it has as many pods as it should: it grows first, and shrinks when they are bound.
        new = plan.wanted_on(gpu_class) - plan.kept.get(gpu_class, 0)
        if new > 0:
            rest = min(stock.stranded - held - silent, stock.replicas - have - held - silent)
            plan.replacing += _held(plan, gpu_class, rest, rest)
        elif plan.kept.get(gpu_class, 0) > stock.sound_ready:
            # A Deployment that shrinks loses pods that are not ready first, whatever their cost: a replacement that
            # starts would go instead of the replica that it replaces, and be asked for again, without end.
            rest = min(stock.stranded_ready - held, stock.replicas - have - held - silent)
            plan.replacing += _held(plan, gpu_class, rest, rest)
    _yield_later(plan, short)


def _yield_later(plan: ModelPlan, short: int) -> None:
    """An evicted replica that serves stays until the one that starts in its place, on GPUs it already has, is ready;
    where the Model has no such place, it goes at once. The preempting Model waits longer, and serving never stops."""
    starting = sum(plan.requested.values()) + sum(
        kept - min(kept, plan.stock[gpu_class].sound_ready) for gpu_class, kept in plan.kept.items()
    )
    for gpu_class in sorted(plan.stock):
        stock = plan.stock[gpu_class]
        held = _held(plan, gpu_class, min(stock.evicted_ready, starting), short)
        if held:
            plan.yielding[gpu_class] = held
            short -= held
            starting -= held


def _starting_before(plan: ModelPlan, gpu_class: str) -> str | None:
    """A cheaper class that has replicas which are not ready yet; None: there is none."""
    for candidate in plan.order:
        if candidate.gpu_class == gpu_class:
            return None
        stock = plan.stock.get(candidate.gpu_class)
        if stock is not None and plan.kept.get(candidate.gpu_class, 0) > stock.sound_ready:
            return candidate.gpu_class
    return None


def _held(plan: ModelPlan, gpu_class: str, replicas: int, short: int) -> int:
    """Holds at most `short` of `replicas`, and returns how many."""
    held = min(replicas, short)
    if held <= 0:
        return 0
    plan.held[gpu_class] = plan.held.get(gpu_class, 0) + held
    return held
