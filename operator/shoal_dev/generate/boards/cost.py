"""GPU classes: what there is, what is used, what a token costs on each. Prices are those of the GPUClasses."""

from typing import Final

from shoal_dev.generate.boards.plan import DashboardPlan, Mark, Panel, PanelQuery, PanelRow
from shoal_dev.generate.boards.promql import gpus, hours, rate, ratio, total

_PRICED: Final = "sum by (gpu_class, currency) (shoal_model_hourly_cost)"
_GENERATED: Final = rate("shoal_replica_generation_tokens_total", by="gpu_class")
_USED: Final = gpus("allocated", "gpu_class")
_UNPRICED: Final = "no GPUClass has `hourlyCost`"

_NOW: Final = PanelRow(
    "Now",
    (
        Panel(
            "Cost per hour",
            "Cost of the GPUs that pods of Models hold, by currency.",
            (PanelQuery("sum by (currency) (shoal_model_hourly_cost)", "{{currency}}", empty=_UNPRICED),),
            kind="number",
            width=6,
        ),
        Panel(
            "Cost in the time range",
            "Cost of these GPUs in the selected time range, by currency.",
            (
                PanelQuery(
                    hours("shoal_model_hourly_cost", by="currency"),
                    "{{currency}}",
                    empty=_UNPRICED,
                ),
            ),
            kind="number",
            width=6,
        ),
        Panel("GPUs in use", "GPUs held by pods.", (PanelQuery(gpus("allocated")),), kind="number", width=6),
        Panel(
            "Share in use",
            "Share of the allocatable GPUs that pods hold.",
            (PanelQuery(ratio(gpus("allocated"), gpus("allocatable"))),),
            unit="percentunit",
            kind="number",
            width=6,
            most=1,
        ),
    ),
)

_CLASSES: Final = PanelRow(
    "Classes",
    (
        Panel(
            "GPUs",
            "GPUs held by pods, free GPUs, and allocatable GPUs.",
            (
                PanelQuery(_USED, "{{gpu_class}} in use"),
                PanelQuery(gpus("free", "gpu_class"), "{{gpu_class}} free"),
                PanelQuery(gpus("allocatable", "gpu_class"), "{{gpu_class}} allocatable"),
            ),
        ),
        Panel(
            "Cost per hour by class",
            "Cost of the GPUs that pods of Models hold.",
            (PanelQuery(_PRICED, "{{gpu_class}} ({{currency}})", empty=_UNPRICED),),
            kind="stacked",
        ),
        Panel(
            "Cost per hour by Model",
            "Cost of the GPUs that the Model's pods hold, for the ten most expensive Models.",
            (
                PanelQuery(
                    "topk(10, sum by (model, currency) (shoal_model_hourly_cost))",
                    "{{model}} ({{currency}})",
                    empty=_UNPRICED,
                ),
            ),
            kind="stacked",
        ),
        Panel(
            "Classes now",
            "GPUs in use, free GPUs, price of a GPU per hour, generated tokens per second.",
            (
                PanelQuery(_USED, "in use"),
                PanelQuery(gpus("free", "gpu_class"), "free"),
                PanelQuery(
                    "max by (gpu_class, currency) (shoal_gpu_class_hourly_cost)", "price per hour", empty=_UNPRICED
                ),
                PanelQuery(_GENERATED, "tokens per second"),
            ),
            kind="table",
            width=24,
        ),
    ),
)

_WORTH: Final = PanelRow(
    "Efficiency",
    (
        Panel(
            "Cost of a million generated tokens",
            "Current cost of the class's GPUs, divided by the current rate of generated tokens. It is high while GPUs "
            "are idle.",
            (
                PanelQuery(
                    f"{_PRICED} / on (gpu_class) group_left () ({_GENERATED} * 3600 / 1e6 > 0)",
                    "{{gpu_class}} ({{currency}})",
                    empty=_UNPRICED,
                ),
            ),
        ),
        Panel(
            "Generated tokens per second and GPU",
            "Generated tokens per second and GPU, by class.",
            (PanelQuery(f"{_GENERATED} / on (gpu_class) ({_USED} > 0)", "{{gpu_class}}"),),
            unit="ops",
        ),
        Panel(
            "KV cache in use",
            "Share of the replicas' KV cache that requests use, by class.",
            (
                PanelQuery(
                    f"{total('shoal_replica_kv_tokens_used', by='gpu_class')} / "
                    f"{total('shoal_replica_kv_tokens_capacity', by='gpu_class')}",
                    "{{gpu_class}}",
                ),
            ),
            unit="percentunit",
            marks=(Mark(0.8, "orange"),),
            most=1,
        ),
        Panel(
            "Idle replicas",
            "Replicas without running requests, by class.",
            (PanelQuery("sum by (gpu_class) (shoal_replica_running == bool 0)", "{{gpu_class}}"),),
        ),
        Panel(
            "Cost of idling per hour",
            "Part of the cost of the class's GPUs that belongs to idle replicas.",
            (
                PanelQuery(
                    f"{_PRICED} * on (gpu_class) group_left () (avg by (gpu_class) (shoal_replica_running == bool 0))",
                    "{{gpu_class}} ({{currency}})",
                    empty=_UNPRICED,
                ),
            ),
        ),
        Panel(
            "GPU-hours",
            "GPU-hours held by pods in the selected time range.",
            (
                PanelQuery(
                    hours("shoal_gpu_class_gpus", 'state="allocated"', "gpu_class"),
                    "GPU-hours",
                ),
            ),
            kind="table",
        ),
    ),
)

BOARD: Final = DashboardPlan(
    uid="shoal-cost",
    title="Shoal / GPU classes and cost",
    description="GPUs of the fleet, their use, and the cost of a token on each GPU class.",
    variables=(),
    rows=(_NOW, _CLASSES, _WORTH),
)
