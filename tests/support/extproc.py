"""A real Envoy in front of a gateway that speaks external processing."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from shoal.gateway.app import GatewayApp
from shoal.gateway.extproc.server import ExtProcServer, PortCertificate
from tests.support.controlplane import free_ports
from tests.support.envoy import PROGRAM
from tests.support.gateway import API_KEY, GatewayUnderTest

_TYPE = "type.googleapis.com/envoy.extensions"


@dataclass(frozen=True)
class Processors:
    """Gateways that an Envoy asks, one after the other. `trust`: the authority of their certificates; None: no TLS.
    `watched`: it asks only those whose health check says that they take requests."""

    addresses: Sequence[tuple[str, int]]
    trust: str | None = None
    watched: bool = False

    def cluster(self) -> dict[str, Any]:
        endpoints = [{"endpoint": {"address": _address(*each)}} for each in self.addresses]
        made: dict[str, Any] = {
            "name": "shoal",
            "type": "STATIC",
            "connect_timeout": "2s",
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": {"http2_protocol_options": {}},
                }
            },
            "load_assignment": {"cluster_name": "shoal", "endpoints": [{"lb_endpoints": endpoints}]},
        }
        if self.trust is not None:
            made["transport_socket"] = _tls(self.trust, "gateway.shoal.internal")
        if self.watched:
            check = {"service_name": "readiness"}
            made["health_checks"] = [
                {
                    "timeout": "1s",
                    "interval": "1s",
                    "no_traffic_interval": "1s",
                    "unhealthy_threshold": 1,
                    "healthy_threshold": 1,
                    "grpc_health_check": check,
                }
            ]
            # Without one that is healthy none is asked, instead of all.
            made["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
        return made


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _tls(trust: str, name: str | None = None) -> dict[str, Any]:
    """`name`: of a gateway, which speaks gRPC, and refuses who does not name HTTP/2 in the handshake."""
    context: dict[str, Any] = {"trusted_ca": {"inline_string": trust}}
    settings: dict[str, Any] = {"@type": f"{_TYPE}.transport_sockets.tls.v3.UpstreamTlsContext"}
    if name is not None:
        context["match_typed_subject_alt_names"] = [{"san_type": "DNS", "matcher": {"exact": name}}]
        settings["sni"] = name
    common: dict[str, Any] = {"validation_context": context}
    if name is not None:
        common["alpn_protocols"] = ["h2"]
    settings["common_tls_context"] = common
    return {"name": "envoy.transport_sockets.tls", "typed_config": settings}


def listener(host: str, port: int, *, logged: bool = False, **filter_settings: Any) -> dict[str, Any]:
    """A port whose requests the processors decide on. `logged`: a line for each request, with the status that the
    client got, the endpoint that answered, and Envoy's flags."""
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
    manager: dict[str, Any] = {
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
    if logged:
        text = "%RESPONSE_CODE% %UPSTREAM_HOST% %RESPONSE_FLAGS%\n"
        manager["access_log"] = [
            {
                "name": "envoy.access_loggers.stdout",
                "typed_config": {
                    "@type": f"{_TYPE}.access_loggers.stream.v3.StdoutAccessLog",
                    "log_format": {"text_format_source": {"inline_string": text}},
                },
            }
        ]
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"address": _address(host, port), "filter_chains": [chain]}


def bootstrap(listeners: Sequence[dict[str, Any]], processors: Processors, trust: str | None = None) -> str:
    """Envoy as data planes set it up for an InferencePool: the endpoint is what the processor says, in a header.
    `trust`: the authority of the engines' certificates; None: plain HTTP."""
    pool: dict[str, Any] = {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }
    if trust is not None:
        pool["transport_socket"] = _tls(trust)
    return json.dumps({"static_resources": {"listeners": listeners, "clusters": [pool, processors.cluster()]}})


class EnvoyInFront:
    """What a client sees, and the processor behind, where there is one."""

    processor: ExtProcServer

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.session = aiohttp.ClientSession()

    async def post(self, body: Any = None, path: str = "/v1/chat/completions", key: str | None = API_KEY, **kw: Any):
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **kw.pop("headers", {})}
        return await self.session.post(self.url + path, json=body, headers=headers, **kw)


@asynccontextmanager
async def listening(
    gateway: GatewayUnderTest, certificate: PortCertificate | None = None
) -> AsyncGenerator[ExtProcServer]:
    """The port on which a gateway decides on the requests of Envoys."""
    processor = ExtProcServer(
        GatewayApp(gateway.app, lambda: gateway.ready),
        lambda: gateway.ready,
        host="127.0.0.1",
        port=0,
        body_seconds=gateway.settings.body_seconds,
        most_streams=1000,
        certificate=certificate,
    )
    await processor.start()
    try:
        yield processor
    finally:
        await processor.stop(0)


@asynccontextmanager
async def in_front_of(
    gateway: GatewayUnderTest, *, serves: int = 200, trust: str | None = None, **filter_settings: Any
) -> AsyncGenerator[EnvoyInFront]:
    """An Envoy whose requests this gateway decides on. `serves`: what it answers to /healthz when it is up."""
    async with (
        listening(gateway) as processor,
        asking(processor, serves=serves, trust=trust, **filter_settings) as envoy,
    ):
        yield envoy


@asynccontextmanager
async def asking(
    processor: ExtProcServer, *, serves: int = 200, trust: str | None = None, **filter_settings: Any
) -> AsyncGenerator[EnvoyInFront]:
    """An Envoy that asks a processor that listens."""
    asked = Processors([("127.0.0.1", processor.port)])
    async with envoy(asked, serves=serves, trust=trust, **filter_settings) as it:
        it.processor = processor
        yield it


@asynccontextmanager
async def envoy(
    asked: Processors, *, serves: int = 200, trust: str | None = None, **filter_settings: Any
) -> AsyncGenerator[EnvoyInFront]:
    (port,) = free_ports(1)
    flags = ("--concurrency", "1", "--log-level", "error", "--use-dynamic-base-id")
    wanted = bootstrap([listener("127.0.0.1", port, **filter_settings)], asked, trust)
    child = await asyncio.create_subprocess_exec(PROGRAM, "--config-yaml", wanted, *flags)
    it = EnvoyInFront(port)
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
