"""One Model: how it answers, what its replicas do, why it has so many."""

from typing import Final

from shoal.api import model as api
from shoal.core.coldstart import ADVICE
from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import (
    BROKEN,
    GATEWAY_MODEL,
    MODEL,
    NAMESPACE,
    ONE_MODEL,
    events,
    or_zero,
    quantile_of_range,
    quantiles,
    rate,
    ratio,
    replicas,
    total,
)

_REQUESTS: Final = "shoal_gateway_requests_total"
_TARGETS: Final = api.Scaling()
_KV: Final = _TARGETS.kv_utilization_percent / 100
_QUEUE: Final = _TARGETS.queued_requests_per_replica
_ADVICE: Final = ". ".join(f"{stage}: {text}" for stage, text in ADVICE.items())

_ANSWERS: Final = PanelRow(
    "Answers",
    (
        Panel(
            "Requests",
            "Accepted requests per second, by outcome.",
            (PanelQuery(rate(_REQUESTS, GATEWAY_MODEL, "outcome"), "{{outcome}}"),),
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Time to first token",
            "Time from acceptance to the first byte of the answer, including the time in the hold queue.",
            quantiles("gen_ai_server_time_to_first_token_seconds", GATEWAY_MODEL),
            unit="s",
        ),
        Panel(
            "Time per output token",
            "Time between tokens of streamed answers, averaged over each answer.",
            quantiles("gen_ai_server_time_per_output_token_seconds", GATEWAY_MODEL),
            unit="s",
        ),
        Panel(
            "Duration",
            "Time from acceptance to the end of the answer.",
            quantiles("gen_ai_server_request_duration_seconds", f'{GATEWAY_MODEL}, outcome="answered"'),
            unit="s",
        ),
        Panel(
            "Tokens",
            "Tokens per second, as the engines count them: prompts (including cached tokens) and generated tokens.",
            (
                PanelQuery(rate("shoal_replica_prompt_tokens_total", MODEL), "prompt"),
                PanelQuery(rate("shoal_replica_generation_tokens_total", MODEL), "generated"),
            ),
            unit="ops",
        ),
        Panel(
            "Not answered",
            "Share of accepted requests that failed, were refused, or expired.",
            (PanelQuery(ratio(rate(_REQUESTS, f"{GATEWAY_MODEL}, {BROKEN}"), rate(_REQUESTS, GATEWAY_MODEL))),),
            unit="percentunit",
            marks=(Mark(0.001, "yellow"), Mark(0.01, "red")),
            runbook="requests-failed.md",
        ),
        Panel(
            "Other units",
            "Documents, images and seconds of audio per second that the engines read. Empty for a Model that has none.",
            (
                PanelQuery(
                    rate("shoal_gateway_units_total", GATEWAY_MODEL, "unit"),
                    "{{unit}}",
                    empty="no request had documents, images or audio",
                ),
            ),
            unit="ops",
            width=24,
        ),
    ),
)

_WAITING: Final = PanelRow(
    "Waiting",
    (
        Panel(
            "Held",
            "Requests that wait in gateways for a replica or an adapter.",
            (PanelQuery(or_zero(total("shoal_gateway_held_requests", GATEWAY_MODEL)), "held"),),
            runbook="hold-near-limit.md",
        ),
        Panel(
            "Time held",
            "Time in the hold queue of requests that had to wait, over the selected time range.",
            tuple(
                PanelQuery(
                    quantile_of_range(share, "shoal_gateway_hold_seconds", GATEWAY_MODEL),
                    f"p{share * 100:g}",
                    empty="no request had to wait in the time range",
                )
                for share in (0.5, 0.99)
            ),
            unit="s",
        ),
        Panel(
            "Queue and batch by replica",
            "Requests that wait in the engine, and requests that it runs. The line is the default of "
            "`queuedRequestsPerReplica`.",
            (
                PanelQuery(total("shoal_replica_waiting", MODEL, "pod"), "{{pod}} waiting"),
                PanelQuery(total("shoal_replica_running", MODEL, "pod"), "{{pod}} running"),
            ),
            marks=(Mark(_QUEUE, "orange"),),
        ),
    ),
)

