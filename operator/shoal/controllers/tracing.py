"""The operator's spans: each reconcile, and each decision that changed how many replicas a Model is to have.

Loaded only where traces are on. A quiet fleet reconciles nothing and makes none.
"""

import time

from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, Tracer

from shoal.api.model import Model
from shoal.core.scaling import ScalingDecision


class OperatorSpans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def reconciled(self, queue: str, key: str, began: float, failure: str | None) -> None:
        """A reconcile that began at `began` (time.monotonic) is over; `failure` is the class of what it raised."""
        attributes = {"shoal.queue": queue, "shoal.key": key}
        started = time.time_ns() - int((time.monotonic() - began) * 1e9)
        span = self._tracer.start_span(f"reconcile {queue}", Context(), attributes=attributes, start_time=started)
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end()

    def decided(self, model: Model, decision: ScalingDecision, before: int) -> None:
        """A Model is to have another number of replicas than `before`."""
        attributes = {
            "shoal.model": model.key,
            "shoal.replicas.before": before,
            "shoal.replicas.wanted": decision.wanted,
            "shoal.reason": decision.reason,
            "shoal.message": decision.message,
        }
        self._tracer.start_span("scale", Context(), attributes=attributes).end()
