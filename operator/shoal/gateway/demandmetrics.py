"""The content of the demand stream as metrics: Prometheus may be the operator's signal source instead of the streams.

Labels are bounded by the number of Models. The samples' names are read by `signals/prometheus.py`.
"""

from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.gateway.demand import DemandState


class DemandMetrics(Collector):
    """`names` returns `namespace/name` by Model uid, as a readable label."""

    def __init__(self, boot: str, demand: DemandState, names: Callable[[], Mapping[str, str]]) -> None:
        self._boot, self._demand, self._names = boot, demand, names

    def collect(self) -> list[Metric]:
        info = GaugeMetricFamily("shoal_demand_info", "1; its label is the boot id of the gateway.", labels=["boot"])
        info.add_metric([self._boot], 1)
        labels = ["model_uid", "model"]
        arrivals = CounterMetricFamily("shoal_demand_arrivals", "Accepted requests of a Model.", labels=labels)
        in_flight = GaugeMetricFamily("shoal_demand_in_flight", "Requests at replicas.", labels=labels)
        held = GaugeMetricFamily("shoal_demand_held", "Held requests.", labels=labels)
        tokens = GaugeMetricFamily("shoal_demand_held_tokens", "Estimated tokens of the held requests.", labels=labels)
        oldest = GaugeMetricFamily("shoal_demand_oldest_seconds", "Age of the oldest held request.", labels=labels)
        names = self._names()
        for uid in self._demand.uids():
            here = self._demand.demand(uid)
            of = [uid, names.get(uid, "")]
            arrivals.add_metric(of, here.arrivals)
            in_flight.add_metric(of, here.in_flight)
            held.add_metric(of, here.held)
            tokens.add_metric(of, here.held_tokens)
            oldest.add_metric(of, here.oldest_seconds)
        return [info, arrivals, in_flight, held, tokens, oldest]
