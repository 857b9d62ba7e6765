"""What `shoal doctor` reads, and the result of a check."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from shoal.api import names
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import EventView, ObjectView, OperatorLease, Unread, WhyNode, WhyPod

Outcome = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """The result of a check."""

    check: str
    outcome: Outcome
    reason: str
    layer: Layer
    message: str
    do: str
    """What to do; empty: nothing."""


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """A Deployment, StatefulSet or DaemonSet of Shoal."""

    kind: str
    name: str
    component: str
    """Label app.kubernetes.io/component."""
    version: str
    """Label app.kubernetes.io/version; empty: none."""
    images: tuple[str, ...]
    account: str
    """Its ServiceAccount."""
    wanted: int
    ready: int
    updated: int


@dataclass(frozen=True, slots=True)
class KindState:
    """A CustomResourceDefinition, compared with that of this version."""

    name: str
    """Such as models.shoal.dev."""
    there: bool
    established: bool = False
    served: bool = False
    """Whether the version that this program uses is served."""
    missing: tuple[str, ...] = ()
    """Fields of this program's schema that the cluster's does not have."""
    further: tuple[str, ...] = ()
    """Fields of the cluster's schema that this program's does not have."""


@dataclass(frozen=True, slots=True)
class PermissionState:
    """Whether an account may do something."""

    verb: str
    resource: str
    """`resource.group`, or the resource's name in the core group."""
    namespace: str | None
    why: str
    """What it is needed for."""
    allowed: bool
    component: str = names.COMPONENT_OPERATOR
    """Whose account it is."""


@dataclass(frozen=True, slots=True)
class CertificateState:
    """A certificate in a Secret, by its public part."""

    secret: str
    not_after: datetime | None
    """None: the Secret does not say it outside of its content."""


@dataclass(frozen=True, slots=True)
class ClockState:
    """What clocks show."""

    server: datetime | None
    """Date header of the API server's answer."""
    before: datetime
    """Clock of the reader when the request was sent."""
    after: datetime
    """The same when the answer came."""


@dataclass(frozen=True, slots=True)
class NodeLease:
    """The Lease with which a kubelet reports that it lives."""

    node: str
    renewed: datetime | None
    seconds: int


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Addresses behind a Service."""

    name: str
    ready: int
    not_ready: int


@dataclass(frozen=True, slots=True)
class NodeCacheSettings:
    """The operator's settings of the node cache."""

    enabled: bool
    size_bytes: int | None
    node_selector: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """What proxies that carry requests need: the operator's settings, and the kind InferencePool."""

    enabled: bool
    """The chart value gateway.extProc.enabled."""
    mtls: bool
    """The chart value transport.mtls.enabled."""
    namespaces: tuple[str, ...]
    """Of the proxies."""
    pools: bool
    """The API server serves InferencePools of inference.networking.k8s.io/v1."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """GPUs that drivers publish as devices (DRA)."""

    of_classes: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """Class -> node -> how many it has there."""
    unmatched: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Node -> those that no GPUClass selects, as driver/pool/device."""


@dataclass(frozen=True, slots=True)
class PriceState:
    """The ledger's price lists."""

    lists: tuple[str, ...] = ()
    """Names of those that were accepted."""
    refused: tuple[str, ...] = ()
    """Mistakes of those in its folder, as file:line: sentence; empty: they were accepted."""


@dataclass(frozen=True, slots=True)
class DoctorSnapshot:
    """What was read. `Unread`: this part could not be read."""

    namespace: str
    version: str
    """Of this program."""
    scope: tuple[str, ...] = ()
    """Namespaces that Shoal is restricted to; empty: all."""
    workloads: tuple[WorkloadState, ...] | Unread = ()
    pods: tuple[WhyPod, ...] | Unread = ()
    """Of Shoal's namespace."""
    events: tuple[EventView, ...] | Unread = ()
    lease: OperatorLease | Unread | None = None
    """None: there is none."""
    kinds: tuple[KindState, ...] | Unread = ()
    permissions: tuple[PermissionState, ...] | Unread = ()
    certificates: tuple[CertificateState, ...] | Unread = ()
    clock: ClockState | Unread | None = None
    node_leases: tuple[NodeLease, ...] | Unread = ()
    services: tuple[ServiceState, ...] | Unread = ()
    """Of Shoal's namespace, by EndpointSlices."""
    name_service: ServiceState | Unread | None = None
    """The cluster's DNS; None: no Service has the usual label."""
    cache: NodeCacheSettings | Unread | None = None
    """None: the operator's configuration has no such settings."""
    proxies: ProxySettings | Unread | None = None
    """None: not asked."""
    prices: PriceState | Unread | None = None
    """None: no ledger runs."""
    disks: Mapping[str, int] | None = None
    """Node -> bytes of its disk for pods; None: unknown."""
    classes: tuple[ObjectView, ...] | Unread = ()
    nodes: tuple[WhyNode, ...] | Unread = ()
    devices: DeviceState | Unread = DeviceState()
    models: tuple[ObjectView, ...] | Unread = ()
    tenants: tuple[ObjectView, ...] | Unread = ()
