"""`shoal advise`: the command."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.text import Text

from shoal.api.traffic import MOST_ROWS
from shoal.cli.advise.gather import Gathered, ModelFacts, gather
from shoal.cli.advise.show import COLUMNS, document, render, rows
from shoal.cli.client import run_command
from shoal.cli.options import Installation, gateway_options
from shoal.cli.output import console, emit, output_option
from shoal.core.advice.facts import window_of
from shoal.core.advice.report import AdviceReport, NotEnoughTraffic, advise

_UNITS: Final = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}
_REQUESTS: Final = 20_000
_MOST_OF: Final = 0.9
"""A report of less than this share of what was asked for says so."""


@click.command()
@click.argument("model", required=False)
@click.option("-n", "--namespace", help="Default: the kubeconfig context's.")
@click.option("--since", default="24h", show_default=True, help="How far back: 30m, 24h, 7d.")
@click.option(
    "--requests",
    type=click.IntRange(1, MOST_ROWS),
    default=_REQUESTS,
    show_default=True,
    help="Most requests of a Model to read, the newest.",
)
@output_option()
@gateway_options
def command(
    model: str | None, namespace: str | None, since: str, requests: int, output: str, installation: Installation
) -> None:
    """Say what routing is worth for a Model's own traffic, in tokens, GPU time and money.

    MODEL is a name, or model/name as kubectl writes it. Default: all Models of the namespace with requests. The
    gateways keep the last requests in memory, without their prompts; these are replayed with other routing and other
    caches. Needs the ClusterRole shoal-viewer in the namespace, or in Shoal's for all.
    """
    back = _since(since)
    now = datetime.now(UTC)

    async def work() -> Gathered:
        async with await installation.connect() as client:
            where = namespace or client.namespace or "default"
            name = None if model is None else model.removeprefix("model/")
            return await gather(client, installation, where, name, since=back, requests=requests, now=now)

    found = run_command(work())
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    reports: list[tuple[str, AdviceReport]] = []
    for facts in found.models:
        report = _report(facts, now - back, now)
        if isinstance(report, AdviceReport):
            reports.append((facts.model, report))
            if (known := report.until - report.since) < _MOST_OF * back.total_seconds():
                click.echo(
                    f"note: {facts.model}: the report covers {known / 3600:.1f} h, not all of --since {since}: "
                    "gateways keep their last requests, in memory, from their start on",
                    err=True,
                )
        elif model is not None:
            raise click.ClickException(f"{facts.model}: {report.message}")
        else:
            click.echo(f"{facts.model}: {report.message}", err=True)
    if not reports:
        raise click.ClickException("the gateways know too few requests of any Model here")
    documents = [document(name, report) for name, report in reports]
    listed: list[dict[str, Any]] = [row for name, report in reports for row in rows(name, report)]
    if not emit(output, documents[0] if model is not None else documents, listed, COLUMNS):
        parts: list[RenderableType] = []
        for name, report in reports:
            parts += [*([Text("")] if parts else []), render(name, report)]
        console().print(Group(*parts))


def _report(facts: ModelFacts, since: datetime, now: datetime) -> AdviceReport | NotEnoughTraffic:
    try:
        window = window_of(facts.parts, since=max(since.timestamp(), facts.since), until=now.timestamp())
    except ValueError as error:
        return NotEnoughTraffic(str(error))
    return advise(window, facts.classes, prompt_tokens_per_day=facts.prompt_tokens_per_day)


def _since(text: str) -> timedelta:
    found = re.fullmatch(r"([0-9]{1,5})([mhd])", text)
    if found is None or not int(found[1]):
        raise click.UsageError(f"--since {text!r} is not a time: give how long ago, as in 30m, 24h, 7d")
    return int(found[1]) * _UNITS[found[2]]
