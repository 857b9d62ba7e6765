"""What can be done to a lab's node from outside: a failed GPU, a driver that is away, a replaced machine."""

import shutil
import time
from typing import TYPE_CHECKING, Any, Final

import orjson

from shoal_dev.lab.errors import LabError
from shoal_dev.lab.node.config import GPU_RESOURCE
from shoal_dev.lab.node.devices import slice_name
from shoal_dev.lab.node.ownnode import AWAY, DRA_DRIVER, HEALTHY_GPUS

if TYPE_CHECKING:
    from shoal_dev.lab.api import Lab

_REPORT_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1


def set_gpu_health(lab: "Lab", node: str, healthy: int) -> None:
    """Returns when the node says so in `status.allocatable`, or by taints of its devices. Raises LabError."""
    devices_before = _devices(lab, node)
    capacity = len(devices_before) or _gpus(lab, node, "capacity")
    if not capacity:
        raise LabError(f"node {node} has no GPUs")
    if not 0 <= healthy <= capacity:
        raise LabError(f"node {node} has {capacity} GPUs: --healthy takes 0 to {capacity}")
    lab.kubectl("annotate", "node", node, f"{HEALTHY_GPUS}={healthy}", "--overwrite")
    deadline = time.monotonic() + _REPORT_TIMEOUT_S

    def reported() -> int | None:
        if devices_before:
            return sum(not device.get("taints") for device in _devices(lab, node))
        return _gpus(lab, node, "allocatable")

    while reported() != healthy:
        if time.monotonic() > deadline:
            raise LabError(f"node {node} does not report {healthy} healthy GPUs: is it switched off, or status-only?")
        time.sleep(_POLL_S)


def set_driver(lab: "Lab", node: str, *, there: bool) -> None:
    """Returns when the node's devices are published, or are not any more. Raises LabError."""
    lab.kubectl("annotate", "node", node, f"{DRA_DRIVER}-" if there else f"{DRA_DRIVER}={AWAY}", "--overwrite")
    deadline = time.monotonic() + _REPORT_TIMEOUT_S
    while bool(_devices(lab, node)) != there:
        if time.monotonic() > deadline:
            state = "does not publish its devices" if there else "still publishes its devices"
            raise LabError(f"node {node} {state}: is it switched off, or has it none?")
        time.sleep(_POLL_S)


def _devices(lab: "Lab", node: str) -> list[dict[str, Any]]:
    """The devices in the node's ResourceSlice; empty: it has none."""
    text = lab.kubectl("get", "resourceslices", slice_name(node), "--ignore-not-found", "-o", "json")
    return orjson.loads(text)["spec"]["devices"] if text.strip() else []


def _gpus(lab: "Lab", node: str, what: str) -> int | None:
    status = orjson.loads(lab.kubectl("get", "node", node, "-o", "json"))["status"]
    value = status.get(what, {}).get(GPU_RESOURCE)
    return None if value is None else int(value)


def replace(lab: "Lab", node: str) -> None:
    """Another machine under the same name: empty disk, new Node object. Raises LabError.

    Pods that were bound to the name are started again there, as nobody has told them otherwise.
    """
    running = {p.name: p.running for p in lab.status().processes}
    name = f"node-{node}"
    if name not in running:
        raise LabError(f"no process {name!r} in this lab; there are: {', '.join(running)}")
    if running[name]:
        lab.kill_node(node)
    lab.kubectl("delete", "node", node, "--ignore-not-found", "--wait=false")
    shutil.rmtree(lab.paths.node_disk(node), ignore_errors=True)
    lab.start_node(node)
