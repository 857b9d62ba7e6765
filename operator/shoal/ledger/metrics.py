"""The ledger's metrics. No label names a tenant."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.ledger.reconcile.watch import Reconciler
from shoal.ledger.store import LedgerStore
from shoal.ledger.totals import TenantTotals


class LedgerMetrics(Collector):
    """Reads the store's counters at each scrape. `open_rows` is the last count of open rows."""

    def __init__(self, store: LedgerStore, totals: TenantTotals, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._totals = totals
        self._clock = clock
        self.open_rows: int | None = None
        self.closed_rows = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> list[Metric]:
        stats = self._store.stats
        records = CounterMetricFamily(
            "shoal_ledger_records", "Records by result: new, known, aside (quarantined).", labels=["result"]
        )
        records.add_metric(["new"], stats.new)
        records.add_metric(["known"], stats.known)
        records.add_metric(["aside"], stats.quarantined)
        metrics: list[Metric] = [
            records,
            CounterMetricFamily("shoal_ledger_commits", "Database transactions.", value=stats.commits),
            CounterMetricFamily(
                "shoal_ledger_commit_seconds", "Time spent in database transactions.", value=stats.commit_seconds
            ),
            CounterMetricFamily("shoal_ledger_database_failures", "Failed database operations.", value=stats.failures),
            CounterMetricFamily(
                "shoal_ledger_closed", "Requests of dead gateways that were closed.", value=self.closed_rows
            ),
            GaugeMetricFamily(
                "shoal_ledger_database_up", "1 while records can be stored.", value=float(self._store.error is None)
            ),
            GaugeMetricFamily("shoal_ledger_waiting", "Records that wait for their commit.", value=self._store.waiting),
            GaugeMetricFamily("shoal_ledger_totals_readers", "Open streams of totals.", value=self._totals.hub.readers),
        ]
        if self.open_rows is not None:  # unknown is not zero
            metrics.append(
                GaugeMetricFamily(
                    "shoal_ledger_open_requests", "Requests that have no final record yet.", value=self.open_rows
                )
            )
        return metrics


class CoverageMetrics(Collector):
    """Coverage of the engines' counters."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def collect(self) -> list[Metric]:
        coverage = self._reconciler.coverage
        lower = "Readings of an engine that were lower than an earlier one with the same boot id."
        engines = GaugeMetricFamily(
            "shoal_ledger_engines", "Engine pods by their agent's stream: live, or stale.", labels=["state"]
        )
        engines.add_metric(["live"], coverage.live)
        engines.add_metric(["stale"], len(coverage.stale))
        rogue = GaugeMetricFamily(
            "shoal_ledger_rogue_pods",
            "Pods with the labels of an engine that no Model owns. They are ignored.",
            value=self._reconciler.pods.ownership.rogue,
        )
        return [engines, rogue, CounterMetricFamily("shoal_ledger_lower_readings", lower, value=self._reconciler.lower)]
