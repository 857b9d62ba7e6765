"""What decisions know of pods, nodes and Deployments: small, immutable, without what no decision reads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """A condition of a node that its kubelet does not write itself."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    labels: Mapping[str, str]
    ready: bool
    unschedulable: bool
    """Cordoned."""
    taints: tuple[Taint, ...]
    capacity: Mapping[str, int]
    """Extended resources only (names with a slash), such as nvidia.com/gpu."""
    allocatable: Mapping[str, int]
    conditions: tuple[NodeCondition, ...] = ()
    """What problem detectors and monitors say."""
    created: datetime | None = None
    keeps: str = ""
    """The annotation that forbids autoscalers to remove the node; "": there is none."""


@dataclass(frozen=True, slots=True)
class HeldDevice:
    """A device that a pod holds, as its kubelet reports it."""

    id: str
    """The device plugin's id. Of a DRA driver: the name that the driver has in the container runtime (CDI), or
    `driver/pool/device` where it has none there."""
    healthy: bool
    """False: the kubelet says that it is not. A kubelet that does not know says nothing bad."""


@dataclass(frozen=True, slots=True)
class Container:
    """The state of one container of an engine pod. None is unknown or none."""

    name: str
    ready: bool
    restarts: int
    waiting_reason: str | None
    waiting_message: str | None
    exit_code: int | None
    """Of the current or the last termination."""
    exit_reason: str | None
    exit_message: str | None
    """The termination message: what the container wrote, or its last log lines."""
    running: bool
    started: datetime | None = None
    """Of the current or the last run."""
    ended: datetime | None = None
    """Of the last run that is over."""


@dataclass(frozen=True, slots=True)
class ClaimRefusal:
    """Why the ResourceClaim of a pod is not made."""

    reason: str
    message: str
    """One line, without the pod."""
    quota: bool
    """A quota of the namespace refuses it: neither another class nor GPUs of others would help."""


