"""The plan of one Model while the plan of the fleet is made."""

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from shoal.core.placement.types import Candidate, Demand, Held

_FAR: Final = datetime.max.replace(tzinfo=UTC)
_ZERO: Final = Decimal(0)
_EMPTY: Final[dict[str, int]] = {}
_EMPTY_NODES: Final[dict[tuple[str, str], int]] = {}


def rank(demand: Demand) -> tuple[int, datetime, str]:
    """Order of the Models: priority, then age, then uid. The order of events never matters."""
    return (-demand.priority, demand.created or _FAR, demand.uid)


def price(candidate: Candidate) -> tuple[bool, Decimal, str]:
    """Sort key, cheapest first; classes without a price come last; equals by name."""
    cost = candidate.hourly_cost
    return (cost is None, cost if cost is not None else _ZERO, candidate.gpu_class)


class Stock:
    """A Model's replicas on one class as the snapshot has them, by what may become of them."""

    __slots__ = ("evicted_ready", "replicas", "sound", "sound_ready", "stranded", "stranded_ready")

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        """Of the Deployment, less the evicted ones."""
        self.sound = self.sound_ready = 0
        """Bound to nodes that take pods of the class."""
        self.stranded = self.stranded_ready = 0
        """Bound to other nodes."""
        self.evicted_ready = 0
        """Ready ones that a higher priority takes away."""


_EMPTY_STOCK: Final[dict[str, Stock]] = {}


