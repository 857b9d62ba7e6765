"""The GPU of a class, from the class's spec and status and the labels of its nodes."""

from collections.abc import Iterable
from typing import Literal

from shoal.api.gpuclass import GPUClass, ObservedDevices
from shoal.core import quantity
from shoal.core.devices.say import DeviceFacts
from shoal.core.facts import Node
from shoal.core.sharing import partition
from shoal.core.sizing.types import GPU

_MI = 2**20
_MOST_MEMORY = 2**48
"""Bytes of one GPU, at most."""
_DIGITS = 9
"""Digits of a GPU's MiB, at most."""


def memory_label(resource_name: str) -> str:
    """The node label with the MiB of one GPU, as GPU feature discovery writes it: nvidia.com/gpu.memory, and
    nvidia.com/mig-3g.40gb.memory for a MIG profile."""
    return f"{resource_name}.memory"


def memory_of(
    gpu_class: GPUClass, nodes: Iterable[Node], devices: DeviceFacts | None = None
) -> tuple[int, Literal["NodeLabels", "Devices", "Spec"]]:
    """Bytes of one GPU, and where they come from; `nodes` are those of the class, `devices` what its devices say. The
    smallest counts: a replica may land on any node. 0: nobody says it.

    Of devices that are gone for now, such as while their driver is replaced, what they said last counts.
    """
    spec, status = gpu_class.spec, gpu_class.status
    if spec.extended_resource is None:
        if devices is not None and devices.memory:
            return min(devices.memory, _MOST_MEMORY), "Devices"
        last = status.memory if status is not None else None
        if last is not None and last.source == "Devices" and not devices:
            return min(int(quantity.parse(last.per_gpu)), _MOST_MEMORY), "Devices"
        return min(int(quantity.parse(spec.memory_per_gpu or 0)), _MOST_MEMORY), "Spec"
    label = memory_label(spec.extended_resource)
    labelled = [mib for n in nodes if (mib := _mib(n.labels.get(label, "")))]
    found = min(labelled) * _MI if labelled else int(quantity.parse(spec.memory_per_gpu or 0))
    return min(found, _MOST_MEMORY), "NodeLabels" if labelled else "Spec"


def last_devices(gpu_class: GPUClass) -> ObservedDevices | None:
    """What devices said last of themselves, by the status of the class. None: nothing, or of another selection."""
    status = gpu_class.status
    if gpu_class.spec.device is None or status is None or status.observed_generation != gpu_class.metadata.generation:
        return None
    return status.devices


def _mib(text: str) -> int:
    """The MiB in a label; 0: no number, or one that no GPU has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0


def _version(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() and text.isascii() else None


def gpu_of(gpu_class: GPUClass, nodes: Iterable[Node], devices: DeviceFacts | None = None) -> GPU:
    """The GPU of a class; `nodes` are those of the class, `devices` what its devices say. Without them the class's spec
    counts, and what they said last.

    The measured overhead comes from the class's status. Raises ValueError for a quantity that does not parse.
    """
    spec, status = gpu_class.spec, gpu_class.status
    own = list(nodes)
    memory, _ = memory_of(gpu_class, own, devices)
    overhead = status.memory.overhead if status and status.memory else None
    sizes = [n.capacity.get(gpu_class.resource, 0) for n in own]
    last = last_devices(gpu_class) if devices is None else None
    profile = devices.profile if devices is not None else last is not None and last.profile
    if profile or partition(own, gpu_class.resource) is not None:
        sizes = [1]  # CUDA gives a process one partition of a GPU, however many its pod has
    if spec.nodes.autoscaled is not None:
        sizes.append(spec.nodes.autoscaled.gpus_per_node)
    text = spec.compute_capability or (last.compute_capability if last is not None else None)
    capability = _version(text) if text else devices.compute_capability if devices is not None else None
    return GPU(
        name=gpu_class.metadata.name,
        memory_bytes=memory,
        overhead_bytes=None if overhead is None else int(quantity.parse(overhead)),
        compute_capability=capability,
        largest_node=max(sizes, default=0) or None,
    )
