"""Which node of a class is emptied, so that an autoscaler removes it.

    plan, memory = decide(snapshot, memory, now)

- One node of a class at a time. While it is emptied it counts as out of use, so its replicas are replaced as on a
  cordoned node: the replacement starts first, and the old replica drains when the new one is ready.
- A node is chosen when at least half of its GPUs are free, all its replicas fit into free GPUs of other nodes, which
  exist and have pods with GPUs already, and nothing forbids to move them. So each move leaves fewer nodes in use, and
  none brings a node or goes back. While a node of the class is empty, or a replica waits for GPUs, none is chosen.
- Never under a stream: each of its replicas must have been without a request for `after_seconds`, and Shoal must know
  it. A stale signal is no zero.
- It has to pay. In GPU-seconds, since all GPUs of a class cost the same:

      saved = G x (H - C)         more than         cost = the sum of g x c over its replicas

  G: GPUs of the node. g, c: GPUs of a replica, and the measured cold start of its Model on the class, for which it runs
  twice. C: the longest c, for which the node stays. H: the time for which the use of the class is expected to last: as
  long as it has lasted, an hour at most, and not beyond the scale-down that would empty the node by itself.
- The node is given back when a request reaches a replica that was to move, when the replacement finds no place or is
  not ready in time, when a replica of the class waits for GPUs, or when another pod with GPUs comes there. After that
  the class is left alone for a while.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain
from typing import Final

from shoal.core.consolidation.types import (
    ConsolidationEnd,
    ConsolidationMemory,
    ConsolidationPlan,
    ConsolidationSnapshot,
    EmptiedNode,
    NodeThere,
    Quiet,
    ReplicaThere,
)

HORIZON_SECONDS: Final = 3600.0
"""Longest time for which the use of a class is expected to last."""
RECHECK_SECONDS: Final = 5.0
MOVING_RECHECK_SECONDS: Final = 1.0
"""While a node is being emptied."""
REST_SECONDS: Final = 300.0
"""From one node that was emptied to the next."""
GIVEN_BACK_REST_SECONDS: Final = 1800.0
"""After a node was given back."""
BIND_SECONDS: Final = 30.0
"""For which a replacement may be without a node, while the scheduler does not say that it fits nowhere."""
START_FACTOR: Final = 3.0
"""Cold starts for which a replacement is waited for."""
SHORTEST_START_SECONDS: Final = 300.0
EMPTY_SECONDS: Final = 1800.0
"""For which an empty node is kept free for the autoscaler to remove it."""
STAYED_SECONDS: Final = 86_400.0
"""For which a node is left alone that was emptied and not removed."""


def decide(
    seen: ConsolidationSnapshot, memory: ConsolidationMemory | None, now: datetime
) -> tuple[ConsolidationPlan, ConsolidationMemory]:
    """The node of the class that is being emptied at `now`. None as memory: the first decision of a term."""
    known = _uids(seen.emptied, memory)
    memory = _remember(seen, memory, now)
    if seen.emptied is not None:
        return _go_on(seen, seen.emptied, known, memory, now)
    if seen.after_seconds is None:
        return ConsolidationPlan(None), memory
    if (why := _unsettled(seen, seen.after_seconds, memory, now)) is not None:
        return ConsolidationPlan(None, stays={"": why}, recheck_seconds=RECHECK_SECONDS), memory
    stays: dict[str, str] = {}
    for node in sorted(seen.nodes, key=lambda each: (each.held, each.name)):
        if (why := _why_not(seen, node, seen.after_seconds, memory, now)) is None:
            chosen = EmptiedNode(node.name, now, _message(seen, node))
            return ConsolidationPlan(chosen, began=True, stays=stays, recheck_seconds=MOVING_RECHECK_SECONDS), memory
        stays[node.name] = why
    return ConsolidationPlan(None, stays=stays, recheck_seconds=RECHECK_SECONDS), memory


def rested(memory: ConsolidationMemory, now: datetime, seconds: float = GIVEN_BACK_REST_SECONDS) -> ConsolidationMemory:
    """From now on the class is left alone for so long."""
    return replace(memory, rests_until=now + timedelta(seconds=seconds))


# --- what is remembered -----------------------------------------------------------------------------------------------


def _remember(seen: ConsolidationSnapshot, memory: ConsolidationMemory | None, now: datetime) -> ConsolidationMemory:
    pattern = frozenset((n.name, n.others, frozenset(r.uid for r in n.replicas)) for n in seen.nodes)
    # A term that begins while a node is emptied has not seen a request, and goes on.
    first = seen.emptied.since if memory is None and seen.emptied is not None else now
    memory = memory or ConsolidationMemory(now, frozenset())
    quiet: dict[str, Quiet] = {}
    for each in (r for n in seen.nodes for r in n.replicas):
        if (load := each.load) is None or _activity(each):
            continue
        marks = (load.engine_boot, load.prompt_tokens_total, load.generation_tokens_total)
        known = memory.quiet.get(each.uid)
        quiet[each.uid] = known if known is not None and known.marks == marks else Quiet(now if known else first, marks)
    return ConsolidationMemory(
        steady_since=now if memory.pattern != pattern or seen.pending or seen.contested else memory.steady_since,
        pattern=pattern,
        quiet=quiet,
        rests_until=memory.rests_until,
        stayed={node: until for node, until in memory.stayed.items() if now < until},
    )


def _uids(emptied: EmptiedNode | None, memory: ConsolidationMemory | None) -> frozenset[str] | None:
    """Replicas that were on the node at the last decision; None: there was none in this term."""
    if emptied is None or memory is None:
        return None
    return next((uids for name, _, uids in memory.pattern if name == emptied.node), frozenset[str]())


def _activity(replica: ReplicaThere) -> str:
    """What runs or waits there, or why that is not known; "": nothing, for sure."""
    load, model = replica.load, replica.model
    if load is None or load.running is None or load.waiting is None:
        return f"the load of {replica.pod} is not known"
    if model.held is None:
        return f"a gateway does not say what it holds for {model.key}"
    if load.running or load.waiting:
        return f"{replica.pod} has requests"
    if model.held:
        return f"requests are held for {model.key}"
    return ""


# --- which node -------------------------------------------------------------------------------------------------------


def _unsettled(
    seen: ConsolidationSnapshot, after_seconds: float, memory: ConsolidationMemory, now: datetime
) -> str | None:
    """Why no node of the class is chosen; None: one may be."""
    if memory.rests_until is not None and now < memory.rests_until:
        return f"the class is left alone until {memory.rests_until:%H:%M:%SZ}, after the last node"
    if seen.contested:
        return "a replica that may run on the class waits for GPUs"
    if seen.pending:
        return f"{seen.pending[0].pod} has no node yet"
    if seen.out_of_use:
        return "GPUs of the class are out of use"
    for replica in chain.from_iterable(node.replicas for node in seen.nodes):
        if replica.deleting or not replica.ready:
            return f"{replica.pod} {'is going' if replica.deleting else 'is not ready'}"
        if why := replica.model.fixed or replica.model.unsettled:
            return f"{replica.model.key} {why}"
    if empty := [n.name for n in seen.nodes if n.takes_pods and n.allocatable and not n.held]:
        return f"{empty[0]} is empty already"
    if _seconds(memory.steady_since, now) < after_seconds:
        return f"the use of the class has not been the same for {after_seconds:.0f} s yet"
    return None


def _why_not(
    seen: ConsolidationSnapshot, node: NodeThere, after_seconds: float, memory: ConsolidationMemory, now: datetime
) -> str | None:
    """Why the node is not emptied; None: it can be, and that pays."""
    if not node.takes_pods:
        return "it takes no pods"
    if node.keeps:
        return f"its annotation {node.keeps} forbids it"
    if not node.replicas:
        return "it has no replica"
    if node.others:
        return f"other pods hold {node.others} of its GPUs"
    if node.held * 2 > node.allocatable:
        return f"{node.held} of its {node.allocatable} GPUs are held, more than half"
    if node.name in memory.stayed:
        return "it was emptied before, and not removed"
    for each in node.replicas:
        if each.keeps:
            return f"{each.pod}: its annotation {each.keeps} forbids it"
        if activity := _activity(each):
            return activity
        if _seconds(memory.quiet[each.uid].since, now) < after_seconds:
            return f"{each.pod} had a request within the last {after_seconds:.0f} s"
    if not _fit(node.replicas, [n.free for n in seen.nodes if n.name != node.name]):  # none of them is empty
        return "its replicas do not fit into the free GPUs of the other nodes in use"
    return _does_not_pay(node, memory, now)


def _fit(replicas: Sequence[ReplicaThere], free: Sequence[int]) -> bool:
    """Whether the replicas fit, both with the fullest node first and with the emptiest one first: the scheduler
    chooses, and prefers nodes with replicas."""
    return all(_fit_in_order(replicas, free, fullest) for fullest in (True, False))


def _fit_in_order(replicas: Sequence[ReplicaThere], free: Sequence[int], fullest: bool) -> bool:
    left = list(free)
    # The emptiest node is the worst choice where small replicas come first and take what a large one needs.
    for each in sorted(replicas, key=lambda r: r.gpus, reverse=fullest):
        places = [i for i, gpus in enumerate(left) if gpus >= each.gpus]
        if not places:
            return False
        place = (min if fullest else max)(places, key=lambda i: left[i])
        left[place] -= each.gpus
    return True


def _does_not_pay(node: NodeThere, memory: ConsolidationMemory, now: datetime) -> str | None:
    """The sum of the module's docstring that fails, solved for H; None: it pays."""
    cost = longest = 0.0
    for each in node.replicas:
        cold = each.model.cold_start_seconds
        if cold is None:
            return f"no cold start of {each.model.key} was measured on the class"
        cost += each.gpus * cold
        longest = max(longest, cold)
    needed = longest + cost / node.allocatable
    if (going := max(_goes_in(each, memory.quiet[each.uid], now) for each in node.replicas)) <= needed:
        return f"it does not pay: scale-down takes its replicas by itself within {needed:.0f} s"
    if min(HORIZON_SECONDS, _seconds(memory.steady_since, now), going) > needed:
        return None
    when = f"until the use of the class has been the same for {needed:.0f} s"
    return (
        f"it does not pay{'' if needed >= HORIZON_SECONDS else f' {when}'}: a cold start of {longest:.0f} s, and "
        f"{cost:.0f} GPU-seconds of replicas that run twice, for {node.allocatable} GPUs"
    )


