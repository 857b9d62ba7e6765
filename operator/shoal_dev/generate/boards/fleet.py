"""The whole fleet: is everything served, what waits, what is short."""

from typing import Final

from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import (
    BROKEN,
    GATEWAY_SPACE,
    NAMESPACE,
    SPACE,
    by_model,
    gpus,
    or_zero,
    quantile,
    quantile_of_range,
    quantiles,
    rate,
    ratio,
    replicas,
    rise,
    total,
)

_REQUESTS: Final = "shoal_gateway_requests_total"

_NOW: Final = PanelRow(
    "Now",
    (
        Panel(
            "Requests",
            "Accepted requests per second that have ended.",
            (PanelQuery(rate(_REQUESTS, GATEWAY_SPACE)),),
            unit="reqps",
            kind="number",
            width=4,
        ),
        Panel(
            "Not answered",
            "Share of accepted requests that failed, were refused, or expired.",
            (PanelQuery(ratio(rate(_REQUESTS, f"{GATEWAY_SPACE}, {BROKEN}"), rate(_REQUESTS, GATEWAY_SPACE))),),
            unit="percentunit",
            kind="number",
            width=4,
            marks=(Mark(0.001, "yellow"), Mark(0.01, "red")),
            runbook="requests-failed.md",
        ),
        Panel(
            "Held",
            "Requests that wait in gateways for a replica or an adapter.",
            (PanelQuery(or_zero(total("shoal_gateway_held_requests", GATEWAY_SPACE))),),
            kind="number",
            width=4,
            marks=(Mark(1, "yellow"),),
            runbook="hold-near-limit.md",
        ),
        Panel(
            "Missing replicas",
            "Replicas that are wanted and not ready.",
            (PanelQuery(f"{replicas('wanted', SPACE)} - {replicas('ready', SPACE)}"),),
            kind="number",
            width=4,
            least=None,
            marks=(Mark(1, "yellow"),),
            runbook="model-without-capacity.md",
        ),
        Panel(
            "GPUs in use",
            "Share of the allocatable GPUs that pods hold.",
            (PanelQuery(ratio(gpus("allocated"), gpus("allocatable"))),),
            unit="percentunit",
            kind="number",
            width=4,
            most=1,
        ),
        Panel(
            "Leading operators",
            "Always 1, by the Lease. With 0, serving continues, but nothing is scaled or reconciled.",
            (PanelQuery(or_zero(total("shoal_leading"))),),
            kind="number",
            width=4,
            marks=(Mark(0, "red"), Mark(1, "green"), Mark(2, "red")),
            runbook="operator-without-leader.md",
        ),
    ),
)

_SERVED: Final = PanelRow(
    "Requests",
    (
        Panel(
            "Requests by Model",
            "Accepted requests per second that have ended, for the ten busiest Models.",
            (
                PanelQuery(
                    f"topk(10, {rate(_REQUESTS, GATEWAY_SPACE, 'gen_ai_request_model')})", "{{gen_ai_request_model}}"
                ),
            ),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Outcomes",
            "Accepted requests per second by outcome. rejected: the engine answered 4xx. cancelled: the client "
            "disconnected. refused: no replica could serve (503 with Retry-After). expired: held for too long. "
            "failed: the engine was lost or answered 5xx.",
            (PanelQuery(rate(_REQUESTS, GATEWAY_SPACE, "outcome"), "{{outcome}}"),),
            unit="reqps",
            kind="stacked",
            runbook="refusals-burn-slow.md",
        ),
        Panel(
            "Time to first token",
            "Time from acceptance to the first byte of the answer, including the time in the hold queue.",
            quantiles("gen_ai_server_time_to_first_token_seconds", GATEWAY_SPACE),
            unit="s",
        ),
        Panel(
            "Time per output token",
            "Time between tokens of streamed answers, averaged over each answer.",
            quantiles("gen_ai_server_time_per_output_token_seconds", GATEWAY_SPACE),
            unit="s",
        ),
        Panel(
            "Held by Model",
            "Requests that wait in gateways, for the ten Models with the most.",
            (
                PanelQuery(
                    or_zero(
                        f"topk(10, {total('shoal_gateway_held_requests', GATEWAY_SPACE, 'gen_ai_request_model')})",
                        "gen_ai_request_model",
                    ),
                    "{{gen_ai_request_model}}",
                ),
            ),
            kind="stacked",
            runbook="hold-near-limit.md",
        ),
        Panel(
            "Engine queue by Model",
            "Requests that wait in engines, on average per replica. The line is the default of "
            "`queuedRequestsPerReplica`.",
            (PanelQuery(f"topk(10, avg by (model) (shoal_replica_waiting{{{SPACE}}}))", "{{model}}"),),
            marks=(Mark(4, "orange"),),
        ),
    ),
)

