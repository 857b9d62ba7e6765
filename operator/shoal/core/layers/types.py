"""What `shoal why` reads, and what it answers. None is unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, Literal

from shoal.core.facts import Taint
from shoal.core.layers.advice import State
from shoal.core.layers.layer import Layer

ExplainedKind = Literal["model", "adapter", "pool", "route", "tenant", "pod", "class", "node"]


@dataclass(frozen=True, slots=True)
class ConditionView:
    """A condition of any object."""

    type: str
    status: str
    reason: str
    message: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class ObjectView:
    """One of Shoal's objects."""

    kind: ExplainedKind
    namespace: str | None
    name: str
    generation: int
    observed_generation: int | None
    conditions: tuple[ConditionView, ...]
    paused: bool = False
    deleting: datetime | None = None
    """Since when it is being deleted."""
    finalizers: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    status: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def text(self) -> str:
        """`Model chat/llama`."""
        return f"{KINDS[self.kind]} {self.key}"


KINDS: Final[Mapping[ExplainedKind, str]] = {
    "model": "Model",
    "adapter": "LoRAAdapter",
    "pool": "LoRAPool",
    "route": "ModelRoute",
    "tenant": "Tenant",
    "pod": "pod",
    "class": "GPUClass",
    "node": "node",
}


@dataclass(frozen=True, slots=True)
class ContainerView:
    """The state of one container."""

    name: str
    init: bool
    ready: bool
    restarts: int
    state: Literal["waiting", "running", "terminated", "unknown"]
    reason: str
    """Of waiting."""
    message: str
    exit_code: int | None
    """Of the present or the last termination."""
    exit_reason: str
    exit_message: str
    ended: datetime | None
    unhealthy_devices: tuple[str, ...] = ()
    """Devices that the kubelet reports as not healthy."""
    started: bool = False
    """It has passed its startup probe since its last start."""


@dataclass(frozen=True, slots=True)
class WhyPod:
    """A pod with what its status says."""

    namespace: str
    name: str
    node: str | None
    phase: str
    reason: str
    message: str
    deleting: bool
    created: datetime | None
    conditions: tuple[ConditionView, ...]
    containers: tuple[ContainerView, ...]
    model: str | None = None
    """Name of its Model, by its label."""
    gpu_class: str | None = None
    component: str | None = None
    queue: str | None = None
    """Kueue's queue, by its label."""
    queue_managed: bool = False
    """Kueue has taken charge of it."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    address: str | None = None
    claims: tuple[str, ...] = ()
    """PersistentVolumeClaims that it mounts."""
    devices: frozenset[str] | None = None
    """The devices in its ResourceClaims, as driver/pool/device; None: not read."""
    lacks_claim: bool = False
    """A ResourceClaim that is to be made for it from a template is not there."""
    owner: str = ""
    """Name of its controller, such as a ReplicaSet."""
    ends: datetime | None = None
    """Its deletionTimestamp: when its grace period ends."""
    finalizers: tuple[str, ...] = ()
    not_ready: tuple[str, ...] = ()
    """What it says itself that it misses, part by part (/readyz of a gateway)."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def ready(self) -> bool:
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions)


@dataclass(frozen=True, slots=True)
class WhyNode:
    """A node with what its status says."""

    name: str
    conditions: tuple[ConditionView, ...]
    cordoned: bool
    capacity: Mapping[str, int]
    """Extended resources only."""
    allocatable: Mapping[str, int]
    labels: Mapping[str, str]
    deleting: bool = False
    gone: bool = False
    """A pod is bound to it, and there is no such node."""
    taints: tuple[Taint, ...] = ()
    """Those that keep pods off: NoSchedule and NoExecute."""


@dataclass(frozen=True, slots=True)
class EventView:
    """An event of Kubernetes."""

    kind: str
    """Of the object that it is about."""
    namespace: str
    name: str
    type: str
    reason: str
    message: str
    at: datetime | None
    source: str


