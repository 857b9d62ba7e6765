"""The alerts. docs/runbooks has a page for each: meaning, impact, diagnosis, what to do."""

import re
from dataclasses import dataclass
from typing import Final, Literal

REFUSED_SLO: Final = 0.01
"""Error budget: share of the accepted requests that may be refused in a month (30 days)."""
FAST_BURN: Final = 14.4
"""Burn rate at which 2 % of the month's error budget is used within an hour."""
SLOW_BURN: Final = 6
"""Burn rate at which 5 % of the month's error budget is used within six hours."""

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `since`: how long `expr` must hold before the alert fires, as a Prometheus duration."""

    name: str
    severity: Severity
    expr: str
    since: str
    summary: str
    description: str

    @property
    def page(self) -> str:
        """File name of its runbook, without suffix."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", self.name.removeprefix("Shoal")).lower()


def _burn(factor: float, short: str, long: str) -> str:
    refused = "model:shoal_gateway_requests_refused:ratio_rate"
    return f"{refused}{short} > {factor * REFUSED_SLO:g} and {refused}{long} > {factor * REFUSED_SLO:g}"


_MODEL: Final = "{{ $labels.model }}"
_SERVED: Final = "{{ $labels.gen_ai_request_model }}"

REQUESTS: Final = (
    Alert(
        "ShoalRequestsFailed",
        "critical",
        "model:shoal_gateway_requests_failed:ratio_rate5m > 0.01",
        "5m",
        f"Requests to {_SERVED} fail.",
        "{{ $value | humanizePercentage }} of the accepted requests of the last 5 minutes lost their engine.",
    ),
    Alert(
        "ShoalRefusalsBurnFast",
        "critical",
        _burn(FAST_BURN, "5m", "1h"),
        "2m",
        f"Requests to {_SERVED} are refused.",
        "{{ $value | humanizePercentage }} of the accepted requests end in 503. At this rate the error budget of a "
        "month "
        f"({REFUSED_SLO:.0%}) is used up in two days.",
    ),
    Alert(
        "ShoalRefusalsBurnSlow",
        "warning",
        _burn(SLOW_BURN, "30m", "6h"),
        "15m",
        f"Requests to {_SERVED} are refused repeatedly.",
        "{{ $value | humanizePercentage }} of the accepted requests end in 503. At this rate the error budget of a "
        "month "
        f"({REFUSED_SLO:.0%}) is used up in five days.",
    ),
    Alert(
        "ShoalHoldNearLimit",
        "warning",
        "model:shoal_gateway_held_requests:ratio > 0.8",
        "1m",
        f"The hold queue of {_SERVED} is nearly full.",
        "A gateway holds {{ $value | humanizePercentage }} of the requests that `spec.hold.maxRequests` allows. "
        "Further "
        "requests are refused.",
    ),
)

MODELS: Final = (
    Alert(
        "ShoalModelWithoutCapacity",
        "warning",
        'max by (model, reason) (shoal_model_condition{type="Placed",status="False"}) == 1',
        "5m",
        f"Replicas of {_MODEL} have no GPUs.",
        "The Model is not placed ({{ $labels.reason }}). It has fewer replicas than decided, or none.",
    ),
    Alert(
        "ShoalModelNotServing",
        "critical",
        'sum by (model) (shoal_model_replicas{state="ready"}) == 0 and on (model) shoal_model_replicas_wanted > 0',
        "30m",
        f"No replica of {_MODEL} is ready.",
        "Replicas are wanted, and none has been ready for half an hour.",
    ),
    Alert(
        "ShoalWakeSlow",
        "warning",
        "model:shoal_model_wake_seconds:mean_rate1h > on (model) "
        "1.5 * max by (model) (shoal_model_cold_start_expected_seconds) + 10",
        "5m",
        f"Wakes of {_MODEL} take longer than a cold start.",
        "Wakes of the last hour took {{ $value | humanizeDuration }} on average, much longer than the last cold start.",
    ),
    Alert(
        "ShoalKVNearFull",
        "warning",
        "model:shoal_replica_kv_tokens:ratio > 0.9",
        "10m",
        f"The KV cache of {_MODEL} is nearly full.",
        "{{ $value | humanizePercentage }} of the KV tokens of its replicas are in use. Engines queue and retract "
        "requests.",
    ),
    Alert(
        "ShoalEngineStalled",
        "critical",
        "max by (namespace, pod) (shoal_agent_stalled) == 1",
        "1m",
        "The engine of {{ $labels.namespace }}/{{ $labels.pod }} makes no progress.",
        "It has requests and makes no progress on them. Gateways send it no new requests.",
    ),
    Alert(
        "ShoalSignalsStale",
        "warning",
        'max by (model, kind) (shoal_model_signal_sources{state="stale"}) > 0',
        "3m",
        f"The operator has no live signals from one or more {{{{ $labels.kind }}}} of {_MODEL}.",
        "{{ $value }} are stale. Their load is unknown, so the Model does not scale down.",
    ),
    Alert(
        "ShoalKEDANotDriving",
        "warning",
        'max by (model, reason) (shoal_model_condition{type="ScalingActive",status="False"}) == 1',
        "2m",
        f"KEDA does not apply the scaling decisions for {_MODEL}.",
        "{{ $labels.reason }}. The replicas stay as they are. The condition ScalingActive says what to do.",
    ),
)