_REPLICAS: Final = PanelRow(
    "Replicas",
    (
        Panel(
            "Wanted and ready",
            "Replicas of all selected Models: decided, and ready.",
            (PanelQuery(replicas("wanted", SPACE), "wanted"), PanelQuery(replicas("ready", SPACE), "ready")),
        ),
        Panel(
            "KV cache in use by Model",
            "Share of the replicas' KV cache that requests use. The lower line is the default of "
            "`kvUtilizationPercent`.",
            (
                PanelQuery(
                    f"topk(10, {total('shoal_replica_kv_tokens_used', SPACE, 'model')} / "
                    f"{total('shoal_replica_kv_tokens_capacity', SPACE, 'model')})",
                    "{{model}}",
                ),
            ),
            unit="percentunit",
            marks=(Mark(0.8, "orange"), Mark(0.95, "red")),
            most=1,
            runbook="kv-near-full.md",
        ),
        Panel(
            "Cold starts and wakes",
            "Cold start: from the creation of a pod until it is ready. Wake: from the decision to wake a Model at "
            "zero until a replica is ready. Over the selected time range.",
            (
                PanelQuery(
                    quantile_of_range(0.5, "shoal_model_cold_start_seconds", SPACE),
                    "cold start p50",
                    empty="no replica started in the time range",
                ),
                PanelQuery(
                    quantile_of_range(0.99, "shoal_model_cold_start_seconds", SPACE),
                    "cold start p99",
                    empty="no replica started in the time range",
                ),
                PanelQuery(
                    quantile_of_range(0.5, "shoal_model_wake_seconds", SPACE),
                    "wake p50",
                    empty="no Model was woken in the time range",
                ),
                PanelQuery(
                    quantile_of_range(0.99, "shoal_model_wake_seconds", SPACE),
                    "wake p99",
                    empty="no Model was woken in the time range",
                ),
            ),
            unit="s",
            runbook="wake-slow.md",
        ),
        Panel(
            "Models now",
            "Per Model: wanted and ready replicas, held requests, requests per second, cost of the replicas per hour.",
            (
                PanelQuery(replicas("wanted", SPACE, "model"), "wanted"),
                PanelQuery(replicas("ready", SPACE, "model"), "ready"),
                PanelQuery(
                    by_model(total("shoal_gateway_held_requests", GATEWAY_SPACE, "gen_ai_request_model")),
                    "held",
                    empty="nothing is held",
                ),
                PanelQuery(by_model(rate(_REQUESTS, GATEWAY_SPACE, "gen_ai_request_model")), "requests per second"),
                PanelQuery(
                    total("shoal_model_hourly_cost", SPACE, "model, currency"), "cost per hour", empty="no price"
                ),
            ),
            kind="table",
            width=16,
        ),
        Panel(
            "GPUs by class",
            "GPUs held by pods, and free GPUs.",
            (
                PanelQuery(gpus("allocated", "gpu_class"), "{{gpu_class}} in use"),
                PanelQuery(gpus("free", "gpu_class"), "{{gpu_class}} free"),
            ),
            kind="stacked",
        ),
        Panel(
            "Models that are not ready, by layer",
            "Selected Models whose condition Ready is False, by layer and reason. `kubectl shoal why model/NAME` shows "
            "the cause, which may be on a lower layer.",
            (
                PanelQuery(
                    total("shoal_model_condition", f'{SPACE}, type="Ready", status="False"', "layer, reason"),
                    "{{layer}} {{reason}}",
                    empty="every Model is ready",
                ),
            ),
            kind="stacked",
            width=12,
            runbook="model-not-serving.md",
        ),
        Panel(
            "Refusals by layer",
            "Requests per second that were answered with an error, by the layer of its cause: before acceptance "
            "(no usage record), and after it. L6: the request, its key or its tenant's limits. `kubectl shoal why "
            "request/ID` shows the cause of one, the board Gateway the reasons.",
            (
                PanelQuery(
                    or_zero(rate("shoal_gateway_rejected_total", by="layer"), "layer"), "{{layer}} not accepted"
                ),
                PanelQuery(or_zero(rate("shoal_gateway_errors_total", by="layer"), "layer"), "{{layer}} accepted"),
            ),
            unit="reqps",
            kind="stacked",
            width=12,
        ),
    ),
)

