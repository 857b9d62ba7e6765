"""The status of a GPUClass."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final

from shoal.api import reasons
from shoal.api.gpuclass import (
    ConsolidatedNode,
    GPUClass,
    GPUClassStatus,
    GPUMemory,
    NodeOutageStatus,
    QuarantinedGPUs,
)
from shoal.core import quantity
from shoal.core.devices import ClassDevices, DeviceFacts
from shoal.core.facts import Node
from shoal.core.gpus import Usage
from shoal.core.layers.texts import shorten
from shoal.core.placement.outages import NodeOutage
from shoal.core.sharing import describe as describe_shared
from shoal.core.sharing import partition, sharing
from shoal.core.sizing import last_devices, memory_label, memory_of
from shoal.core.status import devicestatus
from shoal.core.status.conditions import ConditionUpdate, merge

PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
TOLERANCE_PERCENT: Final = 15
"""Tolerated difference between a data sheet and nvidia-smi: ECC, and GB against GiB, take up to 13 %."""
_NAMED: Final = 3
_LONGEST_STORED: Final = 512
_MI: Final = 2**20


def status(
    gpu_class: GPUClass,
    usage: Usage,
    nodes: Sequence[Node],
    *,
    overlapping: Mapping[str, str],
    overhead: int | None,
    now: datetime,
    twice: Mapping[str, str] = MappingProxyType({}),
    devices: ClassDevices | None = None,
    facts: DeviceFacts | None = None,
    unavailable: ConditionUpdate | None = None,
    quarantined: Sequence[QuarantinedGPUs] = (),
    health: ConditionUpdate | None = None,
    consolidation: ConsolidatedNode | None = None,
    consolidating: ConditionUpdate | None = None,
    node_wait: int | None = None,
    outage: NodeOutage | None = None,
) -> GPUClassStatus:
    """Ready when nodes match; with their number and GPUs.

    `nodes`: those that count for the class; `overlapping`: nodes with its labels that count for another class -> that
    class; `twice`: nodes that have devices of another class too -> that class. `overhead`: measured, in bytes of one
    GPU. Of a class with `device`: its `devices`, what they say of themselves (`facts`), and why there are none in this
    cluster (`unavailable`). `health`: what is to be said of GPUs that are out of use, or should be. `consolidation`:
    the node that is being emptied; `consolidating`: the same as a condition, or why none is. `node_wait`: seconds in
    which an autoscaler added a node; `outage`: why it is not expected to add another one.
    """
    generation = gpu_class.metadata.generation
    memory, source = memory_of(gpu_class, nodes, facts)
    autoscaled = gpu_class.spec.nodes.autoscaled
    coming = autoscaled.gpus_per_node if autoscaled is not None else 0
    if gpu_class.spec.device is None:
        found = _ready(gpu_class, usage, nodes, overlapping, twice)
    else:
        found = devicestatus.ready(gpu_class, usage, devices or ClassDevices(), facts, memory)
    largest = max(*(n.capacity.get(gpu_class.resource, 0) for n in nodes), coming, 0)
    said = devicestatus.observed(facts) or last_devices(gpu_class)
    if (said is not None and said.profile) or partition(nodes, gpu_class.resource) is not None:
        largest = min(1, largest)
    # Kept until an engine reports another value: an operator that has just started knows none.
    known = gpu_class.status.memory.overhead if gpu_class.status and gpu_class.status.memory else None
    return GPUClassStatus(
        conditions=merge(
            gpu_class.status.conditions if gpu_class.status else (),
            [
                unavailable or found,
                *(each for each in (health, consolidating) if each is not None),
                *_no_nodes(outage),
                *_shared(gpu_class, nodes, devices),
            ],
            generation=generation,
            now=now,
        ),
        observed_generation=generation,
        nodes=usage.nodes,
        gpus=usage.counts(),
        memory=GPUMemory(
            per_gpu=quantity.memory(quantity.parse(memory)),
            source=source,
            overhead=quantity.memory(quantity.parse(overhead)) if overhead is not None else known,
        ),
        largest_node=largest,
        devices=said,
        quarantined=tuple(quarantined),
        consolidation=consolidation,
        provision_seconds=node_wait if autoscaled is not None else None,
        node_outage=_shown(outage) if outage is not None else None,
    )


def _no_nodes(outage: NodeOutage | None) -> list[ConditionUpdate]:
    """The condition NodesAvailable, while no node is expected."""
    if outage is None:
        return []
    text = f"{outage.why}; until {outage.until:%Y-%m-%dT%H:%M:%SZ} Models take GPUs of other classes first"
    return [ConditionUpdate(reasons.NODES_AVAILABLE, "False", outage.reason, text)]


def _shown(outage: NodeOutage) -> NodeOutageStatus:
    return NodeOutageStatus(
        reason=outage.reason,
        message=shorten(outage.why, _LONGEST_STORED),
        since=outage.since,
        until=outage.until,
    )


def _shared(gpu_class: GPUClass, nodes: Sequence[Node], devices: ClassDevices | None) -> list[ConditionUpdate]:
    """The condition SharedGPUs, if nodes or devices of the class are shared."""
    if gpu_class.spec.device is None:
        text = describe_shared(nodes, gpu_class.resource)
    else:
        text = devicestatus.shared(devices) if devices is not None else ""
    return [ConditionUpdate(reasons.SHARED_GPUS, "True", reasons.SHARED_GPUS, text)] if text else []


def _ready(
    gpu_class: GPUClass,
    usage: Usage,
    nodes: Sequence[Node],
    overlapping: Mapping[str, str],
    twice: Mapping[str, str],
) -> ConditionUpdate:
    spec, resource = gpu_class.spec, gpu_class.resource
    shared = _overlap(overlapping)
    if not usage.capacity and not shared and (autoscaled := spec.nodes.autoscaled) is not None:
        text = (
            f"no node with GPUs now; an autoscaler adds up to {autoscaled.max} with {autoscaled.gpus_per_node} x "
            f"{resource} each, in about {autoscaled.provision_seconds} s"
        )
        return ConditionUpdate(reasons.READY, "True", reasons.AUTOSCALED, text)
    if not nodes:
        labels = ", ".join(f"{k}={v}" for k, v in sorted(spec.node_selector.items()))
        why = shared or f"no node has the labels {labels}"
        return ConditionUpdate(reasons.READY, "False", reasons.OVERLAPS if shared else reasons.NO_NODES, why)
    if not usage.capacity and (parts := describe_shared(nodes, resource)):
        return ConditionUpdate(reasons.READY, "False", reasons.SHARED_GPUS, parts)
    if not usage.capacity:
        text = f"{usage.nodes} nodes match, none has {resource}: does the device plugin run there?"
        return ConditionUpdate(reasons.READY, "False", reasons.NO_NODES, text)
    text = f"{usage.nodes} nodes with {usage.capacity} x {resource}"
    if usage.unhealthy:
        text += f", {usage.unhealthy} of them unhealthy"
    if spec.nodes.autoscaled is not None:
        text += f"; an autoscaler adds up to {spec.nodes.autoscaled.max} nodes in all"
    if spec.hourly_cost is None:
        text += "; no hourlyCost: it is used after all classes that have one"
    if wrong := disagreements(gpu_class, nodes):
        return ConditionUpdate(reasons.READY, "True", reasons.LABELS_DISAGREE, f"{'; '.join(wrong)}. {text}")
    if said := "; ".join(each for each in (shared, _twice(twice, resource)) if each):
        return ConditionUpdate(reasons.READY, "True", reasons.OVERLAPS, f"{said}. {text}")
    return ConditionUpdate(reasons.READY, "True", reasons.NODES_FOUND, text)


def _overlap(overlapping: Mapping[str, str]) -> str:
    if not overlapping:
        return ""
    others = ", ".join(sorted(set(overlapping.values())))
    return (
        f"{_names(overlapping)} also ha{'s' if len(overlapping) == 1 else 've'} the labels of {others} and "
        f"count{'s' if len(overlapping) == 1 else ''} there: make the selectors exclude each other"
    )


def _twice(twice: Mapping[str, str], resource: str) -> str:
    if not twice:
        return ""
    return (
        f"{_names(twice)} offer{'s' if len(twice) == 1 else ''} both {resource} and devices of GPUClass "
        f"{', '.join(sorted(set(twice.values())))}: where these are the same GPUs, each counts twice, so let either "
        "the device plugin or the DRA driver hand them out on a node"
    )


def disagreements(gpu_class: GPUClass, nodes: Iterable[Node]) -> list[str]:
    """Sentences about nodes whose labels contradict the class."""
    spec, resource = gpu_class.spec, gpu_class.resource
    wanted = int(quantity.parse(spec.memory_per_gpu or 0))
    memory: dict[int, list[str]] = {}
    products: dict[str, list[str]] = {}
    without: list[str] = []
    label = memory_label(resource)
    for node in nodes:
        text = node.labels.get(label, "")
        if text.isdecimal() and abs(int(text) * _MI - wanted) * 100 > wanted * TOLERANCE_PERCENT:
            memory.setdefault(int(text), []).append(node.name)
        if product := node.labels.get(PRODUCT_LABEL):
            products.setdefault(product, []).append(node.name)
        vendor = resource.partition("/")[0]
        others = [name for name, count in node.capacity.items() if count and name.startswith(f"{vendor}/")]
        if others and not node.capacity.get(resource) and sharing(node, resource) is None:
            without.append(node.name)
    found = [
        f"{_names(names)}: label {label} says {mib} MiB, memoryPerGPU says {spec.memory_per_gpu}"
        for mib, names in sorted(memory.items())
    ]
    if len(products) > 1:
        kinds = ", ".join(f"{product} ({_names(names)})" for product, names in sorted(products.items()))
        found.append(f"its nodes have different products: {kinds}")
    if without:
        found.append(f"{_names(without)}: has no {resource} but another resource of its vendor")
    return found


def _names(nodes: Iterable[str]) -> str:
    ordered = sorted(nodes)
    shown = ", ".join(ordered[:_NAMED])
    return f"{shown} and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else shown
