"""The gateway's metrics. Names of GenAI metrics follow OpenTelemetry's semantic conventions.

Labels are bounded: a Model (up to a number, then "other"), an operation, an outcome. Tenants have their own series
(`tenantmetrics.py`). No label holds a key or a name that a client made up.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.core.hold.limits import Held, Limits
from shoal.gateway.tenantmetrics import TenantMetrics, UnitCounts
from shoal.metering.meter import NO_UNITS, Meter
from shoal.metering.record import Outcome
from shoal.metering.spoolmetrics import SpoolMetrics

_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)
_TOKENS = tuple(4.0**n for n in range(14))

_OUTCOMES: Final[tuple[Outcome, ...]] = ("answered", "rejected", "cancelled", "failed", "refused", "expired")

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/v1/classify": "classify",
    "/v1/audio/transcriptions": "transcription",
    "/v1/tokenize": "tokenize",
    "/v1/detokenize": "detokenize",
}


class Tally:
    """A histogram that costs a request a fraction of a microsecond: prometheus_client's takes a lock per bucket and
    sum. Here only the event loop writes, and a scrape reads."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class ModelMetrics:
    """The series of one Model and operation."""

    __slots__ = (
        "adapter_loaded",
        "adapter_missed",
        "duration",
        "first_token",
        "held",
        "input_tokens",
        "output_tokens",
        "per_token",
        "units",
        "waited",
    )

    def __init__(self) -> None:
        self.duration: dict[Outcome, Tally] = {outcome: Tally(_DURATIONS) for outcome in _OUTCOMES}
        self.first_token = Tally(_FIRST_TOKEN)
        self.per_token = Tally(_PER_TOKEN)
        self.held = Tally(_DURATIONS)
        self.input_tokens = Tally(_TOKENS)
        self.output_tokens = Tally(_TOKENS)
        self.units = UnitCounts()
        self.adapter_loaded = self.adapter_missed = 0
        self.waited = False
        """Whether any request has waited: only then is the hold histogram shown."""


