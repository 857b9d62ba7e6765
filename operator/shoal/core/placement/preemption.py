"""Preemption: which replicas of strictly lower priority go when GPUs are short, as few and as unimportant as will
do."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Final

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FAR_SECONDS: Final = 1e12

_Rank = tuple[int, int, float, int, str]
"""Needed for the minimum (0 or 1), priority, youth, GPUs (more first), uid: the lowest goes first."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Replicas of one node that go to make room for another replica."""

    gpu_class: str
    node: int
    victims: tuple[tuple[ModelPlan, int], ...]
    """(loser, GPUs), one entry per replica."""


_Score = tuple[_Rank, int, int]
"""Of an eviction: its most important victim, GPUs that go, node."""


@dataclass(slots=True)
class _Search:
    """Evictions known for the nodes of one class, for replicas of one size and priority. A Model that needs a thousand
    replicas searches a thousand times, and between two searches only one or two nodes change."""

    read: int
    """Entries of `ClassCapacity.changed` taken into account."""
    best: list[tuple[_Score, int]] = field(default_factory=list[tuple[_Score, int]])
    """A heap of (score, version of the node); outdated versions stay in it."""
    versions: dict[int, int] = field(default_factory=dict[int, int])
    evictions: dict[int, Eviction] = field(default_factory=dict[int, Eviction])


