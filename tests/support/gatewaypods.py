"""Pods of gateways at a fake API server, and one gateway that follows the others."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from shoal.api import names
from shoal.gateway.peers import Peers
from shoal.gateway.prefixes import PrefixShare
from shoal.kube.client import KubeClient
from shoal.net.installkey import KeyRing
from shoal.net.stream import ListenerIdentity
from tests.support.addresses import pod_ip
from tests.support.gateway import INSTALL_KEY
from tests.support.gateway_process import FakeApiServer, kubeconfig
from tests.support.rolekeys import give

OWN, FIRST, SECOND, THIRD = (pod_ip(n) for n in (4, 5, 6, 7))


def gateway_pod(name: str, ip: str | None, *, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:01Z"}
    return {
        "metadata": {
            "name": name,
            "namespace": "shoal-system",
            "uid": f"uid-{name}",
            "labels": {names.LABEL_COMPONENT: names.COMPONENT_GATEWAY, names.LABEL_PART_OF: "shoal"},
            **metadata,
        },
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": [condition],
        },
    }


@contextlib.asynccontextmanager
async def following(
    tmp_path: Path, port: int, *pods: dict[str, Any], prefixes: PrefixShare | None = None
) -> AsyncGenerator[tuple[Peers, FakeApiServer]]:
    server = FakeApiServer()
    await server.up()
    for pod in pods:
        await server.change("pods", pod)
    give(tmp_path, INSTALL_KEY)
    ring = KeyRing(tmp_path)
    ring.refresh()
    client = await KubeClient.from_environment(kubeconfig=kubeconfig(tmp_path, server))
    me = ListenerIdentity("gateway-0", "boot-0")
    peers = Peers(client, "shoal-system", me, ring, port=port, prefixes=prefixes)
    peers.start()
    task = asyncio.create_task(peers.reflector.run())
    try:
        async with client:
            yield peers, server
    finally:
        task.cancel()
        await peers.close()
        await asyncio.gather(task, return_exceptions=True)
        await server.down()
