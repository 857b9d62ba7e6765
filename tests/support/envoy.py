"""Envoy as a plain proxy, such as an ingress in front of the gateways."""

import asyncio
import json
import sysconfig
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.controlplane import free_ports

PROGRAM: Final = Path(sysconfig.get_path("scripts")) / "envoy"


def config(port: int, upstream: int) -> str:
    def address(p: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": p}}

    cluster = {
        "name": "engine",
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": {
            "thresholds": [{"max_connections": 8192, "max_pending_requests": 8192, "max_requests": 8192}]
        },
        "load_assignment": {
            "cluster_name": "engine",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(upstream)}}]}],
        },
    }
    extensions = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{extensions}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{extensions}.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "900s"}}],
                }
            ]
        },
    }
    listener = {
        "address": address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})


@asynccontextmanager
async def in_front_of(upstream: int) -> AsyncGenerator[str]:
    """The base URL of a proxy to a port of this machine."""
    (port,) = free_ports(1)
    flags = ("--concurrency", "1", "--log-level", "error", "--use-dynamic-base-id")
    child = await asyncio.create_subprocess_exec(PROGRAM, "--config-yaml", config(port, upstream), *flags)
    try:
        async with asyncio.timeout(60):
            while not await _listens(port):
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        await child.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
