"""Who says that a GPU is not healthy: monitors by conditions of nodes, drivers by taints of devices, kubelets by the
status of pods. Shoal itself detects nothing here.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from shoal.core.devices.match import Matched
from shoal.core.facts import Node, Pod
from shoal.core.health.types import HealthSignal, Unit
from shoal.core.layers import faults, nodes, texts
from shoal.core.layers.types import ConditionView

OF_GPUS: Final = frozenset(
    {
        faults.GPU_ECC_ERROR,
        faults.GPU_LOST,
        faults.GPU_UNHEALTHY,
        faults.NVLINK_FAULT,
        faults.FABRIC_FAILED,
        faults.DRIVER_FAULT,
    }
)
"""What a node's condition may say for its GPUs to be out of use. Full disks and a device plugin that is away are not
healed by other GPUs, and the node's own state keeps pods off."""
_LONGEST: Final = 300


def of_nodes(members: Iterable[Node]) -> Iterator[HealthSignal]:
    """Conditions of a class's nodes. They do not say which GPU it is, so they are about all of the node."""
    for node in members:
        for each in node.conditions:
            reason = nodes.reason_of(ConditionView(each.type, each.status, each.reason, each.message, None))
            if reason in OF_GPUS:
                said = texts.shorten(each.message or each.reason, _LONGEST)
                yield HealthSignal(Unit(node.name), reason, f"condition {each.type} is {each.status}: {said}")


def of_devices(by_node: Mapping[str, Sequence[Matched]]) -> Iterator[HealthSignal]:
    """Taints of a class's devices that keep pods off."""
    for node, devices in by_node.items():
        for matched in devices:
            if not matched.device.offered:
                taint = next(t for t in matched.device.taints if t.effect in ("NoSchedule", "NoExecute"))
                said = texts.shorten(f"{taint.key}={taint.value}" if taint.value else taint.key, _LONGEST)
                text = f"the device has the taint {said} ({taint.effect})"
                yield HealthSignal(Unit(node, str(matched.id)), faults.GPU_UNHEALTHY, text)


def of_pods(
    pods: Iterable[Pod], gpu_class: str, claimed: Callable[[Pod], Collection[str]] = lambda _: ()
) -> Iterator[HealthSignal]:
    """Devices of a class's replicas that their kubelets call unhealthy. `claimed`: the devices in a pod's claims, as
    `driver/pool/device`."""
    for pod in pods:
        if pod.node is None or pod.finished or pod.model_uid is None or pod.gpu_class != gpu_class:
            continue
        for device in pod.devices:
            if not device.healthy and (name := _claimed(device.id, claimed(pod))):
                text = f"the kubelet says that the device, which pod {pod.key} holds, is not healthy"
                yield HealthSignal(Unit(pod.node, name), faults.GPU_UNHEALTHY, text)


def is_unnamed(pod: Pod, claimed: Collection[str]) -> bool:
    """Whether the kubelet calls a device of the pod unhealthy that may be any of several."""
    return any(not device.healthy and _claimed(device.id, claimed) is None for device in pod.devices)


def _claimed(id: str, claimed: Collection[str]) -> str | None:
    """Which device a kubelet means. One of a DRA driver it calls by its first CDI name, such as
    `k8s.gpu.nvidia.com/claim=UID-gpu-0`: drivers end it with the device's own name, but nothing binds them. None: it
    may be any of several."""
    if not claimed or id in claimed:
        return id or None
    own = f"-{id.rpartition('=')[2]}"
    fits = [each for each in claimed if own.endswith(f"-{each.rpartition('/')[2]}")]
    if len(fits) == 1:
        return fits[0]
    return next(iter(claimed)) if len(claimed) == 1 else None
