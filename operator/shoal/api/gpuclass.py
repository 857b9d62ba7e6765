"""GPUClass: a kind of GPU in the fleet. Cluster-scoped; short name `gpuc`."""

from datetime import datetime
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

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
    ResourceName,
)

DEVICES_PREFIX: Final = "devices.shoal.dev/"
DEFAULT_RESOURCE: Final = "nvidia.com/gpu"
"""Extended resource of a class that names none, and no devices."""


class Toleration(Object):
    """A toleration that engine pods of this class get, as in a pod."""

    key: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Key of the taint. Absent with operator Exists: every taint matches."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Equal: key and `value` must match. Exists: the key must match, with any value."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: all effects match."""


def _quoted(amount: object) -> object:
    """As the API server refuses it, with what to do. In a file the number that a person wrote is a float already."""
    if isinstance(amount, float):
        raise ValueError(f'must be in quotes, as in "{amount}": without them YAML makes a float of a decimal')
    return amount


class Money(Object):
    """An amount in a named currency."""

    amount: Annotated[Quantity, BeforeValidator(_quoted)]
    """A decimal number in quotes, such as "2.49": YAML makes a float of a decimal without quotes, which the API server
    refuses."""
    currency: Annotated[
        str,
        StringConstraints(min_length=3, max_length=3, pattern=r"^[A-Z]{3}$"),
        K8s(pattern_message="must be an ISO 4217 code, such as 'USD'"),
    ] = "USD"
    """ISO 4217 code of the currency."""


class Consolidation(Object):
    """Shoal empties a node whose replicas fit on other nodes, so that the autoscaler removes it."""

    after_seconds: Annotated[int, Field(ge=10, le=86400, alias="afterSeconds"), K8s(default_in_code=True)] = 300
    """Seconds for which the node's replicas must have been without a request, and the class's use the same. Default:
    300."""


class AutoscaledNodes(Object):
    """Nodes that a node autoscaler adds for pending pods and removes when they are empty, such as Karpenter or Cluster
    Autoscaler."""

    max: Annotated[int, Field(ge=1, le=1000)]
    """Most nodes of the class, existing ones included; the limit of the autoscaler's node group or pool."""
    gpus_per_node: Annotated[int, Field(ge=1, le=64, alias="gpusPerNode")]
    """GPUs of a node that the autoscaler adds."""
    provision_seconds: Annotated[int, Field(ge=10, le=7200), K8s(default_in_code=True)] = 600
    """Seconds from a pending pod to a node that takes it. After twice this time without a node, replicas go to another
    class; at once where the autoscaler refuses the node. Default: 600."""
    consolidate: Consolidation | None = None
    """Shoal moves the replicas of a nearly empty node to other nodes of the class, where that pays. `{}` turns it on.
    Absent: it moves none; what the autoscaler does about such nodes is its own setting."""


class NodeSource(Object):
    """Where nodes of the class come from."""

    autoscaled: AutoscaledNodes | None = None
    """The class's nodes are added on demand. Absent: the class has the nodes that exist."""


class CELExpression(Object):
    """An expression in the Common Expression Language."""

    expression: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """Expression about `device`, true for the devices of the class, as in a ResourceClaim."""


class DeviceSelector(Object):
    """A condition on a device."""

    condition: Annotated[CELExpression, Field(alias="cel")]
    """The condition, such as device.attributes["gpu.nvidia.com"].architecture == "Hopper"."""


class DeviceSource(Object):
    """GPUs that a driver publishes in ResourceSlices (dynamic resource allocation, DRA)."""

    device_class_name: ResourceName
    """DeviceClass of the GPUs, such as gpu.nvidia.com; `kubectl get deviceclasses` lists them."""
    selectors: Annotated[tuple[DeviceSelector, ...], Field(max_length=8), K8s(list_type="atomic")] = ()
    """Conditions on the GPUs of this class, in addition to those of the DeviceClass. All must be true."""


