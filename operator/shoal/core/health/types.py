"""What health decisions read and what they decide."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple

State = Literal["Quarantined", "Probation"]
"""Quarantined: Shoal places nothing there. Probation: it does again, and the first replica there is tested."""
Source = Literal["Shoal", "Person"]
Monitor = Literal["DCGM"]
"""Something that measures GPUs. While it is silent, nothing is known."""
DCGM: Final = "DCGM"


class Unit(NamedTuple):
    """What can be taken out of use: the GPUs of a class on a node, or one of them."""

    node: str
    device: str = ""
    """As the kubelet names it: `driver/pool/device` of a DRA driver, or the device plugin's id. "": all of the
    node."""

    def __str__(self) -> str:
        return f"device {self.device} of node {self.node}" if self.device else f"node {self.node}"


@dataclass(frozen=True, slots=True)
class HealthSignal:
    """Something says now that a unit is not healthy."""

    unit: Unit
    reason: str
    """As `core/layers/faults.py` has it."""
    message: str
    model: str | None = None
    """namespace/name of the Model whose replicas say so themselves. Such a signal is believed less: a user who may
    write Models can make their replicas say anything. None: a node, a kubelet or a driver says it."""
    monitor: Monitor | None = None
    """Whose metrics say so. When they are gone, the signal is unknown; any other signal that is gone has ended."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A unit that is out of use, as it stands in the status of its class."""

    unit: Unit
    reason: str
    message: str
    since: datetime
    state: State = "Quarantined"
    until: datetime | None = None
    """When it ends, in Probation first; None: not while the signal lasts, or not before a person says so. In Probation:
    from when on a test that nothing can be compared with is enough."""
    by: Source = "Shoal"
    times: int = 1
    """How often in a row: each time it lasts twice as long."""
    model: str | None = None
    """As in the signal."""
    monitor: Monitor | None = None
    """As in the signal."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """A unit that stays in use, though it is known not to be healthy."""

    signal: HealthSignal
    why: str
