"""What the decision to empty a node reads, and what it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Literal

from shoal.core.scaling import Load


@dataclass(frozen=True, slots=True)
class ModelThere:
    """A Model with replicas on the class."""

    key: str
    """namespace/name."""
    held: int | None
    """Requests that gateways hold for it; None: the signal of a gateway is stale."""
    cold_start_seconds: float | None
    """Last measured cold start on the class; None: none was measured."""
    idle_seconds: float | None = None
    """Scale-down takes its replicas after so long without a request; None: `minReplicas` keeps them."""
    fixed: str = ""
    """Why none of its replicas may be moved: it is paused, rolls out, the class is in backoff. "": they may."""
    unsettled: str = ""
    """Why no move begins for now, though one that is under way goes on: its replicas are not all placed."""


@dataclass(frozen=True, slots=True)
class ReplicaThere:
    """A replica on a node, or one that is going."""

    uid: str
    pod: str
    """namespace/name."""
    model: ModelThere
    gpus: int
    ready: bool
    load: Load | None
    """None: its signal is stale."""
    deleting: bool = False
    keeps: str = ""
    """The annotation of the pod that forbids to move it; "": there is none."""


@dataclass(frozen=True, slots=True)
class NodeThere:
    """A node of the class that exists."""

    name: str
    allocatable: int
    """GPUs."""
    replicas: tuple[ReplicaThere, ...] = ()
    others: int = 0
    """GPUs that pods hold which are no replicas of the class."""
    takes_pods: bool = True
    """False: it is cordoned, not Ready, tainted, or out of use."""
    keeps: str = ""
    """The annotation of the node that forbids to remove it; "": there is none."""

    @property
    def held(self) -> int:
        """GPUs, those of terminating pods included."""
        return self.others + sum(each.gpus for each in self.replicas)

    @property
    def free(self) -> int:
        return self.allocatable - self.held if self.takes_pods else 0


@dataclass(frozen=True, slots=True)
class PendingPod:
    """A replica of the class that no node holds yet."""

    pod: str
    """namespace/name."""
    seconds: float
    """Since it was created."""
    why: str = ""
    """The scheduler's sentence; "": it has not said that the pod fits nowhere."""


@dataclass(frozen=True, slots=True)
class EmptiedNode:
    """A node that is being emptied, as the status of its class has it: no new replica goes there."""

    node: str
    since: datetime
    message: str
    empty_since: datetime | None = None
    """When its last replica was gone; None: replicas are there yet."""


@dataclass(frozen=True, slots=True)
class ConsolidationSnapshot:
    """One class at one moment."""

    after_seconds: float | None
    """For so long nothing must have changed; None: no node is to be emptied."""
    nodes: tuple[NodeThere, ...]
    """All nodes of the class that exist."""
    pending: tuple[PendingPod, ...] = ()
    contested: bool = False
    """A replica that may run on the class waits for GPUs, or has none."""
    out_of_use: bool = False
    """GPUs of the class are out of use, because they are not healthy or because a person said so."""
    emptied: EmptiedNode | None = None
    """As the status has it."""
    hourly_cost: tuple[Decimal, str] | None = None
    """Of one GPU, with its currency; only for messages."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Since when a replica has run no request."""

    since: datetime
    marks: tuple[str | None, int | None, int | None]
    """Its engine's boot, and the tokens that it has read and written: a request between two looks changes them."""


@dataclass(frozen=True, slots=True)
class ConsolidationMemory:
    """Passed from each decision of this term to the next."""

    steady_since: datetime
    """Since when the class has had the same replicas on the same nodes, and nothing waited."""
    pattern: frozenset[tuple[str, int, frozenset[str]]]
    """(node, GPUs of others, uids of replicas)."""
    quiet: Mapping[str, Quiet] = field(default_factory=dict[str, Quiet])
    """By uid of the pod. Replicas that are not quiet are not in it."""
    rests_until: datetime | None = None
    """No node is emptied before."""
    stayed: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    """Nodes that were emptied and not removed -> until when they are left alone."""


@dataclass(frozen=True, slots=True)
class ConsolidationEnd:
    """A node is not emptied any more."""

    emptied: EmptiedNode
    result: Literal["removed", "given back"]
    why: str


@dataclass(frozen=True, slots=True)
class ConsolidationPlan:
    """What was decided for one class."""

    emptied: EmptiedNode | None
    began: bool = False
    """`emptied` was chosen now."""
    ended: ConsolidationEnd | None = None
    stays: Mapping[str, str] = field(default_factory=dict[str, str])
    """Node -> why it is not emptied, the one with the fewest GPUs held first. "" as the node: why none is. The
    sentences stand in a condition, so none has a number that time alone changes."""
    recheck_seconds: float | None = None
    """After which the same snapshot may give another decision; None: never."""
