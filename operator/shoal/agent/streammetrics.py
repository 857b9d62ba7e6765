"""The keys of the replica's stream as metrics, for installations where the operator reads Prometheus in place of
streams.

Unknown keys have no sample. The names of the samples are read by `signals/prometheus.py`.
"""

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_GAUGES: Final = {
    "running": ("shoal_replica_running", "Requests in the engine's batch."),
    "max_running": ("shoal_replica_max_running", "Limit of requests that the engine runs concurrently."),
    "waiting": ("shoal_replica_waiting", "Requests in the engine's queue."),
    "waiting_tokens": (
        "shoal_replica_waiting_tokens",
        "Prompt tokens of requests in the engine's queue, without cached tokens.",
    ),
    "kv_tokens_used": ("shoal_replica_kv_tokens_used", "Tokens in use of the KV cache."),
    "adapter_slots": ("shoal_replica_adapter_slots", "Distinct adapters that leases may cover at once."),
    "adapter_slots_leased": ("shoal_replica_adapter_slots_leased", "Distinct adapters that leases cover."),
    "adapters_waiting": ("shoal_replica_adapters_waiting", "Callers that wait for a slot."),
    "tokens_per_step": (
        "shoal_replica_tokens_per_step",
        "Tokens per request and step of an engine with speculation, on average since its start: guessed tokens that "
        "were accepted, and one. Absent without speculation.",
    ),
    "kv_tokens_total": ("shoal_replica_kv_tokens_capacity", "Tokens that the KV cache holds."),
}
_COUNTERS: Final = {
    "adapter_loads_total": ("shoal_replica_adapter_loads", "Adapters loaded since the agent's start."),
    "adapter_evictions_total": (
        "shoal_replica_adapter_evictions",
        "Adapters evicted because others needed the space, since the agent's start.",
    ),
    "prompt_tokens_total": ("shoal_replica_prompt_tokens", "Prompt tokens since the engine's start."),
    "generation_tokens_total": ("shoal_replica_generation_tokens", "Generated tokens since the engine's start."),
}


class AgentMetrics(Collector):
    """`published` returns the last published keys."""

    def __init__(self, boot: str, published: Callable[[], Mapping[str, object]]) -> None:
        self._boot, self._published = boot, published

    def collect(self) -> list[Metric]:
        keys = self._published()
        labels = {
            "boot": self._boot,
            "engine_boot": str(keys.get("engine_boot") or ""),
            "phase": str(keys.get("phase") or ""),
        }
        info = GaugeMetricFamily("shoal_replica_info", "1; its labels describe the replica.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        found: list[Metric] = [info]
        for families, of in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for key, (name, text) in families.items():
                value = keys.get(key)
                if isinstance(value, int | float):
                    found.append(of(name, text, value=value))
        return found
