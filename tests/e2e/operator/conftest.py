"""A real control plane for the operator's tests: one for the whole run, emptied after each test."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shoal.kube.client import Client
from shoal.kube.resources import (
    DEPLOYMENTS,
    GPUCLASSES,
    LORA_ADAPTERS,
    LORA_POOLS,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    TENANTS,
)
from tests.support.controlplane import ControlPlane, Fleet, StatusKubelet, add_node, control_plane, install_crds
from tests.support.operators import NAMESPACE, eventually, gpu_class


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture
async def fleet(plane: ControlPlane, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    namespace = "ns-" + "".join(c for c in request.node.name.lower() if c.isalnum())[:40]
    async with await Client.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await install_crds(client)
        for name in (namespace, NAMESPACE):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await client.apply(NAMESPACES, body, manager="test")
        await add_node(client, "cpu-0", {}, 0)
        await add_node(client, "h100-0", {"nvidia.com/gpu.product": "H100"}, 8)
        await add_node(client, "l4-0", {"nvidia.com/gpu.product": "L4"}, 2)
        kubelet = StatusKubelet(client)
        task = asyncio.create_task(kubelet.run())
        fleet = Fleet(plane, client, kubelet, namespace)
        await fleet.apply(gpu_class("h100", "H100", cost="2.49"))
        await fleet.apply(gpu_class("l4", "L4", cost="0.43", memory="24Gi"))
        try:
            yield fleet
        finally:
            for resource in (LORA_ADAPTERS, LORA_POOLS, MODELS, TENANTS, GPUCLASSES):
                for obj in await fleet.all(resource):
                    await client.delete(resource, obj["metadata"]["name"], obj["metadata"].get("namespace"))
            for resource in (DEPLOYMENTS, PODS):
                await eventually(
                    lambda r=resource: fleet.all(r, namespace=namespace), lambda left: not left, seconds=90
                )
            for node in await fleet.all(NODES):
                await client.delete(NODES, node["metadata"]["name"])
            for secret in await fleet.all(SECRETS, namespace=NAMESPACE):
                await client.delete(SECRETS, secret["metadata"]["name"], NAMESPACE)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            # What kopf's threads left open is collected here, where it is expected, and not in somebody else's test.
            gc.collect()


@pytest.fixture
def audit(plane: ControlPlane) -> Path:
    """The API server's own record of writes."""
    return plane.audit
