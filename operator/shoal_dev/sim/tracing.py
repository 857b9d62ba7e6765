"""The span that an engine adds to a request's trace, as SGLang with `--enable-trace` does: name, attributes, parent.

SGLang has further ones below it, of its stages; those are left out.
"""

import json
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shoal_dev.sim.scheduler import Sequence as Seq

_DELAY_MS: Final = 500
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class EngineTraces:
    """Sends spans to `endpoint`, a URL with its path; which ones, OTEL_TRACES_SAMPLER says."""

    def __init__(self, endpoint: str, service: str, model: str) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
        self._tracer = self._provider.get_tracer("sglang server")

    @contextmanager
    def request(self, headers: Mapping[str, str], sequences: Sequence[Seq]) -> Generator[None]:
        """The span of one request while the block runs."""
        rid = sequences[0].rid
        parent = _PROPAGATOR.extract(headers, Context())
        attributes = {"rid": rid, "module": "sglang::request"}
        span = self._tracer.start_span(f" Req {rid[:8]}", parent, attributes=attributes)
        try:
            yield
        finally:
            first = sequences[0]
            span.set_attributes(
                {
                    "gen_ai.request.id": rid,
                    "gen_ai.response.model": self._model,
                    "gen_ai.usage.prompt_tokens": len(first.prompt),
                    "gen_ai.usage.completion_tokens": len(first.output),
                    "gen_ai.usage.cached_tokens": first.cached or 0,
                }
            )
            if first.finish is not None:
                span.set_attribute("gen_ai.response.finish_reasons", json.dumps([first.finish.type]))
            span.end()

    def close(self, seconds: float = 2.0) -> None:
        """Sends what waits, for so long at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-shutdown", daemon=True)
        thread.start()
        thread.join(seconds)
