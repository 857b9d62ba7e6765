"""GPUs of a node without a device plugin: what a DRA driver publishes of them, and which of them a pod was given.

The driver and its attributes are as NVIDIA's. The scheduler allocates devices and writes that into the pod's claims;
this reads which ones. A GPU that has failed gets a taint. While its driver is replaced, a node publishes nothing.
"""

from http import HTTPStatus
from typing import Any, Final

from shoal_dev.lab.kubeapi import Api, KubeAPIError
from shoal_dev.lab.node import fields
from shoal_dev.lab.node.config import NodeSpec

Json = dict[str, Any]

DRIVER: Final = "gpu.nvidia.com"
"""Also the name of the DeviceClass."""
UNHEALTHY: Final = {"key": f"{DRIVER}/unhealthy", "value": "true", "effect": "NoSchedule"}
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
_ARCHITECTURES: Final = {
    "H100": ("Hopper", "9.0.0"),
    "A100": ("Ampere", "8.0.0"),
    "L40S": ("Ada Lovelace", "8.9.0"),
    "L4": ("Ada Lovelace", "8.9.0"),
}


class NotAllocated(Exception):
    """The pod's claim is not there, or has no devices yet: the kubelet tries again."""


def device_class() -> Json:
    """The DeviceClass that the driver's chart installs."""
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }


def resource_slice(node: NodeSpec, uid: str, healthy: int, generation: int = 1) -> Json:
    """The node's GPUs. `uid`: of its Node object, with which the slice goes. `generation`: of its pool."""
    assert node.dra is not None  # noqa: S101 - only such nodes have a slice
    product = node.dra.product
    architecture = next((found for name, found in _ARCHITECTURES.items() if name in product), None)

    def device(index: int) -> Json:
        attributes: Json = {
            "type": {"string": "gpu"},
            "uuid": {"string": f"GPU-{node.name}-{index}"},
            "productName": {"string": product},
            "driverVersion": {"version": "580.95.5"},
        }
        if architecture is not None:
            attributes["architecture"] = {"string": architecture[0]}
            attributes["cudaComputeCapability"] = {"version": architecture[1]}
        found: Json = {
            "name": f"gpu-{index}",
            "attributes": attributes,
            "capacity": {"memory": {"value": f"{node.dra.memory_mib}Mi"}} if node.dra else {},
        }
        return found | ({"taints": [UNHEALTHY]} if index >= healthy else {})

    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": uid, "controller": True}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(node.name), "ownerReferences": [owner]},
        "spec": {
            "driver": DRIVER,
            "nodeName": node.name,
            "pool": {"name": node.name, "generation": generation, "resourceSliceCount": 1},
            "devices": [device(index) for index in range(node.dra.count)],
        },
    }


def slice_name(node: str) -> str:
    return f"{node}-{DRIVER}"


async def publish(api: Api, node: NodeSpec, uid: str, healthy: int, generation: int = 1) -> None:
    """Creates the slice, or replaces what it says of the devices: its pool's generation stays then. Raises KubeAPIError
    and connection errors."""
    wanted = resource_slice(node, uid, healthy, generation)
    path = f"{SLICES}/{wanted['metadata']['name']}"
    try:
        await api.request("POST", SLICES, wanted)
    except KubeAPIError as error:
        if error.status != HTTPStatus.CONFLICT:
            raise
        found = await api.request("GET", path)
        wanted["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
        wanted["spec"]["pool"]["generation"] = found["spec"]["pool"]["generation"]
        await api.request("PUT", path, wanted)


async def withdraw(api: Api, node: NodeSpec) -> None:
    """Deletes the slice, if there is one. Raises KubeAPIError and connection errors."""
    try:
        await api.request("DELETE", f"{SLICES}/{slice_name(node.name)}")
    except KubeAPIError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


async def allocated(api: Api, node: NodeSpec, pod: Json) -> dict[str, list[int]]:
    """The pod's claim -> indexes of this node's GPUs. Raises NotAllocated and connection errors."""
    names = {
        status["name"]: status.get("resourceClaimName")
        for status in fields.items(fields.mapping(pod, "status"), "resourceClaimStatuses")
    }
    found: dict[str, list[int]] = {}
    for claim in fields.items(pod["spec"], "resourceClaims"):
        name = claim.get("resourceClaimName") or names.get(claim["name"])
        if not name:
            raise NotAllocated(f"claim {claim['name']} was not made yet")
        path = f"/apis/resource.k8s.io/v1/namespaces/{pod['metadata']['namespace']}/resourceclaims/{name}"
        try:
            status = fields.mapping(await api.request("GET", path), "status")
        except KubeAPIError as error:
            raise NotAllocated(f"claim {name}: {error}") from error
        users = {user.get("uid") for user in fields.items(status, "reservedFor")}
        if pod["metadata"]["uid"] not in users:
            raise NotAllocated(f"claim {name} is not reserved for the pod")
        results = fields.items(fields.mapping(fields.mapping(status, "allocation"), "devices"), "results")
        found[claim["name"]] = [
            int(result["device"].removeprefix("gpu-"))
            for result in results
            if (result["driver"], result["pool"]) == (DRIVER, node.name)
        ]
    return found