class ModelPlan:
    """Mutable; lives for one call of the planner."""

    __slots__ = (
        "_order", "adding", "asking_again", "demand", "evicted", "evicted_by", "evicts", "gated", "held", "kept",
        "missing", "moving_from", "moving_to", "passed_over", "rejected", "relocated", "replacing", "requested",
        "stock", "unchanged", "unhealthy", "waiting", "yielding",
    )  # fmt: skip

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.unchanged = False
        """As many replicas as wanted exist and are bound: only a move may change anything."""
        # Most of thousands of Models are unchanged: until `begin`, they share one empty dict.
        self.evicted: dict[tuple[str, str], int] = _EMPTY_NODES
        """(class, node) -> replicas that a Model of higher priority takes away."""
        self.evicted_by: tuple[Demand, ...] = ()
        self.evicts: tuple[tuple[Demand, str], ...] = ()
        """(Model that loses a replica, class)."""
        self.unhealthy: dict[tuple[str, str], int] = _EMPTY_NODES
        """(class, node) -> replicas that count as stranded: GPUs there are unhealthy, or the replica is relocated."""
        self.relocated: str | None = None
        """The class whose only replica is replaced on another one (`relocation.py`)."""
        self.stock: dict[str, Stock] = _EMPTY_STOCK
        self.kept: dict[str, int] = _EMPTY
        """Class -> replicas that run and count as wanted."""
        self.requested: dict[str, int] = _EMPTY
        """Class -> replicas for which there is capacity and that are not bound yet."""
        self.waiting: dict[str, int] = _EMPTY
        """Class -> replicas for which there is capacity once other pods are gone."""
        self.adding: dict[str, int] = _EMPTY
        """Of `requested`: replicas that wait for a node of an autoscaler."""
        self.gated: dict[str, int] = _EMPTY
        """Class -> replicas that a quota holds back. They take no GPUs in this plan."""
        self.rejected: dict[str, int] = _EMPTY
        """Of `gated`: replicas that have quota, and for which Kueue got no node."""
        self.asking_again: dict[str, int] = _EMPTY
        """Class -> replicas that are not requested until the pods are gone there for which Kueue got no node."""
        self.held: dict[str, int] = _EMPTY
        """Class -> replicas that go as soon as others are ready in their place."""
        self.missing = 0
        self.replacing = 0
        """Of `held`: on nodes that take no pods, or on classes that are no longer candidates."""
        self.yielding: dict[str, int] = _EMPTY
        """Class -> evicted replicas that serve until others are ready in their place. Part of `held`."""
        self.moving_from: str | None = None
        self.moving_to: str | None = None
        self.passed_over: frozenset[str] = frozenset()
        """Classes that are no candidates at the moment."""
        self._order: list[Candidate] | None = None

    def begin(self) -> None:
        """Replaces the shared empty dicts. Only `evicted` and `unhealthy` may be written before."""
        self.stock, self.kept, self.requested, self.waiting, self.held = {}, {}, {}, {}, {}
        self.yielding = {}

    def request(self, gpu_class: str) -> None:
        """One more replica for which there is capacity."""
        if self.requested is _EMPTY:
            self.requested = {}
        self.requested[gpu_class] = self.requested.get(gpu_class, 0) + 1

    def add_node(self, gpu_class: str) -> None:
        """One more replica, which waits for a node of an autoscaler."""
        self.request(gpu_class)
        if self.adding is _EMPTY:
            self.adding = {}
        self.adding[gpu_class] = self.adding.get(gpu_class, 0) + 1

    def wait(self, gpu_class: str) -> None:
        """One more replica for which there will be capacity."""
        self.waiting[gpu_class] = self.waiting.get(gpu_class, 0) + 1

    def hold_back(self, gpu_class: str, replicas: int) -> None:
        """Counts replicas that a quota holds back."""
        if self.gated is _EMPTY:
            self.gated = {}
        self.gated[gpu_class] = self.gated.get(gpu_class, 0) + replicas

    def reject(self, gpu_class: str, replicas: int) -> None:
        """Counts replicas for which Kueue got no node."""
        self.hold_back(gpu_class, replicas)
        if self.rejected is _EMPTY:
            self.rejected = {}
        self.rejected[gpu_class] = replicas

    def evict(self, gpu_class: str, node: str, winner: Demand) -> None:
        """Takes away one replica."""
        if self.evicted is _EMPTY_NODES:
            self.evicted = {}
        self.evicted[gpu_class, node] = self.evicted.get((gpu_class, node), 0) + 1
        if winner not in self.evicted_by:
            self.evicted_by += (winner,)

    @property
    def order(self) -> list[Candidate]:
        """Candidates, cheapest first; those in backoff after the others."""
        if self._order is None:
            backoffs = self.demand.backoffs
            self._order = sorted(self.demand.candidates, key=lambda c: (c.gpu_class in backoffs, *price(c)))
        if self.passed_over:
            return [c for c in self._order if c.gpu_class not in self.passed_over]
        return self._order

    def candidate(self, gpu_class: str) -> Candidate | None:
        for candidate in self.demand.candidates:
            if candidate.gpu_class == gpu_class:
                return candidate
        return None

    def wanted_on(self, gpu_class: str) -> int:
        """Replicas on a class that count as wanted."""
        places = (self.kept, self.requested, self.waiting, self.gated)
        return sum(place.get(gpu_class, 0) for place in places)

    def may_have_more(self, candidate: Candidate, *, instead_of: Candidate | None = None) -> int:
        """How many more replicas the spec allows on a class; `instead_of`: a replica of that class goes in exchange."""
        demand = self.demand
        if candidate.gpu_class == self.relocated:
            return 0
        more = demand.wanted
        if candidate.max_replicas is not None:
            more = candidate.max_replicas - self.wanted_on(candidate.gpu_class)
        if candidate.interruptible:
            have = sum(self.wanted_on(c.gpu_class) for c in demand.candidates if c.interruptible)
            swapped = instead_of is not None and instead_of.interruptible
            more = min(more, interruptible_limit(demand) - have + swapped)
        return max(0, more)

    def replicas(self, gpu_class: str) -> int:
        """`spec.replicas` of the Deployment."""
        return self.wanted_on(gpu_class) + self.held.get(gpu_class, 0)

    def left_after_eviction(self, gpu_class: str) -> Iterator[tuple[str, int, Held]]:
        """(node, pods less the evicted ones, pods as they are)."""
        state = self.demand.replica_states.get(gpu_class)
        for node, held in state.by_node.items() if state else ():
            yield node, held.pods - self.evicted.get((gpu_class, node), 0), held


def interruptible_limit(demand: Demand) -> int:
    """How many replicas may run on interruptible classes."""
    return demand.wanted * demand.interruptible_percent // 100
