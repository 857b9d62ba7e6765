"""A request's spans: the server's own, `hold` for each wait, one per attempt at a replica, `stream` below it.

Loaded only where traces are on. Never a prompt, an answer or a key; nor a word that a client made up, before it is
known to be a model's name. Names of GenAI attributes follow OpenTelemetry's semantic conventions, and stand on the
attempts: each is one call of a model, and who sums up tokens must find them once.
"""

import re
import time
from collections.abc import Mapping
from typing import Final

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

from shoal.core.access import Identity
from shoal.core.routing import Replica
from shoal.gateway import ids
from shoal.gateway.errors import ApiError
from shoal.gateway.meter import Meter
from shoal.gateway.metrics import OPERATIONS
from shoal.gateway.relay import Prepared
from shoal.gateway.upstream import Target

PROVIDER: Final = "sglang"
_MOST: Final = 32
"""Spans of one request below its own; a request for an adapter may wait and try again often."""
_REASONS: Final = 8
_FINISH: Final = re.compile(rb'"finish_reason":\s?"([a-z_]{1,32})"')
"""In the text of an answer each quote would have a backslash before it."""
_ROOT: Final = Context()


class Traces:
    """Begins the traces of a gateway's requests."""

    __slots__ = ("_tracer",)

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(
        self, headers: Mapping[bytes, bytes], path: str, request: str, identity: Identity
    ) -> tuple[str, "RequestSpans | None"]:
        """What the engine gets as headers, and the spans; None: this request has none, and the headers say so, so that
        the engine makes none of its own."""
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
        lines = onward(span)
        return lines, RequestSpans(self._tracer, span, path, lines) if span.is_recording() else None


class RequestSpans:
    """Of one request that is traced."""

    __slots__ = (
        "_attempt",
        "_below",
        "_endpoint",
        "_error",
        "_finish",
        "_left_out",
        "_made",
        "_meter",
        "_onward",
        "_prepared",
        "_refused",
        "_span",
        "_started",
        "_tracer",
    )

    def __init__(self, tracer: Tracer, span: Span, path: str, lines: str) -> None:
        self._tracer = tracer
        self._span = span
        self._endpoint = path
        self._below = set_span_in_context(span, _ROOT)
        self._started = time.time_ns() - time.monotonic_ns()
        """Spans of what is over are made from the request's own, monotonic times."""
        self._onward = lines
        self._meter: Meter | None = None
        self._prepared: Prepared | None = None
        self._attempt: Span | None = None
        self._error: str | None = None
        self._refused: int | None = None
        self._finish: list[str] = []
        self._made = self._left_out = 0

    # --- on the way -------------------------------------------------------------------------------------------------

    def accepted(self, meter: Meter, prepared: Prepared) -> None:
        """It has a usage record, and its model is known."""
        self._meter, self._prepared = meter, prepared
        self._span.set_attributes(self._asked(prepared))

    def failed(self, error: ApiError) -> None:
        """What the client was told instead of an answer."""
        # Not the error itself: its traceback leads back here, and only the garbage collector would free the request.
        self._error, self._refused = error.code or str(error.status), error.status

    def held(self, began: float, reason: str, ended: str) -> None:
        """It waited from `began` (time.monotonic) until now."""
        if self._room():
            attributes = {"shoal.hold.reason": reason, "shoal.hold.ended": ended}
            span = self._tracer.start_span("hold", self._below, attributes=attributes, start_time=self._at(began))
            span.end()

    def attempt(self, replica: Replica, target: Target) -> str:
        """It goes to a replica; what the engine gets as headers."""
        meter, prepared = self._meter, self._prepared
        if meter is None or prepared is None or not self._room():
            return self._onward
        attributes = {
            **self._asked(prepared),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.stream": prepared.stream,
            "server.address": target.host,
            "server.port": target.port,
            "shoal.attempt": meter.attempts,
            "shoal.replica": replica.key,
            "shoal.gpu_class": replica.gpu_class,
            "k8s.node.name": replica.node or "",
        }
        if prepared.answer_bound is not None:
            attributes["gen_ai.request.max_tokens"] = prepared.answer_bound
        if prepared.choices != 1:
            attributes["gen_ai.request.choice.count"] = prepared.choices
        name = f"{OPERATIONS[self._endpoint]} {prepared.word}"
        self._attempt = span = self._tracer.start_span(name, self._below, SpanKind.CLIENT, attributes)
        self._finish.clear()
        return onward(span)

    def saw(self, data: bytes) -> None:
        """A part of the engine's answer: why it ended is read, and nothing else."""
        if len(self._finish) < _REASONS:
            self._finish += [reason.decode() for reason in _FINISH.findall(data)][: _REASONS - len(self._finish)]

    def attempt_over(self, failure: str | None = None) -> None:
        """The answer is over, or there is none for this reason. Another call changes nothing."""
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
                if self._room():
                    below = set_span_in_context(span, _ROOT)
                    self._tracer.start_span("stream", below, start_time=self._at(first)).end()
        span.end()

    def end(self) -> None:
        """The request is over."""
        self.attempt_over()
        span, meter, error, status = self._span, self._meter, self._error, self._refused
        failed = status is not None and status >= 500
        if meter is not None:
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
            # Not the message: it may repeat what the client wrote.
            span.set_status(Status(StatusCode.ERROR, error))
        if self._left_out:
            span.set_attribute("shoal.spans_left_out", self._left_out)
        span.end()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _asked(self, prepared: Prepared) -> dict[str, str | int | bool]:
        model = prepared.model
        asked: dict[str, str | int | bool] = {
            "gen_ai.operation.name": OPERATIONS[self._endpoint],
            "gen_ai.request.model": prepared.word,
            "shoal.model": model.key,
        }
        if model.adapter is not None:
            asked |= {"shoal.adapter": model.adapter.key, "shoal.adapter.revision": model.adapter.revision}
        return asked

    def _room(self) -> bool:
        if self._made >= _MOST:
            self._left_out += 1
            return False
        self._made += 1
        return True

    def _at(self, monotonic: float) -> int:
        return self._started + int(monotonic * 1e9)


def onward(span: Span) -> str:
    """The lines of a request's head that carry the trace on."""
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
