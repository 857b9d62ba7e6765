"""GPUClass: a kind of GPU in the fleet. Cluster-scoped; short name `gpuc`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import (
    NAME_IS_LABEL,
    CELRule,
    Column,
    Conditions,
    Count,
    CustomResource,
    K8s,
    LabelValue,
    Object,
    Quantity,
)


class Toleration(Object):
    """A toleration that engine pods of this class get, as in a pod."""

    key: Annotated[str, StringConstraints(max_length=253)] | None = None
    """The taint's key; absent with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How the taint is compared: Equal with `value`, or Exists whatever its value."""
    value: LabelValue | None = None
    """The taint's value, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; absent matches all."""


class Money(Object):
    """An amount in a named currency."""

    amount: Quantity
    """A decimal number, such as "2.49"."""
    currency: Annotated[
        str,
        StringConstraints(min_length=3, max_length=3, pattern=r"^[A-Z]{3}$"),
        K8s(pattern_message="must be an ISO 4217 code, such as 'USD'"),
    ] = "USD"
    """Currency as its ISO 4217 code."""


class GPUClassSpec(Object):
    """Which nodes belong to the class and what one of its GPUs is."""

    node_selector: Annotated[dict[str, LabelValue], Field(min_length=1, max_length=16)]
    """Labels that a node of this class carries; usually nvidia.com/gpu.product as GPU feature discovery writes it."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16), K8s(list_type="atomic")] = ()
    """Tolerations that engine pods need to get onto these nodes."""
    resource_name: Annotated[
        str,
        StringConstraints(
            min_length=1,
            max_length=253,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        ),
        K8s(pattern_message="must be a domain, '/' and a name, such as 'nvidia.com/gpu'"),
    ] = "nvidia.com/gpu"
    """The extended resource that the device plugin advertises."""
    memory_per_gpu: Annotated[Quantity, Field(alias="memoryPerGPU")]
    """Memory of one GPU as its data sheet says, such as 80Gi."""
    memory_bandwidth_gbps: Annotated[int, Field(ge=1, le=100000)] | None = Field(None, alias="memoryBandwidthGBps")
    """Memory bandwidth of one GPU in 10^9 bytes per second."""
    compute_capability: (
        Annotated[
            str,
            StringConstraints(max_length=8, pattern=r"^[0-9]+\.[0-9]+$"),
            K8s(pattern_message='must be a CUDA compute capability in quotes, such as "9.0"'),
        ]
        | None
    ) = None
    """CUDA compute capability, such as "9.0"."""
    interconnect: Literal["NVLink", "PCIe"] = "PCIe"
    """How the GPUs of one node are connected."""
    hourly_cost: Money | None = None
    """What one GPU costs per hour. Classes without a price come after those with one."""
    interruptible: bool = False
    """Whether nodes of this class may be taken away at short notice (spot)."""

    cel: ClassVar = (
        CELRule(
            "!has(self.tolerations) || self.tolerations.all(t, t.operator == 'Exists' || has(t.key))",
            "a toleration with operator 'Equal' must have a `key`",
        ),
        CELRule(
            # A quantity that does not parse is told by the field's own rule.
            "!isQuantity(string(self.memoryPerGPU)) || "
            "quantity(string(self.memoryPerGPU)).compareTo(quantity('1Gi')) >= 0",
            "`memoryPerGPU` must be at least '1Gi'; write the unit, as in '80Gi'",
        ),
    )


class GPUCounts(Object):
    """GPUs of the class, counted over its nodes and over every pod that asks for GPUs, not only Shoal's."""

    capacity: Count
    """GPUs that the nodes have."""
    allocatable: Count
    """GPUs that healthy, schedulable nodes offer."""
    allocated: Count
    """GPUs that pods bound to these nodes hold; terminating pods hold theirs until they are gone."""
    free: Count
    """GPUs that a new pod could get: allocatable minus allocated, on schedulable nodes."""
    largest_free_on_one_node: Count
    """The largest replica, in GPUs, that still fits on one node."""


class GPUMemory(Object):
    """Memory of one GPU as sizing counts with it."""

    per_gpu: Annotated[Quantity, Field(alias="perGPU")]
    """Memory of one GPU."""
    source: Literal["NodeLabels", "Spec"]
    """NodeLabels: the least of what the nodes' label nvidia.com/gpu.memory says. Spec: `memoryPerGPU`."""
    overhead: Quantity | None = None
    """Memory of one GPU that is gone before an engine asks for any (CUDA context, NCCL), measured: computed back from
    what engines on this class said of their KV cache. Absent: none has started yet, an estimate is used."""


class GPUClassStatus(Object):
    """What was found."""

    conditions: Conditions = ()
    """Condition Ready says whether the class has nodes: NodesFound, NoNodes, LabelsDisagree, Overlaps, Invalid."""
    observed_generation: Count | None = None
    """The generation that this status is about."""
    nodes: Count | None = None
    """Nodes that match the selector."""
    gpus: GPUCounts | None = None
    """Counts over all nodes of the class."""
    memory: GPUMemory | None = None
    """Memory of one GPU as sizing counts with it."""
    largest_node: Count | None = None
    """GPUs of the largest node: no replica can have more."""


class GPUClass(CustomResource):
    """A kind of GPU in the fleet: which nodes have it, what it can hold, what it costs."""

    kind_name: ClassVar = "GPUClass"
    plural: ClassVar = "gpuclasses"
    singular: ClassVar = "gpuclass"
    short_names: ClassVar = ("gpuc",)
    scope: ClassVar = "Cluster"
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Nodes", ".status.nodes", "integer"),
        Column("GPUs", ".status.gpus.capacity", "integer"),
        Column("Allocated", ".status.gpus.allocated", "integer"),
        Column("Free", ".status.gpus.free", "integer"),
        Column("Largest", ".status.gpus.largestFreeOnOneNode", "integer"),
        Column("Memory", ".spec.memoryPerGPU", "string", 1),
        Column("Hourly", ".spec.hourlyCost.amount", "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
    )

    cel: ClassVar = (NAME_IS_LABEL,)

    spec: GPUClassSpec
    status: GPUClassStatus | None = None
