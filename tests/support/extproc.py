"""A real Envoy in front of a gateway that speaks external processing."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from shoal.gateway.app import GatewayApp
from shoal.gateway.extproc.server import ExtProcServer
from tests.support.controlplane import free_ports
from tests.support.envoy import PROGRAM
from tests.support.gateway import API_KEY, GatewayUnderTest

_TYPE = "type.googleapis.com/envoy.extensions"


def bootstrap(port: int, processor: int, trust: str | None = None, **filter_settings: Any) -> str:
    """Envoy as data planes set it up for an InferencePool: the endpoint is what the processor says, in a header.
    `trust`: the authority of the engines' certificates; None: plain HTTP."""

    def address(p: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": p}}

    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    mode = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    processing = {
        "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "shoal"}},
        "failure_mode_allow": False,
        "processing_mode": mode,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        **filter_settings,
    }
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processing},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}},
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "900s"}}],
                }
            ]
        },
    }
    pool: dict[str, Any] = {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }
    if trust is not None:
        context = {"trusted_ca": {"inline_string": trust}}
        pool["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TYPE}.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"validation_context": context},
            },
        }
    shoal = {
        "name": "shoal",
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": http2,
        "load_assignment": {
            "cluster_name": "shoal",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(processor)}}]}],
        },
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {"address": address(port), "filter_chains": [chain]}
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [pool, shoal]}})


class EnvoyInFront:
    """What a client sees, and the processor behind."""

    def __init__(self, processor: ExtProcServer, port: int) -> None:
        self.processor, self.url = processor, f"http://127.0.0.1:{port}"
        self.session = aiohttp.ClientSession()

    async def post(self, body: Any = None, path: str = "/v1/chat/completions", key: str | None = API_KEY, **kw: Any):
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **kw.pop("headers", {})}
        return await self.session.post(self.url + path, json=body, headers=headers, **kw)


@asynccontextmanager
async def in_front_of(
    gateway: GatewayUnderTest, *, serves: int = 200, trust: str | None = None, **filter_settings: Any
) -> AsyncGenerator[EnvoyInFront]:
    """An Envoy whose requests this gateway decides on. `serves`: what it answers to /healthz when it is up."""
    processor = ExtProcServer(
        GatewayApp(gateway.app, lambda: gateway.ready),
        lambda: gateway.ready,
        host="127.0.0.1",
        port=0,
        body_seconds=gateway.settings.body_seconds,
        most_streams=1000,
    )
    await processor.start()
    try:
        async with asking(processor, serves=serves, trust=trust, **filter_settings) as envoy:
            yield envoy
    finally:
        await processor.stop(0)


@asynccontextmanager
async def asking(
    processor: ExtProcServer, *, serves: int = 200, trust: str | None = None, **filter_settings: Any
) -> AsyncGenerator[EnvoyInFront]:
    """An Envoy that asks a processor that listens."""
    (port,) = free_ports(1)
    flags = ("--concurrency", "1", "--log-level", "error", "--use-dynamic-base-id")
    child = await asyncio.create_subprocess_exec(
        PROGRAM, "--config-yaml", bootstrap(port, processor.port, trust, **filter_settings), *flags
    )
    it = EnvoyInFront(processor, port)
    try:
        async with asyncio.timeout(60):
            while not await _serves(it, serves):
                await asyncio.sleep(0.05)
        yield it
    finally:
        await it.session.close()
        child.terminate()
        await child.wait()


async def _serves(it: EnvoyInFront, status: int) -> bool:
    with suppress(aiohttp.ClientError):
        async with it.session.get(it.url + "/healthz") as answer:
            return answer.status == status
    return False
