"""Prints the report as tables."""

from collections.abc import Iterator, Sequence
from decimal import Decimal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.sources import shown
from shoal.cli.explain.data import allocated_percent, fits
from shoal.cli.explain.decide import ClassReport, ModelReport, Report, currency
from shoal.cli.explain.inputs import ExplainedFleet
from shoal.core import quantity

_GI, _KI = 2**30, 2**10
FEW = 10
"""Up to this number of Models, each has a table of its own."""
_NAMED = 20


def tables(report: Report, fleet: ExplainedFleet, console: Console, *, sums: bool) -> None:
    """Prints a table per Model, or one line per Model if there are many."""
    if len(report.models) <= FEW or sums:
        for each in report.models:
            _model_table(each, console, sums=sums)
            console.print()
    else:
        console.print(_summary(report))
    for line in _totals(report, fleet):
        console.print(line, soft_wrap=True)


def _summary(report: Report) -> Table:
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("  model", "class", "replicas", "GPUs", "KV tokens", "cost/h"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("  model", "class") else "right")
    table.add_column("", overflow="fold")
    for each in report.models:
        rows = [row for row in each.classes if row.replicas]
        sign = "[green]✓[/]" if each.placed else "[red]✗[/]"
        verdict = each.problem or (each.placement.message if each.placement else fits(each))
        for number, row in enumerate(rows or [None]):
            gpus, tokens, _, cost = _numbers(row, None) if row else ("-", "-", "-", "-")
            table.add_row(
                "" if number else f"{sign} {escape(each.model.key)}",
                escape(row.gpu_class) if row else "-",
                str(row.replicas) if row else "-",
                gpus,
                tokens,
                cost,
                "" if number or each.placed else escape(verdict),
            )
    return table


def _model_table(report: ModelReport, console: Console, *, sums: bool) -> None:
    console.print(f"[bold]{escape(report.model.key)}[/]  {escape(shown(report.model.spec.source.uri))}", soft_wrap=True)
    if known := "; ".join(_facts(report)):
        console.print(f"  {escape(known)}", soft_wrap=True)
    if report.model.spec.scaling.driver == "KEDA":
        console.print("  KEDA writes the replicas (spec.scaling.driver)", soft_wrap=True)
    if report.note:
        console.print(f"  [yellow]{escape(report.note)}[/]", soft_wrap=True)
    if report.pool_note:
        color = "default" if report.pool else "red"
        console.print(f"  [{color}]{escape(report.pool_note)}[/]", soft_wrap=True)
    if report.problem:
        console.print(f"  [red]not looked at[/]: {escape(report.problem)}", soft_wrap=True)
    else:
        _classes(report, console, sums=sums)
    for other in report.others:
        console.print(f"  [dim]{escape(other.summary)}[/]", soft_wrap=True)


def _classes(report: ModelReport, console: Console, *, sums: bool) -> None:
    table = Table(show_edge=False, box=None, pad_edge=False, title_justify="left")
    requests = f"requests of {report.context:,}" if report.context else "requests"
    table.add_column("  class", no_wrap=True)
    for heading in ("GPUs", "KV tokens", requests, "cost/h"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in report.classes:
        chosen = row.replicas or (row.sized and report.placement is None)
        sign = "[green]✓[/]" if chosen else "[red]✗[/]" if row.sized is None else " "
        table.add_row(f"{sign} {escape(row.gpu_class)}", *_numbers(row, report.context), escape(_verdict(row)))
        if sums and row.sized:
            table.add_row("", "", "", "", "", f"[dim]{escape(_sums(row))}[/]")
    console.print(table)
    color = "green" if report.placed else "red"
    # If no class fits, the message repeats the sums in the table.
    if report.placement is None:
        console.print(f"  [{color}]{fits(report)}[/]", soft_wrap=True)
    elif report.placement.reason == reasons.NO_FIT:
        console.print(f"  [{color}]{report.placement.reason}[/]: no class is large enough", soft_wrap=True)
    else:
        console.print(f"  [{color}]{report.placement.reason}[/]: {escape(report.placement.message)}", soft_wrap=True)


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
    if report.model.spec.engine.context_length and (facts is None or facts.context_length is None):
        yield "contextLength is not checked: what the model was made for is not known here"


def _numbers(row: ClassReport, context: int | None) -> tuple[str, str, str, str]:
    if row.sized is None:
        return "-", "-", "-", "-"
    tokens = row.sized.kv_tokens
    concurrent = row.sized.concurrent(context) if context else None
    return (
        str(row.sized.gpus),
        "?" if tokens is None else f"{'≥ ' if row.sized.at_least else ''}{tokens:,}",
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
    s = row.sized.breakdown
    state = f" + states {gib(s.state)}" if s.state else ""
    adapters = f" + adapters {gib(s.adapters)}" if s.adapters else ""
    estimated = [("images", s.images), ("activations", s.activations), ("graphs", s.graphs)]
    measured = "".join(f" + {name} {gib(size)} (estimated)" for name, size in estimated if size and row.sized.at_least)
    return (
        f"{gib(s.memory)} a GPU = gone before {gib(s.overhead)} + reserve {gib(s.reserve)} + weights {gib(s.weights)}"
        f"{state}{adapters}{measured} + KV cache {gib(s.kv)} ({row.sized.kv_bytes_per_token:,} B a token)"
    )


def _totals(report: Report, fleet: ExplainedFleet) -> Iterator[str]:
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
    currencies = sorted({c for g in fleet.classes.values() if (c := currency(g))})
    if len(currencies) > 1:
        yield f"[yellow]Prices in {' and '.join(currencies)} are compared as numbers: give all classes one currency.[/]"
    if report.use:
        used = ", ".join(f"{name} {u.allocated}/{u.gpus}" for name, u in report.use.items() if u.gpus)
        percent = allocated_percent(report)
        yield f"GPUs allocated: {'none there' if percent is None else f'{percent:.1f} % ({used})'}"
    if len(report.models) > 1:
        yield from _named("Not placed", [m.model.key for m in report.models if not m.placed and not m.problem])
        yield from _named("Not looked at", [m.model.key for m in report.models if m.problem])


def _named(what: str, models: Sequence[str]) -> Iterator[str]:
    if models:
        more = f" and {len(models) - _NAMED} more" if len(models) > _NAMED else ""
        yield f"[red]{what}:[/] {escape(', '.join(models[:_NAMED]))}{more}"


def quantity_of(count: int) -> str:
    """A number of parameters, such as 8.03 B or 0.6 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def gib(count: int) -> str:
    """Bytes in GiB or MiB."""
    return f"{count / _GI:.2f} GiB" if count >= _GI / 10 else f"{count / 2**20:.1f} MiB"


def _amount(amount: Decimal) -> str:
    return f"{amount:.2f}" if amount == amount.quantize(Decimal("0.01")) else quantity.money(amount)
