"""Metrics of a replica's adapters. No label names an adapter, because there may be thousands."""

from collections.abc import Callable
from typing import Final, get_args

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.core.layers.faults import layer_label
from shoal.core.lora.lifecycle.registry import Registry, State

_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Timings:
    """Histograms, in seconds."""

    def __init__(self) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"shoal_agent_adapter_{name}_seconds", text, buckets=_BUCKETS, registry=None)

        self.stage = histogram("stage", "Fetching and verifying an adapter's files.")
        self.load = histogram("load", "Loading an adapter into the engine.")
        self.unload = histogram("unload", "Unloading an adapter from the engine.")
        self.wait = histogram("wait", "Time from a caller's request for an adapter to its lease.")
        self.all = (self.stage, self.load, self.unload, self.wait)


class AdapterMetrics(Collector):
    """Reads `registry` and the refusals by reason at each scrape."""

    def __init__(self, registry: Registry, timings: Timings, refusals: Callable[[], dict[str, int]]) -> None:
        self._registry = registry
        self._timings = timings
        self._refusals = refusals

    def collect(self) -> list[Metric]:
        registry = self._registry
        found: list[Metric] = [metric for each in self._timings.all for metric in each.collect()]
        resident = GaugeMetricFamily("shoal_agent_adapters", "Adapters of this replica by state.", labels=["state"])
        for state in get_args(State):
            resident.add_metric([state], registry.count(frozenset({state})))
        refused = CounterMetricFamily(
            "shoal_agent_adapter_refusals", "Refused leases by reason and its layer.", labels=["reason", "layer"]
        )
        for reason, count in self._refusals().items():
            refused.add_metric([reason, layer_label(reason)], count)
        gauges = {
            "places": ("Adapters that the engine may have in host memory.", registry.places),
            "failed": ("Adapters that could not be staged or loaded.", len(registry.failures)),
        }
        for name, (text, value) in gauges.items():
            found.append(GaugeMetricFamily(f"shoal_agent_adapter_{name}", text, value=value))
        return [*found, resident, refused]
