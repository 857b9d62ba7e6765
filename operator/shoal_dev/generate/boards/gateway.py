"""Gateways: what they accept, turn away, hold and retry, and whether usage records get through."""

from typing import Final

from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import or_zero, quantile_of_range, rate, total

_LOGS_OFF: Final = "request logs are written only for Tenants that ask for one"

_NOW: Final = PanelRow(
    "Now",
    (
        Panel(
            "Ready gateways",
            "Gateways that say ok at /readyz.",
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
            "Streams to agents that should be live and are not. A gateway sends nothing to a replica that it does not "
            "hear.",
            (PanelQuery(or_zero(total("shoal_gateway_replica_streams", 'state="down"'))),),
            kind="number",
            width=4,
            marks=(Mark(1, "red"),),
            runbook="signals-stale.md",
        ),
        Panel(
            "Gateways without a spool",
            "Gateways whose disk takes no usage records.",
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
            "Requests since the gateways' start whose usage could not be kept.",
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
            "Accepted requests per second that ended.",
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
            "Requests per second without a usage record, by reason: unknown key or model, a limit, a wrong body.",
            (PanelQuery(or_zero(rate("shoal_gateway_rejected_total", by="reason"), "reason"), "{{reason}}"),),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Attempts made again",
            "Attempts per second that failed before the first byte, by reason; and rounds in which the budget of "
            "retries was spent.",
            (
                PanelQuery(or_zero(rate("shoal_gateway_retries_total", by="reason"), "reason"), "{{reason}}"),
                PanelQuery(rate("shoal_gateway_retry_budget_exhausted_total"), "budget spent"),
            ),
            unit="ops",
            marks=(Mark(1, "orange"),),
        ),
        Panel(
            "Replicas not heard",
            "Streams to agents, live and down; and choices per second of a replica while no stream of its Model was "
            "live.",
            (
                PanelQuery(total("shoal_gateway_replica_streams", by="state"), "{{state}}"),
                PanelQuery(rate("shoal_gateway_fallback_choices_total"), "chosen unheard per second"),
            ),
            runbook="signals-stale.md",
        ),
        Panel(
            "Objects known",
            "Models, adapters, keys and pods that each gateway knows; gateways that differ for long have lost a watch.",
            (PanelQuery("max by (kind, pod) (shoal_gateway_objects)", "{{kind}} {{pod}}"),),
        ),
    ),
)

_HELD: Final = PanelRow(
    "Holding",
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
            "Let go and turned away",
            "Per second: requests that waited and went on, and those that could not wait, by the bound they would "
            "have broken.",
            (
                PanelQuery(rate("shoal_gateway_hold_releases_total"), "let go"),
                PanelQuery(or_zero(rate("shoal_gateway_hold_refused_total", by="bound"), "bound"), "refused {{bound}}"),
            ),
            unit="reqps",
            runbook="refusals-burn-fast.md",
            width=6,
        ),
        Panel(
            "Time held",
            "Of those that waited, over the time shown.",
            tuple(
                PanelQuery(
                    quantile_of_range(share, "shoal_gateway_hold_seconds"),
                    f"p{share * 100:g}",
                    empty="nothing had to wait in the time shown",
                )
                for share in (0.5, 0.99)
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Bodies in memory",
            "Bytes of request bodies that gateways keep, to send them to a replica or to another one.",
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
            "Share of its bound that each gateway's usage records take on disk. Nothing is lost before it is full; "
            "then `gateway.whenSpoolFull` decides.",
            (PanelQuery("shoal_gateway_spool_bytes / (shoal_gateway_spool_limit_bytes > 0)", "{{pod}}"),),
            unit="percentunit",
            marks=(Mark(0.5, "yellow"), Mark(0.9, "red")),
            most=1,
            runbook="spool-filling.md",
            width=6,
        ),
        Panel(
            "Not yet at the ledger",
            "Rows on disk that the ledger does not have.",
            (PanelQuery(total("shoal_gateway_unshipped_rows", by="pod"), "{{pod}}"),),
            runbook="ledger-behind.md",
            width=6,
        ),
        Panel(
            "Ledger",
            "Records per second: new, known already, put aside because they cannot be read.",
            (PanelQuery(rate("shoal_ledger_records_total", by="result"), "{{result}}"),),
            unit="ops",
            width=6,
        ),
        Panel(
            "Request log",
            "Entries per second that were written, and those that were not kept, by reason. Serving goes on.",
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