@dataclass(frozen=True, slots=True)
class NodeRefusal:
    """An autoscaler says that it adds no node for a pending pod."""

    reason: str
    """One of `autoscalerevents.REFUSALS`."""
    message: str
    """One line, with the autoscaler's name."""
    everyone: bool
    """It adds none for other pods of the class either. False: only this pod is known to get none."""
    repeated: bool = False
    """It said so at two looks in a row: it is not about to change its mind."""


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Why Kueue has not admitted a pod."""

    reason: str
    message: str
    """One line, without the pod and the queue."""
    refusal: NodeRefusal | None = None
    """Kueue has given up, since no node could be had of a class to which an autoscaler adds some; None: it has not, or
    for another reason."""
    refused_at: datetime | None = None
    """When the last request for a node failed."""
    no_room: bool = False
    """Kueue has said that the quota has no room for it, or took it away. False: it has room, or nothing was said."""


@dataclass(frozen=True, slots=True)
class AutoscalerNews:
    """What an autoscaler says of a pending pod."""

    event: str | None = None
    """Its last event as one line, with its name."""
    refusal: NodeRefusal | None = None
    announced: bool = False
    """It has announced a node, and has not failed since."""
    late: bool = False
    """That node should be there by now."""
    last_announced: datetime | None = None
    """When it announced a node last, also one that it failed to bring; None: it has announced none."""


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """What a pod's engine computes with, as the pod's spec has it."""

    image: str
    weights: str | None
    """Digest of the manifest that the pod's weights have, or of their content; None: neither is asked for."""
    pinned: bool
    """Its weights are those, or a folder of an image of Shoal's. False: they may change in place."""
    digest: str
    """Of all that: weights, the engine's image, arguments and environment. 16 hex digits."""


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    node: str | None
    finished: bool
    """Succeeded or Failed: holds nothing any more."""
    deleting: bool
    ready: bool
    requests: Mapping[str, int]
    """Extended resources that the pod holds once it is bound."""
    model_uid: str | None
    """Set on engine pods that have proved that they are (`core/ownership.py`); the fields below are read of these
    only."""
    gpu_class: str | None = None
    install_key: str | None = None
    created: datetime | None = None
    unschedulable: str | None = None
    """The scheduler's own sentence."""
    gates: tuple[str, ...] = ()
    """Scheduling gates: while there are any, the scheduler does not look at the pod."""
    queue: str | None = None
    """Kueue's queue, by the pod's label."""
    queue_managed: bool = False
    """Kueue has taken charge of the pod."""
    queue_wait: QueueWait | None = None
    """What Kueue says of a pod that it holds back."""
    lacks_claim: bool = False
    """A ResourceClaim that is to be made for it from a template is not there: until then no scheduler looks at it."""
    claim_refusal: ClaimRefusal | None = None
    """Why it lacks the claim; None: it does not lack one, or why is unknown."""
    claim_was_refused: bool = False
    """Its claim is, or once was, refused."""
    scheduled: datetime | None = None
    """When it was bound to its node."""
    autoscaler_event: str | None = None
    """The last event in which an autoscaler says what it does for the pending pod, with the autoscaler's name."""
    node_refusal: NodeRefusal | None = None
    """Why an autoscaler adds no node for the pending pod; None: it does not say that."""
    node_announced: bool = False
    """An autoscaler has announced a node for the pending pod, which is not late yet."""
    node_late: bool = False
    """An autoscaler has announced a node for the pending pod, which should be there by now."""
    containers: tuple[Container, ...] = ()
    """Init containers first."""
    ip: str | None = None
    ready_since: datetime | None = None
    """When it last turned Ready; None while it is not."""
    devices: tuple[HeldDevice, ...] = ()
    """Devices of the engine, from kubelets that report them."""
    cache_claim: str | None = None
    """The claim of the node cache that it mounts."""
    deletion_cost: int = 0
    """Of the pods of one Deployment those with the lowest go first."""
    job: str | None = None
    """Set on pods of Jobs that read a source's metadata: the Job's name."""
    gateway: bool = False
    """Says of itself that it is a gateway; it is one in Shoal's own namespace only."""
    mtls: bool = False
    """It speaks mutual TLS, as its annotation says. Set on engine pods and on Shoal's own."""
    process: bool = False
    """Says of itself that it is a gateway, an operator or a ledger; it is one in Shoal's own namespace only."""
    knows_role_keys: bool = False
    """Of a gateway: it has keys of its own role, not only the install key of before."""
    was_ready: bool = False
    """Ready now, or once before."""
    engine: EngineBuild | None = None
    """Of a ready one."""
    template: str = ""
    """Hash of the pod template that it was made from, by the Deployment controller's label; "": it has none."""
    claims: str | None = None
    """Uid of the Model whose engine the pod says it is, while it has not proved it."""
    keeps: str = ""
    """The annotation that forbids autoscalers to evict the pod; "": there is none."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def gated(self) -> bool:
        """A controller, or a quota on its ResourceClaim, holds it back before the scheduler sees it."""
        refused = self.claim_refusal is not None and self.claim_refusal.quota
        return self.node is None and (bool(self.gates) or refused)

    def with_news(self, news: AutoscalerNews) -> "Pod":
        """The same pod, with what an autoscaler says of it."""
        return replace(
            self,
            autoscaler_event=news.event,
            node_refusal=news.refusal,
            node_announced=news.announced and not news.late,
            node_late=news.announced and news.late,
        )

    @property
    def waited_for_quota(self) -> bool:
        """How long it took to be bound says nothing of the next replica."""
        return self.queue_managed or self.claim_was_refused

    @property
    def broken_device(self) -> bool:
        """The kubelet says of a device that the pod holds that it is not healthy."""
        return any(not device.healthy for device in self.devices)

    def container(self, name: str) -> Container | None:
        return next((c for c in self.containers if c.name == name), None)


@dataclass(frozen=True, slots=True)
class MetadataJob:
    """A Job that reads a source's metadata."""

    namespace: str
    name: str
    uid: str
    active: bool
    """Neither succeeded nor failed yet."""
    failed: str | None
    """Why it failed, as the Job controller says: its deadline, too many tries."""
    deleting: bool
    created: datetime | None = None
    reads: tuple[str, ...] = ()
    """Of adapters: what it reads, as `names.ANNOTATION_READS` lists it."""
    pool: str | None = None
    """Of adapters: `namespace/name` of their pool."""
    node: str | None = None
    """Of a prefetch: the node whose cache it asks."""
    model_uid: str | None = None
    """Of a prefetch: its Model."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A variant as it stands in the cluster."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    model_uid: str
    gpu_class: str
    gpus_per_replica: int
    resource_name: str
    generation: int
    observed_generation: int
    replicas: int
    """Of the spec."""
    replicas_managers: frozenset[str]
    """Field managers that own spec.replicas. Nobody: KEDA and the HPA write `/scale` so that the field is left without
    an owner. It is `shoal-model` alone that has never been scaled."""
    updated: int
    ready: int
    """Ready replicas, of whatever revision."""
    total: int
    """Pods that exist, of whatever revision; terminating ones not counted."""
    refused: str | None
    """Why the API server refuses its pods (quota, admission)."""
    deleting: bool
    surges: bool = True
    """A rollout starts the new replica before the old one goes."""
    replacing: bool = False
    """A later revision takes over from an earlier one, and is not complete yet."""
    overdue: str | None = None
    """Its rollout, or its first start, made no progress within the deadline: the Deployment controller's own
    sentence."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def rolled_out(self) -> bool:
        """Every pod is of the current revision."""
        return self.observed_generation >= self.generation and self.updated >= self.total

    @property
    def has_old_pods(self) -> bool:
        """Pods of an earlier revision exist. A change of the spec that is not observed yet does not count."""
        return self.updated < self.total
