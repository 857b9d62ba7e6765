"""What the devices of a class say of themselves, in the attributes and capacities that drivers use."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.core.devices.facts import Device, Version

_MOST: Final = 8
"""Names of drivers or products that are kept."""
_LONGEST: Final = 253
_VERSION: Final = re.compile(r"^([0-9]{1,3})\.([0-9]{1,3})(?:\.|$)")
_ARCHITECTURES: Final[Mapping[str, tuple[int, int]]] = {
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": (8, 0),
    "ada lovelace": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}
"""The lowest compute capability of data centre GPUs of an architecture."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Of all devices of one class. What no device says is None or empty."""

    memory: int | None
    """Bytes of the smallest; None: a device does not say it."""
    compute_capability: tuple[int, int] | None
    """The lowest."""
    architecture: str | None
    profile: str | None
    """Of devices that are parts of a GPU: the MIG profile, or several with commas."""
    drivers: tuple[str, ...]
    products: tuple[str, ...]


def facts_of(devices: Iterable[tuple[str, Device]]) -> DeviceFacts | None:
    """From (driver, device) of all devices of a class; None: it has none."""
    known = list(devices)
    if not known:
        return None
    memory = [found if (found := d.capacity.get(f"{driver}/memory")) and found > 0 else None for driver, d in known]
    capabilities = [found for driver, d in known if (found := _compute_capability(driver, d)) is not None]
    architectures, products, profiles = (_texts(known, id_) for id_ in ("architecture", "productName", "profile"))
    return DeviceFacts(
        memory=min((int(m) for m in memory if m is not None), default=None) if None not in memory else None,
        compute_capability=min(capabilities, default=None),
        architecture=architectures[0] if len(architectures) == 1 else None,
        profile=", ".join(profiles)[:_LONGEST] or None,
        drivers=tuple(sorted({driver for driver, _ in known})[:_MOST]),
        products=products,
    )


def _texts(devices: Iterable[tuple[str, Device]], id_: str) -> tuple[str, ...]:
    found = {d.attributes.get(f"{driver}/{id_}") for driver, d in devices}
    return tuple(sorted(text for text in found if isinstance(text, str) and text)[:_MOST])


def _compute_capability(driver: str, device: Device) -> tuple[int, int] | None:
    """From the attribute `cudaComputeCapability`, or what `architecture` implies."""
    said = device.attributes.get(f"{driver}/cudaComputeCapability")
    text = said.text if isinstance(said, Version) else said
    if isinstance(text, str) and (found := _VERSION.match(text)) is not None:
        return int(found[1]), int(found[2])
    name = device.attributes.get(f"{driver}/architecture")
    return _ARCHITECTURES.get(name.lower()) if isinstance(name, str) else None
