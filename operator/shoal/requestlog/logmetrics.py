"""The request log's metrics, read when they are scraped. They have no tenant label."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.requestlog.logger import RequestLogger

_PREFIX: Final = "shoal_gateway_request_log_"


class RequestLogMetrics(Collector):
    def __init__(self, logger: RequestLogger) -> None:
        self._logger = logger

    def collect(self) -> Iterable[Metric]:
        logger, stats = self._logger, self._logger.writer.stats
        dropped = CounterMetricFamily(_PREFIX + "dropped", "Entries that were dropped, by reason.", labels=["reason"])
        for reason, count in stats.dropped.items():
            dropped.add_metric([reason], count)
        return (
            CounterMetricFamily(_PREFIX + "entries", "Entries written.", value=stats.entries),
            CounterMetricFamily(_PREFIX + "written_bytes", "Bytes written, compressed.", value=stats.bytes),
            dropped,
            CounterMetricFamily(
                _PREFIX + "without_content",
                "Entries without prompt and answer, because a redaction rule of their tenant is refused.",
                value=stats.without_content,
            ),
            CounterMetricFamily(
                _PREFIX + "upload_failures", "Failed uploads to the bucket.", value=logger.upload_failures
            ),
            GaugeMetricFamily(
                _PREFIX + "memory_bytes",
                "Memory used for running requests and waiting entries.",
                value=logger.budget.held,
            ),
            GaugeMetricFamily(_PREFIX + "folder_bytes", "Bytes of the log files in the folder.", value=stats.held),
            GaugeMetricFamily(_PREFIX + "ok", "1 while entries can be written.", value=stats.error is None),
        )
