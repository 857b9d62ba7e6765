"""The real Karpenter on a test's control plane. Its kwok provider makes Node objects instead of machines, and
`run_nodes` says of them what a kubelet would say."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import yaml

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import Conflict, NotFound
from shoal.kube.resources import NODES, Resource
from shoal_dev.lab import karpenter
from shoal_dev.lab.gobuild import MANIFESTS
from tests.support.controlplane import ControlPlane, free_ports

NODE_POOLS: Final = Resource("karpenter.sh", "v1", "nodepools", "NodePool", namespaced=False)
NODE_CLAIMS: Final = Resource("karpenter.sh", "v1", "nodeclaims", "NodeClaim", namespaced=False)
NODE_CLASSES: Final = Resource("karpenter.kwok.sh", "v1alpha1", "kwoknodeclasses", "KWOKNodeClass", namespaced=False)
_GPU: Final = "nvidia.com/gpu"


def instance_type(name: str, gpus: int, price: float) -> JsonObject:
    offered = {"karpenter.sh/capacity-type": "on-demand", "topology.kubernetes.io/zone": "test-a"}
    requirements = [{"key": key, "operator": "In", "values": [value]} for key, value in offered.items()]
    return {
        "name": name,
        "offerings": [{"Price": price, "Available": True, "Requirements": requirements}],
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": {"cpu": "192", "memory": "2Ti", "pods": "110", "ephemeral-storage": "100Ti"}
        | ({_GPU: str(gpus)} if gpus else {}),
    }


def node_pool(
    name: str,
    labels: dict[str, str],
    instance: str,
    *,
    limits: dict[str, str] | None = None,
    consolidation: str = "WhenEmpty",
) -> JsonObject:
    """A pool of nodes of one instance type, which have `labels` and the usual taint of GPU nodes."""
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "disruption": {"consolidationPolicy": consolidation, "consolidateAfter": "5s"},
            **({"limits": limits} if limits else {}),
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
                    "requirements": [
                        {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": [instance]}
                    ],
                    "taints": [{"key": _GPU, "value": "present", "effect": "NoSchedule"}],
                    "expireAfter": "Never",
                },
            },
        },
    }


NODE_CLASS: Final[JsonObject] = {
    "apiVersion": "karpenter.kwok.sh/v1alpha1",
    "kind": "KWOKNodeClass",
    "metadata": {"name": "default"},
    "spec": {},
}


@contextlib.contextmanager
def running_karpenter(plane: ControlPlane, folder: Path, types: list[JsonObject]) -> Generator[Path]:
    """Karpenter until the block ends; yields its log."""
    found = karpenter.find_or_build(lambda _line: None)
    for crd in sorted((found / MANIFESTS).glob("*.yaml")):
        plane.run_kubectl("apply", "--server-side", "-f", str(crd))
    plane.run_kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    plane.run_kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(NODE_CLASS))
    (folder / "instance-types.json").write_text(json.dumps(types))
    metrics, health = free_ports(2)
    settings = {
        "KUBECONFIG": str(plane.kubeconfig),
        "DISABLE_LEADER_ELECTION": "true",
        "SYSTEM_NAMESPACE": "kube-system",
        "METRICS_PORT": str(metrics),
        "HEALTH_PROBE_PORT": str(health),
        "BATCH_IDLE_DURATION": "200ms",
        "BATCH_MAX_DURATION": "1s",
        "INSTANCE_TYPES_FILE_PATH": str(folder / "instance-types.json"),
    }
    log = folder / "karpenter.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [found / "karpenter"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | settings
        )
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def run_nodes(client: KubeClient) -> None:
    """Lets each node that Karpenter makes become Ready with all that its instance type has, until cancelled. The taint
    that the API server gives a new node is taken off, as the node lifecycle controller does."""
    while True:
        async for node in client.list(NODES):
            if "kwok.x-k8s.io/node" in node["metadata"].get("annotations", {}):
                with contextlib.suppress(NotFound, Conflict):
                    await _run(client, node)
        await asyncio.sleep(0.3)


async def _run(client: KubeClient, node: JsonObject) -> None:
    name, version = node["metadata"]["name"], node["metadata"]["resourceVersion"]
    taints = node["spec"].get("taints", [])
    left = [taint for taint in taints if taint["key"] != "node.kubernetes.io/not-ready"]
    if not any(c["type"] == "Ready" for c in node.get("status", {}).get("conditions", [])):
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastTransitionTime": now}
        body: JsonObject = {"status": {"capacity": node["status"]["allocatable"], "conditions": [ready]}}
        await client.merge_patch(NODES, name, None, body, manager="kubelet", subresource="status")
    elif left != taints:
        # With the version: Karpenter takes a taint of its own off at the same time.
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": left}}
        await client.merge_patch(NODES, name, None, body, manager="kubelet")
