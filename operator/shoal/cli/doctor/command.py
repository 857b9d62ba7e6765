"""The command `shoal doctor`."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.client import run_command
from shoal.cli.doctor.read import DoctorReader
from shoal.cli.options import NAMESPACE, kubeconfig_options
from shoal.cli.output import console, emit, output_option
from shoal.core.doctor.checks import examine
from shoal.core.doctor.types import DoctorResult
from shoal.kube.client import KubeClient

_COLUMNS: Final = ("check", "outcome", "layer", "reason", "message", "do")
_STYLES: Final = {"ok": "green", "warning": "yellow", "error": "red", "unknown": "cyan"}


@click.command()
@click.option(
    "--operator-namespace",
    envvar="SHOAL_NAMESPACE",
    default=NAMESPACE,
    show_default=True,
    help="Namespace of Shoal.",
)
@click.option("--all", "everything", is_flag=True, help="Show what is well too.")
@output_option()
@kubeconfig_options
def command(
    operator_namespace: str, everything: bool, output: str, kubeconfig: str | None, context: str | None
) -> None:
    """Check a whole installation: what is wrong, on which layer, and what to do.

    Checks clocks, name service, kinds, the operator's permissions, certificates, the leader, processes and their
    versions, Services, price lists, GPU classes, node caches, signals, KEDA, Models and tenants. It reads, and changes
    nothing. What cannot be read is `unknown`. Exit code 1: something is wrong.
    """

    async def work() -> tuple[DoctorResult, ...]:
        async with await KubeClient.from_environment(kubeconfig=kubeconfig, context=context) as client:
            seen = await DoctorReader(client, operator_namespace).read()
        return examine(seen, datetime.now(UTC))

    results = run_command(work())
    rows = [_row(each) for each in results]
    if not emit(output, {"results": rows, "counts": _counts(results)}, rows, _COLUMNS):
        console(markup=False).print(render(results, everything=everything))
    if any(each.outcome == "error" for each in results):
        raise SystemExit(1)


def _row(each: DoctorResult) -> dict[str, Any]:
    return {
        "check": each.check,
        "outcome": each.outcome,
        "layer": each.layer.value,
        "reason": each.reason,
        "message": each.message,
        "do": each.do,
    }


def _counts(results: Sequence[DoctorResult]) -> dict[str, int]:
    counts = Counter(each.outcome for each in results)
    return {outcome: counts[outcome] for outcome in ("error", "warning", "unknown", "ok")}


def render(results: Sequence[DoctorResult], *, everything: bool) -> RenderableType:
    """One block per result; what is well in one line, or with `everything` a line each."""
    table = Table(show_edge=False, show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in results:
        if each.outcome == "ok" and not everything:
            continue
        reason = "" if each.outcome == "ok" else f"{each.reason}: "
        table.add_row(
            Text(each.outcome, style=_STYLES[each.outcome]),
            Text(each.layer.label),
            Text(f"{each.check}: {reason}{each.message}"),
        )
        if each.do:
            table.add_row(Text(""), Text(""), Text(f"do: {each.do}"))
    summary = ", ".join(f"{count} {outcome}" for outcome, count in _counts(results).items())
    return Group(table, Text(""), Text(summary, style="bold")) if table.row_count else Text(summary, style="bold")
