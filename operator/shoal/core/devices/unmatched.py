"""GPUs that drivers publish as devices and that no GPUClass selects."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from shoal.core.devices.facts import Device, DeviceId
from shoal.core.devices.match import ClassDevices
from shoal.core.devices.pools import DevicePool

_GPU_DRIVER: Final = "gpu."
"""How names of GPU drivers begin: gpu.nvidia.com, gpu.amd.com, gpu.intel.com. Others publish network adapters, CPUs or
channels."""
_PASSED_THROUGH: Final = "vfio"
"""Type of a device that is a whole GPU for a virtual machine; the same GPU is a device for containers too."""


def without_class(
    pools: Iterable[DevicePool], of_classes: Mapping[str, ClassDevices], nodes: Collection[str]
) -> dict[str, tuple[DeviceId, ...]]:
    """Node -> GPUs there that no class has. Left out are parts of a GPU of which a class has another part or the whole,
    by the counters that they share, and devices that several claims may share, which never count. None at all where the
    selectors of a class cannot be evaluated: the GPUs may be its."""
    if any(of.problem is not None for of in of_classes.values()):
        return {}
    had = [matched for of in of_classes.values() for matched in of.devices]
    ids = {matched.id for matched in had}
    counted = {(m.id.driver, m.id.pool, counters) for m in had for counters, _ in m.device.counters}
    found: dict[str, list[DeviceId]] = {}
    for pool in pools:
        if not pool.driver.startswith(_GPU_DRIVER):
            continue
        for _, device in pool.devices:
            id_ = DeviceId(pool.driver, pool.name, device.name)
            part = any((pool.driver, pool.name, counters) in counted for counters, _ in device.counters)
            usable = device.node in nodes and not device.shared and not _passed_through(pool.driver, device)
            if id_ not in ids and not part and usable:
                found.setdefault(str(device.node), []).append(id_)
    return {node: tuple(sorted(of)) for node, of in sorted(found.items())}


def _passed_through(driver: str, device: Device) -> bool:
    return device.attributes.get(f"{driver}/type") == _PASSED_THROUGH