class GPUClassSpec(Object):
    """Selects the nodes of the class and describes one of their GPUs."""

    node_selector: Annotated[dict[str, LabelValue], Field(max_length=16)] = {}
    """Labels of the nodes of this class, usually nvidia.com/gpu.product as set by GPU feature discovery. With `device`
    it may be left out: the class then has the nodes that have such devices."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16), K8s(list_type="atomic")] = ()
    """Tolerations of the engine pods, for the taints of these nodes."""
    resource_name: (
        Annotated[
            str,
            StringConstraints(
                min_length=1,
                max_length=253,
                pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
            ),
            K8s(pattern_message="must be a domain, '/' and a name, such as 'nvidia.com/gpu'"),
        ]
        | None
    ) = None
    """Extended resource that the device plugin advertises. Default: nvidia.com/gpu, unless `device` is set."""
    device: DeviceSource | None = None
    """GPUs that a driver publishes as devices, in place of an extended resource of a device plugin."""
    memory_per_gpu: Quantity | None = Field(None, alias="memoryPerGPU")
    """Memory of one GPU according to its data sheet, such as 80Gi. With `device` it may be left out if the devices have
    a capacity `memory`."""
    memory_bandwidth_gbps: Annotated[int, Field(ge=1, le=100000)] | None = Field(None, alias="memoryBandwidthGBps")
    """Memory bandwidth of one GPU in 10^9 bytes per second; of a MIG partition its own, not that of the whole GPU."""
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
    """Interconnect of the GPUs of one node."""
    hourly_cost: Money | None = None
    """Cost of one GPU per hour. Cheaper classes are used first, classes without a cost last."""
    nodes: NodeSource = NodeSource()
    """Where nodes of the class come from. The nodes of an autoscaler must have the labels of `nodeSelector` in the
    template of its node group or pool: it adds a node only for a pod that the node would take."""
    interruptible: bool = False
    """Whether nodes of this class can be reclaimed at short notice (spot nodes)."""

    @model_validator(mode="after")
    def _one_of_two_worlds(self) -> Self:
        """As the rules below, for objects that were stored before there were these, and for files."""
        if self.device is not None and self.resource_name is not None:
            raise ValueError("device and resourceName exclude each other")
        if self.device is None and not self.node_selector:
            raise ValueError("nodeSelector must have a label")
        if self.device is None and self.memory_per_gpu is None:
            raise ValueError("memoryPerGPU must be set")
        if self.device is not None and self.nodes.autoscaled is not None:
            raise ValueError("nodes.autoscaled cannot be combined with device")
        return self

    @property
    def extended_resource(self) -> str | None:
        """The extended resource that engine pods request; None: they claim devices."""
        return None if self.device is not None else self.resource_name or DEFAULT_RESOURCE

    cel: ClassVar = (
        CELRule(
            "!(has(self.device) && has(self.resourceName))",
            "`device` and `resourceName` exclude each other: a class has GPUs of a DRA driver or of a device plugin",
        ),
        CELRule(
            "has(self.device) || (has(self.nodeSelector) && self.nodeSelector.size() > 0)",
            "`nodeSelector` must have a label; only a class with `device` may leave it out",
        ),
        CELRule(
            "has(self.device) || has(self.memoryPerGPU)",
            "`memoryPerGPU` must be set; only a class with `device` may leave it out",
        ),
        CELRule(
            "!has(self.device) || !has(self.nodes) || !has(self.nodes.autoscaled)",
            "`nodes.autoscaled` cannot be combined with `device` yet: a node that does not exist has no devices",
        ),
        CELRule(
            "!has(self.tolerations) || self.tolerations.all(t, t.operator == 'Exists' || has(t.key))",
            "a toleration with operator 'Equal' must have a `key`",
        ),
        CELRule(
            # The field's own rule reports a quantity that does not parse.
            "!has(self.memoryPerGPU) || !isQuantity(string(self.memoryPerGPU)) || "
            "quantity(string(self.memoryPerGPU)).compareTo(quantity('1Gi')) >= 0",
            "`memoryPerGPU` must be at least '1Gi'; write the unit, as in '80Gi'",
        ),
    )


class GPUCounts(Object):
    """GPUs of the class, counted over its nodes and over all pods that request GPUs, not only Shoal's."""

    capacity: Count
    """Total GPUs of the nodes."""
    allocatable: Count
    """GPUs that healthy, schedulable nodes offer to pods."""
    allocated: Count
    """GPUs held by pods that are bound to these nodes. A terminating pod holds its GPUs until it is gone."""
    free: Count
    """GPUs available to new pods: allocatable minus allocated, on schedulable nodes."""
    largest_free_on_one_node: Count
    """Most free GPUs on a single node: the size of the largest replica that still fits."""


