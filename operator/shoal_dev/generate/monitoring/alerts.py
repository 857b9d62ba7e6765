"""Alerts. What they name is in docs/runbooks: each page says what it means, what suffers, where to look, what to do."""

import re
from dataclasses import dataclass
from typing import Final, Literal

REFUSED_SLO: Final = 0.01
"""Part of the accepted requests that may be refused in a month (30 days)."""
FAST_BURN: Final = 14.4
"""So many times faster than allowed: 2 % of the month's budget within an hour."""
SLOW_BURN: Final = 6
"""The same: 5 % within six hours."""

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `since` is how long it must hold before it fires, as Prometheus writes it."""

    name: str
    severity: Severity
    expr: str
    since: str
    summary: str
    description: str

    @property
    def page(self) -> str:
        """Its runbook, as a file name without suffix."""
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
        f"Requests to {_SERVED} break off.",
        "{{ $value | humanizePercentage }} of the accepted requests of the last 5 minutes lost their engine after the "
        "first byte.",
    ),
    Alert(
        "ShoalRefusalsBurnFast",
        "critical",
        _burn(FAST_BURN, "5m", "1h"),
        "2m",
        f"Requests to {_SERVED} are refused.",
        "{{ $value | humanizePercentage }} of the accepted requests end in 503: a month's budget of refusals "
        f"({REFUSED_SLO:.0%}) would last two days.",
    ),
    Alert(
        "ShoalRefusalsBurnSlow",
        "warning",
        _burn(SLOW_BURN, "30m", "6h"),
        "15m",
        f"Requests to {_SERVED} are refused again and again.",
        "{{ $value | humanizePercentage }} of the accepted requests end in 503: a month's budget of refusals "
        f"({REFUSED_SLO:.0%}) would last five days.",
    ),
    Alert(
        "ShoalHoldNearLimit",
        "warning",
        "model:shoal_gateway_held_requests:ratio > 0.8",
        "1m",
        f"Nearly as many requests to {_SERVED} wait as may.",
        "A gateway holds {{ $value | humanizePercentage }} of what `spec.hold.maxRequests` allows; beyond it requests "
        "are refused.",
    ),
)

MODELS: Final = (
    Alert(
        "ShoalModelWithoutCapacity",
        "warning",
        'max by (model, reason) (shoal_model_condition{type="Placed",status="False"}) == 1',
        "5m",
        f"There are no GPUs for {_MODEL}.",
        "It is not placed ({{ $labels.reason }}): fewer replicas than are wanted, or none.",
    ),
    Alert(
        "ShoalModelNotServing",
        "critical",
        'sum by (model) (shoal_model_replicas{state="ready"}) == 0 and on (model) shoal_model_replicas_wanted > 0',
        "30m",
        f"No replica of {_MODEL} serves.",
        "Replicas are wanted, and none has been ready for half an hour.",
    ),
    Alert(
        "ShoalWakeSlow",
        "warning",
        "model:shoal_model_wake_seconds:mean_rate1h > on (model) "
        "1.5 * max by (model) (shoal_model_cold_start_expected_seconds) + 10",
        "5m",
        f"{_MODEL} wakes more slowly than a replica starts.",
        "Wakes of the last hour took {{ $value | humanizeDuration }} on average, well beyond the last cold start.",
    ),
    Alert(
        "ShoalKVNearFull",
        "warning",
        "model:shoal_replica_kv_tokens:ratio > 0.9",
        "10m",
        f"The KV cache of {_MODEL} is nearly full.",
        "{{ $value | humanizePercentage }} of all its replicas' KV tokens are in use: engines queue and retract.",
    ),
    Alert(
        "ShoalEngineStalled",
        "critical",
        "max by (namespace, pod) (shoal_agent_stalled) == 1",
        "1m",
        "The engine of {{ $labels.namespace }}/{{ $labels.pod }} makes no progress.",
        "It has requests and answers none of them; gateways send it nothing meanwhile.",
    ),
    Alert(
        "ShoalSignalsStale",
        "warning",
        'max by (model, kind) (shoal_model_signal_sources{state="stale"}) > 0',
        "3m",
        f"The operator has no live signals from some {{{{ $labels.kind }}}} of {_MODEL}.",
        "{{ $value }} of them are silent. Their load is unknown, so the Model does not scale down.",
    ),
    Alert(
        "ShoalKEDANotDriving",
        "warning",
        'max by (model, reason) (shoal_model_condition{type="ScalingActive",status="False"}) == 1',
        "2m",
        f"KEDA does not carry out what is decided for {_MODEL}.",
        "{{ $labels.reason }}. Its replicas stay as they are; the condition ScalingActive says what to do.",
    ),
)

PARTS: Final = (
    Alert(
        "ShoalOperatorWithoutLeader",
        "critical",
        "(sum(shoal_leading) or vector(0)) == 0",
        "2m",
        "No operator leads.",
        "Serving goes on; nothing scales, wakes or is repaired.",
    ),
    Alert(
        "ShoalScalerCertificateExpires",
        "warning",
        "min(shoal_keda_certificate_expiry_timestamp_seconds > 0) - time() < 7 * 86400",
        "1h",
        "The certificate by which KEDA knows the operator ends soon.",
        "It ends in {{ $value | humanizeDuration }}; then KEDA scales nothing, and replicas stay as they are.",
    ),
    Alert(
        "ShoalReconcilesFail",
        "warning",
        'sum by (queue) (increase(shoal_reconciles_total{outcome="error"}[15m])) > 5',
        "5m",
        "The operator fails again and again ({{ $labels.queue }}).",
        "{{ $value | humanize }} reconciles failed in 15 minutes.",
    ),
    Alert(
        "ShoalCacheFailing",
        "warning",
        '(sum by (pod) (increase(shoal_cache_fetches_total{result="failed"}[15m])) > 2) '
        "or (sum by (pod) (increase(shoal_cache_broken_files_total[15m])) > 0)",
        "0m",
        "The node cache {{ $labels.pod }} cannot give weights, or found rotten files.",
        "{{ $value | humanize }} times in 15 minutes; replicas on its node start late or not at all.",
    ),
)

USAGE: Final = (
    Alert(
        "ShoalSpoolRefuses",
        "critical",
        "min by (pod) (shoal_gateway_spool_ok) == 0",
        "1m",
        "{{ $labels.pod }} cannot keep usage records.",
        "Unless `gateway.whenSpoolFull` is Serve it refuses all requests: what is not recorded cannot be billed.",
    ),
    Alert(
        "ShoalSpoolFilling",
        "warning",
        "max by (pod) (shoal_gateway_spool_bytes / (shoal_gateway_spool_limit_bytes > 0)) > 0.8",
        "5m",
        "The usage spool of {{ $labels.pod }} is {{ $value | humanizePercentage }} full.",
        "When it is full the gateway refuses requests. It empties as the ledger takes records.",
    ),
    Alert(
        "ShoalUsageLost",
        "critical",
        "max by (pod) (delta(shoal_gateway_spool_requests_lost[15m])) > 0",
        "0m",
        "{{ $labels.pod }} lost usage records.",
        "The usage of {{ $value | humanize }} requests is lost: its disk refused them for too long.",
    ),
    Alert(
        "ShoalLedgerBehind",
        "warning",
        "max by (pod) (shoal_gateway_unshipped_oldest_seconds) > 300",
        "5m",
        "The ledger is {{ $value | humanizeDuration }} behind {{ $labels.pod }}.",
        "Records wait in the gateway's spool. Nothing is lost; bills, budgets and totals lag.",
    ),
    Alert(
        "ShoalLedgerDatabaseDown",
        "critical",
        "min by (pod) (shoal_ledger_database_up) == 0",
        "2m",
        "The ledger cannot reach its database.",
        "Gateways keep records meanwhile; bills, budgets and totals stand still.",
    ),
    Alert(
        "ShoalUnattributedTokens",
        "warning",
        "abs(cluster:shoal_ledger_unattributed_tokens:ratio) > 0.02 and sum(shoal_ledger_engine_tokens) > 1e6",
        "30m",
        "{{ $value | humanizePercentage }} of the engines' tokens are in no bill.",
        "Over the last 24 hours. Somebody uses engines past the gateways, or records are missing.",
    ),
)

ALERTS: Final[dict[str, tuple[Alert, ...]]] = {
    "shoal.requests": REQUESTS,
    "shoal.models": MODELS,
    "shoal.parts": PARTS,
    "shoal.usage": USAGE,
}
"""By rule group."""
