"""The GPUs of one class while a plan is made: each is given away once."""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from shoal.core.placement import fragments
from shoal.core.placement.types import ClassSupply, ClassUse


class ClassCapacity:
    """Mutable; lives for one call of the planner. Nodes are addressed by index, in the order of their names."""

    def __init__(self, supply: ClassSupply, sizes: Callable[[], Mapping[int, int]]) -> None:
        nodes = sorted((n for n in supply.nodes if n.allocatable > 0), key=lambda n: n.name)
        self.supply = supply
        self.names = [n.name for n in nodes]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.coming = [supply.coming_gpus] * supply.coming
        """By node that an autoscaler would add: GPUs that this plan has not given away."""
        self.largest = max([*(n.allocatable for n in nodes), *self.coming[:1]], default=0)
        """GPUs of the largest node, free or not, existing or to be added."""
        self.allocatable = [n.allocatable for n in nodes]
        self.free = [max(0, n.free) for n in nodes]
        """By node: GPUs that no pod holds and that this plan has not given away."""
        self.soon = [n.free + n.releasing for n in nodes]
        """By node: `free`, plus GPUs of terminating pods."""
        self.unhealthy = {n.name: -n.free for n in nodes if n.free < 0}
        """Node -> GPUs that pods hold and the device plugin no longer offers."""
        self.changed: list[int] = []
        """Nodes whose `soon` changed, in order of the changes: a preemption search evaluates only these again."""
        self.free_at_first = sum(self.free)
        self.block = 0
        """GPUs of the largest multi-GPU replica that waits for terminating pods. The scheduler could bind a smaller
        replica requested meanwhile into that block, whatever node the plan assumes: the larger one would never
        start."""
        self._by_free: dict[int, list[int]] = {}
        for i, free in enumerate(self.free):
            if free:
                self._by_free.setdefault(free, []).append(i)
        self._most: int | None = None
        self._none_soon: int | None = None
        """The smallest size for which `soon` had no node."""
        self._sizes = sizes
        self._fragments: Sequence[float] | None = None

    def use(self) -> ClassUse:
        """The class after the plan."""
        offered = sum(node.allocatable for node in self.supply.nodes)
        return ClassUse(offered, offered - sum(self.free), self.most_free())

    def fits(self, gpus: int) -> bool:
        """Whether one replica of so many GPUs could be bound now."""
        return self.most_free() >= gpus

    def may_come(self, gpus: int) -> bool:
        """Whether one replica could be bound on a node that an autoscaler is expected to add."""
        return not self.supply.outage and any(free >= gpus for free in self.coming)

    def most_free(self) -> int:
        """Free GPUs on the node that has most."""
        if self._most is None:
            self._most = max((free for free in list(self._by_free) if self._first(free) is not None), default=0)
        return self._most

    def take(self, gpus: int, *, exists: bool = False) -> bool:
        """Gives GPUs of the best node to a replica; False where no node has enough, or where a larger replica waits for
        its block. `exists`: the pod exists already, so the block does not stop it."""
        if self.most_free() < gpus or (gpus < self.block and not exists):
            return False
        choices = [free for free in sorted(self._by_free) if free >= gpus and self._first(free) is not None]
        free = choices[0]
        if len(choices) > 1 and free != gpus:  # an exact fit leaves no fragment
            if self._fragments is None:
                self._fragments = fragments.table(max(self._by_free), self._sizes())
            free = fragments.best(choices, gpus, self._fragments)
        i = self._first(free)
        assert i is not None  # noqa: S101 - `choices` has only values with a node
        self._soon(i, -gpus)
        self._set_free(i, free - gpus)
        return True

    def take_coming(self, gpus: int) -> bool:
        """Gives a replica GPUs of a node that an autoscaler has to add; False where there is none."""
        fitting = [(free, i) for i, free in enumerate(self.coming) if free >= gpus]
        if not fitting:
            return False
        free, i = min(fitting)  # the node that other pending replicas already need, if the replica fits beside them
        self.coming[i] = free - gpus
        return True

    def take_soon(self, gpus: int) -> bool:
        """Gives a replica GPUs that terminating pods still hold, with the free ones beside them; False: none fit."""
        if gpus < self.block or (self._none_soon is not None and gpus >= self._none_soon):
            return False
        fitting = [(self.soon[i], i) for i in range(len(self.soon)) if self.soon[i] >= gpus]
        if not fitting:
            self._none_soon = gpus
            return False
        self.take_soon_on(min(fitting)[1], gpus)
        return True

    def take_soon_on(self, i: int, gpus: int) -> None:
        self._soon(i, -gpus)
        self.block = max(self.block, gpus if gpus > 1 else 0)
        if self.free[i] > self.soon[i]:
            # The free GPUs of the node complete the block: no other replica may take them meanwhile.
            self._set_free(i, max(0, self.soon[i]))

    def will_release(self, i: int, gpus: int) -> None:
        """A replica on node `i` is to be removed."""
        self._soon(i, gpus)
        self._none_soon = None

    def _soon(self, i: int, more: int) -> None:
        self.soon[i] += more
        self.changed.append(i)

    def _set_free(self, i: int, free: int) -> None:
        self.free[i] = free
        self._most = None
        if free:
            heappush(self._by_free.setdefault(free, []), i)

    def _first(self, free: int) -> int | None:
        """The first node with exactly `free` GPUs free."""
        heap = self._by_free.get(free)
        while heap and self.free[heap[0]] != free:
            heappop(heap)  # outdated: the node has given GPUs away since
        if heap:
            return heap[0]
        self._by_free.pop(free, None)
        return None
