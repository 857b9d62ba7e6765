"""A real control plane for the operator's tests: one for the whole run, emptied after each test."""

import asyncio
import contextlib
import gc
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shoal.kube.client import KubeClient
from shoal.kube.resources import (
    DEPLOYMENTS,
    GPUCLASSES,
    LORA_ADAPTERS,
    LORA_POOLS,
    MODEL_ROUTES,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    TENANTS,
    Resource,
)
from tests.support.controlplane import ControlPlane, Fleet, StatusKubelet, add_node, control_plane, install_crds
from tests.support.operators import NAMESPACE, eventually, gpu_class

_SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_KOPF_SECONDS = 30
_KOPF_STAYS = ("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
"""Kopf's thread ends with its process, its streams open; in a test the process goes on."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings(*_KOPF_STAYS))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture
async def fleet(plane: ControlPlane, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    # Of each test its own, also of two whose names begin alike: what belonged to a namesake's Model may still be there.
    name = "".join(c for c in request.node.name.lower() if c.isalnum())[:40]
    namespace = f"ns-{name}-{zlib.crc32(request.node.nodeid.encode()):08x}"
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await install_crds(client)
        for name in (namespace, NAMESPACE):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await client.apply(NAMESPACES, body, manager="test")
        for name in (namespace, NAMESPACE):  # without it no pod is taken
            await eventually(lambda n=name: _names(client, _SERVICE_ACCOUNTS, n), lambda found: "default" in found)
        await _clear(client)
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
            try:
                await install_crds(client)  # a test that takes them away may end early
                await _clear(client, NODES)
                for resource in (DEPLOYMENTS, PODS):
                    # The garbage collector stands still while kinds come and go.
                    await eventually(
                        lambda r=resource: _names(client, r, namespace), lambda left: not left, seconds=180
                    )
                await _clear(client)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            # What kopf's threads left open is collected here, where it is expected, and not in somebody else's test.
            await without_kopf()
            gc.collect()


async def _names(client: KubeClient, resource: Resource, namespace: str | None = None) -> list[str]:
    return [o["metadata"]["name"] async for o in client.list(resource, namespace=namespace)]


async def _clear(client: KubeClient, *keep: Resource) -> None:
    """Takes away what tests make, but for what the garbage collector takes."""
    for resource in (MODEL_ROUTES, LORA_ADAPTERS, LORA_POOLS, MODELS, TENANTS, GPUCLASSES, NODES):
        if resource not in keep:
            for obj in [o async for o in client.list(resource)]:
                await client.delete(resource, obj["metadata"]["name"], obj["metadata"].get("namespace"))
    for resource in (PODS, SECRETS):
        for name in await _names(client, resource, NAMESPACE):
            await client.delete(resource, name, NAMESPACE)


async def without_kopf() -> None:
    """Kopf's threads end a moment after their operators: they are waited for."""
    for thread in threading.enumerate():
        if thread.name == "kopf":
            await asyncio.to_thread(thread.join, _KOPF_SECONDS)
