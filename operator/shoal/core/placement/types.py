"""What the planner reads and what it says: small, immutable, without what no decision reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from shoal.api import reasons


class Unplannable(Exception):
    """A Model's part of the plan ends in an error. What was planned with it does not count: plan without it."""

    def __init__(self, uid: str) -> None:
        super().__init__(uid)
        self.uid = uid


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU class on which a Model fits and may run."""

    gpu_class: str
    gpus: int
    """Per replica; all on one node."""
    hourly_cost: Decimal | None = None
    """Of one replica; None: the class has no price."""
    max_replicas: int | None = None
    """None: no limit but the Model's own."""
    interruptible: bool = False
    kv_tokens: int | None = None
    """That one replica holds; shown, never compared."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A class that sizing or the spec rules out. Shown, never used."""

    gpu_class: str
    reason: str
    why: str
    """The sum that does not work out."""


@dataclass(frozen=True, slots=True)
class Held:
    """A variant's pods on one node. Finished pods hold nothing and are left out."""

    pods: int
    """Bound and not terminating."""
    ready: int = 0
    """Of `pods`."""
    terminating: int = 0
    """Bound, marked for deletion, and still holding their GPUs. Not in `pods`."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A variant as it stands in the cluster. Pods on a node that is not among the class's nodes (cordoned, NotReady,
    gone, of another class now) count as stranded: they serve, and are replaced."""

    replicas: int
    """Of the Deployment's spec."""
    gpus: int
    """Per replica, as the Deployment asks."""
    by_node: Mapping[str, Held]
    """Node -> pods. Pods that no node holds yet are in no entry."""
    pods: int = 0
    """Pods that are not terminating, bound or not. More than `replicas` while a rollout surges or a scale-down has not
    reached the pods."""
    settled: bool = True
    """No rollout is under way. A Model in a rollout is not moved."""

    @property
    def bound(self) -> int:
        return sum(held.pods for held in self.by_node.values())

    @property
    def ready(self) -> int:
        return sum(held.ready for held in self.by_node.values())

    @property
    def terminating(self) -> int:
        return sum(held.terminating for held in self.by_node.values())


@dataclass(frozen=True, slots=True)
class Demand:
    """One Model's wish, and what it has."""

    key: str
    """namespace/name."""
    uid: str
    wanted: int
    """Replicas."""
    candidates: Sequence[Candidate]
    """In any order: filled cheapest-first."""
    minimum: int = 1
    """Replicas that only a Model of higher priority may take away."""
    priority: int = 0
    created: datetime | None = None
    rejected: Sequence[Rejected] = ()
    replica_states: Mapping[str, ReplicaState] = field(default_factory=dict[str, ReplicaState])
    """Class -> what stands there."""
    interruptible_percent: int = 100
    """Of `wanted`, rounded down: replicas that may run on interruptible classes."""
    drain_seconds: int = 900
    """How long a replica that is to go may hold its GPUs; only told."""
    backoffs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Class -> why it is the last choice for now: see `backoff.py`. What is ready there stays."""
    frozen: bool = False
    """The Model is paused, or its facts are unknown for now: it keeps exactly what it has."""


@dataclass(frozen=True, slots=True)
class NodeSupply:
    """One node that takes the class's pods (Ready, not cordoned, taints tolerated)."""

    name: str
    free: int
    """GPUs: allocatable less what bound pods hold, of whatever owner, the terminating ones included. Negative while the
    device plugin offers less than pods hold (unhealthy GPUs): then replicas there are replaced."""
    allocatable: int
    releasing: int = 0
    """GPUs that terminating pods hold, of whatever owner. They come free by themselves."""


@dataclass(frozen=True, slots=True)
class ClassSupply:
    """A GPU class with the nodes that count for it. A node belongs to one class only."""

    name: str
    nodes: Sequence[NodeSupply]
    """Those that take pods, full ones included."""
    matching: int | None = None
    """Nodes with the class's labels, also those that take no pods; None: as many as `nodes`."""
    capacity: int | None = None
    """GPUs of all matching nodes; None: what `nodes` offer."""


@dataclass(frozen=True, slots=True)
class ClassUse:
    """What a plan leaves of a GPU class."""

    gpus: int
    """That nodes offer which take pods."""
    allocated: int
    """Of these: what was held before, and what the Models get."""
    largest_free: int
    """Free GPUs of the node that has most."""


@dataclass(frozen=True, slots=True)
class Moves:
    """How fast replicas may move to a cheaper class."""

    in_flight: int = 4
    """Models of the whole fleet that move at a time, one replica each. 0: nothing moves."""
    min_saving_percent: int = 10
    """Of the replica's cost per hour; below this a move is not worth a cold start."""


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """Replicas on one class: what the Deployment shall say."""

    gpu_class: str
    replicas: int
    gpus: int
    """Per replica."""
    hourly_cost: str | None
    """Of all its replicas; None: no price."""
    waiting: int = 0
    """Of `replicas`: asked for, while pods that go still hold the GPUs."""
    leaving: tuple[tuple[str, int], ...] = ()
    """(node, pods): whose pods go first when the Deployment shrinks, by a lower deletion cost set before `replicas`."""
    forced: tuple[tuple[str, int], ...] = ()
    """Of `leaving`: those that have to be of that node, for a higher priority or since it takes no pods. For the others
    any pod will do as well."""
    retired: bool = False
    """Not a candidate any more: it serves until its replacement is ready. Its template is to be left as it is."""
    why: str = ""
    """Why it is no candidate any more."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A class that was looked at and not used."""

    gpu_class: str
    why: str
    reason: str = ""
    """NotNeeded, NoCapacity, Limited, or the reason that sizing gave."""
    gpus: int | None = None
    """Per replica; None: it fits with no number of GPUs, or that is unknown."""
    kv_tokens: int | None = None
    hourly_cost: str | None = None
    """Of one replica."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a Model's replicas go, and why."""

    variants: tuple[VariantPlan, ...]
    """Cheapest first. A class that only keeps an empty Deployment has 0 replicas."""
    excluded: tuple[Excluded, ...]
    missing: int
    """Replicas that are not asked for: there is no room for them, not even soon."""
    reason: str
    message: str
    hourly_cost: str | None = None
    """Of all replicas that are asked for; None: one of them has no price."""

    @property
    def waiting(self) -> int:
        """Replicas that are asked for and wait for GPUs which others still hold."""
        return sum(variant.waiting for variant in self.variants)

    @property
    def placed(self) -> bool:
        """Every replica has its GPUs."""
        return self.reason in (reasons.PLACED_ON, reasons.MOVING)