@dataclass(frozen=True, slots=True)
class PolicyView:
    """A NetworkPolicy."""

    namespace: str
    name: str
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A PersistentVolumeClaim."""

    key: str
    phase: str
    storage_class: str
    """Empty: none, or the cluster's default before it is filled in."""
    created: datetime | None


@dataclass(frozen=True, slots=True)
class AutoscalerView:
    """A HorizontalPodAutoscaler that nobody of KEDA's made."""

    namespace: str
    name: str
    deployment: str
    """The Deployment that it scales."""
    since: datetime | None


@dataclass(frozen=True, slots=True)
class GPUHolder:
    """A pod that is not Shoal's and holds GPUs of a node."""

    pod: str
    """`namespace/name`."""
    node: str
    amounts: Mapping[str, int]
    """By extended resource; of GPUs that are devices by `devices_of` their class."""


@dataclass(frozen=True, slots=True)
class ExternalTargetView:
    """An external target whose last request at a gateway failed."""

    target: str
    """namespace/route/name."""
    gateway: str
    outcome: str
    age_seconds: int | None
    rests: bool
    """It gets no requests now."""


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A Tenant's budget and what is used of it."""

    used: Decimal
    most: Decimal
    unit: str
    """`tokens`, or a currency."""
    month: str
    """Such as 2026-11 (UTC)."""


@dataclass(frozen=True, slots=True)
class OperatorLease:
    """The Lease of the leading operator."""

    holder: str
    renewed: datetime | None
    seconds: int
    """After these without renewal it counts as lost."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that could not be read, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class DecisionView:
    """The operator's last decision about a Model."""

    at: datetime
    reason: str
    message: str
    alternative: str
    stale: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WhySnapshot:
    """What was read of a subject and of what it depends on."""

    kind: ExplainedKind
    key: str
    """`namespace/name`, or `name`."""
    subject: ObjectView | None = None
    """None for pods and nodes."""
    related: tuple[ObjectView, ...] = ()
    """What the subject depends on: GPU classes of a Model; pool and Model of an adapter; Models of a Tenant."""
    pods: tuple[WhyPod, ...] = ()
    nodes: tuple[WhyNode, ...] = ()
    """Nodes of these pods, and of the GPU classes."""
    events: tuple[EventView, ...] = ()
    gateways: tuple[WhyPod, ...] | None = None
    """Pods of Shoal's gateways; None: unknown, or they do not matter to the subject."""
    policies: tuple[PolicyView, ...] = ()
    """NetworkPolicies of the replicas' namespace and of the gateways'."""
    claim: ClaimView | None = None
    """That of a Model's source."""
    autoscalers: tuple[AutoscalerView, ...] = ()
    """Those of others, in the replicas' namespace."""
    holders: tuple[GPUHolder, ...] = ()
    """Pods of others with GPUs of the classes; read where GPUs are short."""
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """Class -> node -> its GPUs there that are devices."""
    externals: tuple[ExternalTargetView, ...] = ()
    """Of a route: its external targets that fail."""
    budget: BudgetView | None = None
    """That of a Tenant; None: it has none, or its use is unknown."""
    absent: tuple[str, ...] = ()
    """Of a Tenant: keys of the Models that it grants and that do not exist."""
    lease: OperatorLease | None = None
    decision: DecisionView | None = None
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Something that was seen."""

    what: str
    where: str
    age_seconds: int | None
    """None: nobody says when it was."""


@dataclass(frozen=True, slots=True)
class LayerCause:
    """One thing that is wrong."""

    reason: str
    layer: Layer
    state: State
    message: str
    do: str
    """What to do."""
    evidence: tuple[Evidence, ...] = ()
    tried: tuple[str, ...] = ()
    """What Shoal or Kubernetes did about it already."""
    consequences: tuple[str, ...] = ()
    """What it explains: `L4 engine EngineFailed: ...`."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer."""

    kind: ExplainedKind
    key: str
    state: Literal["ok", "waiting", "failing", "unknown"]
    """unknown: nothing wrong was found, and not everything could be read."""
    causes: tuple[LayerCause, ...]
    """The most upstream first."""
    unread: tuple[Unread, ...]
