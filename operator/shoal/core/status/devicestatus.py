"""The condition Ready of a GPUClass whose GPUs are devices, and what its devices say of themselves."""

from collections.abc import Iterable
from typing import Final

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass, ObservedDevices
from shoal.core import quantity
from shoal.core.devices import ClassDevices, DeviceFacts
from shoal.core.gpus import Usage
from shoal.core.status.conditions import ConditionUpdate

TOLERANCE_PERCENT: Final = 15
"""Tolerated difference between a data sheet and what a driver says of a GPU's memory."""
_NAMED: Final = 3
_MI: Final = 2**20

NOT_SERVED: Final = (
    "the API server does not serve resource.k8s.io/v1, which Kubernetes has from 1.34 on: upgrade it, or use "
    "`resourceName` with the device plugin in place of `device`"
)
NOT_LISTED: Final = "the ResourceSlices of the cluster are not listed yet: may the operator list them?"


def observed(facts: DeviceFacts | None) -> ObservedDevices | None:
    """For the status; None: there is no device."""
    if facts is None:
        return None
    capability = facts.compute_capability
    return ObservedDevices(
        drivers=facts.drivers,
        products=facts.products,
        architecture=facts.architecture,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        profile=facts.profile,
    )


def unavailable(*, served: bool) -> ConditionUpdate:
    """There are no devices: the API server knows none, or they are not listed yet."""
    if served:
        return ConditionUpdate(reasons.READY, "Unknown", reasons.PENDING, NOT_LISTED)
    return ConditionUpdate(reasons.READY, "False", reasons.DRA_UNAVAILABLE, NOT_SERVED)


def ready(
    gpu_class: GPUClass, usage: Usage, devices: ClassDevices, facts: DeviceFacts | None, memory: int
) -> ConditionUpdate:
    """`memory`: bytes of one GPU as sizing uses it; 0: unknown."""
    spec = gpu_class.spec
    assert spec.device is not None  # noqa: S101 - the caller chose such a class
    elsewhere = _elsewhere(devices)
    if devices.problem is not None:
        return ConditionUpdate(reasons.READY, "False", devices.problem.reason, devices.problem.message)
    if not usage.capacity and (parts := shared(devices)):
        return ConditionUpdate(reasons.READY, "False", reasons.SHARED_GPUS, "; ".join([parts, *_notes(devices)]))
    if not usage.capacity:
        reason = reasons.OVERLAPS if elsewhere else reasons.NO_DEVICES
        why = elsewhere or f"no device of DeviceClass {spec.device.device_class_name} is selected"
        return ConditionUpdate(reasons.READY, "False", reason, "; ".join([why, *_notes(devices)]))
    if not memory:
        text = f"{usage.capacity} devices without a capacity `memory`: set `memoryPerGPU`, or no Model is placed"
        return ConditionUpdate(reasons.READY, "False", reasons.MEMORY_UNKNOWN, text)
    text = f"{usage.nodes} nodes with {usage.capacity} devices"
    if usage.unhealthy:
        text += f", {usage.unhealthy} of them with a taint or out of use"
        if any(matched.device.counters for matched in devices.devices):
            text += ", or used up by claims of other partitions of their GPU"
    text = "; ".join([text, *_notes(devices)])
    if spec.hourly_cost is None:
        text += "; no hourlyCost: it is used after all classes that have one"
    if elsewhere:
        return ConditionUpdate(reasons.READY, "True", reasons.OVERLAPS, f"{elsewhere}. {text}")
    if wrong := _disagreement(gpu_class, facts):
        return ConditionUpdate(reasons.READY, "True", reasons.LABELS_DISAGREE, f"{wrong}. {text}")
    return ConditionUpdate(reasons.READY, "True", reasons.NODES_FOUND, text)


def shared(devices: ClassDevices) -> str:
    """Which devices do not count because several claims may have a part of them; empty: none."""
    found, every = devices.shared, len(devices.devices)
    if not found:
        return ""
    text = (
        f"{len(found)} of {every} devices do not count, since several claims may share them and a part of a GPU has no "
        f"memory of its own: {_some(str(i) for i in found)}. Let the driver publish them for one claim each"
    )
    if len(found) == every:
        return text
    return (
        f"{text}, or leave them out with `!device.allowMultipleAllocations` in spec.device.selectors: until then the "
        "scheduler may give one to a replica"
    )


def _elsewhere(devices: ClassDevices) -> str:
    """Names both classes' devices: this class's message is about the others."""
    if not devices.elsewhere:
        return ""
    told = (f"{_some(str(i) for i in ids)} count for GPUClass {name}" for name, ids in devices.elsewhere.items())
    return f"devices that this class selects too: {'; '.join(told)}: make the selectors exclude each other"


def _notes(devices: ClassDevices) -> list[str]:
    notes: list[str] = []
    if devices.of_many_nodes:
        notes.append(f"{devices.of_many_nodes} devices that several nodes can use are not counted")
    if devices.updating:
        notes.append(f"the driver is replacing the slices of {_some(devices.updating)}; the last ones count")
    if devices.incomplete:
        notes.append(f"slices of the pools {_some(devices.incomplete)} are not all there, so these do not count")
    return notes


def _disagreement(gpu_class: GPUClass, facts: DeviceFacts | None) -> str:
    spec = gpu_class.spec
    if facts is None or not facts.memory or spec.memory_per_gpu is None:
        return ""
    wanted = int(quantity.parse(spec.memory_per_gpu))
    if abs(facts.memory - wanted) * 100 <= wanted * TOLERANCE_PERCENT:
        return ""
    return f"a device has {facts.memory // _MI} MiB of memory, memoryPerGPU says {spec.memory_per_gpu}"


def _some(found: Iterable[str]) -> str:
    ordered = sorted(found)
    shown = ", ".join(ordered[:_NAMED])
    return f"{shown} and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else shown
