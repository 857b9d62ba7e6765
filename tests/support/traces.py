"""A collector of traces: OTLP over HTTP on a real port, as OpenTelemetry's collector listens."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from shoal.gateway.tracing import Traces
from shoal.net.trace import close, from_environment
from tests.support.gateway import GatewayUnderTest


@dataclass
class Received:
    """A span, as people look at it."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    """Empty: it has none."""
    kind: str
    began: int
    ended: int
    attributes: dict[str, object]
    error: str | None
    """None: its status is not one."""
    resource: dict[str, object]


@dataclass
class Collector:
    """`spans` are those that came; `status` is what it answers."""

    status: int = 200
    spans: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    port: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """It answers only while this is set. It is, unless a test clears it."""

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.gate.wait()
        if self.status == 200:
            if body[:2] == b"\x1f\x8b":
                body = gzip.decompress(body)
            self.raw.append(body)
            self.spans += decode(body)
        return web.Response(status=self.status)

    async def until(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        """Waits until the spans that came are enough."""
        async with asyncio.timeout(20):
            while not enough(self.spans):
                await asyncio.sleep(0.02)
        return self.spans

    def named(self, name: str) -> Received:
        """The only span of that name."""
        [found] = [span for span in self.spans if span.name == name]
        return found

    def below(self, span: Received) -> list[Received]:
        """Its children, by when they began."""
        return sorted((s for s in self.spans if s.parent == span.id), key=lambda s: s.began)


def decode(body: bytes) -> list[Received]:
    request, found = ExportTraceServiceRequest.FromString(body), list[Received]()
    for part in request.resource_spans:
        resource = {a.key: _value(a.value) for a in part.resource.attributes}
        for scope in part.scope_spans:
            for span in scope.spans:
                failed = span.status.code == span.status.STATUS_CODE_ERROR
                found.append(
                    Received(
                        name=span.name,
                        service=str(resource.get("service.name")),
                        trace=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                        began=span.start_time_unix_nano,
                        ended=span.end_time_unix_nano,
                        attributes={a.key: _value(a.value) for a in span.attributes},
                        error=span.status.message if failed else None,
                        resource=resource,
                    )
                )
    return found


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


@contextlib.asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    """A collector that listens until the block ends."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        collector.gate.set()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def traced(gateway: GatewayUnderTest, collector: Collector, patch: pytest.MonkeyPatch, **environment: str):
    """Lets a gateway of a test trace, set up by these variables; yields its `Tracing`. Leave the block to have every
    span at the collector."""
    for name, value in {**environment_of(collector), **environment}.items():
        patch.setenv(name, value)
    tracing = from_environment("shoal-gateway", gateway.metrics.registry)
    assert tracing is not None
    gateway.app.traces = Traces(tracing.tracer)
    try:
        yield tracing
    finally:
        await close(tracing)


def environment_of(collector: Collector) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