class _ModelCollector(Collector):
    """Turns the tallies into Prometheus' families when they are scraped."""

    def __init__(self, models: Mapping[tuple[str, str], ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        labels = ["gen_ai_request_model", "gen_ai_operation_name"]
        duration = HistogramMetricFamily(
            "gen_ai_server_request_duration_seconds",
            "Time from acceptance to the end of the answer.",
            labels=[*labels, "outcome"],
        )
        first_token = HistogramMetricFamily(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from acceptance to the first byte of the answer.",
            labels=labels,
        )
        per_token = HistogramMetricFamily(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token after the first, averaged over each answer that was streamed to its end.",
            labels=labels,
        )
        tokens = HistogramMetricFamily(
            "gen_ai_client_token_usage",
            "Tokens per request, as the engine counted them; input includes cached tokens.",
            labels=[*labels, "gen_ai_token_type"],
        )
        held = HistogramMetricFamily(
            "shoal_gateway_hold_seconds",
            "Time for which requests were held, without requests that were not held.",
            labels=labels,
        )
        requests = CounterMetricFamily(
            "shoal_gateway_requests", "Accepted requests by outcome.", labels=[*labels, "outcome"]
        )
        adapters = CounterMetricFamily(
            "shoal_gateway_adapter_requests",
            "Requests for an adapter, by whether a replica had it loaded when they arrived.",
            labels=["gen_ai_request_model", "loaded"],
        )
        units = CounterMetricFamily(
            "shoal_gateway_units",
            "Documents, images and seconds of audio that engines have read, of Models that had any.",
            labels=[*labels, "unit"],
        )
        asked: dict[str, list[int]] = {}
        for key, model in self._models.items():
            for outcome, tally in model.duration.items():
                ended = sum(tally.counts)
                requests.add_metric([*key, outcome], ended)
                if ended:  # most outcomes never occur, and their buckets would be half of the scrape
                    duration.add_metric([*key, outcome], tally.buckets(), tally.sum)
            first_token.add_metric([*key], model.first_token.buckets(), model.first_token.sum)
            per_token.add_metric([*key], model.per_token.buckets(), model.per_token.sum)
            if model.waited:
                held.add_metric([*key], model.held.buckets(), model.held.sum)
            if model.adapter_loaded or model.adapter_missed:
                of_model = asked.setdefault(key[0], [0, 0])
                of_model[0] += model.adapter_loaded
                of_model[1] += model.adapter_missed
            for kind, tally in (("input", model.input_tokens), ("output", model.output_tokens)):
                tokens.add_metric([*key, kind], tally.buckets(), tally.sum)
            for unit, count in model.units.by_name() if model.units else ():
                units.add_metric([*key, unit], count)
        for name, (loaded, missed) in asked.items():
            adapters.add_metric([name, "yes"], loaded)
            adapters.add_metric([name, "no"], missed)
        return (duration, first_token, per_token, held, tokens, units, requests, adapters)


class _HoldCollector(Collector):
    """Held requests, read when they are scraped."""

    def __init__(
        self, held: Callable[[], Mapping[str, Held]], limits: Callable[[], Mapping[str, Limits]], most: int
    ) -> None:
        self._held, self._limits = held, limits
        self._most = most

    def collect(self) -> Iterable[Metric]:
        labels = ["gen_ai_request_model"]
        requests = GaugeMetricFamily(
            "shoal_gateway_held_requests", "Held requests: they wait for a replica.", labels=labels
        )
        size = GaugeMetricFamily("shoal_gateway_held_bytes", "Bytes of the bodies of held requests.", labels=labels)
        most = GaugeMetricFamily(
            "shoal_gateway_hold_limit_requests",
            "Limit of held requests, for Models with held requests.",
            labels=labels,
        )
        most_size = GaugeMetricFamily(
            "shoal_gateway_hold_limit_bytes",
            "Limit for the bytes of the bodies of held requests.",
            labels=labels,
        )
        limits = self._limits()
        held_by_model = sorted(self._held().items(), key=lambda pair: -pair[1].requests)
        shown = dict(held_by_model[: self._most])
        for _, held in held_by_model[self._most :]:
            before = shown.get("other", Held())
            shown["other"] = Held(before.requests + held.requests, before.bytes + held.bytes)
        for model, held in shown.items():
            requests.add_metric([model], held.requests)
            size.add_metric([model], held.bytes)
            if model in limits:
                most.add_metric([model], limits[model].max_requests)
                most_size.add_metric([model], limits[model].max_bytes)
        return (requests, size, most, most_size)


class GatewayMetrics:
    def __init__(self, max_models: int = 1000, max_tenants: int = 1000) -> None:
        self.registry = registry = CollectorRegistry()
        self.rejected = Counter(
            "shoal_gateway_rejected",
            "Requests that were not accepted and have no usage record, by reason and the layer of its cause.",
            ["reason", "layer"],
            registry=registry,
        )
        self.errors = Counter(
            "shoal_gateway_errors",
            "Accepted requests that were answered with an error, by reason and the layer of its cause.",
            ["reason", "layer"],
            registry=registry,
        )
        self.share_waits = Counter(
            "shoal_gateway_share_waits",
            "Requests that waited for reports of the other gateways: for this gateway's next share of their tenant's "
            "limit, or to learn whether its requests there have ended.",
            registry=registry,
        )
        self.retries = Counter(
            "shoal_gateway_retries",
            "Attempts that failed before the first byte, whether or not they were retried.",
            ["reason"],
            registry=registry,
        )
        self.cancellations = Counter(
            "shoal_gateway_cancellations",
            "Requests whose client disconnected, without streaming or in the middle of an external target's stream, by"
            " source of their token counts: exact (they came when the engine ended the request, or at the end of the"
            " stream), estimated (they did not).",
            ["counts"],
            registry=registry,
        )
        self.broken_off = Counter(
            "shoal_gateway_broken_off",
            "Answers in the midst of which a proxy (external processing) ended the request, by cause: replica_ended, or"
            " unknown: the client left, or the proxy lost the connection to a replica that goes on.",
            ["cause"],
            registry=registry,
        )
        self.suspects = Counter(
            "shoal_gateway_suspects",
            "Requests whose replica died before the first byte of the answer: sent_again to one more replica, or ended"
            " because it was the second one.",
            ["next"],
            registry=registry,
        )
        self.retries_deferred = Counter(
            "shoal_gateway_retry_budget_exhausted",
            "Rounds in which failed requests had to wait because their Model's retry budget was exhausted.",
            registry=registry,
        )
        self.releases = Counter(
            "shoal_gateway_hold_releases", "Held requests that were released to a replica.", registry=registry
        )
        self.hold_refused = Counter(
            "shoal_gateway_hold_refused",
            "Requests that could not be held, by the limit that was reached.",
            ["bound"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "shoal_gateway_fallback_choices",
            "Replicas that were chosen while no stream of their Model was live.",
            registry=registry,
        )
        self.fallbacks_taken = Counter(
            "shoal_gateway_route_fallbacks",
            "Requests that left a route's target for a fallback of the route, by why: refused, wait, cost or budget.",
            ["reason"],
            registry=registry,
        )
        self.external = Counter(
            "shoal_gateway_external_requests",
            "Requests to external targets of routes, by how they went.",
            ["outcome"],
            registry=registry,
        )
        self.mirrored = Counter(
            "shoal_gateway_mirrored",
            "Copies of requests for a route's mirror, by whether a replica got them.",
            ["result"],
            registry=registry,
        )
        self.leases = Counter(
            "shoal_gateway_adapter_leases",
            "Requests to agents for a lease of an adapter, by result.",
            ["result"],
            registry=registry,
        )
        self.invalid = Counter(
            "shoal_gateway_invalid_objects",
            "Versions of objects that were ignored because they are invalid.",
            ["kind"],
            registry=registry,
        )
        self.media = Counter(
            "shoal_gateway_media_fetches",
            "Files that clients referenced by https URL, by outcome: fetched, or the reason why not.",
            ["outcome"],
            registry=registry,
        )
        self.in_flight = Gauge("shoal_gateway_requests_in_flight", "Requests that are being served.", registry=registry)
        self.ready = Gauge("shoal_gateway_ready", "1 while /readyz answers ok.", registry=registry)
        self.spool = SpoolMetrics(registry)
        self.streams = Gauge("shoal_gateway_replica_streams", "Streams to agents.", ["state"], registry=registry)
        self.objects = Gauge("shoal_gateway_objects", "Known objects.", ["kind"], registry=registry)
        self.rogue_pods = Gauge(
            "shoal_gateway_rogue_pods",
            "Pods with the labels of an engine that no Model owns. They get no requests and no keys.",
            registry=registry,
        )
        self.body_bytes = Gauge(
            "shoal_gateway_held_body_bytes", "Bytes of request bodies in memory.", registry=registry
        )
        self._max_models = max_models
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._labelled: set[str] = set()
        registry.register(_ModelCollector(self._models))
        self.tenants = TenantMetrics(max_tenants)
        registry.register(self.tenants)

    def watch_holds(self, held: Callable[[], Mapping[str, Held]], limits: Callable[[], Mapping[str, Limits]]) -> None:
        """Adds the metrics of held requests and of the hold limits, by Model."""
        self.registry.register(_HoldCollector(held, limits, self._max_models))

    def observe(self, meter: Meter, endpoint: str) -> None:
        """A request has ended."""
        series = self.of(meter.model, endpoint)
        seconds, outcome = meter.seconds, meter.outcome or "failed"
        series.duration[outcome].observe(seconds)
        first = meter.seconds_to_first_byte
        if first is not None:
            series.first_token.observe(first)
        if meter.held_seconds is not None:
            series.held.observe(meter.held_seconds)
            series.waited = True
        counts = meter.tokens()
        if (tokens := counts["inputTokens"]) is not None:
            series.input_tokens.observe(tokens)
        if (tokens := counts["outputTokens"]) is not None:
            series.output_tokens.observe(tokens)
            if tokens > 1 and first is not None and outcome == "answered" and meter.fields["stream"]:
                series.per_token.observe((seconds - first) / (tokens - 1))
        self.tenants.observe(meter, counts)
        if (units := meter.units_read()) is not NO_UNITS:
            series.units.add(units)
            self.tenants.read(meter.tenant, units)

    def adapter_requested(self, model: str, endpoint: str, *, missed: bool) -> None:
        """A request names an adapter. `missed`: no replica has it loaded."""
        series = self.of(model, endpoint)
        if missed:
            series.adapter_missed += 1
        else:
            series.adapter_loaded += 1

    def hold_began(self, model: str, endpoint: str) -> None:
        """A request begins to wait. The series is shown from now on, because `increase()` ignores a series' first
        value."""
        self.of(model, endpoint).waited = True

    def of(self, model: str, endpoint: str) -> ModelMetrics:
        """The series of a Model (`namespace/name`) on one endpoint."""
        operation = OPERATIONS[endpoint]
        found = self._models.get((model, operation))
        if found is not None:
            return found
        if model not in self._labelled:
            if len(self._labelled) >= self._max_models:
                return self._models.setdefault(("other", operation), ModelMetrics())
            self._labelled.add(model)
        found = self._models[model, operation] = ModelMetrics()
        return found
