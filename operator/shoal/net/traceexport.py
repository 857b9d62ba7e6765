"""OpenTelemetry's SDK as this project uses it: what is sampled, what waits, what was sent. Loaded where it is on."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger()

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The semantic conventions that the attributes follow."""
_QUEUE: Final = 2048
_BATCH: Final = 128
"""Spans per call. A quarter of the SDK's own number: they are encoded in Python, and the event loop waits meanwhile."""
_REPEAT_SECONDS: Final = 60.0


class SpanCounts(Collector):
    """What became of spans. Each number has one writer: the event loop, or the SDK's thread."""

    def __init__(self) -> None:
        self.queued = self.taken = self.dropped = self.limited = 0
        self.exported = self.failed = 0

    def collect(self) -> Iterable[Metric]:
        spans = CounterMetricFamily(
            "shoal_trace_spans",
            "Spans by result: exported, failed (not accepted by the collector), dropped (the queue was full).",
            labels=["result"],
        )
        for result in ("exported", "failed", "dropped"):
            spans.add_metric([result], getattr(self, result))
        limited = CounterMetricFamily(
            "shoal_traces_limited", "Requests that were not traced because of the limit per second."
        )
        limited.add_metric([], self.limited)
        return (spans, limited)


class Bounded(Sampler):
    """Bounds what a sampler lets in. A client's `traceparent` may ask for a trace of each of its requests; parent-based
    samplers do as it asks, and here it ends: at `per_second` traces for all, a second's worth of them at once."""

    def __init__(
        self, inner: Sampler, per_second: float, counts: SpanCounts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner, self._rate, self._counts, self._clock = inner, per_second, counts, clock
        self._most = max(1.0, per_second)
        self._left, self._at = self._most, clock()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        result = self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is Decision.DROP:
            return result
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid and not parent.is_remote:
            return result  # part of a trace that was let in
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            self._counts.limited += 1
            return SamplingResult(Decision.DROP, trace_state=result.trace_state)
        self._left -= 1
        return result

    def get_description(self) -> str:
        return f"Bounded{{{self._inner.get_description()},{self._rate:g}/s}}"


class _Queue(SpanProcessor):
    """In front of the SDK's queue, which would make room by forgetting what is in it, and count nothing."""

    def __init__(self, inner: BatchSpanProcessor, counts: SpanCounts, most: int) -> None:
        self._inner, self._counts, self._most = inner, counts, most

    def on_end(self, span: ReadableSpan) -> None:
        counts = self._counts
        if counts.queued - counts.taken >= self._most:
            counts.dropped += 1
            return
        counts.queued += 1
        self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _Exporter(SpanExporter):
    """Counts, and tells once when the collector is lost and once when it is back. Runs in the SDK's thread."""

    def __init__(self, inner: SpanExporter, counts: SpanCounts) -> None:
        self._inner, self._counts = inner, counts
        self._lost = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        counts = self._counts
        counts.taken += len(spans)
        result = self._inner.export(spans)
        lost = result is not SpanExportResult.SUCCESS
        if lost:
            counts.failed += len(spans)
        else:
            counts.exported += len(spans)
        if lost != self._lost:
            self._lost = lost
            if lost:
                log.warning("the collector takes no traces; they are dropped until it does, and counted")
            else:
                log.info("the collector takes traces again")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _SDKLog(logging.Handler):
    """What the SDK logs, in our own form, and each sentence once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        # Not the message: its numbers and times differ each time.
        key, now = str(record.msg), time.monotonic()
        if now - self._logged_at.get(key, -_REPEAT_SECONDS) >= _REPEAT_SECONDS:
            self._logged_at[key] = now
            log.warning("OpenTelemetry", said=record.getMessage())


class TraceExporter:
    """This process's tracer, and the way of its spans. Sampler, limits, endpoint, headers and TLS are read from the
    environment by the SDK.

    Raises:
        ValueError: the SDK refuses a number in the environment.
    """

    def __init__(self, service: str, registry: CollectorRegistry, per_second: float) -> None:
        self.counts = counts = SpanCounts()
        release = _release()
        sdk = logging.getLogger("opentelemetry")
        sdk.handlers, sdk.propagate = [_SDKLog()], False
        own = {"service.name": service, "service.version": release, "service.namespace": "shoal"}
        if pod := os.environ.get("POD_NAME"):
            own |= {"service.instance.id": pod, "k8s.pod.name": pod}
        if namespace := os.environ.get("POD_NAMESPACE"):
            own["k8s.namespace.name"] = namespace
        said = OTELResourceDetector().detect().attributes
        self._provider = provider = TracerProvider(
            resource=Resource.create({name: value for name, value in own.items() if name not in said}),
            shutdown_on_exit=False,
        )
        provider.sampler = Bounded(provider.sampler, per_second, counts)
        most = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _QUEUE)
        batch = int(os.environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE") or min(_BATCH, most))
        processor = BatchSpanProcessor(_Exporter(OTLPSpanExporter(), counts), most, max_export_batch_size=batch)
        provider.add_span_processor(_Queue(processor, counts, most))
        self.tracer = provider.get_tracer("shoal", release, SCHEMA_URL)
        self._registry = registry
        registry.register(counts)

    def shut_down(self, done: Callable[[], None]) -> None:
        """Sends what waits and takes no more; `done` is called from another thread, when that is over."""

        def run() -> None:
            self._provider.shutdown()
            done()

        self._registry.unregister(self.counts)
        threading.Thread(target=run, name="traces-shutdown", daemon=True).start()


def _release() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "unknown"  # it runs from a source tree
