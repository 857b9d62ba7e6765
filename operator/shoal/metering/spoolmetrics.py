"""Metrics of the spool and of its shipper, updated when they are scraped."""

from prometheus_client import CollectorRegistry, Gauge

from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool


class SpoolMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"shoal_gateway_{name}", text, registry=registry)

        self._ok = gauge("spool_ok", "1 while usage records can be written.")
        self._backlog = gauge("spool_backlog_rows", "Rows of usage records that are not on disk yet.")
        self._rows = gauge("spool_rows_written", "Rows of usage records written since the start.")
        self._failures = gauge("spool_write_failures", "Commits of usage records that failed since the start.")
        self._dropped = gauge(
            "spool_rows_dropped", "Rows lost since the start because the disk could not be written for too long."
        )
        self._lost = gauge(
            "spool_requests_lost",
            "Requests since the start whose usage was lost because the disk could not be written for too long.",
        )
        self._used = gauge("spool_bytes", "Bytes of the spool's rows.")
        self._limit = gauge("spool_limit_bytes", "Limit for the bytes of the spool's rows; 0: no limit.")
        self._cut = gauge("spool_requests_cut", "Requests of a killed gateway that were closed as cut at the start.")
        self._damaged_rows = gauge(
            "spool_rows_damaged", "Rows found damaged on the disk since the start: quarantined, or unreadable."
        )
        self._damaged_files = gauge(
            "spool_files_damaged",
            "How often the spool was damaged and rebuilt from its readable rows since the start.",
        )
        self._ledger = gauge("ledger_ok", "1 while the ledger accepts records; 0 also without a ledger.")
        self._unshipped = gauge("unshipped_rows", "Rows on disk that the ledger does not have.")
        self._behind = gauge("unshipped_oldest_seconds", "Age of the oldest row on disk that the ledger does not have.")
        self._shipped = gauge("shipped_rows", "Rows that the ledger accepted since the start.")
        self._batches = gauge("shipped_batches", "Batches of rows that the ledger accepted since the start.")
        self._bytes = gauge("shipped_bytes", "Bytes of the records that the ledger accepted since the start.")
        self._sent = gauge(
            "shipped_wire_bytes", "Compressed bytes sent to the ledger since the start, including failed attempts."
        )
        self._known = gauge("shipped_rows_known", "Rows that the ledger already had.")
        self._quarantined = gauge("shipped_rows_aside", "Rows that the ledger quarantined because they are invalid.")
        self._ship_failures = gauge("ship_failures", "Failed attempts to ship rows to the ledger since the start.")

    def show(self, spool: UsageSpool, shipper: Shipper | None) -> None:
        stats = spool.stats
        self._ok.set(spool.error is None)
        self._backlog.set(spool.backlog)
        self._rows.set(stats.rows)
        self._failures.set(stats.failures)
        self._dropped.set(stats.dropped)
        self._lost.set(stats.lost)
        self._used.set(spool.used_bytes)
        self._limit.set(spool.limit_bytes or 0)
        self._cut.set(stats.closed_as_cut)
        self._damaged_rows.set(stats.damaged_rows)
        self._damaged_files.set(stats.damaged_files)
        self._unshipped.set(spool.last_seq if shipper is None else shipper.unshipped)
        if shipper is None:
            return
        shipped = shipper.stats
        self._ledger.set(shipper.error is None)
        self._behind.set(shipper.behind_seconds())
        self._shipped.set(shipped.rows)
        self._batches.set(shipped.batches)
        self._bytes.set(shipped.bytes)
        self._sent.set(shipped.sent_bytes)
        self._known.set(shipped.known)
        self._quarantined.set(shipped.quarantined)
        self._ship_failures.set(shipped.failures)
