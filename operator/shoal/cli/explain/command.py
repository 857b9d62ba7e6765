"""`shoal explain`: the operator's decision without a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Model
from shoal.cli.catalog import built_in
from shoal.cli.explain import artifacts, data, inputs, show
from shoal.cli.explain.decide import explain
from shoal.cli.explain.settings import read_config
from shoal.runtime import logs

NARROW = 132
"""Columns where the output is no terminal."""

FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command()
@click.option(
    "-f",
    "--filename",
    "files",
    type=FILE,
    multiple=True,
    help="YAML or JSON with Models, and their LoRAPools; - is stdin.",
)
@click.option("--models", "more", type=FILE, multiple=True, help="Further files with Models: they are placed together.")
@click.option(
    "--fleet",
    type=FILE,
    help="GPUClasses, and Nodes and Pods if it has them: `kubectl get gpuclasses,nodes,pods -A -o yaml`. "
    "Without: a catalogue of well-known GPUs, without prices.",
)
@click.option(
    "--facts",
    multiple=True,
    metavar="[MODEL=]FILE",
    help="Facts of the weights, or a model's config.json, instead of asking the source.",
)
@click.option("--context", type=click.IntRange(min=1), help="Tokens of the requests to count. Default: the longest.")
@click.option("--config", type=FILE, help="The operator's configuration. Default: the chart's defaults.")
@click.option("-n", "--namespace", default="default", show_default=True, help="For Models that name none.")
@click.option("--sums", is_flag=True, help="Show what the memory of a GPU is divided into.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
def command(
    files: tuple[Path, ...],
    more: tuple[Path, ...],
    fleet: Path | None,
    facts: tuple[str, ...],
    context: int | None,
    config: Path | None,
    namespace: str,
    sums: bool,
    output: Literal["table", "json", "yaml"],
) -> None:
    """Say where Models would run, and why: the operator's own decision, without a cluster.

    For each GPU class: GPUs of a replica, tokens of its KV cache, requests at once, cost; or the sum that does not
    work out. Ends with 0 when every Model has its place, with 1 when one has not, with 2 when the call is wrong.
    """
    logs.configure("warning")  # that a source was asked again is no news to people; that it failed is told in the table
    if not files + more:
        raise click.UsageError("name a file with Models: -f FILE")
    said = inputs.read_models(files + more, namespace)
    if fleet:
        where = inputs.read_fleet(fleet)
    else:
        where = inputs.ExplainedFleet(said.classes or built_in(), None, built_in=not said.classes)
    settings = read_config(config)
    known = artifacts.of_models(said.models, given(facts, said.models))
    report = explain(said, where, known, settings, context)
    if output == "table":
        console = Console(highlight=False, width=None if Console().is_terminal else NARROW)
        show.tables(report, where, console, sums=sums)
    else:
        click.echo(data.dump(report, where, output))
    raise SystemExit(0 if report.all_placed else 1)


def given(options: tuple[str, ...], models: Sequence[Model]) -> dict[str, ArtifactFacts]:
    """--facts, by Model: named as namespace/name or name, or unnamed where there is one source only."""
    given: dict[str, ArtifactFacts] = {}
    for option in options:
        name, equals, path = option.rpartition("=")
        chosen = [m for m in models if not equals or name in (m.key, m.metadata.name)]
        if not chosen:
            have = ", ".join(m.key for m in models)
            raise click.UsageError(f"--facts {option}: there is no Model {name!r} in the files; there are: {have}")
        if len({m.spec.source.uri for m in chosen}) > 1:
            raise click.UsageError(f"--facts {option}: say of which Model these are the facts: --facts NAME={path}")
        given |= dict.fromkeys((m.key for m in chosen), artifacts.from_file(Path(path)))
    return given
