"""Which pods of a Deployment are deleted first when it shrinks, by their deletion cost. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.core.facts import Pod
from shoal.core.scaling import Load

GOES_FIRST: Final = -1000
"""Deletion cost of a pod that is to go; others have 0."""
_UNKNOWN_LOSS: Final = 1 << 60

Loads = Callable[[str], Load | None]
"""What the agent of a pod says, by the pod's uid; None: the signal is stale."""
_Where = Callable[[Pod], str | None]


@dataclass(frozen=True, slots=True)
class DeletionCost:
    """A deletion cost that has to change."""

    pod: Pod
    cost: int
    why: str


def deletion_costs(
    pods: Iterable[Pod],
    leaving: Mapping[str, int],
    forced: Mapping[str, int],
    loads: Loads = lambda _uid: None,
    where: _Where = lambda pod: pod.node,
    others: Mapping[str, int] | None = None,
    gpus: int = 1,
) -> list[DeletionCost]:
    """So many pods as `leaving` says (node -> pods) go first, of each node at least `forced`. `where`: the place of a
    pod. The order: pods that do not serve, pods that are marked already, then the cheapest loss (fewest requests, least
    in the cache). A pod that was marked and is to stay loses its mark.

    Of pods without a node, those go first that Kueue has given up: another one would lose its place in the queue.

    `others`: (node -> GPUs that others hold there), where an autoscaler removes empty nodes. Before the cheapest loss,
    pods then go whose node becomes empty; after those, pods of the node nearest to empty. `gpus`: of each pod.
    """
    here = [p for p in pods if not p.deleting and not p.finished]
    must, spare = dict(forced), sum(leaving.values()) - sum(forced.values())
    chosen: dict[str, str] = {}
    """Uid -> why."""

    def order(pod: Pod) -> tuple[bool, bool, int, int, bool, str]:
        stays = not leaving.get(where(pod) or "")
        return (pod.ready, pod.deletion_cost != GOES_FIRST, *_loss(loads(pod.uid)), stays, pod.name)

    ordered = sorted(here, key=order)
    for pod in ordered:
        placed = where(pod) or ""
        if must.get(placed, 0) > 0:
            must[placed] -= 1
            chosen[pod.uid] = "its node or GPU has to be left"
    chosen |= {
        p.uid: _WHY_GIVEN_UP for p in here if p.node is None and p.gates and p.queue_wait and p.queue_wait.refusal
    }
    # A pod that no node holds goes before all others by itself, and was not counted among those that leave.
    rest = [p for p in ordered if p.uid not in chosen and p.node is not None]
    if others:
        plain = [p for p in rest if not p.ready or p.deletion_cost == GOES_FIRST][: max(0, spare)]
        chosen |= {p.uid: _WHY_PLAIN for p in plain}
        chosen |= _emptying([p for p in rest if p.uid not in chosen], spare - len(plain), others, gpus, loads, where)
    else:
        chosen |= {p.uid: _WHY_PLAIN for p in rest[: max(0, spare)]}
    changes: list[DeletionCost] = []
    for pod in ordered:
        cost = GOES_FIRST if pod.uid in chosen else 0
        if pod.deletion_cost != cost and (cost or pod.deletion_cost == GOES_FIRST):
            changes.append(DeletionCost(pod, cost, chosen.get(pod.uid, "it stays")))
    return changes


_WHY_GIVEN_UP: Final = "Kueue got no node for it, and asks for no other one"
_WHY_PLAIN: Final = "it does not serve yet, or loses least: fewest requests, then least in its cache"


def _emptying(
    pods: Sequence[Pod], spare: int, others: Mapping[str, int], gpus: int, loads: Loads, where: _Where
) -> dict[str, str]:
    """Uid -> why, of `spare` pods. Nodes that this empties come first, those with fewest pods before the others; then
    one pod after the other of the node where fewest GPUs stay held. Equal ones by the cheapest loss."""
    on: dict[str, list[Pod]] = {}
    for pod in pods:  # in the order of the cheapest loss
        on.setdefault(where(pod) or "", []).append(pod)
    chosen: dict[str, str] = {}

    def loss(node: str) -> tuple[int, int]:
        losses = [_loss(loads(pod.uid)) for pod in on[node]]
        return sum(running for running, _ in losses), sum(cached for _, cached in losses)

    while spare > 0 and on:
        emptied = [node for node, found in on.items() if len(found) <= spare and others.get(node) == 0]
        if emptied:
            node = min(emptied, key=lambda n: (len(on[n]), *loss(n), n))
            why, going = f"node {node} becomes empty, and an autoscaler removes it", on.pop(node)
        else:

            def nearness(node: str) -> tuple[int, int, int, str]:
                held = others.get(node, _UNKNOWN_LOSS) + len(on[node]) * gpus
                return (held, *_loss(loads(on[node][0].uid)), node)

            node = min(on, key=nearness)
            why, going = f"node {node} is nearest to empty", [on[node].pop(0)]
            if not on[node]:
                del on[node]
        chosen |= {pod.uid: why for pod in going}
        spare -= len(going)
    return chosen


def _loss(load: Load | None) -> tuple[int, int]:
    """(requests there, prompt tokens that its engine has read: the more, the more its cache holds)."""
    if load is None or load.running is None:
        return _UNKNOWN_LOSS, _UNKNOWN_LOSS
    return load.running + (load.waiting or 0), load.prompt_tokens_total or 0