class GPUMemory(Object):
    """Memory of one GPU as used for sizing."""

    per_gpu: Annotated[Quantity, Field(alias="perGPU")]
    """Memory of one GPU."""
    source: Literal["NodeLabels", "Devices", "Spec"]
    """NodeLabels: the smallest value of the nodes' label nvidia.com/gpu.memory. Devices: the smallest capacity `memory`
    of the class's devices. Spec: `memoryPerGPU`."""
    overhead: Quantity | None = None
    """Memory of one GPU that is used before the engine allocates any (CUDA context, NCCL). It is derived from the KV
    cache sizes that engines of this class reported. Absent: no engine has started on this class yet, and an estimate is
    used."""


ObservedName = Annotated[str, StringConstraints(max_length=253)]


class ObservedDevices(Object):
    """What the devices of a class say of themselves."""

    drivers: Annotated[tuple[ObservedName, ...], Field(max_length=8), K8s(list_type="atomic")] = ()
    """Drivers of the devices."""
    products: Annotated[tuple[ObservedName, ...], Field(max_length=8), K8s(list_type="atomic")] = ()
    """Values of the attribute `productName`."""
    architecture: ObservedName | None = None
    """Value of the attribute `architecture`, if it is the same for all devices."""
    compute_capability: ObservedName | None = None
    """The lowest CUDA compute capability of the devices."""
    profile: ObservedName | None = None
    """MIG profile, from the attribute `profile`. Each device is a part of a GPU, and a replica has one device."""


class QuarantinedGPUs(Object):
    """GPUs of one node that Shoal does not use, or one GPU."""

    node: ObservedName
    """Node of the GPUs."""
    device: Annotated[str, StringConstraints(max_length=512)] | None = None
    """The GPU: `driver/pool/device` of a DRA driver, or the device plugin's id. Absent: all GPUs of the class on the
    node."""
    uuid: ObservedName | None = None
    """Attribute `uuid` of the device, by which engine pods claim other devices."""
    state: Literal["Quarantined", "Probation"]
    """Quarantined: no replica is placed there. Probation: replicas are, and the first one is tested."""
    reason: Annotated[str, StringConstraints(max_length=128)]
    """Reason as one CamelCase word: the signal, or CordonedByPerson."""
    message: Annotated[str, StringConstraints(max_length=512)]
    """The signal in its own words, or what the person wrote."""
    by: Literal["Shoal", "Person"]
    """Who decided it."""
    since: datetime
    """Begin."""
    until: datetime | None = None
    """Time after which it ends, in probation first. In probation: after which it is enough that a replica answers its
    tests, where no other can be compared. Absent: not while the signal lasts, or not before a person says so."""
    times: Annotated[int, Field(ge=1, le=16)]
    """How often in a row. Each time it lasts twice as long."""
    model: Annotated[str, StringConstraints(max_length=320)] | None = None
    """Model whose replicas alone say that the GPU is not healthy."""
    monitor: Literal["DCGM"] | None = None
    """Monitor whose metrics say that the GPU is not healthy. While it has none, the quarantine does not end."""


