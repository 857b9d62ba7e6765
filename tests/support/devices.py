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
    `!!` a taint that also evicts them."""
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


def _device(node: str, name: str) -> JsonObject:
    device: JsonObject = {
        "name": name.rstrip("!"),
        "attributes": {
            "cudaComputeCapability": {"version": "9.0.0"},
            "uuid": {"string": f"GPU-{node}-{name.rstrip('!')}"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    }
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
