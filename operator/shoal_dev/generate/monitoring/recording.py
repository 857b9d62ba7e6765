"""Recording rules, named `level:metric:operation` as Prometheus recommends."""

from dataclasses import dataclass
from typing import Final

WINDOWS: Final = ("5m", "30m", "1h", "6h")
"""Windows of the ratios that use an error budget: a short and a long one each, for fast and slow burn rates."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded series."""

    record: str
    expr: str


def _ratio(what: str, outcomes: str, window: str) -> Recorded:
    by = "sum by (gen_ai_request_model)"
    part = f'{by} (rate(shoal_gateway_requests_total{{outcome=~"{outcomes}"}}[{window}]))'
    return Recorded(
        f"model:shoal_gateway_requests_{what}:ratio_rate{window}",
        f"{part} / ({by} (rate(shoal_gateway_requests_total[{window}])) > 0)",
    )


RECORDED: Final[tuple[Recorded, ...]] = (
    Recorded(
        "model:shoal_gateway_requests:rate5m",
        "sum by (gen_ai_request_model) (rate(shoal_gateway_requests_total[5m]))",
    ),
    *(_ratio("failed", "failed", window) for window in WINDOWS[:1]),
    *(_ratio("refused", "refused|expired", window) for window in WINDOWS),
    Recorded(
        "model:gen_ai_server_time_to_first_token_seconds:p99_rate5m",
        "histogram_quantile(0.99, sum by (gen_ai_request_model, le) "
        "(rate(gen_ai_server_time_to_first_token_seconds_bucket[5m])))",
    ),
    Recorded(
        "model:gen_ai_server_time_per_output_token_seconds:p99_rate5m",
        "histogram_quantile(0.99, sum by (gen_ai_request_model, le) "
        "(rate(gen_ai_server_time_per_output_token_seconds_bucket[5m])))",
    ),
    Recorded(
        "model:shoal_replica_kv_tokens:ratio",
        "sum by (model) (shoal_replica_kv_tokens_used) / sum by (model) (shoal_replica_kv_tokens_capacity)",
    ),
    Recorded(
        "model:shoal_model_wake_seconds:mean_rate1h",
        "sum by (model) (rate(shoal_model_wake_seconds_sum[1h])) "
        "/ (sum by (model) (rate(shoal_model_wake_seconds_count[1h])) > 0)",
    ),
    Recorded(
        "model:shoal_gateway_held_requests:ratio",
        "max by (gen_ai_request_model) (shoal_gateway_held_requests / shoal_gateway_hold_limit_requests)",
    ),
    Recorded(
        "cluster:shoal_ledger_unattributed_tokens:ratio",
        "sum(shoal_ledger_unattributed_tokens) / (sum(shoal_ledger_engine_tokens) > 0)",
    ),
    Recorded(
        "tenant:shoal_tenant_tokens:rate5m",
        "sum by (tenant, gen_ai_token_type) (rate(shoal_tenant_tokens_total[5m]))",
    ),
)
