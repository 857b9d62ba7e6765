"""`/metrics` with SGLang's names, labels and buckets, for what the simulator knows.

Gauges are read when scraped, so they are fresher than SGLang's, which writes them at intervals.
Families of what is not simulated (speculative decoding, disaggregation, grammars) are left out.
"""

import os
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_dev.sim.scheduler import Scheduler, Sequence

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
_RANKS: Final = ("engine_type", "model_name", "tp_rank", "pp_rank", "moe_ep_rank")
_LATENCY: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_LONG: Final = (*_LATENCY, 600, 1200, 1800, 2400)
_TOKEN: Final = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2,
    4, 6, 8,
)  # fmt: skip
_QUEUE: Final = (
    0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300,
    400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000,
)  # fmt: skip
_LENGTHS: Final = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000, 17500, 20000,
    22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000,
    1100000,
)  # fmt: skip


_STARTUP: Final = ("load_weight", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e")
_GRAPHS: Final = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")


class _SchedulerCollector(Collector):
    def __init__(self, model: str, scheduler: Scheduler, throughput: Callable[[], float], context: int) -> None:
        self._model = model
        self._scheduler = scheduler
        self._throughput = throughput
        self._context = context

    def collect(self) -> Iterable[Metric]:
        scheduler, kv, totals = self._scheduler, self._scheduler.kv, self._scheduler.totals
        ranks = ("unified", self._model, "0", "0", "0")
        usage = kv.used / kv.capacity
        gauges: dict[str, tuple[str, float]] = {
            "num_running_reqs": ("The number of running requests.", scheduler.running),
            "num_queue_reqs": ("The number of requests in the waiting queue.", scheduler.waiting),
            "num_grammar_queue_reqs": ("The number of requests in the grammar waiting queue.", 0),
            "token_usage": ("The token usage.", round(usage, 2)),
            "full_token_usage": ("The token usage for full attention layers.", usage),
            "num_used_tokens": ("The number of used tokens.", kv.used),
            "kv_used_tokens": ("KV tokens in use.", kv.used),
            "kv_evictable_tokens": ("KV tokens cached and evictable.", kv.evictable),
            "kv_available_tokens": ("KV tokens free.", kv.free),
            "max_total_num_tokens": ("Maximum total number of tokens in the KV cache pool.", kv.capacity),
            "page_size": ("KV cache page size.", 1),
            "num_pages": ("Number of KV cache pages.", kv.capacity),
            "context_len": ("Context length.", self._context),
            "gen_throughput": ("The generation throughput (token/s).", self._throughput()),
            "cache_hit_rate": ("The prefix cache hit rate.", scheduler.cache_hit_rate),
            "decode_sum_seq_lens": ("The sum of all sequence lengths in decode.", scheduler.context_tokens),
            # SGLang never sets it, and agents must not rely on it.
            "utilization": ("The utilization.", 0),
        }
        if scheduler.slots is not None:
            used, slots = scheduler.adapters_running, scheduler.slots.total
            # "Occupied in GPU memory" it says, but SGLang counts the adapters of the running batch.
            gauges |= {
                "lora_pool_slots_used": ("Number of LoRA adapter slots currently occupied in GPU memory.", used),
                "lora_pool_slots_total": ("Total number of LoRA adapter slots available (max_loras_per_batch).", slots),
                "lora_pool_utilization": ("LoRA pool utilization ratio (used/total). 1.0 means full.", used / slots),
            }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"sglang:{name}", text, labels=_RANKS)
            family.add_metric(ranks, value)
            yield family
        for name, value in (
            ("num_retracted_reqs", scheduler.retracted_waiting),
            ("num_paused_reqs", scheduler.waiting if scheduler.paused else 0),
        ):
            family = GaugeMetricFamily(f"sglang:{name}", "The number of such requests.", labels=(*_RANKS, "pid"))
            family.add_metric((*ranks, str(os.getpid())), value)
            yield family
        modes: dict[str, dict[str, float]] = {
            "realtime_tokens": {
                "prefill_compute": totals.prefill_uncached_tokens,
                "prefill_cache": totals.prefill_cached_tokens,
                "decode": totals.decode_tokens,
            },
            "prefill_effective_tokens": {
                "input": totals.prefill_uncached_tokens,
                "device_hit": totals.prefill_cached_tokens,
            },
        }
        for name, values in modes.items():
            counter = CounterMetricFamily(f"sglang:{name}", "Tokens by mode.", labels=(*_RANKS, "mode"))
            for mode, value in values.items():
                counter.add_metric((*ranks, mode), value)
            yield counter


