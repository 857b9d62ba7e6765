"""The GPU of a class, from the class's spec and status and the labels of its nodes."""

from collections.abc import Iterable

from shoal.api.gpuclass import GPUClass
from shoal.core import quantity
from shoal.core.facts import Node
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


def memory_of(gpu_class: GPUClass, nodes: Iterable[Node]) -> tuple[int, bool]:
    """Bytes of one GPU, and whether they come from node labels; `nodes` are those of the class. The smallest counts: a
    replica may land on any node."""
    label = memory_label(gpu_class.spec.resource_name)
    labelled = [mib for n in nodes if (mib := _mib(n.labels.get(label, "")))]
    found = min(labelled) * _MI if labelled else int(quantity.parse(gpu_class.spec.memory_per_gpu))
    return min(found, _MOST_MEMORY), bool(labelled)


def _mib(text: str) -> int:
    """The MiB in a label; 0: no number, or one that no GPU has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0


def gpu_of(gpu_class: GPUClass, nodes: Iterable[Node]) -> GPU:
    """The GPU of a class; `nodes` are those of the class. Without nodes the class's spec alone counts.

    The measured overhead comes from the class's status. Raises ValueError for a quantity that does not parse.
    """
    spec, status = gpu_class.spec, gpu_class.status
    own = list(nodes)
    memory, _ = memory_of(gpu_class, own)
    overhead = status.memory.overhead if status and status.memory else None
    sizes = [n.capacity.get(spec.resource_name, 0) for n in own]
    if spec.nodes.autoscaled is not None:
        sizes.append(spec.nodes.autoscaled.gpus_per_node)
    capability = spec.compute_capability.split(".") if spec.compute_capability else None
    return GPU(
        name=gpu_class.metadata.name,
        memory_bytes=memory,
        overhead_bytes=None if overhead is None else int(quantity.parse(overhead)),
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        largest_node=max(sizes, default=0) or None,
    )
