"""What `up` waits for and puts into a new API server before it hands the lab over."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

import aiohttp

from shoal_dev.lab import network, volumes
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.kubeapi import Api, KubeAPIError, Object
from shoal_dev.lab.node import devices
from shoal_dev.lab.node.config import GPU_RESOURCE

_POLL_S: Final = 0.05
_GPU_POLL_S: Final = 1.0
_NOT_READY: Final = "node.kubernetes.io/not-ready"


async def wait_for_api(api: Api, timeout: float) -> None:
    """Returns when /readyz says ok. Raises LabError after `timeout` seconds."""
    last = "no answer"
    begun = time.monotonic()
    while time.monotonic() - begun < timeout:
        try:
            await api.request("GET", "/readyz")
            return
        except KubeAPIError as error:
            last = str(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            last = str(error) or type(error).__name__
        await asyncio.sleep(_POLL_S)
    raise LabError(f"the API server is not ready after {timeout:.0f} s: {last}")


async def apply_basics(api: Api) -> None:
    """The default StorageClass, and the Service that keeps the cluster DNS's address from being given to another. Its
    EndpointSlice is for who asks whether there is a DNS (`shoal doctor`): the server itself listens on that address."""
    await api.apply(f"/apis/storage.k8s.io/v1/storageclasses/{volumes.STORAGE_CLASS}", volumes.storage_class())
    ports = [{"name": f"dns-{p.lower()}", "port": 53, "protocol": p} for p in ("UDP", "TCP")]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": network.DNS, "ports": ports},
    }
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [network.HOST], "conditions": {"ready": True}}],
    }
    await _until(lambda: api.apply("/api/v1/namespaces/kube-system/services/kube-dns", service), 20)
    await api.apply("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns", slice_)


async def apply_device_class(api: Api) -> None:
    """The DeviceClass of the nodes whose GPUs are devices."""
    wanted = devices.device_class()
    await _until(lambda: api.apply(f"/apis/resource.k8s.io/v1/deviceclasses/{devices.DRIVER}", wanted), 20)


async def keep_gpus(api: Api, gpus: Mapping[str, int]) -> None:
    """Offers GPUs on nodes with a real kubelet: name -> how many, until cancelled.

    Instead of a device plugin: a kubelet keeps what is written into its Node's capacity and offers it, but for a
    restart, when it takes the resource for one whose plugin is gone.
    """
    while True:
        for name, count in gpus.items():
            with suppress(KubeAPIError, aiohttp.ClientError, OSError, TimeoutError):
                node = await api.request("GET", f"/api/v1/nodes/{name}")
                has: Object = node["status"].get("capacity") or {}
                if has.get(GPU_RESOURCE) != str(count):
                    patch: Object = {"status": {"capacity": {GPU_RESOURCE: str(count)}}}
                    path = f"/api/v1/nodes/{name}/status"
                    await api.request("PATCH", path, patch, content_type="application/merge-patch+json")
        await asyncio.sleep(_GPU_POLL_S)


async def wait_for_default_account(api: Api, timeout: float) -> None:
    """Pods are refused before the namespace `default` has its ServiceAccount. Raises LabError after `timeout` s."""
    await _until(lambda: api.request("GET", "/api/v1/namespaces/default/serviceaccounts/default"), timeout)


async def _until(call: Callable[[], Awaitable[object]], timeout: float) -> None:
    begun = time.monotonic()
    while True:
        try:
            await call()
            return
        except KubeAPIError as error:
            if error.status not in (403, 404, 409, 500, 503) or time.monotonic() - begun > timeout:
                raise LabError(f"the new API server does not do its first work: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if time.monotonic() - begun > timeout:
                raise LabError(f"the API server went away: {error}") from error
        await asyncio.sleep(_POLL_S)


async def unready_nodes(api: Api, names: Collection[str]) -> list[str]:
    """Those of `names` that take no pods yet: Node object missing, not Ready, or still tainted for not being so."""
    items = (await api.request("GET", "/api/v1/nodes"))["items"]
    return sorted(set(names) - {item["metadata"]["name"] for item in items if _takes_pods(item)})


def _takes_pods(node: Object) -> bool:
    # Every new Node is tainted; the node lifecycle controller takes that off some time after the node is Ready.
    tainted = any(taint["key"] == _NOT_READY for taint in node["spec"].get("taints") or ())
    conditions = node["status"].get("conditions") or ()
    return not tainted and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def wait_for_nodes(api: Api, names: Collection[str], timeout: float) -> None:
    """Raises LabError, naming those that are not Ready after `timeout` seconds."""
    begun = time.monotonic()
    while missing := await unready_nodes(api, names):
        if time.monotonic() - begun > timeout:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise LabError(f"{len(missing)} of {len(names)} nodes are not Ready after {timeout:.0f} s: {shown}")
        await asyncio.sleep(_POLL_S * 2)