PARTS: Final = (
    Alert(
        "ShoalOperatorWithoutLeader",
        "critical",
        "(sum(shoal_leading) or vector(0)) == 0",
        "2m",
        "There is no leading operator.",
        "Serving continues, but nothing scales, wakes or is reconciled.",
    ),
    Alert(
        "ShoalScalerCertificateExpires",
        "warning",
        "min(shoal_keda_certificate_expiry_timestamp_seconds > 0) - time() < 7 * 86400",
        "1h",
        "The certificate of the operator's external scaler expires soon.",
        "It expires in {{ $value | humanizeDuration }}. Then KEDA scales nothing, and replicas stay as they are.",
    ),
    Alert(
        "ShoalReconcilesFail",
        "warning",
        'sum by (queue) (increase(shoal_reconciles_total{outcome="error"}[15m])) > 5',
        "5m",
        "Reconciliations of the operator fail ({{ $labels.queue }}).",
        "{{ $value | humanize }} reconciliations failed in 15 minutes.",
    ),
    Alert(
        "ShoalCacheFailing",
        "warning",
        '(sum by (pod) (increase(shoal_cache_fetches_total{result="failed"}[15m])) > 2) '
        "or (sum by (pod) (increase(shoal_cache_broken_files_total[15m])) > 0)",
        "0m",
        "The node cache {{ $labels.pod }} cannot fetch weights, or found corrupt files.",
        "{{ $value | humanize }} times in 15 minutes. Replicas on its node start late or not at all.",
    ),
)

USAGE: Final = (
    Alert(
        "ShoalSpoolRefuses",
        "critical",
        "min by (pod) (shoal_gateway_spool_ok) == 0",
        "1m",
        "{{ $labels.pod }} cannot write usage records.",
        "It refuses all requests, unless `gateway.whenSpoolFull` is Serve: requests without a record cannot be billed.",
    ),
    Alert(
        "ShoalSpoolFilling",
        "warning",
        "max by (pod) (shoal_gateway_spool_bytes / (shoal_gateway_spool_limit_bytes > 0)) > 0.8",
        "5m",
        "The usage spool of {{ $labels.pod }} is {{ $value | humanizePercentage }} full.",
        "When it is full, the gateway refuses requests. It is emptied by shipping records to the ledger.",
    ),
    Alert(
        "ShoalUsageLost",
        "critical",
        "max by (pod) (delta(shoal_gateway_spool_requests_lost[15m])) > 0",
        "0m",
        "{{ $labels.pod }} lost usage records.",
        "The usage of {{ $value | humanize }} requests is lost, because the disk could not be written for too long.",
    ),
    Alert(
        "ShoalLedgerBehind",
        "warning",
        "max by (pod) (shoal_gateway_unshipped_oldest_seconds) > 300",
        "5m",
        "The ledger is {{ $value | humanizeDuration }} behind {{ $labels.pod }}.",
        "Records wait in the gateway's spool. Nothing is lost, but bills, budgets and totals lag.",
    ),
    Alert(
        "ShoalLedgerDatabaseDown",
        "critical",
        "min by (pod) (shoal_ledger_database_up) == 0",
        "2m",
        "The ledger cannot reach its database.",
        "Gateways keep the records meanwhile. Bills, budgets and totals are not updated.",
    ),
    Alert(
        "ShoalUnattributedTokens",
        "warning",
        "abs(cluster:shoal_ledger_unattributed_tokens:ratio) > 0.02 and sum(shoal_ledger_engine_tokens) > 1e6",
        "30m",
        "{{ $value | humanizePercentage }} of the tokens counted by engines are not billed.",
        "Over the last 24 hours. Requests bypass the gateways, or usage records are missing.",
    ),
)

ALERTS: Final[dict[str, tuple[Alert, ...]]] = {
    "shoal.requests": REQUESTS,
    "shoal.models": MODELS,
    "shoal.parts": PARTS,
    "shoal.usage": USAGE,
}
"""By rule group."""
