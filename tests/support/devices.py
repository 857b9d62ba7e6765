"""What a DRA driver publishes, and GPUClasses of its devices."""

from typing import Any, Final

from shoal.api.meta import API_VERSION, JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
from shoal.kube.resources import DEVICECLASSES, RESOURCESLICES

DRIVER: Final = "gpu.test"


def device_class() -> JsonObject:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
    }


def class_of_devices(name: str, *expressions: str, **spec: Any) -> JsonObject:
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    return {
        "apiVersion": API_VERSION,
        "kind": "GPUClass",
        "metadata": {"name": name},
        "spec": {
            "device": {"deviceClassName": DRIVER, "selectors": selectors},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            **spec,
        },
    }


def resource_slice(node: str, *devices: str, generation: int = 1, part: int = 0, parts: int = 1) -> JsonObject:
    """A part of the pool of a node: devices by name. One that ends with `!` has a taint that keeps pods off, one with
    `!!` a taint that also evicts them, and of one with `*` several claims may have a part."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{generation}-{part}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": parts},
            "devices": [_device(node, name) for name in devices],
        },
    }


PARTITIONS: Final = {"3g.40gb": ("40448Mi", 60, 4, (0, 4)), "1g.10gb": ("9984Mi", 16, 1, range(7))}
"""Of an H100: MIG profile -> memory, multiprocessors, memory slices, and the slices at which one may begin."""


def partitioned(node: str) -> tuple[JsonObject, JsonObject]:
    """The pool of a node with one H100 of which a driver makes partitions when they are claimed, as that of NVIDIA
    does: what they share, and the GPU with everything that could be made of it."""
    slices = {f"memory-slice-{i}": {"value": "1"} for i in range(8)}
    every = {"memory": {"value": "81559Mi"}, "multiprocessors": {"value": "132"}, **slices}
    found = [_partition("gpu-0", {"type": {"string": "gpu"}}, "81559Mi", every)]
    for profile, (memory, processors, size, starts) in PARTITIONS.items():
        for start in starts:
            takes = {"memory": {"value": memory}, "multiprocessors": {"value": str(processors)}}
            takes |= {f"memory-slice-{i}": {"value": "1"} for i in range(start, start + size)}
            attributes = {"type": {"string": "mig"}, "profile": {"string": profile}}
            found.append(_partition(f"gpu-0-mig-{profile.replace('.', '')}-{start}", attributes, memory, takes))
    shared, devices = (resource_slice(node, part=part, parts=2) for part in (0, 1))
    del shared["spec"]["devices"]
    shared["spec"]["sharedCounters"] = [{"name": "gpu-0", "counters": every}]
    devices["spec"]["devices"] = found
    return shared, devices


def _partition(name: str, attributes: JsonObject, memory: str, takes: JsonObject) -> JsonObject:
    return {
        "name": name,
        "attributes": {"cudaComputeCapability": {"version": "9.0.0"}, **attributes},
        "capacity": {"memory": {"value": memory}},
        "consumesCounters": [{"counterSet": "gpu-0", "counters": takes}],
    }


def _device(node: str, name: str) -> JsonObject:
    device: JsonObject = {
        "name": name.rstrip("!*"),
        "attributes": {
            "cudaComputeCapability": {"version": "9.0.0"},
            "uuid": {"string": f"GPU-{node}-{name.rstrip('!*')}"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    }
    if name.endswith("*"):
        device["allowMultipleAllocations"] = True
    effect = "NoExecute" if name.endswith("!!") else "NoSchedule"
    taints = [{"key": "unhealthy", "value": "true", "effect": effect}]
    return device | ({"taints": taints} if name.endswith("!") else {})


async def clear_devices(client: KubeClient) -> None:
    """Takes away all slices and the DeviceClass."""
    for name in [o["metadata"]["name"] async for o in client.list(RESOURCESLICES)]:
        await client.delete(RESOURCESLICES, name)
    try:
        await client.delete(DEVICECLASSES, DRIVER)
    except NotFound:
        return
