"""The Node object and its Lease: how the control plane knows that the node is alive."""

import asyncio
import os
from datetime import UTC, datetime
from typing import Any

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import Api, KubeAPIError
from shoal_dev.lab.node import devices
from shoal_dev.lab.node.config import NodeConfig, NodeSpec
from shoal_dev.lab.node.status import timestamp

_log = structlog.get_logger()
Json = dict[str, Any]

RENEWALS = 4
"""Per lease duration, as a kubelet."""
RETRY_SECONDS = 0.5
VERSION = "v1.36.4"
"""Of the kubelet that this node imitates."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_STRATEGIC = "application/strategic-merge-patch+json"


def node_object(config: NodeConfig, node: NodeSpec) -> Json:
    """As it is created."""
    labels = {
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
    }
    taints = [taint.model_dump() for taint in node.taints]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels | node.labels},
        "spec": {"taints": taints} if taints else {},
        "status": node_status(config, node),
    }


def node_status(config: NodeConfig, node: NodeSpec) -> Json:
    now = timestamp()
    healthy = {
        "MemoryPressure": "KubeletHasSufficientMemory",
        "DiskPressure": "KubeletHasNoDiskPressure",
        "PIDPressure": "KubeletHasSufficientPID",
    }
    conditions = [
        {"type": kind, "status": "False", "reason": reason, "message": "", "lastHeartbeatTime": now,
         "lastTransitionTime": now}
        for kind, reason in healthy.items()
    ]  # fmt: skip
    conditions.append(
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the lab's process node is running",
         "lastHeartbeatTime": now, "lastTransitionTime": now}
    )  # fmt: skip
    resources = node.capacity.resources()
    return {
        "capacity": resources,
        "allocatable": resources,
        "conditions": conditions,
        "addresses": [
            {"type": "InternalIP", "address": config.host_address},
            {"type": "Hostname", "address": node.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": node.kubelet_port}},
        # tells the API server to hand `kubectl exec` and `port-forward` on as WebSockets (server.py)
        "declaredFeatures": [] if config.status_only else ["ExtendWebSocketsToKubelet"],
        "nodeInfo": {
            "machineID": node.name,
            "systemUUID": node.name,
            "bootID": node.name,
            "kernelVersion": os.uname().release,
            "osImage": f"Shoal lab {config.lab}",
            "containerRuntimeVersion": "process://1.0",
            "kubeletVersion": VERSION,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }


async def register(api: Api, config: NodeConfig, node: NodeSpec) -> None:
    """Creates the Node, or brings an existing one up to date. Raises ApiError and connection errors."""
    wanted = node_object(config, node)
    try:
        await api.request("POST", "/api/v1/nodes", wanted)
    except KubeAPIError as error:
        if error.status != 409:
            raise
        labels = {"metadata": {"labels": wanted["metadata"]["labels"]}}
        await api.request("PATCH", f"/api/v1/nodes/{node.name}", labels, content_type=_STRATEGIC)
    # a created Node's status is taken over for admins only
    status = {"status": wanted["status"]}
    registered = await api.request("PATCH", f"/api/v1/nodes/{node.name}/status", status, content_type=_STRATEGIC)
    if node.dra is not None:
        await devices.publish(api, node, registered["metadata"]["uid"], node.dra.count)


async def renew(api: Api, config: NodeConfig, node: NodeSpec) -> None:
    """Renews the Lease, or makes it. Raises ApiError and connection errors."""
    spec = {
        "holderIdentity": node.name,
        "leaseDurationSeconds": max(1, round(config.lease_seconds)),
        "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    try:
        path = f"{_LEASES}/{node.name}"
        await api.request("PATCH", path, {"spec": spec}, content_type="application/merge-patch+json")
    except KubeAPIError as error:
        if error.status != 404:
            raise
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": node.name, "namespace": "kube-node-lease"},
            "spec": spec,
        }
        await api.request("POST", _LEASES, lease)


async def keep_registered(api: Api, config: NodeConfig, node: NodeSpec, offset: float = 0.0) -> None:
    """Registers, then renews the Lease for ever. A Node that somebody deleted is registered again."""
    registered = False
    await asyncio.sleep(offset)
    while True:
        pause = config.lease_seconds / RENEWALS
        try:
            if not registered:
                await register(api, config, node)
                registered = True
                _log.info("node_registered", node=node.name)
            await renew(api, config, node)
        except KubeAPIError as error:
            _log.warning("api_server_refuses", node=node.name, error=str(error))
            # 403: the node is not allowed what it asks, which time does not change, or its Node object is gone
            registered = registered and error.status not in (403, 404)
            pause = RETRY_SECONDS
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.info("api_server_away", node=node.name, error=str(error) or type(error).__name__)
            pause = RETRY_SECONDS
        await asyncio.sleep(pause)