class ConsolidatedNode(Object):
    """A node that Shoal empties, so that the autoscaler removes it. No new replica goes there."""

    node: ObservedName
    """The node."""
    since: datetime
    """When it was chosen."""
    empty_since: datetime | None = None
    """When its last replica was gone. Absent: replicas are there yet."""
    message: Annotated[str, StringConstraints(max_length=512)]
    """Why it was chosen."""


class NodeOutageStatus(Object):
    """No further node of the class is expected to come for now."""

    reason: Annotated[str, StringConstraints(max_length=128)]
    """StockOut, LimitReached, ScaleUpFailed: an autoscaler said so. NoNodeCame: none came in twice the time."""
    message: Annotated[str, StringConstraints(max_length=512)]
    """The autoscaler's own words."""
    since: datetime
    """When it was found out."""
    until: datetime
    """When a node is asked for again. A node that comes, and a change of the spec, end it before."""


class GPUClassStatus(Object):
    """Observed state of the class."""

    conditions: Conditions = ()
    """Conditions of the class. Ready says whether the class has nodes: NodesFound, NoNodes, LabelsDisagree, Overlaps,
    SharedGPUs, Invalid; of a class with `device` also DRAUnavailable, DeviceClassNotFound, SelectorInvalid, NoDevices,
    MemoryUnknown. SharedGPUs is present while GPUs of the class are shared, which do not count: by nodes (time-slicing,
    MPS), or as devices of which several claims may have a part. GPUsHealthy is there while GPUs are not:
    GPUsQuarantined, QuarantineWithheld, CordonInvalid; or, as Unknown, while GPUs are not measured:
    GPUMetricsMissing. Consolidating is there where `nodes.autoscaled.consolidate` is set: Consolidating, or
    NothingEmptied, whose message says why. NodesAvailable is there, as False, while an autoscaler adds no further node:
    StockOut, LimitReached, ScaleUpFailed, NoNodeCame."""
    observed_generation: Count | None = None
    """Generation of the spec that this status describes."""
    nodes: Count | None = None
    """Nodes that match the selector."""
    gpus: GPUCounts | None = None
    """GPU counts over all nodes of the class."""
    memory: GPUMemory | None = None
    """Memory of one GPU as used for sizing."""
    largest_node: Count | None = None
    """GPUs of the largest node: the upper limit for the size of a replica."""
    devices: ObservedDevices | None = None
    """Of a class with `device`: what its devices say of themselves."""
    quarantined: Annotated[tuple[QuarantinedGPUs, ...], Field(max_length=64), K8s(list_type="atomic")] = ()
    """GPUs that Shoal does not use, because they are not healthy or because a person said so."""
    consolidation: ConsolidatedNode | None = None
    """The node that Shoal empties (`spec.nodes.autoscaled.consolidate`). Absent: none."""
    node_outage: NodeOutageStatus | None = None
    """Why no further node of the class is expected, and until when nodes of other classes are asked for first. Absent:
    nodes may come."""
    provision_seconds: Count | None = None
    """Seconds in which an autoscaler added a node of the class: the longest of the last five times that a replica
    waited for one. Absent: none was measured, and `spec.nodes.autoscaled.provisionSeconds` counts."""


def devices_of(gpu_class: str) -> str:
    """The name under which devices of a class count as a resource of their node. It is in no object of the cluster."""
    return f"{DEVICES_PREFIX}{gpu_class}"


class GPUClass(CustomResource):
    """GPUClass describes a kind of GPU in the fleet: its nodes, its memory and its cost."""

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
        Column("Memory", ".status.memory.perGPU", "string", 1),
        Column("NoNodes", ".status.nodeOutage.reason", "string", 1),
        Column("Hourly", ".spec.hourlyCost.amount", "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
    )

    cel: ClassVar = (NAME_IS_LABEL,)

    spec: GPUClassSpec
    status: GPUClassStatus | None = None

    @property
    def resource(self) -> str:
        """What a node has so many of: the extended resource, or the name under which the class's devices count."""
        return self.spec.extended_resource or devices_of(self.metadata.name)
