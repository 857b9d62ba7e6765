"""Pods of a trace placed one after the other on its nodes: GPU allocation of several rules for choosing the node.

The trace is "openb default" of Alibaba's GPU cluster (kubernetes-scheduler-simulator, data/csv), as in the FGD paper:
pods in random order, then drawn again from the trace until they ask for 130 % of all GPUs; a pod that fits nowhere is
dropped. CPU and memory count. Pods ask for whole GPUs or for thousandths of one.
"""

import csv
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf
from pathlib import Path

from shoal.core.placement.fragments import WHOLE, Size, growth, lost

NODES, PODS = "openb/openb_node_list_gpu_node.csv", "openb/openb_pod_list_default.csv"
PUBLISHED = "openb/fgd_expected_allocation_default.csv"
DEMAND = 1.3

GPUs = tuple[int, ...]
"""Thousandths free of each GPU of a node, the most first."""
Rule = Callable[["Node", "Node"], tuple[float, ...]]
"""(node before, node after) -> score; the lowest is taken."""
Lost = Callable[[Sequence[int], Size], int]
Growth = Callable[[float, float], int]


@dataclass(frozen=True, slots=True)
class Node:
    position: int
    cpu: int
    """Milli-CPUs that are free."""
    memory: int
    """MiB that are free."""
    gpus: GPUs


@dataclass(frozen=True, slots=True)
class TracePod:
    size: Size
    cpu: int
    memory: int

    @property
    def demand(self) -> int:
        return self.size.gpus * self.size.share


@dataclass(frozen=True, slots=True)
class Trace:
    nodes: tuple[Node, ...]
    pods: tuple[TracePod, ...]

    @property
    def capacity(self) -> int:
        """Thousandths of a GPU."""
        return sum(len(n.gpus) for n in self.nodes) * WHOLE


def read(folder: Path) -> Trace:
    """Raises OSError where the files are missing."""
    with (folder / NODES).open() as file:
        rows = list(csv.DictReader(file))
        nodes = tuple(
            Node(i, int(r["cpu_milli"]), int(r["memory_mib"]), (WHOLE,) * int(r["gpu"])) for i, r in enumerate(rows)
        )
    with (folder / PODS).open() as file:
        pods = tuple(
            TracePod(Size(int(r["num_gpu"]), int(r["gpu_milli"] or 0)), int(r["cpu_milli"]), int(r["memory_mib"]))
            for r in sorted(csv.DictReader(file), key=lambda r: r["name"])
        )
    return Trace(nodes, pods)


def published(folder: Path) -> dict[str, float]:
    """Policy -> GPU allocation % at 130 % demand, as its authors publish it (mean of 10 seeds)."""
    with (folder / PUBLISHED).open() as file:
        return {r["sc_policy"].split("-", 1)[1]: float(r["130"]) for r in csv.DictReader(file)}


def arrivals(trace: Trace, seed: int) -> list[TracePod]:
    draw = random.Random(seed)  # noqa: S311
    pods = list(trace.pods)
    draw.shuffle(pods)
    total, target = sum(p.demand for p in pods), DEMAND * trace.capacity
    while True:
        pod = draw.choice(trace.pods)
        if total + pod.demand > target:
            return pods
        total += pod.demand
        pods.append(pod)


def allocation(trace: Trace, seed: int, rule: Rule) -> float:
    """GPU allocation % once all pods have arrived."""
    nodes = list(trace.nodes)
    best: dict[TracePod, list[tuple[tuple[float, ...], Node | None]]] = {}
    stale: dict[TracePod, set[int]] = {}
    allocated = 0
    for pod in arrivals(trace, seed):
        if pod not in best:
            best[pod] = [((inf,), None)] * len(nodes)
            stale[pod] = set(range(len(nodes)))
        known = best[pod]
        for i in stale[pod]:
            known[i] = _best_on(nodes[i], pod, rule)
        stale[pod].clear()
        i = min(range(len(nodes)), key=lambda i: known[i][0])
        after = known[i][1]
        if after is not None:
            nodes[i] = after
            allocated += pod.demand
            for others in stale.values():
                others.add(i)
    return 100 * allocated / trace.capacity