_OPERATOR: Final = PanelRow(
    "Operator",
    (
        Panel(
            "Decisions",
            "Decisions on numbers of replicas per second, by outcome.",
            (PanelQuery(rate("shoal_scaling_decisions_total", by="outcome"), "{{outcome}}"),),
            unit="ops",
            width=6,
        ),
        Panel(
            "Plan and reconcile, p99",
            "Duration of one plan of the whole fleet, and of one reconciliation of an object, by queue.",
            (
                PanelQuery(
                    quantile(0.99, "shoal_plan_seconds"), "plan", empty="no Model, node or pod changed for a while"
                ),
                PanelQuery(
                    quantile(0.99, "shoal_reconcile_seconds", by="queue"),
                    "{{queue}}",
                    empty="no object changed for a while",
                ),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Failed reconciliations",
            "Failed reconciliations per second, by queue. They are retried with backoff.",
            (PanelQuery(or_zero(rate("shoal_reconciles_total", 'outcome="error"', "queue"), "queue"), "{{queue}}"),),
            unit="ops",
            width=6,
            marks=(Mark(0.1, "red"),),
            runbook="reconciles-fail.md",
        ),
        Panel(
            "Calls to the API server",
            "Calls per second, by verb and status code. A fleet without changes writes only Leases.",
            (PanelQuery(rate("shoal_kube_requests_total", by="verb, code"), "{{verb}} {{code}}"),),
            unit="reqps",
            width=6,
        ),
    ),
)

_KEDA: Final = PanelRow(
    "KEDA, if it writes the replicas",
    (
        Panel(
            "Calls by KEDA",
            "Calls to the external scaler per second, by outcome. A stream counts when it is opened.",
            (
                PanelQuery(
                    or_zero(rate("shoal_keda_calls_total", by="method, outcome"), "method"), "{{method}} {{outcome}}"
                ),
            ),
            unit="reqps",
            width=12,
            runbook="keda-not-driving.md",
        ),
        Panel(
            "Wakes pushed to KEDA",
            "Wakes from zero that were pushed to KEDA in the time range, and KEDA's open streams.",
            (
                PanelQuery(or_zero(rise("shoal_keda_pushes_total")), "pushed"),
                PanelQuery(or_zero(total("shoal_keda_streams", by="method"), "method"), "streams {{method}}"),
            ),
            width=12,
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-fleet",
    title="Shoal / Fleet",
    description="All Models of a cluster: requests, replicas, GPUs, and the operator itself.",
    variables=(NAMESPACE,),
    rows=(_NOW, _SERVED, _REPLICAS, _OPERATOR, _KEDA),
)