def _goes_in(replica: ReplicaThere, quiet: Quiet, now: datetime) -> float:
    """Seconds after which scale-down takes the replica by itself."""
    idle = replica.model.idle_seconds
    return HORIZON_SECONDS if idle is None else max(0.0, idle - _seconds(quiet.since, now))


def _message(seen: ConsolidationSnapshot, node: NodeThere) -> str:
    pods = ", ".join(sorted(each.pod for each in node.replicas)[:4])
    more = f" and {len(node.replicas) - 4} more" if len(node.replicas) > 4 else ""
    saves = ""
    if seen.hourly_cost is not None:
        price, currency = seen.hourly_cost
        saves = f", which saves {price * node.allocatable:f} {currency} per hour"
    return f"{node.free} of its {node.allocatable} GPUs are free, and {pods}{more} fit on other nodes{saves}"


# --- a node that is being emptied -------------------------------------------------------------------------------------


def _go_on(
    seen: ConsolidationSnapshot,
    emptied: EmptiedNode,
    known: frozenset[str] | None,
    memory: ConsolidationMemory,
    now: datetime,
) -> tuple[ConsolidationPlan, ConsolidationMemory]:
    """`known`: replicas that were there at the last decision; None: not known, all that are there may stay."""
    node = next((each for each in seen.nodes if each.name == emptied.node), None)
    if node is None:
        how = "it was removed" if emptied.empty_since is not None else "it went before it was empty"
        return _end(ConsolidationEnd(emptied, "removed", how), memory, now, REST_SECONDS)
    new = [each.pod for each in node.replicas if known is not None and each.uid not in known]
    against = f"{new[0]} has come there" if new else next(_against(seen, node, emptied, memory, now), None)
    if against is not None:
        return _end(ConsolidationEnd(emptied, "given back", against), memory, now, GIVEN_BACK_REST_SECONDS)
    if node.replicas:
        return ConsolidationPlan(replace(emptied, empty_since=None), recheck_seconds=MOVING_RECHECK_SECONDS), memory
    since = emptied.empty_since or now
    if _seconds(since, now) >= EMPTY_SECONDS:
        why = f"no autoscaler removed it in {EMPTY_SECONDS / 60:.0f} minutes; it is left alone for a day"
        left = {**memory.stayed, node.name: now + timedelta(seconds=STAYED_SECONDS)}
        return _end(
            ConsolidationEnd(emptied, "given back", why), replace(memory, stayed=left), now, GIVEN_BACK_REST_SECONDS
        )
    return ConsolidationPlan(replace(emptied, empty_since=since), recheck_seconds=MOVING_RECHECK_SECONDS), memory


