"""Input and output of the planner. Immutable, and only what a decision reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Final

from shoal.api import reasons

BROKEN: Final = " (broken GPU)"
"""Stands behind the node's name for pods that hold a GPU which is not healthy or out of use: no class has such a node,
so these pods count as stranded, and are replaced."""


class Unplannable(Exception):
    """A Model's part of the plan ended in an error. The plan made so far is void: plan again without this Model."""

    def __init__(self, uid: str) -> None:
        super().__init__(uid)
        self.uid = uid


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU class on which a Model fits and may run."""

    gpu_class: str
    gpus: int
    """Per replica, all on one node."""
    hourly_cost: Decimal | None = None
    """Of one replica, per hour; None: the class has no price."""
    max_replicas: int | None = None
    """None: only the Model's own limit."""
    interruptible: bool = False
    kv_tokens: int | None = None
    """Capacity of one replica's KV cache in tokens; shown, never compared."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A class that sizing or the spec rules out; shown only."""

    gpu_class: str
    reason: str
    why: str
    """The calculation that failed, as a sentence."""


@dataclass(frozen=True, slots=True)
class Held:
    """A variant's pods on one node, without finished pods, which hold no GPUs."""

    pods: int
    """Bound and not terminating."""
    ready: int = 0
    """Of `pods`."""
    terminating: int = 0
    """Bound, marked for deletion, and still holding their GPUs. Not in `pods`."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A variant's replicas in the cluster. Pods on a node that is not among the class's nodes (cordoned, NotReady,
    gone, of another class now) count as stranded: they serve, and are replaced."""

    replicas: int
    """`spec.replicas` of the Deployment."""
    gpus: int
    """Per replica, as the Deployment requests."""
    by_node: Mapping[str, Held]
    """Node -> pods. Pods that are not bound are in no entry."""
    pods: int = 0
    """Pods that are not terminating, bound or not. More than `replicas` while a rollout surges or a scale-down has not
    reached the pods."""
    gated: int = 0
    """Replicas and surge pods, none of them bound, that a quota or a scheduling gate holds back: GPUs would not help
    them."""
    rejected: int = 0
    """Of `gated`: pods that Kueue does not admit any more, since no node that an autoscaler adds could be had."""
    rejection: str = ""
    """Why no node could be had for one of them: the ProvisioningRequest, with the autoscaler's words."""
    settled: bool = True
    """No rollout is under way. A Model with a rollout is not moved."""
    announced: int = 0
    """Pods that are not bound, and to which an autoscaler has announced a node that is not late."""
    keeps: str = ""
    """The annotation of a pod there that forbids autoscalers to evict it: no cheaper class is worth moving it. "": none
    has one."""

    @property
    def bound(self) -> int:
        return sum(held.pods for held in self.by_node.values())

    @property
    def held_back(self) -> int:
        """Of `gated`: replicas, not surge pods."""
        return min(self.gated, max(0, self.replicas - self.bound))

    @property
    def ready(self) -> int:
        return sum(held.ready for held in self.by_node.values())

    @property
    def terminating(self) -> int:
        return sum(held.terminating for held in self.by_node.values())


@dataclass(frozen=True, slots=True)
class Demand:
    """Replicas that one Model wants, and those it has."""

    key: str
    """namespace/name."""
    uid: str
    wanted: int
    """Replicas."""
    candidates: Sequence[Candidate]
    """In any order; filled cheapest-first."""
    minimum: int = 1
    """Replicas that only a Model of higher priority may take away."""
    priority: int = 0
    created: datetime | None = None
    rejected: Sequence[Rejected] = ()
    replica_states: Mapping[str, ReplicaState] = field(default_factory=dict[str, ReplicaState])
    """Class -> replicas there."""
    interruptible_percent: int = 100
    """Of `wanted`, rounded down: replicas that may run on interruptible classes."""
    drain_seconds: int = 900
    """Seconds for which a replica that is to go may hold its GPUs; only for messages."""
    backoffs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Class -> why it is the last choice for now (`backoff.py`). Replicas that are ready there stay."""
    crashes: frozenset[str] = frozenset()
    """Of `backoffs`: classes where the engine ends again and again. GPUs there are worth less than a node that an
    autoscaler adds to another class."""
    lacks_surge: frozenset[str] = frozenset()
    """Classes where a rollout waits: they have no GPUs for one replica more, so that the replica there would go before
    its successor comes (`relocation.py`)."""
    frozen: bool = False
    """The Model is paused, or its facts are unknown for now: it keeps its replicas as they are."""


@dataclass(frozen=True, slots=True)
class NodeSupply:
    """A node that takes the class's pods (Ready, not cordoned, taints tolerated)."""

    name: str
    free: int
    """GPUs: allocatable less what bound pods of any owner hold, terminating ones included. Negative while pods hold
    more than the device plugin offers (unhealthy GPUs): then replicas there are replaced."""
    allocatable: int
    releasing: int = 0
    """GPUs that terminating pods of any owner hold."""