class Preemptor:
    """Finds evictions. Victims are ranked after the winner, so none of them has been decided yet."""

    def __init__(self, plans: Iterable[ModelPlan], capacities: dict[str, ClassCapacity]) -> None:
        self._capacities = capacities
        self._plans = plans
        self._holders: dict[str, dict[int, list[tuple[ModelPlan, int]]]] | None = None
        """Class -> node -> (Model, GPUs per replica)."""
        self._lowest: dict[str, int] = {}
        """Class -> the lowest priority of a Model that holds GPUs there."""
        self._bound: dict[str, int] = {}
        """uid -> bound replicas left to the Model."""
        self._searches: dict[tuple[str, int, int], _Search] = {}
        """By (class, GPUs, priority)."""
        self._hopeless: dict[tuple[str, int], int] = {}
        """(class, GPUs) -> the highest priority for which no eviction was found."""

    def find(self, plan: ModelPlan) -> Eviction | None:
        """The least harmful eviction that makes room for one more replica; None: no eviction helps."""
        if self._holders is None:
            self._holders = self._collect_holders()
        found: tuple[tuple[bool, _Rank, int, int, int], Eviction] | None = None
        for position, candidate in enumerate(plan.order):
            if not plan.may_have_more(candidate):
                continue
            better = self._on_class(plan, candidate.gpu_class, candidate.gpus)
            if better is None:
                continue
            (worst, gpus, node), eviction = better
            # On a class in backoff the GPUs would be taken for a replica that does not start.
            score = (candidate.gpu_class in plan.demand.backoffs, worst, gpus, position, node)
            if found is None or score < found[0]:
                found = (score, eviction)
        return found[1] if found else None

    def evict(self, winner: ModelPlan, eviction: Eviction) -> None:
        capacity = self._capacities[eviction.gpu_class]
        node = capacity.names[eviction.node]
        for loser, gpus in eviction.victims:
            loser.evict(eviction.gpu_class, node, winner.demand)
            winner.evicts += ((loser.demand, eviction.gpu_class),)
            self._bound[loser.demand.uid] -= 1
            self._mark_changed(loser)
            capacity.will_release(eviction.node, gpus)
        self._hopeless.clear()

    def _on_class(self, plan: ModelPlan, gpu_class: str, gpus: int) -> tuple[tuple[_Rank, int, int], Eviction] | None:
        priority = plan.demand.priority
        capacity = self._capacities.get(gpu_class)
        if (
            capacity is None
            or capacity.largest < gpus
            or gpus < capacity.block
            or self._lowest.get(gpu_class, priority) >= priority
        ):
            return None
        if self._hopeless.get((gpu_class, gpus), priority - 1) >= priority:
            return None
        search = self._search(priority, capacity, gpu_class, gpus)
        while search.best and search.versions[search.best[0][0][2]] != search.best[0][1]:
            heappop(search.best)
        if not search.best:
            self._hopeless[gpu_class, gpus] = priority
            return None
        score = search.best[0][0]
        return score, search.evictions[score[2]]

    def _search(self, priority: int, capacity: ClassCapacity, gpu_class: str, gpus: int) -> _Search:
        """The search for these replicas, with nodes that changed since evaluated again."""
        holders = (self._holders or {}).get(gpu_class, {})
        known = self._searches.get((gpu_class, gpus, priority))
        if known is None:
            known = self._searches[gpu_class, gpus, priority] = _Search(len(capacity.changed))
            for i in holders:
                self._evaluate(known, priority, capacity, gpu_class, i, gpus)
            return known
        for i in dict.fromkeys(capacity.changed[known.read :]):
            if i in holders:
                self._evaluate(known, priority, capacity, gpu_class, i, gpus)
        known.read = len(capacity.changed)
        return known

    def _evaluate(
        self, search: _Search, priority: int, capacity: ClassCapacity, gpu_class: str, i: int, gpus: int
    ) -> None:
        version = search.versions[i] = search.versions.get(i, 0) + 1
        victims = self._on_node(priority, capacity, gpu_class, i, (self._holders or {})[gpu_class][i], gpus)
        if victims is not None:
            score = (max(r for r, _, _ in victims), sum(g for _, _, g in victims), i)
            search.evictions[i] = Eviction(gpu_class, i, tuple((c, g) for _, c, g in victims))
            heappush(search.best, (score, version))

    def _mark_changed(self, loser: ModelPlan) -> None:
        """Marks nodes of a Model that has one replica less to spare: on other nodes its last ones may be needed now."""
        spare = self._spare(loser)
        for gpu_class, state in loser.demand.replica_states.items():
            capacity = self._capacities.get(gpu_class)
            for node, held in state.by_node.items() if capacity is not None else ():
                i = capacity.index.get(node) if capacity is not None else None
                if capacity is not None and i is not None and held.pods > spare:
                    capacity.changed.append(i)

    def _spare(self, plan: ModelPlan) -> int:
        return self._bound[plan.demand.uid] - min(plan.demand.minimum, plan.demand.wanted)

    def _on_node(
        self,
        priority: int,
        capacity: ClassCapacity,
        gpu_class: str,
        i: int,
        holders: list[tuple[ModelPlan, int]],
        gpus: int,
    ) -> list[tuple[_Rank, ModelPlan, int]] | None:
        """The replicas of one node that go; None where all those of lower priority would not be enough."""
        short = gpus - capacity.soon[i]
        node = capacity.names[i]
        going: list[tuple[_Rank, ModelPlan, int]] = []
        for plan, size in holders:
            if plan.demand.priority >= priority:
                continue
            pods = plan.demand.replica_states[gpu_class].by_node[node].pods - plan.evicted.get((gpu_class, node), 0)
            spare = self._spare(plan)
            going += [(_rank(plan, size, needed=n >= spare), plan, size) for n in range(pods)]
        if sum(size for _, _, size in going) < short:
            return None
        going.sort(key=lambda entry: entry[0])
        chosen: list[tuple[_Rank, ModelPlan, int]] = []
        freed = 0
        for entry in going:
            if freed >= short:
                break
            chosen.append(entry)
            freed += entry[2]
        for entry in list(reversed(chosen)):  # a large replica may make smaller ones unnecessary
            if freed - entry[2] >= short:
                chosen.remove(entry)
                freed -= entry[2]
        return chosen

    def _collect_holders(self) -> dict[str, dict[int, list[tuple[ModelPlan, int]]]]:
        found: dict[str, dict[int, list[tuple[ModelPlan, int]]]] = {}
        for plan in self._plans:
            demand = plan.demand
            bound = 0
            for gpu_class, state in demand.replica_states.items():
                capacity = self._capacities.get(gpu_class)
                for node, held in state.by_node.items() if capacity else ():
                    i = capacity.index.get(node) if capacity else None
                    if i is None or not held.pods:
                        continue
                    bound += held.pods
                    if not demand.frozen:  # a paused Model keeps what it has
                        found.setdefault(gpu_class, {}).setdefault(i, []).append((plan, state.gpus))
                        lowest = self._lowest.get(gpu_class, demand.priority)
                        self._lowest[gpu_class] = min(lowest, demand.priority)
            self._bound[demand.uid] = bound
        return found


def _rank(plan: ModelPlan, gpus: int, *, needed: bool) -> _Rank:
    created = plan.demand.created
    age = (created - _EPOCH).total_seconds() if created else _FAR_SECONDS
    return (int(needed), plan.demand.priority, -age, -gpus, plan.demand.uid)
