"""LoRA adapters: where they are, how often they move, who waits for one."""

from typing import Final

from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import (
    GATEWAY_MODEL,
    MODEL,
    MODELS,
    NAMESPACE,
    or_zero,
    quantile_of_range,
    rate,
    ratio,
    total,
)

_ASKED: Final = "shoal_gateway_adapter_requests_total"
_RARE: Final = "no adapter was moved in the time shown"


def _times(step: str) -> tuple[PanelQuery, ...]:
    metric = f"shoal_agent_adapter_{step}_seconds"
    return tuple(
        PanelQuery(quantile_of_range(share, metric, MODEL), f"{step} p{share * 100:g}", empty=_RARE)
        for share in (0.5, 0.99)
    )


_POOLS: Final = PanelRow(
    "Pools",
    (
        Panel(
            "Adapters",
            "Adapters of each pool: all, those that answer, those that cannot.",
            (
                PanelQuery(
                    total("shoal_lora_pool_adapters", 'pool=~"$namespace/.*"', "pool, state"),
                    "{{pool}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Adapters by state",
            "At the agents of the replicas shown.",
            (PanelQuery(total("shoal_agent_adapters", MODEL, "state"), "{{state}}"),),
            kind="stacked",
        ),
        Panel(
            "Places in host memory",
            "Adapters that engines have in host memory, and those that they may have.",
            (
                PanelQuery(
                    total("shoal_agent_adapters", f'{MODEL}, state="loaded"', "model"),
                    "{{model}} loaded",
                ),
                PanelQuery(total("shoal_agent_adapter_places", MODEL, "model"), "{{model}} places"),
            ),
        ),
    ),
)

_SLOTS: Final = PanelRow(
    "Slots on the GPU",
    (
        Panel(
            "Slots leased by replica",
            "Share of the slots that running requests hold.",
            (
                PanelQuery(
                    f"{total('shoal_replica_adapter_slots_leased', MODEL, 'pod')} / "
                    f"({total('shoal_replica_adapter_slots', MODEL, 'pod')} > 0)",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
            marks=(Mark(1, "orange"),),
            most=1,
        ),
        Panel(
            "Waiting for a slot",
            "Callers that wait at the agents for a place for their adapter. They are demand: the base scales up by "
            "them.",
            (PanelQuery(total("shoal_replica_adapters_waiting", MODEL, "model"), "{{model}}"),),
            marks=(Mark(1, "yellow"),),
        ),
        Panel(
            "Leases",
            "Gateways' calls for the use of an adapter per second: granted at once, after a load, refused, failed.",
            (PanelQuery(or_zero(rate("shoal_gateway_adapter_leases_total", by="result"), "result"), "{{result}}"),),
            unit="ops",
            kind="stacked",
        ),
    ),
)

_MOVES: Final = PanelRow(
    "Swaps",
    (
        Panel(
            "Loads and evictions",
            "Adapters per second that engines loaded, and those that went for others.",
            (
                PanelQuery(rate("shoal_replica_adapter_loads_total", MODEL), "loads"),
                PanelQuery(rate("shoal_replica_adapter_evictions_total", MODEL), "evictions"),
            ),
            unit="ops",
        ),
        Panel(
            "Found loaded",
            "Share of the requests for adapters whose replica had the adapter loaded already.",
            (
                PanelQuery(
                    ratio(
                        rate(_ASKED, f'{GATEWAY_MODEL}, loaded="yes"'),
                        rate(_ASKED, GATEWAY_MODEL),
                    ),
                    "at once",
                ),
            ),
            unit="percentunit",
            most=1,
        ),
        Panel(
            "How long a swap takes",
            "Over the time shown: fetching and verifying the files (stage), loading into the engine (load), unloading; "
            "and from a caller's asking to its lease (wait).",
            (*_times("stage"), *_times("load"), *_times("unload"), *_times("wait")),
            unit="s",
        ),
        Panel(
            "Callers without a lease",
            "Per second, by the agents' reason.",
            (PanelQuery(or_zero(rate("shoal_agent_adapter_refusals_total", MODEL, "reason"), "reason"), "{{reason}}"),),
            unit="ops",
        ),
        Panel(
            "Adapters that failed",
            "Those that could not be brought to a replica; `kubectl describe lora` says why.",
            (PanelQuery(total("shoal_agent_adapter_failed", MODEL, "pod"), "{{pod}}"),),
            marks=(Mark(1, "red"),),
        ),
        Panel(
            "Floors told to agents",
            "What replicas should hold, sent per second, by outcome.",
            (PanelQuery(or_zero(rate("shoal_adapter_desired_writes_total", by="outcome"), "outcome"), "{{outcome}}"),),
            unit="ops",
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-adapters",
    title="Shoal / Adapters",
    description="LoRA adapters: where they are, how often they move, who waits for one.",
    variables=(NAMESPACE, MODELS),
    rows=(_POOLS, _SLOTS, _MOVES),
)
