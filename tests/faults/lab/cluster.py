"""The lab in which faults are injected: nodes that can be broken one by one, each with a GPU class of its own."""

from typing import Any, Final

WELL: Final = "well"
"""The class of nodes on which nothing is broken."""
BROKEN: Final = (
    "silent", "xid", "ecc", "link", "both", "unplugged", "shared", "pressure", "tainted", "cordoned", "small", "single",
    "spare", "partial", "full", "nameless", "later", "held",
)  # fmt: skip
"""Classes of one node each, named for what happens to the node."""
REPORTED: Final = (
    "sick", "monitored", "readonly", "rdma", "logged", "deadlocked", "checked", "bridged", "repartitioned",
)  # fmt: skip
"""The same, of nodes on which nothing runs: what is reported of them is all that there is."""
CLASSES: Final = (WELL, *BROKEN, *REPORTED)
BARE: Final = "bare"
"""An image that has no engine."""
_PRODUCT: Final = "NVIDIA-{}"


def product(name: str) -> str:
    """Label of a class's nodes."""
    return _PRODUCT.format(name.upper())


def _node(name: str, **more: Any) -> dict[str, Any]:
    return {"name": f"{name}-1", "gpus": 2, "gpuProduct": product(name), "gpuMemoryMiB": 46068, **more}


NODES: Final[dict[str, Any]] = {
    "nodes": [
        {"name": "cpu-1"},
        _node(WELL, gpus=64),
        *(_node(name, cpu="500m" if name == "small" else "64") for name in BROKEN),
        *(_node(name, statusOnly=True) for name in REPORTED),
    ],
    "images": {BARE: {"user": 65532}},
}


def gpu_class(name: str, selector: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A GPUClass; by default of the nodes that are named for it."""
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "GPUClass",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": selector or {"nvidia.com/gpu.product": product(name)},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "memoryPerGPU": "48Gi",
            **spec,
        },
    }
