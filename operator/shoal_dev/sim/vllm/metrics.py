"""`/metrics` with vLLM's names, labels and buckets, for what the simulator knows.

Gauges are what the engine told at its last step: of one that hangs they do not change. Token counters move with every
step. Every family is there before the first request.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_dev.sim.loop import Clock
from shoal_dev.sim.metrics import SimMetrics
from shoal_dev.sim.scheduler import Sequence
from shoal_dev.sim.vllm.args import VLLMArgs
from shoal_dev.sim.vllm.lora import VLLMRegistry
from shoal_dev.sim.vllm.scheduler import VLLMScheduler

_LATENCY: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_FIRST: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_UNCOUNTED: Final = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
"""Parts of paths that http_requests_total leaves out; the load of an adapter is among them."""
_FLOPS_PER_TOKEN: Final = 2.0
"""Times the parameters."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine's metrics tell of."""

    args: VLLMArgs
    scheduler: VLLMScheduler
    adapters: VLLMRegistry | None
    clock: Clock
    context_length: int


class _Collector(Collector):
    def __init__(self, engine: Told) -> None:
        self._engine = engine
        self._labels = ("engine", "model_name")
        self._values = ("0", engine.args.names[0])

    def collect(self) -> Iterable[Metric]:
        gauges, counters = self._engine.scheduler.gauges, self._engine.scheduler.counters
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", gauges.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", gauges.waiting)
        waiting = {"capacity": gauges.waiting - gauges.deferred, "deferred": gauges.deferred}
        yield self._gauges("num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason", waiting)
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauges("engine_sleep_state", "Engine sleep state.", "sleep_state", states)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauges.usage)
        flops = counters.work * _FLOPS_PER_TOKEN * 1e6 if self._engine.args.flops else 0.0
        for name, value in (
            ("estimated_flops_per_gpu", flops),
            ("estimated_read_bytes_per_gpu", flops / 2),
            ("estimated_write_bytes_per_gpu", flops / 20),
            ("prefix_cache_queries", counters.queried),
            ("prefix_cache_hits", counters.cached),
            ("external_prefix_cache_queries", 0),
            ("external_prefix_cache_hits", 0),
            ("mm_cache_queries", 0),
            ("mm_cache_hits", 0),
            ("num_preemptions", counters.preemptions),
            ("prompt_tokens", counters.prompt),
            ("prompt_tokens_cached", counters.cached),
            ("generation_tokens", counters.generated),
            *self._speculation(),
        ):
            family = CounterMetricFamily(f"vllm:{name}", "As in vLLM.", labels=self._labels)
            family.add_metric(self._values, value)
            yield family
        computed = counters.prompt - counters.cached
        sources = {"local_compute": computed, "local_cache_hit": counters.cached, "external_kv_transfer": 0}
        yield self._counters("prompt_tokens_by_source", sources)
        tiers = {"device": counters.cached, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        yield self._counters("prompt_tokens_cached_by_source", tiers)
        yield from self._lora()
        yield self._config()

    def _speculation(self) -> tuple[tuple[str, float], ...]:
        """There only where the engine was started with it. The simulator guesses nothing."""
        if not self._engine.args.engine.given.get("speculative_config"):
            return ()
        return tuple((f"spec_decode_num_{what}", 0) for what in ("drafts", "draft_tokens", "accepted_tokens"))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=self._labels)
        family.add_metric(self._values, value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=(*self._labels, label))
        for word, value in values.items():
            family.add_metric((*self._values, word), value)
        return family

    def _counters(self, name: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", "As in vLLM.", labels=(*self._labels, "source"))
        for word, value in values.items():
            family.add_metric((*self._values, word), value)
        return family

    def _lora(self) -> Iterable[Metric]:
        """One series per combination of adapters that ever ran together; the value is a Unix time."""
        adapters, clock = self._engine.adapters, self._engine.clock
        seen = self._engine.scheduler.adapters_seen
        if not seen or adapters is None:
            return
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
        for batch, moment in seen.items():
            names = ",".join(adapters.slots.load_of(adapter).name for adapter in batch)
            family.add_metric((str(adapters.args.slots), names, names), time.time() - (clock.now() - moment))
        yield family

    def _config(self) -> Metric:
        engine = self._engine
        given = engine.args.engine
        tokens = engine.scheduler.pool.blocks * engine.args.block_size
        content = {
            "block_size": str(engine.args.block_size),
            "cache_dtype": str(given.given.get("kv_cache_dtype") or "auto"),
            "enable_prefix_caching": str(given.radix_cache),
            "engine": "0",
            "gpu_memory_utilization": str(given.mem_fraction_static),
            "kv_cache_max_concurrency": str(tokens / engine.context_length),
            "kv_cache_memory_bytes": str(engine.args.kv_bytes),
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(engine.scheduler.pool.blocks),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the CacheConfig.", labels=tuple(content))
        family.add_metric(tuple(content.values()), 1)
        return family


class VLLMMetrics(SimMetrics):
    """One engine's registry."""

    def __init__(self, engine: Told) -> None:
        # Not the base class's: its families are SGLang's.
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(engine))
        self._engine = engine
        labels = {"engine": "0", "model_name": engine.args.names[0]}

        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", "As in vLLM.", list(labels), buckets=buckets, registry=self._registry)
            return made.labels(**labels)

        lengths = _lengths(engine.context_length)
        self._first = histogram("time_to_first_token_seconds", _FIRST)
        self._between = histogram("inter_token_latency_seconds", _TOKEN)
        self._each = histogram("request_time_per_output_token_seconds", _TOKEN)
        self._whole = histogram("e2e_request_latency_seconds", _LATENCY)
        self._queue = histogram("request_queue_time_seconds", _LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", _LATENCY)
        self._decode = histogram("request_decode_time_seconds", _LATENCY)
        self._inference = histogram("request_inference_time_seconds", _LATENCY)
        self._prompts = histogram("request_prompt_tokens", lengths)
        self._answers = histogram("request_generation_tokens", lengths)
        ends = Counter("vllm:request_success", "As in vLLM.", [*labels, "finished_reason"], registry=self._registry)
        self._ends = {reason: ends.labels(**labels, finished_reason=reason) for reason in _REASONS}
        refused = Counter("vllm:admission_rejections", "As in vLLM.", ["model_name", "reason"], registry=self._registry)
        name = engine.args.names[0]
        self._refused = {
            reason: refused.labels(name, reason) for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        }
        self._http = Counter("http_requests", "As in vLLM.", ["handler", "method", "status"], registry=self._registry)

    def arrived(self, endpoint: str, method: str) -> None:
        """vLLM counts requests when they are answered."""

    def answered(self, endpoint: str, method: str, status: int | None) -> None:
        if status is not None and not any(part in endpoint for part in _UNCOUNTED):
            self._http.labels(endpoint, method, f"{status // 100}xx").inc()

    def refused(self) -> None:
        """The queue was full."""
        self._refused["max_num_queued_reqs"].inc()

    def count(self, prompt: int, generated: int, *, stream: bool = False) -> None:
        """The scheduler counts, in its steps."""

    def finished(self, sequence: Sequence, *, stream: bool) -> None:
        """A request whose client left is counted nowhere."""
        if sequence.finish is None or sequence.finish.type == "abort" or sequence.admitted is None:
            return
        finished = sequence.finished or sequence.arrived
        self._ends[sequence.finish.type].inc()
        self._whole.observe(finished - sequence.arrived)
        self._queue.observe(sequence.admitted - sequence.arrived)
        self._inference.observe(finished - sequence.admitted)
        self._prompts.observe(len(sequence.prompt))
        self._answers.observe(len(sequence.output))
        if sequence.first_token is None:
            return
        self._first.observe(sequence.first_token - sequence.arrived)
        self._prefill.observe(sequence.first_token - sequence.admitted)
        self._decode.observe(finished - sequence.first_token)
        if len(sequence.output) > 1:
            each = (finished - sequence.first_token) / (len(sequence.output) - 1)
            self._each.observe(each)
            for _ in range(len(sequence.output) - 1):
                self._between.observe(each)

    def render(self) -> bytes:
        return generate_latest(self._registry)


def _lengths(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on, as far as the context."""
    found: list[float] = []
    step = 1
    while True:
        for digit in (1, 2, 5):
            if digit * step > longest:
                return tuple(found)
            found.append(digit * step)
        step *= 10