def _against(
    seen: ConsolidationSnapshot, node: NodeThere, emptied: EmptiedNode, memory: ConsolidationMemory, now: datetime
) -> Iterator[str]:
    """Why the node is given back. Replicas that drain already are not held up."""
    staying = [each for each in node.replicas if not each.deleting]
    if seen.after_seconds is None:
        yield "the class does not ask for it any more"
    if seen.contested:
        yield "a replica that may run on the class waits for GPUs"
    if node.keeps:
        yield f"its annotation {node.keeps} forbids it now"
    if node.others:
        yield f"other pods hold {node.others} of its GPUs now"
    for each in staying:
        if each.keeps:
            yield f"{each.pod}: its annotation {each.keeps} forbids it now"
        if each.model.fixed:
            yield f"{each.model.key} {each.model.fixed}"
        if activity := _activity(each):
            yield activity
        elif memory.quiet[each.uid].since > emptied.since:
            yield f"{each.pod} had a request"
    for pod in seen.pending:
        if pod.why:
            yield f"{pod.pod} finds no place: {pod.why}"
        elif staying and pod.seconds > BIND_SECONDS:
            yield f"{pod.pod} has had no node for {pod.seconds:.0f} s"
    if staying and (took := _seconds(emptied.since, now)) > _start_timeout(staying):
        yield f"a replacement was not ready after {took:.0f} s"


def _start_timeout(replicas: Iterable[ReplicaThere]) -> float:
    """Seconds for which replacements are waited for."""
    return max(SHORTEST_START_SECONDS, *(START_FACTOR * (r.model.cold_start_seconds or 0.0) for r in replicas))


def _end(
    ended: ConsolidationEnd, memory: ConsolidationMemory, now: datetime, rest: float
) -> tuple[ConsolidationPlan, ConsolidationMemory]:
    return ConsolidationPlan(None, ended=ended, recheck_seconds=RECHECK_SECONDS), rested(memory, now, rest)


def _seconds(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()
