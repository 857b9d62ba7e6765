"""What decisions know of ResourceSlices, DeviceTaintRules, ResourceClaims and DeviceClasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from shoal.core.facts import Taint


class DeviceId(NamedTuple):
    """Names a device in the whole cluster."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return "/".join(self)


@dataclass(frozen=True, slots=True)
class Version:
    """An attribute that is a semantic version."""

    text: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a slice. Names of attributes and capacities have a domain: `gpu.nvidia.com/memory`."""

    name: str
    attributes: Mapping[str, bool | int | str | Version]
    capacity: Mapping[str, Decimal]
    taints: tuple[Taint, ...] = ()
    node: str | None = None
    """The node from which it can be used; None: several nodes can use it."""
    counters: Mapping[tuple[str, str], Decimal] = field(default_factory=dict[tuple[str, str], Decimal])
    """(counter set, counter) -> what the device takes of it, such as memory slices of a GPU that is partitioned."""
    shared: bool = False
    """Several claims may have a part of it. It never counts: Shoal takes whole devices."""

    @property
    def offered(self) -> bool:
        """No taint keeps new pods off. Shoal's requests tolerate none."""
        return not self.taints or not any(taint.effect in ("NoSchedule", "NoExecute") for taint in self.taints)


@dataclass(frozen=True, slots=True)
class Slice:
    """A ResourceSlice: a part of what one driver publishes about one pool."""

    name: str
    driver: str
    pool: str
    generation: int
    slices_of_pool: int
    """How many slices of this generation the pool has."""
    devices: tuple[Device, ...]
    counters: Mapping[tuple[str, str], Decimal]
    """(counter set, counter) -> what devices of the pool share."""
    nodes: frozenset[str | None]
    """Those that can use a device of it; None among them: several can use one."""


@dataclass(frozen=True, slots=True)
class DeviceTaintRule:
    """A DeviceTaintRule: a taint on every device that it selects. A field that is None selects all."""

    name: str
    taint: Taint
    driver: str | None = None
    pool: str | None = None
    device: str | None = None

    def selects(self, of: Slice, device: Device) -> bool:
        return self.driver in (None, of.driver) and self.pool in (None, of.pool) and self.device in (None, device.name)


@dataclass(frozen=True, slots=True)
class Claim:
    """A ResourceClaim that has devices."""

    namespace: str
    name: str
    devices: tuple[DeviceId, ...]
    """Those that nobody else can get meanwhile."""
    pods: tuple[tuple[str, str], ...]
    """(name, uid) of the pods for which they are reserved."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A DeviceClass: what its selectors say of each device of a request."""

    name: str
    selectors: tuple[str, ...]
