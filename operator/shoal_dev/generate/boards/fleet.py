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
            "Accepted requests per second that ended.",
            (PanelQuery(rate(_REQUESTS, GATEWAY_SPACE)),),
            unit="reqps",
            kind="number",
            width=4,
        ),
        Panel(
            "Not answered",
            "Share of accepted requests that failed, were refused or ran out of time.",
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
            "Share of the classes' GPUs that pods hold.",
            (PanelQuery(ratio(gpus("allocated"), gpus("allocatable"))),),
            unit="percentunit",
            kind="number",
            width=4,
            most=1,
        ),
        Panel(
            "Operators that lead",
            "1, by the Lease. With 0 serving goes on, and nothing is scaled or rolled.",
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
            "Accepted requests per second that ended; the ten busiest Models.",
            (
                PanelQuery(
                    f"topk(10, {rate(_REQUESTS, GATEWAY_SPACE, 'gen_ai_request_model')})", "{{gen_ai_request_model}}"
                ),
            ),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "How they ended",
            "answered; rejected: by the engine, as wrong; cancelled: by the client; refused: 429 or 503 with "
            "Retry-After; expired: held for too long; failed: the engine was lost, or said 5xx.",
            (PanelQuery(rate(_REQUESTS, GATEWAY_SPACE, "outcome"), "{{outcome}}"),),
            unit="reqps",
            kind="stacked",
            runbook="refusals-burn-slow.md",
        ),
        Panel(
            "Time to first token",
            "From acceptance to the first byte of the answer, holding included.",
            quantiles("gen_ai_server_time_to_first_token_seconds", GATEWAY_SPACE),
            unit="s",
        ),
        Panel(
            "Time per output token",
            "Between tokens of streamed answers, on average over each answer.",
            quantiles("gen_ai_server_time_per_output_token_seconds", GATEWAY_SPACE),
            unit="s",
        ),
        Panel(
            "Held by Model",
            "Requests that wait in gateways; the ten Models with most.",
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
            "Engines' queues by Model",
            "Requests that wait in engines, per replica on average. Models scale up from 4 on, unless their spec says "
            "otherwise.",
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
            "Replicas of all Models shown: as decided, and as they serve.",
            (PanelQuery(replicas("wanted", SPACE), "wanted"), PanelQuery(replicas("ready", SPACE), "ready")),
        ),
        Panel(
            "KV cache in use by Model",
            "Share of the replicas' KV cache that requests fill. Models scale up from 80 % on, unless their spec says "
            "otherwise.",
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
            "Cold start: from a pod's creation until it is ready. Wake: from the decision at zero until a replica is "
            "ready. Over the time shown.",
            (
                PanelQuery(
                    quantile_of_range(0.5, "shoal_model_cold_start_seconds", SPACE),
                    "cold start p50",
                    empty="no replica started in the time shown",
                ),
                PanelQuery(
                    quantile_of_range(0.99, "shoal_model_cold_start_seconds", SPACE),
                    "cold start p99",
                    empty="no replica started in the time shown",
                ),
                PanelQuery(
                    quantile_of_range(0.5, "shoal_model_wake_seconds", SPACE),
                    "wake p50",
                    empty="no Model was woken in the time shown",
                ),
                PanelQuery(
                    quantile_of_range(0.99, "shoal_model_wake_seconds", SPACE),
                    "wake p99",
                    empty="no Model was woken in the time shown",
                ),
            ),
            unit="s",
            runbook="wake-slow.md",
        ),
        Panel(
            "Models now",
            "Per Model: replicas wanted and ready, requests per second, held, cost of the replicas per hour.",
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
            "GPUs that pods hold, and those that are free.",
            (
                PanelQuery(gpus("allocated", "gpu_class"), "{{gpu_class}} in use"),
                PanelQuery(gpus("free", "gpu_class"), "{{gpu_class}} free"),
            ),
            kind="stacked",
        ),
    ),
)

_OPERATOR: Final = PanelRow(
    "Operator",
    (
        Panel(
            "Decisions",
            "Decisions on replicas per second, by what came of them.",
            (PanelQuery(rate("shoal_scaling_decisions_total", by="outcome"), "{{outcome}}"),),
            unit="ops",
            width=6,
        ),
        Panel(
            "Plan and reconcile, p99",
            "One plan of the whole fleet; one reconcile of an object, by queue.",
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
            "Reconciles that failed",
            "Per second, by queue; they are tried again, later and later.",
            (PanelQuery(or_zero(rate("shoal_reconciles_total", 'outcome="error"', "queue"), "queue"), "{{queue}}"),),
            unit="ops",
            width=6,
            marks=(Mark(0.1, "red"),),
            runbook="reconciles-fail.md",
        ),
        Panel(
            "Calls to the API server",
            "Per second, by verb and answer. A quiet fleet writes nothing but Leases.",
            (PanelQuery(rate("shoal_kube_requests_total", by="verb, code"), "{{verb}} {{code}}"),),
            unit="reqps",
            width=6,
        ),
    ),
)

_KEDA: Final = PanelRow(
    "KEDA, where it writes replicas",
    (
        Panel(
            "Calls of KEDA",
            "At the external scaler per second, by outcome; streams count when they are opened.",
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
            "Wakes told to KEDA",
            "Times that KEDA was told, unasked, to go from zero, in the time shown; and its open streams.",
            (
                PanelQuery(or_zero(rise("shoal_keda_pushes_total")), "told"),
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
