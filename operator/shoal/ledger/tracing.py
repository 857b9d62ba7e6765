"""Spans of the ledger: one per call, so one per batch of records, never one per request.

Imported only when tracing is on.
"""

import time

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from shoal.net.shell import ShellRequest


class LedgerSpans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def answered(self, request: ShellRequest, began: float, status: int) -> None:
        """Records the span of an API call that began at `began` (time.monotonic)."""
        method, path = request.method, request.scope["path"]
        attributes = {
            "http.request.method": method,
            "http.route": path,
            "http.response.status_code": status,
            "shoal.caller": request.caller.role,
        }
        started = time.time_ns() - int((time.monotonic() - began) * 1e9)
        span = self._tracer.start_span(f"{method} {path}", Context(), SpanKind.SERVER, attributes, start_time=started)
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()