_REPLICAS: Final = PanelRow(
    "Replicas",
    (
        Panel(
            "Wanted and ready",
            "Replicas: decided; placed and ready on each GPU class.",
            (
                PanelQuery(replicas("wanted", MODEL), "wanted"),
                PanelQuery(replicas("desired", MODEL, "gpu_class"), "{{gpu_class}} placed"),
                PanelQuery(replicas("ready", MODEL, "gpu_class"), "{{gpu_class}} ready"),
            ),
            runbook="scaling.md",
        ),
        Panel(
            "KV cache in use by replica",
            "Share of the KV cache that requests use. The lower line is the default of `kvUtilizationPercent`.",
            (
                PanelQuery(
                    f"{total('shoal_replica_kv_tokens_used', MODEL, 'pod')} / "
                    f"{total('shoal_replica_kv_tokens_capacity', MODEL, 'pod')}",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
            marks=(Mark(_KV, "orange"), Mark(0.95, "red")),
            most=1,
            runbook="kv-near-full.md",
        ),
        Panel(
            "Tokens per step with speculation",
            "By replica, since its engine's start: guessed tokens that a step accepted for a request, and one. Near 1 "
            "the guesses cost more than they save.",
            (
                PanelQuery(
                    total("shoal_replica_tokens_per_step", MODEL, "pod"),
                    "{{pod}}",
                    empty="no replica speculates, or none has made a step",
                ),
            ),
        ),
        Panel(
            "Why the number changed",
            "Decisions that changed the number of replicas in the time range, by direction, reason and layer. `kubectl "
            "shoal why` shows each with its inputs.",
            (
                PanelQuery(
                    f"{events('shoal_model_decisions_total', MODEL, 'direction, reason, layer')} > 0",
                    "decisions",
                    empty="the number did not change in the time range",
                ),
            ),
            kind="table",
        ),
        Panel(
            "Cold starts",
            "Time from the creation of a pod until it is ready, over the selected time range; and the expected cold "
            "start, which is the last measured one.",
            (
                PanelQuery(
                    quantile_of_range(0.5, "shoal_model_cold_start_seconds", MODEL, "gpu_class"),
                    "{{gpu_class}} p50",
                    empty="no replica started in the time range",
                ),
                PanelQuery(
                    quantile_of_range(0.99, "shoal_model_cold_start_seconds", MODEL, "gpu_class"),
                    "{{gpu_class}} p99",
                    empty="no replica started in the time range",
                ),
                PanelQuery(f"shoal_model_cold_start_expected_seconds{{{MODEL}}}", "{{gpu_class}} expected"),
            ),
            unit="s",
        ),
        Panel(
            "Cold starts by stage",
            "Median of each part of a cold start, over the selected time range: schedule (until a node has the pod), "
            "pull (images and volumes), fetch (weights), load (from the engine's start to ready), graph_capture (part "
            "of load, where the engine says it), first_token (from ready to the first token of the first answer).",
            (
                PanelQuery(
                    quantile_of_range(0.5, "shoal_model_cold_start_stage_seconds", MODEL, "gpu_class, stage"),
                    "{{gpu_class}} {{stage}}",
                    empty="no replica started in the time range",
                ),
            ),
            unit="s",
        ),
        Panel(
            "What to shorten in a cold start",
            "The stage that takes most of a cold start, in seconds: of the median of the last few starts on the class. "
            f"Empty where a start takes at most 10 s. {_ADVICE}. The status of the Model says it too "
            "(`status.variants[].coldStart.advice`).",
            (
                PanelQuery(
                    f"max by (gpu_class, stage) (shoal_model_cold_start_longest_stage_seconds{{{MODEL}}})",
                    "seconds",
                    empty="no start was measured, or they are short",
                ),
            ),
            unit="s",
            kind="table",
        ),
        Panel(
            "Wakes",
            "Time from the decision to wake the Model at zero until a replica is ready, over the selected time range.",
            tuple(
                PanelQuery(
                    quantile_of_range(share, "shoal_model_wake_seconds", MODEL),
                    f"p{share * 100:g}",
                    empty="the Model was not woken in the time range",
                )
                for share in (0.5, 0.99)
            ),
            unit="s",
            runbook="wake-slow.md",
        ),
        Panel(
            "Stale signals",
            "Gateways and replicas without live signals of load and demand. While there is one, the Model does not "
            "scale down.",
            (PanelQuery(total("shoal_model_signal_sources", f'{MODEL}, state="stale"', "kind"), "{{kind}} stale"),),
            marks=(Mark(1, "red"),),
            runbook="signals-stale.md",
        ),
    ),
)

_ENGINES: Final = PanelRow(
    "Engines",
    (
        Panel(
            "Stalled or draining",
            "Replicas whose engine makes no progress, and replicas that finish their requests before they stop.",
            (
                PanelQuery(or_zero(total("shoal_agent_stalled", MODEL)), "stalled"),
                PanelQuery(or_zero(total("shoal_agent_draining", MODEL)), "draining"),
            ),
            marks=(Mark(1, "yellow"),),
            runbook="engine-stalled.md",
        ),
        Panel(
            "Failed calls to the engine",
            "Failed calls of the agents to their engines per second.",
            (PanelQuery(or_zero(rate("shoal_agent_engine_errors_total", MODEL, "kind"), "kind"), "{{kind}}"),),
            unit="ops",
        ),
        Panel(
            "KV cache, predicted and real",
            "KV cache of one replica in tokens: predicted before its engine started, and reported by the engine.",
            (
                PanelQuery(f"shoal_kv_tokens_predicted{{{MODEL}}}", "{{gpu_class}} predicted"),
                PanelQuery(f"shoal_kv_tokens_engine{{{MODEL}}}", "{{gpu_class}} engine"),
            ),
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-model",
    title="Shoal / Model",
    description="One Model: answers, waiting, replicas, engines.",
    variables=(NAMESPACE, ONE_MODEL),
    rows=(_ANSWERS, _WAITING, _REPLICAS, _ENGINES),
)
