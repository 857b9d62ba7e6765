"""GPUs that are not there, for a cluster without any: so that the demo can place simulated engines.

Nodes get the labels that GPU feature discovery would write and a capacity of `nvidia.com/gpu`. Only on a cluster in
which no node has that resource; what was changed is remembered in an annotation on the node, and `undo` takes it away.
"""

import json

from shoal.api.meta import GROUP
from shoal_dev.demo.clusters import DemoCluster

RESOURCE = "nvidia.com/gpu"
ANNOTATION = f"{GROUP}/demo-fake-gpus"
PRODUCTS = ("NVIDIA-L40S", "NVIDIA-H100-80GB-HBM3", "NVIDIA-L4")
GPUS_PER_NODE = 4


def present(cluster: DemoCluster) -> bool:
    """Whether any node of the cluster has GPUs."""
    return any(
        int(node["status"].get("capacity", {}).get(RESOURCE, "0")) and ANNOTATION not in _annotations(node)
        for node in cluster.get("nodes")
    )


def pretend(cluster: DemoCluster) -> list[str]:
    """Gives every schedulable node fake GPUs, one product after the other. Returns a line per node for the user."""
    announced: list[str] = []
    nodes = [n for n in cluster.get("nodes") if not n["spec"].get("unschedulable")]
    for i, node in enumerate(nodes):
        name, product = node["metadata"]["name"], PRODUCTS[i % len(PRODUCTS)]
        labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.present": "true"}
        metadata = {"metadata": {"labels": labels, "annotations": {ANNOTATION: json.dumps(sorted(labels))}}}
        cluster.kubectl("patch", "node", name, "--type=merge", "-p", json.dumps(metadata))
        amount = {RESOURCE: str(GPUS_PER_NODE)}
        # A kubelet keeps what it does not know and works out allocatable itself, within ten seconds; this is sooner.
        capacity = {"status": {"capacity": amount, "allocatable": amount}}
        cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(capacity))
        announced.append(f"{name}: {GPUS_PER_NODE} x {product}")
    return announced


def undo(cluster: DemoCluster) -> None:
    """Takes the fake GPUs away again."""
    for node in cluster.get("nodes"):
        if not (labels := _annotations(node).get(ANNOTATION)):
            continue
        name = node["metadata"]["name"]
        capacity = {"status": {"capacity": {RESOURCE: None}, "allocatable": {RESOURCE: None}}}
        cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(capacity))
        metadata = {
            "metadata": {"labels": dict.fromkeys(json.loads(labels)), "annotations": {ANNOTATION: None}},
        }
        cluster.kubectl("patch", "node", name, "--type=merge", "-p", json.dumps(metadata))


def _annotations(node: dict[str, dict[str, dict[str, str]]]) -> dict[str, str]:
    return node["metadata"].get("annotations", {})