@dataclass(frozen=True, slots=True)
class ClassSupply:
    """A GPU class with its nodes. A node belongs to one class only."""

    name: str
    nodes: Sequence[NodeSupply]
    """Nodes that take pods, full ones included."""
    matching: int | None = None
    """Nodes with the class's labels, also those that take no pods; None: `nodes` are all."""
    capacity: int | None = None
    """GPUs of all matching nodes; None: those of `nodes`."""
    coming: int = 0
    """Nodes that an autoscaler would add for pending pods."""
    coming_gpus: int = 0
    """GPUs of each of them."""
    outage: str = ""
    """Why none of them is expected to come for now (`outages.py`): they are the last choice, after GPUs of Models of
    lower priority. "": they come."""


@dataclass(frozen=True, slots=True)
class ClassUse:
    """GPUs of one class after a plan."""

    gpus: int
    """Offered by nodes that take pods."""
    allocated: int
    """Of `gpus`: held before, or given to Models."""
    largest_free: int
    """Free GPUs of the node that has most of them."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Pace of moves to a cheaper class."""

    in_flight: int = 4
    """Models of the whole fleet that move at a time, one replica each. 0: none."""
    min_saving_percent: int = 10
    """Of the replica's cost per hour; a smaller saving is not worth a cold start."""


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """Replicas on one class, as the Deployment is to have them."""

    gpu_class: str
    replicas: int
    gpus: int
    """Per replica."""
    hourly_cost: str | None
    """Of all its replicas, per hour; None: no price."""
    waiting: int = 0
    """Of `replicas`: those whose GPUs are still held by pods that go."""
    leaving: tuple[tuple[str, int], ...] = ()
    """(node, pods) that go first when the Deployment shrinks, by a lower deletion cost set before `replicas`."""
    forced: tuple[tuple[str, int], ...] = ()
    """Of `leaving`: pods that must be of that node, for a higher priority or because it takes no pods. The others may
    be of any node."""
    others: tuple[tuple[str, int], ...] = ()
    """(node, GPUs that pods of others hold there) for the nodes of the variant, while it shrinks on a class whose nodes
    an autoscaler removes once they are empty."""
    retired: bool = False
    """No longer a candidate: it serves until its replacement is ready. Its pod template must not change."""
    why: str = ""
    """Why it is no longer a candidate."""
    relocated: bool = False
    """Its replica serves until its successor on another class is ready, for a rollout. Its pod template must not change
    before."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A class that was considered and is not used."""

    gpu_class: str
    why: str
    reason: str = ""
    """NotNeeded, NoCapacity, Limited, InBackoff, or the reason given by sizing."""
    gpus: int | None = None
    """Per replica; None: unknown, or no number of GPUs fits."""
    kv_tokens: int | None = None
    hourly_cost: str | None = None
    """Of one replica, per hour."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a Model's replicas go, and why."""

    variants: tuple[VariantPlan, ...]
    """Cheapest first. A class that only keeps an empty Deployment has 0 replicas."""
    excluded: tuple[Excluded, ...]
    missing: int
    """Replicas that are not requested: there is no capacity for them, not even soon."""
    reason: str
    message: str
    hourly_cost: str | None = None
    """Of all requested replicas, per hour; None: one of them has no price."""

    @property
    def waiting(self) -> int:
        """Replicas that are requested and wait for GPUs that other pods still hold."""
        return sum(variant.waiting for variant in self.variants)

    @property
    def placed(self) -> bool:
        """Every replica has its GPUs."""
        return self.reason in (reasons.PLACED_ON, reasons.MOVING)
