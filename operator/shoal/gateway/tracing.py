"""A request's spans: the server's own, `hold` for each wait, one per attempt at a replica, and `stream` below it.

Loaded only where tracing is on. A span never holds a prompt, an answer or a key, nor a model name that a client made
up. Names of GenAI attributes follow OpenTelemetry's semantic conventions. They are on the attempts, because each
attempt is one call of a model and a sum of tokens must count them once.
"""

import re
import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from shoal.core.access import KeyIdentity
from shoal.core.routing.replica import Replica
from shoal.core.routing.routes import RouteRole
from shoal.core.routing.score import Pick
from shoal.gateway import ids
from shoal.gateway.metrics import OPERATIONS
from shoal.gateway.prepared import Prepared
from shoal.gateway.upstream import UpstreamAddress
from shoal.metering.meter import Meter
from shoal.net.errors import ApiError

_MOST: Final = 32
"""Most spans of one request below its own: a request for an adapter may wait and retry often."""
_REASONS: Final = 8
_FINISH: Final = re.compile(rb'"finish_reason":\s?"([a-z_]{1,32})"')
"""In an answer's text every quote is escaped, so this matches only the field."""
_ROOT: Final = Context()


class Traces:
    """Starts the traces of a gateway's requests."""

    __slots__ = ("_tracer",)

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(
        self, headers: Mapping[bytes, bytes], path: str, request: str, identity: KeyIdentity
    ) -> tuple[str, "RequestSpans | None"]:
        """The trace headers for the engine, and the spans; None: the request is not sampled. The headers then tell the
        engine not to sample either."""
        parent = _parent(headers)
        context = _ROOT if parent is None else set_span_in_context(NonRecordingSpan(parent), _ROOT)
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "shoal.request.id": request,
            "shoal.tenant": identity.tenant,
        }
        span = self._tracer.start_span(f"POST {path}", context, SpanKind.SERVER, attributes)
        lines = trace_lines_of(span)
        return lines, RequestSpans(self._tracer, span, path, lines) if span.is_recording() else None


