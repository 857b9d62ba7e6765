"""What the status of a GPUClass says."""

from datetime import datetime

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass, GPUClassStatus
from shoal.core.conditions import Finding, merge
from shoal.core.gpus import Usage


def status(gpu_class: GPUClass, usage: Usage, now: datetime) -> GPUClassStatus:
    """Ready when nodes match; their number and GPUs stand beside it."""
    spec = gpu_class.spec
    if not usage.nodes:
        labels = ", ".join(f"{k}={v}" for k, v in sorted(spec.node_selector.items()))
        finding = Finding(reasons.READY, "False", reasons.NO_NODES, f"no node has the labels {labels}")
    elif not usage.capacity:
        text = f"{usage.nodes} nodes match, none has {spec.resource_name}: does the device plugin run there?"
        finding = Finding(reasons.READY, "False", reasons.NO_NODES, text)
    else:
        text = f"{usage.nodes} nodes with {usage.capacity} x {spec.resource_name}"
        finding = Finding(reasons.READY, "True", reasons.NODES_FOUND, text)
    generation = gpu_class.metadata.generation
    return GPUClassStatus(
        conditions=merge(
            gpu_class.status.conditions if gpu_class.status else (), [finding], generation=generation, now=now
        ),
        observed_generation=generation,
        nodes=usage.nodes,
        gpus=usage.counts(),
    )