def _best_on(node: Node, pod: TracePod, rule: Rule) -> tuple[tuple[float, ...], Node | None]:
    if node.cpu < pod.cpu or node.memory < pod.memory:
        return (inf,), None
    found: tuple[tuple[float, ...], Node | None] = ((inf,), None)
    for gpus in _takings(node.gpus, pod.size):
        after = Node(node.position, node.cpu - pod.cpu, node.memory - pod.memory, gpus)
        score = rule(node, after)
        if score < found[0]:
            found = (score, after)
    return found


@cache
def _takings(gpus: GPUs, size: Size) -> tuple[GPUs, ...]:
    """What the GPUs may look like with one more pod."""
    if not size.gpus:
        return (gpus,)
    usable = [i for i, free in enumerate(gpus) if free >= size.share]
    if len(usable) < size.gpus:
        return ()
    whole = size.gpus > 1 or size.share == WHOLE
    picks = [usable[: size.gpus]] if whole else [[i] for i in usable]
    found = {
        tuple(sorted((free - size.share if i in pick else free for i, free in enumerate(gpus)), reverse=True))
        for pick in picks
    }
    return tuple(sorted(found))


# --- rules ------------------------------------------------------------------------------------------------------------


def first_fit(_before: Node, after: Node) -> tuple[float, ...]:
    return (after.position,)


def best_fit(_before: Node, after: Node) -> tuple[float, ...]:
    return (sum(after.gpus), after.cpu)


def gradient(trace: Trace, measure: Lost, steps_of: Growth) -> Rule:
    """The node where fragmentation grows least by whole steps, then the tightest.

    What a size loses is all that is free where the CPU does not suffice, else what `measure` says; sizes weigh by how
    often the trace has them.
    """
    requests: dict[Size, list[int]] = {}
    for pod in trace.pods:
        if pod.size.gpus:
            requests.setdefault(pod.size, []).append(pod.cpu)
    sizes = [(size, sorted(cpus)) for size, cpus in requests.items()]
    steps = sorted({cpu for _, cpus in sizes for cpu in cpus})
    one = lru_cache(maxsize=None)(measure)

    @cache
    def fragmented(step: int, gpus: GPUs) -> float:
        cpu = steps[step - 1] if step else -1
        free, found = sum(gpus), 0
        for size, cpus in sizes:
            fit = bisect_right(cpus, cpu)
            found += fit * one(gpus, size) + (len(cpus) - fit) * free
        return found / len(trace.pods)

    def rule(before: Node, after: Node) -> tuple[float, ...]:
        was = fragmented(bisect_right(steps, before.cpu), before.gpus)
        grown = steps_of(was, fragmented(bisect_right(steps, after.cpu), after.gpus))
        return (grown, sum(after.gpus), after.cpu)

    return rule


def lost_as_published(free: Sequence[int], size: Size) -> int:
    """The FGD paper's own measure, beside Shoal's: what is left over once a node is filled does not count."""
    usable = [amount for amount in free if amount >= size.share]
    return sum(free) if len(usable) < size.gpus else sum(free) - sum(usable)


def growth_as_published(before: float, after: float) -> int:
    """The published simulator's scores are whole points of 100 times a sigmoid: near zero a point is 40 thousandths."""
    return round((after - before) / 40)


def rules(trace: Trace) -> dict[str, Rule]:
    return {
        "first-fit": first_fit,
        "best-fit": best_fit,
        "FGD's measure, this harness": gradient(trace, lost_as_published, growth_as_published),
        "Shoal's measure (core.placement.fragments)": gradient(trace, lost, growth),
    }
