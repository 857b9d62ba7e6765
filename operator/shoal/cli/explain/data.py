"""The report as plain data, for programs."""

from typing import Final

from shoal.api.meta import JsonObject
from shoal.api.sources import shown
from shoal.cli.explain.decide import ClassReport, ModelReport, Report
from shoal.cli.explain.engines import OtherEngine
from shoal.cli.explain.inputs import ExplainedFleet
from shoal.core import quantity

COLUMNS: Final = (
    "model", "placed", "gpuClass", "fits", "replicas", "waiting", "gpusPerReplica", "kvTokensPerReplica",
    "concurrentRequests", "hourlyCostPerReplica", "currency", "reason", "message",
)  # fmt: skip
"""Columns of the CSV."""


def as_object(report: Report, fleet: ExplainedFleet) -> JsonObject:
    """The report as plain data: sizes in bytes, money as decimal strings, null for unknown."""
    return {
        "fleet": {
            "classes": "builtIn" if fleet.built_in else "file",
            "room": "unlimited" if fleet.nodes is None else "nodes",
            "gpus": [
                {"gpuClass": name, "gpus": u.gpus, "allocated": u.allocated, "largestFreeOnOneNode": u.largest_free}
                for name, u in report.use.items()
            ],
            "allocatedPercent": allocated_percent(report),
            "hourlyCost": {c: quantity.money(amount) for c, amount in sorted(report.costs.items())},
            "withoutPrice": list(report.unpriced),
            "notPlaced": [m.model.key for m in report.models if not m.placed],
        },
        "models": [_model_object(m) for m in report.models],
    }


def _model_object(report: ModelReport) -> JsonObject:
    placement = report.placement
    return {
        "model": report.model.key,
        "source": shown(report.model.spec.source.uri),
        "placed": report.placed,
        "reason": placement.reason if placement else None,
        "message": placement.message if placement else report.problem or fits(report),
        "hourlyCost": placement.hourly_cost if placement else None,
        "contextLength": report.context,
        "note": report.note or None,
        "loraPool": report.pool.metadata.name if report.pool else None,
        "loraPoolNote": report.pool_note or None,
        "artifact": report.facts.model_dump(mode="json", exclude_none=True) if report.facts else None,
        "classes": [_class_object(c, report.context) for c in report.classes],
        "otherEngines": [_other_object(other) for other in report.others],
    }


def _class_object(row: ClassReport, context: int | None) -> JsonObject:
    sized = row.sized
    sums = sized.breakdown if sized else None
    return {
        "gpuClass": row.gpu_class,
        "fits": sized is not None,
        "replicas": row.replicas,
        "waiting": row.waiting,
        "gpusPerReplica": sized.gpus if sized else None,
        "kvTokensPerReplica": sized.kv_tokens if sized else None,
        "concurrentRequests": sized.concurrent(context) if sized and context else None,
        "hourlyCostPerReplica": None if row.hourly_cost is None else quantity.money(row.hourly_cost),
        "currency": row.currency,
        "kvBytesPerTokenPerGPU": sized.kv_bytes_per_token if sized else None,
        "bytesPerGPU": sums
        and {
            "memory": sums.memory,
            "overhead": sums.overhead,
            "reserve": sums.reserve,
            "weights": sums.weights,
            "state": sums.state,
            "adapters": sums.adapters,
            "images": sums.images,
            "activations": sums.activations,
            "graphs": sums.graphs,
            "kv": sums.kv,
        },
        "estimates": list(sized.estimates) if sized else None,
        "reason": row.reason or None,
        "message": row.why or None,
    }


def _other_object(other: OtherEngine) -> JsonObject:
    why = {r.gpu_class: r.why for r in other.considered.rejected}
    return {
        "engine": other.engine,
        "summary": other.summary,
        "classes": [
            {
                "gpuClass": name,
                "fits": sized is not None,
                "gpusPerReplica": sized.gpus if sized else None,
                "kvTokensPerReplica": sized.kv_tokens if sized else None,
                "estimates": list(sized.estimates) if sized else None,
                "message": why.get(name),
            }
            for name in [*other.considered.sized, *why]
            for sized in (other.considered.sized.get(name),)
        ],
    }


def allocated_percent(report: Report) -> float | None:
    """Percentage of allocated GPUs, of those that schedulable nodes offer; None without nodes."""
    offered = sum(u.gpus for u in report.use.values())
    return round(100 * sum(u.allocated for u in report.use.values()) / offered, 1) if offered else None


def rows(document: JsonObject) -> list[JsonObject]:
    """A row per Model and class, for CSV."""
    return [
        {"model": model["model"], "placed": model["placed"], **each}
        for model in document["models"]
        for each in model["classes"]
    ]


def fits(report: ModelReport) -> str:
    """The verdict where no class was chosen."""
    return f"fits on {sum(c.sized is not None for c in report.classes)} of {len(report.classes)} classes"