class SimMetrics:
    """One engine's registry."""

    def __init__(self, model: str, scheduler: Scheduler, throughput: Callable[[], float], context: int) -> None:
        disable_created_metrics()
        self._registry = registry = CollectorRegistry()
        registry.register(_SchedulerCollector(model, scheduler, throughput, context))
        self._labels = {"engine_type": "unified", "model_name": model}
        self._ranks = {**self._labels, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        common = list(self._labels)
        by_kind = [*common, "is_streaming"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"sglang:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sglang:{name}", text, labels, buckets=buckets, registry=registry)

        self._prompt = counter("prompt_tokens", "Number of prefill tokens processed.", by_kind)
        self._generation = counter("generation_tokens", "Number of generation tokens processed.", by_kind)
        self._cached = counter("cached_tokens", "Number of cached prompt tokens by source.", [*common, "cache_source"])
        self._requests = counter("num_requests", "Number of requests processed.", by_kind)
        self._aborted = counter("num_aborted_requests", "Number of requests aborted.", common)
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token in seconds.", by_kind, _LATENCY)
        self._e2e = histogram("e2e_request_latency_seconds", "End-to-end latency in seconds.", by_kind, _LONG)
        self._tpot = histogram("request_time_per_output_token_seconds", "Time per output token.", by_kind, _TOKEN)
        self._itl = histogram("inter_token_latency_seconds", "Inter-token latency in seconds.", common, _TOKEN)
        self._queue = histogram("queue_time_seconds", "Time in the queue in seconds.", list(self._ranks), _QUEUE)
        self._prompts = histogram("prompt_tokens_histogram", "Prompt length.", common, _LENGTHS)
        self._uncached = histogram("uncached_prompt_tokens_histogram", "Uncached prompt length.", common, _LENGTHS)
        self._lengths = histogram("generation_tokens_histogram", "Generation length.", common, _LENGTHS)
        self._http = counter("http_requests", "HTTP requests by endpoint and method.", ["endpoint", "method"])
        self._answers = counter("http_responses", "HTTP responses.", ["endpoint", "status_code", "method"])
        startup = {
            "startup_time_seconds": ("Engine startup duration by phase in seconds.", _STARTUP),
            "startup_cuda_graph_time_seconds": ("CUDA graph capture duration by phase in seconds.", _GRAPHS),
        }
        self._startup = {
            name: (Gauge(f"sglang:{name}", text, [*common, "phase"], registry=registry), phases)
            for name, (text, phases) in startup.items()
        }
        self.active = Gauge(
            "sglang:http_requests_active", "Active HTTP requests.", ["endpoint", "method"], registry=registry
        )

    def started(self, load_seconds: float) -> None:
        """The start is over. Nothing is captured here, as in SGLang on a CPU."""
        spent = {"load_weight": load_seconds, "scheduler_e2e": load_seconds, "tokenizer_e2e": load_seconds}
        for gauge, phases in self._startup.values():
            for phase in phases:
                gauge.labels(**self._labels, phase=phase).set(spent.get(phase, 0.0))

    def arrived(self, endpoint: str, method: str) -> None:
        self._http.labels(endpoint, method).inc()
        self.active.labels(endpoint, method).inc()

    def answered(self, endpoint: str, method: str, status: int | None) -> None:
        self.active.labels(endpoint, method).dec()
        if status is not None:
            self._answers.labels(endpoint, str(status), method).inc()

    def finished(self, sequence: Sequence, *, stream: bool) -> None:
        """Counts a sequence that ended. One aborted before it was admitted counts as aborted only."""
        labels, kind = self._labels, {**self._labels, "is_streaming": str(stream).lower()}
        if sequence.finish is not None and sequence.finish.type == "abort":
            self._aborted.labels(**labels).inc()
        if sequence.admitted is None or sequence.finished is None:
            return
        prompt, cached, generated = len(sequence.prompt), sequence.cached or 0, len(sequence.output)
        self.count(prompt, generated, stream=stream)
        if cached:
            self._cached.labels(**labels, cache_source="device").inc(cached)
        self._e2e.labels(**kind).observe(sequence.finished - sequence.arrived)
        self._queue.labels(**self._ranks).observe(sequence.admitted - sequence.arrived)
        self._prompts.labels(**labels).observe(prompt)
        self._uncached.labels(**labels).observe(prompt - cached)
        self._lengths.labels(**labels).observe(generated)
        if sequence.first_token is not None:
            self._ttft.labels(**kind).observe(sequence.first_token - sequence.arrived)
            if generated > 1:
                each = (sequence.finished - sequence.first_token) / (generated - 1)
                self._tpot.labels(**kind).observe(each)
                self._itl.labels(**labels).observe(each)

    def count(self, prompt: int, generated: int, *, stream: bool = False) -> None:
        """Counts a request's tokens."""
        kind = {**self._labels, "is_streaming": str(stream).lower()}
        self._requests.labels(**kind).inc()
        self._prompt.labels(**kind).inc(prompt)
        self._generation.labels(**kind).inc(generated)

    def render(self) -> bytes:
        return generate_latest(self._registry)
