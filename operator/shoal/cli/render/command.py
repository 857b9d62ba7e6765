"""The command: the decision as `shoal explain` makes it, then the objects as YAML."""

from pathlib import Path

import click

from shoal.api.yamltext import to_yaml
from shoal.cli.explain import artifacts, inputs
from shoal.cli.explain.command import FILE, given
from shoal.cli.explain.decide import explain
from shoal.cli.explain.settings import read_config
from shoal.cli.render.objects import NO_KEY, NO_UID, children

_KNOWN_LATER = f"""\
# What only a cluster knows is replaced: uid {NO_UID} where a Model has none yet,
# '{NO_KEY}' for the fingerprint of the installation's key and for what is made of it. Secrets are not printed."""


@click.command()
@click.option(
    "-f",
    "--filename",
    "files",
    type=FILE,
    multiple=True,
    required=True,
    help="YAML with Models, and their LoRAPools; - is stdin.",
)
@click.option("--fleet", type=FILE, help="GPUClasses, and Nodes and Pods if it has them, as for `shoal explain`.")
@click.option("--facts", multiple=True, metavar="[MODEL=]FILE", help="Facts of the weights, as for `shoal explain`.")
@click.option("--config", type=FILE, help="The operator's configuration. Default: the chart's defaults.")
@click.option("-n", "--namespace", default="default", show_default=True, help="For Models that name none.")
@click.option("--shoal-namespace", default="shoal-system", show_default=True, help="Where Shoal itself runs.")
def command(
    files: tuple[Path, ...],
    fleet: Path | None,
    facts: tuple[str, ...],
    config: Path | None,
    namespace: str,
    shoal_namespace: str,
) -> None:
    """Print the objects that the operator would make of Models, as YAML.

    Ends with 1 when a Model has no place: what is independent of it is printed all the same.
    """
    said = inputs.read_models(files, namespace)
    if not fleet and not said.classes:
        raise click.UsageError("which GPUClasses are there? --fleet FILE, or put them beside the Models")
    where = inputs.read_fleet(fleet) if fleet else inputs.ExplainedFleet(said.classes, None)
    settings = read_config(config)
    report = explain(said, where, artifacts.of_models(said.models, given(facts, said.models)), settings, None)
    click.echo(_KNOWN_LATER)
    printed: set[tuple[str, str, str]] = set()
    for each in report.models:
        if not each.placed:
            why = each.placement.message if each.placement else each.problem
            click.echo(f"{each.model.key}: no place for all of its replicas: {why}", err=True)
        if each.problem:
            continue
        for child in children(each, where.classes, settings, shoal_namespace):
            name = (child["kind"], child["metadata"].get("namespace", ""), child["metadata"]["name"])
            if (
                name not in printed
            ):  # Models of one source share its Job, those of one namespace its share in the node cache
                printed.add(name)
                click.echo(f"---\n{to_yaml(child)}", nl=False)
    raise SystemExit(0 if report.all_placed else 1)
