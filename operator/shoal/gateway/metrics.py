"""The gateway's metrics. Names of GenAI measures follow OpenTelemetry's semantic conventions.

Labels are bounded: a Model (up to a number, then "other"), an operation, an outcome. Never a tenant, a key or a word
that a client made up.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_TOKENS = tuple(4.0**n for n in range(14))

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The series of one Model and operation, looked up once."""

    duration: dict[str, Histogram]
    first_token: Histogram
    input_tokens: Histogram
    output_tokens: Histogram
    requests: dict[str, Counter]


class Metrics:
    def __init__(self, max_models: int = 1000) -> None:
        self.registry = registry = CollectorRegistry()
        model_labels = ["gen_ai_request_model", "gen_ai_operation_name"]
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from acceptance to the end of the answer.",
            [*model_labels, "outcome"],
            buckets=_DURATIONS,
            registry=registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from acceptance to the first byte of the answer.",
            model_labels,
            buckets=_FIRST_TOKEN,
            registry=registry,
        )
        self.tokens = Histogram(
            "gen_ai_client_token_usage",
            "Tokens per request, as the engine counted them; input includes cached ones.",
            [*model_labels, "gen_ai_token_type"],
            buckets=_TOKENS,
            registry=registry,
        )
        self.requests = Counter(
            "shoal_gateway_requests",
            "Accepted requests by how they ended.",
            [*model_labels, "outcome"],
            registry=registry,
        )
        self.rejected = Counter(
            "shoal_gateway_rejected",
            "Requests that were not accepted (no usage record), by reason.",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            "shoal_gateway_retries",
            "Attempts that failed before the first byte and were made again or given up.",
            ["reason"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "shoal_gateway_fallback_choices",
            "Replicas chosen while no stream of their Model was live.",
            registry=registry,
        )
        self.invalid = Counter(
            "shoal_gateway_invalid_objects",
            "Versions of objects that were left out because they do not validate.",
            ["kind"],
            registry=registry,
        )
        self.in_flight = Gauge("shoal_gateway_requests_in_flight", "Requests that are being served.", registry=registry)
        self.ready = Gauge("shoal_gateway_ready", "1 when /readyz says ok.", registry=registry)
        self.spool_ok = Gauge("shoal_gateway_spool_ok", "1 while usage records can be kept.", registry=registry)
        self.spool_backlog = Gauge("shoal_gateway_spool_backlog_rows", "Rows not yet on disk.", registry=registry)
        self.spool_rows = Gauge("shoal_gateway_spool_rows_written", "Rows written since the start.", registry=registry)
        self.spool_failures = Gauge(
            "shoal_gateway_spool_write_failures", "Commits that failed since the start.", registry=registry
        )
        self.spool_dropped = Gauge(
            "shoal_gateway_spool_rows_dropped",
            "Rows lost since the start because the disk refused them for too long.",
            registry=registry,
        )
        self.streams = Gauge("shoal_gateway_replica_streams", "Streams to agents.", ["state"], registry=registry)
        self.objects = Gauge("shoal_gateway_objects", "Objects that the gateway knows.", ["kind"], registry=registry)
        self.body_bytes = Gauge(
            "shoal_gateway_held_body_bytes", "Request bodies that are in memory.", registry=registry
        )
        self._max_models = max_models
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._known: set[str] = set()

    def of(self, model: str, endpoint: str) -> ModelMetrics:
        """The series of a Model (`namespace/name`) on one endpoint."""
        found = self._models.get((model, endpoint))
        if found is not None:
            return found
        label = model
        if model not in self._known:
            if len(self._known) >= self._max_models:
                label = "other"
            else:
                self._known.add(model)
        operation = OPERATIONS[endpoint]
        outcomes = ("answered", "rejected", "cancelled", "failed", "refused")
        found = ModelMetrics(
            duration={o: self.duration.labels(label, operation, o) for o in outcomes},
            first_token=self.first_token.labels(label, operation),
            input_tokens=self.tokens.labels(label, operation, "input"),
            output_tokens=self.tokens.labels(label, operation, "output"),
            requests={o: self.requests.labels(label, operation, o) for o in outcomes},
        )
        if label != "other":
            self._models[model, endpoint] = found
        return found
