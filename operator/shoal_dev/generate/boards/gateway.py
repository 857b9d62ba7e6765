"""Gateways: what they accept, turn away, hold and retry, and whether usage records get through."""

from typing import Final

from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import or_zero, quantile_of_range, rate, total

_LOGS_OFF: Final = "request logs are written only for Tenants that enable `logging`"

_NOW: Final = PanelRow(
    "Now",
    (
        Panel(
            "Ready gateways",
            "Gateways whose /readyz answers ok.",
            (PanelQuery(or_zero(total("shoal_gateway_ready"))),),
            kind="number",
            width=4,
            marks=(Mark(0, "red"), Mark(1, "green")),
        ),
        Panel(
            "In flight",
            "Requests that are being served or held.",
            (PanelQuery(total("shoal_gateway_requests_in_flight")),),
            kind="number",
            width=4,
        ),
        Panel(
            "Streams down",
            "Streams to agents that should be live and are not. A gateway sends no requests to a replica without a "
            "live stream.",
            (PanelQuery(or_zero(total("shoal_gateway_replica_streams", 'state="down"'))),),
            kind="number",
            width=4,
            marks=(Mark(1, "red"),),
            runbook="signals-stale.md",
        ),
        Panel(
            "Gateways without a spool",
            "Gateways that cannot write usage records to their disk.",
            (PanelQuery("count(shoal_gateway_spool_ok == 0) or vector(0)"),),
            kind="number",
            width=4,
            marks=(Mark(1, "red"),),
            runbook="spool-refuses.md",
        ),
        Panel(
            "Oldest unshipped record",
            "Age of the oldest usage record that the ledger does not have.",
            (PanelQuery("max(shoal_gateway_unshipped_oldest_seconds)"),),
            unit="s",
            kind="number",
            width=4,
            marks=(Mark(60, "yellow"), Mark(600, "red")),
            runbook="ledger-behind.md",
        ),
        Panel(
            "Usage lost",
            "Requests since the start of the gateways whose usage record was lost.",
            (PanelQuery(total("shoal_gateway_spool_requests_lost")),),
            kind="number",
            width=4,
            marks=(Mark(1, "red"),),
            runbook="usage-lost.md",
        ),
    ),
)

_REQUESTS: Final = PanelRow(
    "Requests",
    (
        Panel(
            "Requests by gateway",
            "Accepted requests per second that have ended.",
            (PanelQuery(rate("shoal_gateway_requests_total", by="pod"), "{{pod}}"),),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "In flight by gateway",
            "Requests that are being served or held.",
            (PanelQuery(total("shoal_gateway_requests_in_flight", by="pod"), "{{pod}}"),),
            kind="stacked",
        ),
        Panel(
            "Not accepted",
            "Requests per second that were refused before acceptance, by reason and the layer of its cause: an unknown "
            "key or model, a limit, an invalid body. They have no usage record.",
            (
                PanelQuery(
                    or_zero(rate("shoal_gateway_rejected_total", by="reason, layer"), "reason"), "{{reason}} {{layer}}"
                ),
            ),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Failed attempts",
            "Attempts per second that failed before the first byte, by reason; and how often the retry budget was "
            "exhausted.",
            (
                PanelQuery(or_zero(rate("shoal_gateway_retries_total", by="reason"), "reason"), "{{reason}}"),
                PanelQuery(rate("shoal_gateway_retry_budget_exhausted_total"), "budget exhausted"),
            ),
            unit="ops",
            marks=(Mark(1, "orange"),),
        ),
        Panel(
            "Streams to agents",
            "Streams to agents, live and down; and how often per second a replica was chosen while no stream of its "
            "Model was live.",
            (
                PanelQuery(total("shoal_gateway_replica_streams", by="state"), "{{state}}"),
                PanelQuery(rate("shoal_gateway_fallback_choices_total"), "chosen without a stream per second"),
            ),
            runbook="signals-stale.md",
        ),
        Panel(
            "Known objects",
            "Models, adapters, keys and pods that each gateway knows. If gateways differ for long, one has lost a "
            "watch.",
            (PanelQuery("max by (kind, pod) (shoal_gateway_objects)", "{{kind}} {{pod}}"),),
        ),
    ),
)

_HELD: Final = PanelRow(
    "Hold queue",
    (
        Panel(
            "Held by gateway",
            "Requests that wait for a replica or an adapter.",
            (PanelQuery(or_zero(total("shoal_gateway_held_requests", by="pod"), "pod"), "{{pod}}"),),
            kind="stacked",
            runbook="hold-near-limit.md",
            width=6,
        ),
        Panel(
            "Released and refused",
            "Requests per second that were released from the hold queue, and that were refused because it was full, "
            "by the exceeded bound.",
            (
                PanelQuery(rate("shoal_gateway_hold_releases_total"), "released"),
                PanelQuery(or_zero(rate("shoal_gateway_hold_refused_total", by="bound"), "bound"), "refused {{bound}}"),
            ),
            unit="reqps",
            runbook="refusals-burn-fast.md",
            width=6,
        ),
        Panel(
            "Time held",
            "Time in the hold queue of requests that had to wait, over the selected time range.",
            tuple(
                PanelQuery(
                    quantile_of_range(share, "shoal_gateway_hold_seconds"),
                    f"p{share * 100:g}",
                    empty="no request had to wait in the time range",
                )
                for share in (0.5, 0.99)
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Request bodies in memory",
            "Bytes of request bodies that gateways keep, to send them to a replica or to retry on another one.",
            (PanelQuery(total("shoal_gateway_held_body_bytes", by="pod"), "{{pod}}"),),
            unit="bytes",
            width=6,
        ),
    ),
)

_USAGE: Final = PanelRow(
    "Usage records and request logs",
    (
        Panel(
            "Spool",
            "Share of the spool's size limit that usage records use. Nothing is lost until it is full; then "
            "`gateway.whenSpoolFull` decides.",
            (PanelQuery("shoal_gateway_spool_bytes / (shoal_gateway_spool_limit_bytes > 0)", "{{pod}}"),),
            unit="percentunit",
            marks=(Mark(0.5, "yellow"), Mark(0.9, "red")),
            most=1,
            runbook="spool-filling.md",
            width=6,
        ),
        Panel(
            "Not yet shipped",
            "Rows on disk that the ledger does not have yet.",
            (PanelQuery(total("shoal_gateway_unshipped_rows", by="pod"), "{{pod}}"),),
            runbook="ledger-behind.md",
            width=6,
        ),
        Panel(
            "Ledger",
            "Records per second: new, already known, and quarantined because they are invalid (aside).",
            (PanelQuery(rate("shoal_ledger_records_total", by="result"), "{{result}}"),),
            unit="ops",
            width=6,
        ),
        Panel(
            "Request log",
            "Entries per second that were written, and entries that were dropped, by reason. Dropped entries do not "
            "affect requests.",
            (
                PanelQuery(rate("shoal_gateway_request_log_entries_total"), "written", empty=_LOGS_OFF),
                PanelQuery(rate("shoal_gateway_request_log_dropped_total", by="reason"), "{{reason}}", empty=_LOGS_OFF),
            ),
            unit="ops",
            width=6,
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-gateway",
    title="Shoal / Gateway",
    description="The gateways themselves: what they accept, hold, retry and record.",
    variables=(),
    rows=(_NOW, _REQUESTS, _HELD, _USAGE),
)