class RequestSpans:
    """The spans of one request."""

    __slots__ = (
        "_attempt",
        "_below",
        "_endpoint",
        "_error",
        "_finish",
        "_left_out",
        "_made",
        "_meter",
        "_prepared",
        "_refused",
        "_role",
        "_span",
        "_started",
        "_trace_lines",
        "_tracer",
    )

    def __init__(self, tracer: Tracer, span: Span, path: str, lines: str) -> None:
        self._tracer = tracer
        self._span = span
        self._endpoint = path
        self._below = set_span_in_context(span, _ROOT)
        self._started = time.time_ns() - time.monotonic_ns()
        """Converts the request's monotonic times to times of spans."""
        self._trace_lines = lines
        self._meter: Meter | None = None
        self._prepared: Prepared | None = None
        self._attempt: Span | None = None
        self._error: str | None = None
        self._refused: int | None = None
        self._role: RouteRole | None = None
        self._finish: list[str] = []
        self._made = self._left_out = 0

    # --- while it runs ------------------------------------------------------------------------------------------------

    def accepted(self, meter: Meter, prepared: Prepared, role: RouteRole | None) -> None:
        """The request has a usage record, and its model is known, as is the part of that model in the request's route.
        Called again when the request goes to a fallback."""
        self._meter, self._prepared, self._role = meter, prepared, role

    def failed(self, error: ApiError) -> None:
        """Records the error that the client got instead of an answer."""
        # The error itself is not stored: its traceback refers to this object, and only the garbage collector would free
        # the request.
        self._error, self._refused = error.code or str(error.status), error.status

    def held(self, began: float, reason: str, ended: str) -> None:
        """Adds a span for a wait from `began` (time.monotonic) until now."""
        if self._may_add_span():
            attributes = {"shoal.hold.reason": reason, "shoal.hold.ended": ended}
            span = self._tracer.start_span("hold", self._below, attributes=attributes, start_time=self._at(began))
            span.end()

    def attempt(self, replica: Replica, target: UpstreamAddress, provider: str, pick: Pick | None = None) -> str:
        """Starts the span of an attempt at an engine of `provider`; returns the trace headers for the engine. `pick`:
        why this replica."""
        meter, prepared = self._meter, self._prepared
        if meter is None or prepared is None or not self._may_add_span():
            return self._trace_lines
        attributes: dict[str, Any] = {
            "gen_ai.provider.name": provider,
            "server.address": target.host,
            "server.port": target.port,
            "shoal.attempt": meter.attempts,
            "shoal.replica": replica.key,
            "shoal.gpu_class": replica.gpu_class,
            "k8s.node.name": replica.node or "",
        }
        if pick is not None:
            attributes["shoal.routing"] = pick.message
        return trace_lines_of(self._begin(prepared, attributes))

    def attempt_outside(self, host: str, port: int, provider: str) -> None:
        """Starts the span of the attempt at an external target, with an API like that of `provider`. The target gets no
        trace headers: they would tell it of others' requests."""
        meter, prepared = self._meter, self._prepared
        if meter is None or prepared is None or not self._may_add_span():
            return
        self._begin(
            prepared,
            {
                "gen_ai.provider.name": provider,
                "server.address": host,
                "server.port": port,
                "shoal.attempt": meter.attempts,
            },
        )

    def observe_answer(self, data: bytes) -> None:
        """Reads the finish reason from a part of the engine's answer, and nothing else."""
        if len(self._finish) < _REASONS:
            self._finish += [reason.decode() for reason in _FINISH.findall(data)][: _REASONS - len(self._finish)]

    def attempt_over(self, failure: str | None = None) -> None:
        """Ends the attempt's span; `failure` is the reason if there is no answer. A second call changes nothing."""
        span, meter, prepared = self._attempt, self._meter, self._prepared
        if span is None or meter is None or prepared is None:
            return
        self._attempt = None
        failure = failure or self._error
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(Status(StatusCode.ERROR, failure))
        for name, counted in (
            ("gen_ai.usage.input_tokens", "inputTokens"),
            ("gen_ai.usage.output_tokens", "outputTokens"),
            ("gen_ai.usage.cache_read.input_tokens", "cachedTokens"),
            ("gen_ai.usage.reasoning.output_tokens", "reasoningTokens"),
        ):
            if (tokens := meter.tokens()[counted]) is not None and meter.count_source != "estimated":
                span.set_attribute(name, tokens)
        first = meter.first_byte
        if first is not None:
            span.set_attribute("gen_ai.response.id", meter.id)
            span.set_attribute("gen_ai.response.model", prepared.model.address)
            if self._finish:
                span.set_attribute("gen_ai.response.finish_reasons", tuple(self._finish))
            if prepared.stream:
                span.set_attribute("gen_ai.response.time_to_first_chunk", meter.seconds_to_first_byte or 0.0)
                if self._may_add_span():
                    below = set_span_in_context(span, _ROOT)
                    self._tracer.start_span("stream", below, start_time=self._at(first)).end()
        span.end()

    def end(self) -> None:
        """Ends the request's span."""
        self.attempt_over()
        span, meter, error, status = self._span, self._meter, self._error, self._refused
        failed = status is not None and status >= 500
        if meter is not None:
            if self._prepared is not None:
                # Not before: a fallback may follow, and an attribute cannot be taken back.
                span.set_attributes(self._request_attributes(self._prepared))
            status = meter.status or status
            failed = failed or meter.outcome in ("failed", "refused", "expired")
            span.set_attribute("shoal.outcome", meter.outcome or "failed")
            span.set_attribute("shoal.attempts", meter.attempts)
            if meter.held_seconds is not None:
                span.set_attribute("shoal.hold.seconds", round(meter.held_seconds, 6))
            if meter.replica is not None:
                span.set_attribute("shoal.replica", meter.replica.key)
                span.set_attribute("shoal.gpu_class", meter.replica.gpu_class)
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if error is not None:
            span.set_attribute("error.type", error)
        if failed:
            # The code, not the message, which may repeat the client's text.
            span.set_status(Status(StatusCode.ERROR, error))
        if self._left_out:
            span.set_attribute("shoal.spans_left_out", self._left_out)
        span.end()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, prepared: Prepared, of_server: Mapping[str, Any]) -> Span:
        """Starts the span of an attempt, with the attributes of the request and of who gets it."""
        attributes = {
            **self._request_attributes(prepared),
            "gen_ai.request.stream": prepared.stream,
            **of_server,
        }
        if prepared.answer_bound is not None:
            attributes["gen_ai.request.max_tokens"] = prepared.answer_bound
        if prepared.choices != 1:
            attributes["gen_ai.request.choice.count"] = prepared.choices
        name = f"{OPERATIONS[self._endpoint]} {prepared.model_name}"
        self._attempt = span = self._tracer.start_span(name, self._below, SpanKind.CLIENT, attributes)
        self._finish.clear()
        return span

    def _request_attributes(self, prepared: Prepared) -> dict[str, str | int | bool]:
        model = prepared.model
        asked: dict[str, str | int | bool] = {
            "gen_ai.operation.name": OPERATIONS[self._endpoint],
            "gen_ai.request.model": prepared.model_name,
            "shoal.model": model.key,
        }
        if model.adapter is not None:
            asked |= {"shoal.adapter": model.adapter.key, "shoal.adapter.revision": model.adapter.revision}
        if self._meter is not None and self._role is not None and (route := self._meter.fields.get("route")):
            asked |= {"shoal.route": route, "shoal.route.role": self._role}
        return asked

    def _may_add_span(self) -> bool:
        if self._made >= _MOST:
            self._left_out += 1
            return False
        self._made += 1
        return True

    def _at(self, monotonic: float) -> int:
        return self._started + int(monotonic * 1e9)


def trace_lines_of(span: Span) -> str:
    """The header lines that propagate a span's trace."""
    context = span.get_span_context()
    lines = f"traceparent: 00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}\r\n"
    state = context.trace_state
    return f"{lines}tracestate: {state.to_header()}\r\n" if state else lines


def _parent(headers: Mapping[bytes, bytes]) -> SpanContext | None:
    found = ids.trace(headers)
    if found is None:
        return None
    parent, state = found
    _, trace, span, flags = parent.split("-")
    return SpanContext(
        int(trace, 16),
        int(span, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state]) if state else None,
    )
