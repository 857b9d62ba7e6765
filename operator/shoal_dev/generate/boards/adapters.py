"""LoRA adapters: where they are loaded, how often they are loaded and evicted, who waits for one."""

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
_RARE: Final = "no adapter was loaded or unloaded in the time range"


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
            "Adapters of each pool: total, available, failed.",
            (
                PanelQuery(
                    total("shoal_lora_pool_adapters", 'pool=~"$namespace/.*"', "pool, state"),
                    "{{pool}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Adapters by state",
            "Adapters on the selected replicas, by state.",
            (PanelQuery(total("shoal_agent_adapters", MODEL, "state"), "{{state}}"),),
            kind="stacked",
        ),
        Panel(
            "Adapters in host memory",
            "Adapters that engines have loaded into host memory, and their limit.",
            (
                PanelQuery(
                    total("shoal_agent_adapters", f'{MODEL}, state="loaded"', "model"),
                    "{{model}} loaded",
                ),
                PanelQuery(total("shoal_agent_adapter_places", MODEL, "model"), "{{model}} limit"),
            ),
        ),
    ),
)

_SLOTS: Final = PanelRow(
    "Slots on the GPU",
    (
        Panel(
            "Slots leased by replica",
            "Share of the slots that are leased for requests.",
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
            "Callers that wait at the agents for a slot for their adapter. They count as demand for the base Model.",
            (PanelQuery(total("shoal_replica_adapters_waiting", MODEL, "model"), "{{model}}"),),
            marks=(Mark(1, "yellow"),),
        ),
        Panel(
            "Leases",
            "Lease requests of gateways per second, by result.",
            (PanelQuery(or_zero(rate("shoal_gateway_adapter_leases_total", by="result"), "result"), "{{result}}"),),
            unit="ops",
            kind="stacked",
        ),
    ),
)

_MOVES: Final = PanelRow(
    "Loads and unloads",
    (
        Panel(
            "Loads and evictions",
            "Adapters per second that engines loaded, and that were evicted for others.",
            (
                PanelQuery(rate("shoal_replica_adapter_loads_total", MODEL), "loads"),
                PanelQuery(rate("shoal_replica_adapter_evictions_total", MODEL), "evictions"),
            ),
            unit="ops",
        ),
        Panel(
            "Hit rate",
            "Share of requests for adapters that found their adapter loaded on a replica.",
            (
                PanelQuery(
                    ratio(
                        rate(_ASKED, f'{GATEWAY_MODEL}, loaded="yes"'),
                        rate(_ASKED, GATEWAY_MODEL),
                    ),
                    "hits",
                ),
            ),
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Duration of loads and unloads",
            "Over the selected time range: fetching and verifying the files (stage), loading into the engine (load), "
            "unloading (unload), and from a caller's request to its lease (wait).",
            (*_times("stage"), *_times("load"), *_times("unload"), *_times("wait")),
            unit="s",
        ),
        Panel(
            "Refused leases",
            "Lease requests per second that agents refused, by reason and its layer.",
            (
                PanelQuery(
                    or_zero(rate("shoal_agent_adapter_refusals_total", MODEL, "reason, layer"), "reason"),
                    "{{reason}} {{layer}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            "Failed adapters",
            "Adapters that could not be staged or loaded on a replica. `kubectl describe lora` shows the reason.",
            (PanelQuery(total("shoal_agent_adapter_failed", MODEL, "pod"), "{{pod}}"),),
            marks=(Mark(1, "red"),),
        ),
        Panel(
            "Desired adapters sent to agents",
            "Sets of desired adapters sent to agents per second, by outcome.",
            (PanelQuery(or_zero(rate("shoal_adapter_desired_writes_total", by="outcome"), "outcome"), "{{outcome}}"),),
            unit="ops",
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-adapters",
    title="Shoal / Adapters",
    description="LoRA adapters: where they are loaded, how often they are loaded and evicted, who waits for one.",
    variables=(NAMESPACE, MODELS),
    rows=(_POOLS, _SLOTS, _MOVES),
)
