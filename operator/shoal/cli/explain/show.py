"""The report for people (a table) and for programs (JSON, YAML)."""

import json
from collections.abc import Iterator
from decimal import Decimal

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import JsonObject
from shoal.api.sources import shown
from shoal.cli.explain.decide import ClassReport, ModelReport, Report
from shoal.cli.explain.inputs import Fleet
from shoal.core import quantity

_GI, _KI = 2**30, 2**10


def as_object(report: Report, fleet: Fleet) -> JsonObject:
    """The report as plain data: bytes are bytes, money is a decimal number in a string, unknown is null."""
    return {
        "fleet": {
            "classes": "builtIn" if fleet.built_in else "file",
            "room": "unlimited" if fleet.nodes is None else "nodes",
            "gpus": [
                {"class": u.name, "gpus": u.gpus, "allocated": u.allocated, "largestFreeOnOneNode": u.largest_free}
                for u in report.use
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
        "artifact": report.facts.model_dump(mode="json", exclude_none=True) if report.facts else None,
        "classes": [_class_object(c, report.context) for c in report.classes],
    }


def _class_object(row: ClassReport, context: int | None) -> JsonObject:
    sized = row.sized
    sums = sized.sums if sized else None
    return {
        "class": row.gpu_class,
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
            "kv": sums.kv,
        },
        "reason": row.reason or None,
        "why": row.why or None,
    }


def allocated_percent(report: Report) -> float | None:
    """GPUs that somebody holds, of those that schedulable nodes offer; None without nodes."""
    offered = sum(u.gpus for u in report.use)
    return round(100 * sum(u.allocated for u in report.use) / offered, 1) if offered else None


def dump(report: Report, fleet: Fleet, output: str) -> str:
    """The report as JSON or YAML."""
    data = as_object(report, fleet)
    return json.dumps(data, indent=2) if output == "json" else yaml.safe_dump(data, sort_keys=False, width=120).rstrip()


def tables(report: Report, fleet: Fleet, console: Console, *, sums: bool) -> None:
    """Prints the report for people."""
    for each in report.models:
        _one(each, console, sums=sums)
        console.print()
    for line in _totals(report, fleet):
        console.print(line, soft_wrap=True)


def _one(report: ModelReport, console: Console, *, sums: bool) -> None:
    console.print(f"[bold]{escape(report.model.key)}[/]  {escape(shown(report.model.spec.source.uri))}", soft_wrap=True)
    if known := "; ".join(_facts(report)):
        console.print(f"  {escape(known)}", soft_wrap=True)
    if report.note:
        console.print(f"  [yellow]{escape(report.note)}[/]", soft_wrap=True)
    if report.problem:
        console.print(f"  [red]not looked at[/]: {escape(report.problem)}", soft_wrap=True)
        return
    table = Table(show_edge=False, box=None, pad_edge=False, title_justify="left")
    requests = f"requests of {report.context:,}" if report.context else "requests"
    table.add_column("  class", no_wrap=True)
    for heading in ("GPUs", "KV tokens", requests, "cost/h"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in report.classes:
        chosen = row.replicas or (row.sized and report.placement is None)
        sign = "[green]✓[/]" if chosen else "[red]✗[/]" if row.sized is None else " "
        table.add_row(f"{sign} {escape(row.gpu_class)}", *_figures(row, report.context), escape(_verdict(row)))
        if sums and row.sized:
            table.add_row("", "", "", "", "", f"[dim]{escape(_sums(row))}[/]")
    console.print(table)
    color = "green" if report.placed else "red"
    # Where nothing fits, the sentence repeats every sum that the table has.
    if report.placement is None:
        console.print(f"  [{color}]{fits(report)}[/]", soft_wrap=True)
    elif report.placement.reason == reasons.NO_FIT:
        console.print(f"  [{color}]{report.placement.reason}[/]: no class is large enough", soft_wrap=True)
    else:
        console.print(f"  [{color}]{report.placement.reason}[/]: {escape(report.placement.message)}", soft_wrap=True)


def fits(report: ModelReport) -> str:
    """What is said where nothing is chosen."""
    return f"fits on {sum(c.sized is not None for c in report.classes)} of {len(report.classes)} classes"


def _facts(report: ModelReport) -> Iterator[str]:
    facts: ArtifactFacts | None = report.facts
    if facts is not None:
        yield facts.architecture or "architecture unknown"
        if facts.parameters is not None:
            yield f"{quantity_of(facts.parameters)} parameters"
        kind = facts.quantization or facts.dtype
        size = "size of the weights unknown" if facts.weight_bytes is None else f"weights {gib(facts.weight_bytes)}"
        yield size + (f" ({kind})" if kind else "")
        if facts.kv_bytes_per_token is not None:
            yield f"KV cache {facts.kv_bytes_per_token / _KI:,.1f} KiB a token ({facts.kv.kind})"
        if facts.context_length is not None:
            yield f"made for {facts.context_length:,} tokens"
        if facts.revision:
            yield f"revision {facts.revision[:12]}"
    sizing = report.model.spec.sizing
    given = [
        *([f"weightBytes {sizing.weight_bytes}"] if sizing.weight_bytes else []),
        *([f"kvBytesPerToken {sizing.kv_bytes_per_token}"] if sizing.kv_bytes_per_token else []),
    ]
    if given:
        yield f"as spec.sizing says: {', '.join(given)}"


def _figures(row: ClassReport, context: int | None) -> tuple[str, str, str, str]:
    if row.sized is None:
        return "-", "-", "-", "-"
    tokens = row.sized.kv_tokens
    concurrent = row.sized.concurrent(context) if context else None
    return (
        str(row.sized.gpus),
        "?" if tokens is None else f"{tokens:,}",
        "?" if concurrent is None else f"{concurrent:,}",
        "no price" if row.hourly_cost is None else f"{_amount(row.hourly_cost)} {row.currency}",
    )


def _verdict(row: ClassReport) -> str:
    if row.replicas:
        waiting = f", {row.waiting} of them without GPUs as yet" if row.waiting else ""
        return f"{row.replicas} replica{'s' if row.replicas > 1 else ''} here{waiting}"
    return row.why


def _sums(row: ClassReport) -> str:
    if row.sized is None:
        return ""
    s = row.sized.sums
    state = f" + states {gib(s.state)}" if s.state else ""
    return (
        f"{gib(s.memory)} a GPU = gone before {gib(s.overhead)} + reserve {gib(s.reserve)} + weights {gib(s.weights)}"
        f"{state} + KV cache {gib(s.kv)} ({row.sized.kv_bytes_per_token:,} B a token)"
    )


def _totals(report: Report, fleet: Fleet) -> Iterator[str]:
    if fleet.built_in:
        yield "[dim]Classes: the built-in catalogue of well-known GPUs, without prices, so that none is chosen.[/]"
        yield "[dim]--fleet FILE takes your own; nodes of 8 GPUs are assumed.[/]"
    elif fleet.nodes is None:
        yield "[dim]Room: without end, on nodes of 8 GPUs, since no file names Nodes.[/]"
    if not fleet.built_in and (len(report.models) > 1 or report.use):
        costs = " + ".join(f"{_amount(amount)} {c}" for c, amount in sorted(report.costs.items()))
        yield f"Cost per hour: {costs or 'not known'}" + (
            f", without {', '.join(report.unpriced)} (no price)" if report.unpriced and costs else ""
        )
    if report.use:
        used = ", ".join(f"{u.name} {u.allocated}/{u.gpus}" for u in report.use if u.gpus)
        percent = allocated_percent(report)
        yield f"GPUs allocated: {'none there' if percent is None else f'{percent:.1f} % ({used})'}"
    lost = [m.model.key for m in report.models if not m.placed]
    if lost and len(report.models) > 1:
        yield f"[red]Not placed:[/] {escape(', '.join(lost))}"


def quantity_of(count: int) -> str:
    """Parameters for people: 8.03 B, 0.6 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / _GI:.2f} GiB" if count >= _GI / 10 else f"{count / 2**20:.1f} MiB"


def _amount(amount: Decimal) -> str:
    return f"{amount:.2f}" if amount == amount.quantize(Decimal("0.01")) else quantity.money(amount)
