"""Tenants: what they ask for and get. What they pay is the ledger's: `kubectl shoal bill`."""

from typing import Final

from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import TENANT, events, or_zero, rate, ratio, rise, total

_MATCH: Final = 'tenant=~"$tenant"'
_UNITS: Final = "shoal_tenant_units_total"
_TOKENS: Final = "shoal_tenant_tokens_total"
_INPUT: Final = f'{_MATCH}, gen_ai_token_type="input"'
_CACHED: Final = f'{_MATCH}, gen_ai_token_type="cached"'
_OUTPUT: Final = f'{_MATCH}, gen_ai_token_type="output"'

_NOW: Final = PanelRow(
    "In the time range",
    (
        Panel(
            "Requests",
            "Accepted requests that have ended.",
            (PanelQuery(rise("shoal_tenant_requests_total", _MATCH)),),
            kind="number",
            width=6,
        ),
        Panel(
            "Input tokens",
            "Tokens of prompts, including cached tokens.",
            (PanelQuery(rise(_TOKENS, _INPUT)),),
            kind="number",
            width=6,
        ),
        Panel("Output tokens", "Tokens of answers.", (PanelQuery(rise(_TOKENS, _OUTPUT)),), kind="number", width=6),
        Panel(
            "Refused",
            "Requests over one of the tenant's limits (429).",
            (PanelQuery(or_zero(events("shoal_tenant_refused_total", _MATCH))),),
            kind="number",
            width=6,
            marks=(Mark(1, "yellow"),),
        ),
    ),
)

_REQUESTS: Final = PanelRow(
    "Requests",
    (
        Panel(
            "Requests by tenant",
            "Accepted requests per second that have ended, for the ten busiest tenants.",
            (PanelQuery(f"topk(10, {rate('shoal_tenant_requests_total', _MATCH, 'tenant')})", "{{tenant}}"),),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Outcomes",
            "Accepted requests per second by outcome. rejected: the engine answered 4xx. cancelled: the client "
            "disconnected. refused: no replica could serve (503 with Retry-After). expired: held for too long. "
            "failed: the engine was lost or answered 5xx.",
            (PanelQuery(rate("shoal_tenant_requests_total", _MATCH, "outcome"), "{{outcome}}"),),
            unit="reqps",
            kind="stacked",
            runbook="refusals-burn-slow.md",
        ),
        Panel(
            "Over a limit",
            "Requests per second that were refused with 429, by tenant.",
            (
                PanelQuery(
                    or_zero(rate("shoal_tenant_refused_total", _MATCH, "tenant"), "tenant"),
                    "{{tenant}}",
                ),
            ),
            unit="reqps",
        ),
    ),
)

_USE: Final = PanelRow(
    "Tokens",
    (
        Panel(
            "Tokens by tenant",
            "Input and output tokens per second, for the ten busiest tenants.",
            (
                PanelQuery(
                    f'topk(10, {rate(_TOKENS, f"""{_MATCH}, gen_ai_token_type=~"input|output" """.strip(), "tenant")})',
                    "{{tenant}}",
                ),
            ),
            unit="ops",
            kind="stacked",
        ),
        Panel(
            "Tokens by kind",
            "Tokens per second. Cached tokens are part of the input.",
            (PanelQuery(rate(_TOKENS, _MATCH, "gen_ai_token_type"), "{{gen_ai_token_type}}"),),
            unit="ops",
        ),
        Panel(
            "Cached input",
            "Share of the input tokens found in an engine's prefix cache.",
            (PanelQuery(ratio(rate(_TOKENS, _CACHED), rate(_TOKENS, _INPUT)), "cached"),),
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Other units by tenant",
            "Documents, images and seconds of audio per second that engines read, for the ten busiest tenants.",
            (PanelQuery(f"topk(10, {rate(_UNITS, _MATCH, 'tenant, unit')})", "{{tenant}} {{unit}}"),),
            unit="ops",
            kind="stacked",
            width=12,
        ),
        Panel(
            "Other units by kind",
            "Documents of `/v1/rerank` and `/v1/score`, images of chats, seconds of sound of chats and transcriptions.",
            (PanelQuery(rate(_UNITS, _MATCH, "unit"), "{{unit}}"),),
            unit="ops",
            width=12,
        ),
        Panel(
            "Tenants",
            "In the selected time range: requests, tokens, other units, and requests over a limit.",
            (
                PanelQuery(rise("shoal_tenant_requests_total", _MATCH, "tenant"), "requests"),
                PanelQuery(rise(_TOKENS, _INPUT, "tenant"), "input tokens"),
                PanelQuery(rise(_TOKENS, _CACHED, "tenant"), "of them cached"),
                PanelQuery(rise(_TOKENS, _OUTPUT, "tenant"), "output tokens"),
                PanelQuery(rise(_UNITS, f'{_MATCH}, unit="documents"', "tenant"), "documents"),
                PanelQuery(rise(_UNITS, f'{_MATCH}, unit="images"', "tenant"), "images"),
                PanelQuery(rise(_UNITS, f'{_MATCH}, unit="audio_seconds"', "tenant"), "seconds of audio"),
                PanelQuery(
                    events("shoal_tenant_refused_total", _MATCH, "tenant"),
                    "over a limit",
                    empty="no request was over a limit",
                ),
            ),
            kind="table",
            width=24,
        ),
    ),
)

_BOOKS: Final = PanelRow(
    "Billing",
    (
        Panel(
            "Engine counts and billed tokens",
            "Tokens of the last 24 hours, as engines counted them and as billed. `kubectl shoal unattributed --by "
            "hour` shows the difference.",
            (
                PanelQuery(total("shoal_ledger_engine_tokens", by="kind"), "engines {{kind}}"),
                PanelQuery(total("shoal_ledger_billed_tokens", by="kind"), "billed {{kind}}"),
            ),
            width=12,
        ),
        Panel(
            "Unattributed",
            "Share of the engines' tokens in the last 24 hours that was not billed. Negative if the last counts of a "
            "killed engine are missing.",
            (
                PanelQuery(
                    f"{total('shoal_ledger_unattributed_tokens', by='kind')} / "
                    f"({total('shoal_ledger_engine_tokens', by='kind')} > 0)",
                    "{{kind}}",
                ),
            ),
            unit="percentunit",
            width=12,
            least=None,
            marks=(Mark(0.01, "yellow"), Mark(0.05, "red")),
            runbook="unattributed-tokens.md",
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-tenant",
    title="Shoal / Tenant",
    description="Requests, tokens and limits of tenants. For bills: `kubectl shoal bill --tenant TENANT`.",
    variables=(TENANT,),
    rows=(_NOW, _REQUESTS, _USE, _BOOKS),
)
