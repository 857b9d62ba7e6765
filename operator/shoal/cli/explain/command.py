"""The command `shoal explain`."""

from collections.abc import Sequence
from pathlib import Path

import click

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Model
from shoal.cli.catalog import built_in
from shoal.cli.explain import artifacts, data, inputs, show
from shoal.cli.explain.decide import explain
from shoal.cli.explain.route import RouteQuestion
from shoal.cli.explain.route import run as run_route
from shoal.cli.explain.settings import read_config
from shoal.cli.output import console, emit, output_option
from shoal.runtime import logs

FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command()
@click.argument("subject", nargs=-1, metavar="[route NAME]")
@click.option(
    "-f",
    "--filename",
    "files",
    type=FILE,
    multiple=True,
    help="YAML or JSON with Models and their LoRAPools; - is stdin.",
)
@click.option("--models", "more", type=FILE, multiple=True, help="More files with Models to place together with them.")
@click.option(
    "--fleet",
    type=FILE,
    help="GPUClasses, and optionally Nodes and Pods: `kubectl get gpuclasses,nodes,pods -A -o yaml`. "
    "Of classes with `device` also resourceslices,deviceclasses,resourceclaims, and any devicetaintrules. "
    "Default: a catalogue of well-known GPUs, without prices.",
)
@click.option(
    "--facts",
    multiple=True,
    metavar="[MODEL=]FILE",
    help="Facts of the weights, or a model's config.json, in place of reading the source.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help="Request length in tokens, to compute concurrency. Default: the longest context.",
)
@click.option("--config", type=FILE, help="The operator's configuration. Default: the chart's defaults.")
@click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of Models without one.")
@click.option("--sums", is_flag=True, help="Show how the memory of a GPU is used.")
@click.option("--tenant", help="With route: the Tenant whose request it is. Default: one that may use every target.")
@click.option("--endpoint", default="/v1/chat/completions", show_default=True, help="With route: path of the request.")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="With route: a header.")
@click.option("--bytes", "size", type=click.IntRange(min=0), default=0, help="With route: size of the body.")
@click.option("--kubeconfig", help="With route. Default: KUBECONFIG, else ~/.kube/config.")
@click.option("--kube-context", help="With route: context of the kubeconfig.")
@click.option(
    "--operator-namespace",
    default="shoal-system",
    show_default=True,
    help="With route: Shoal's namespace, whose gateways know whether external targets answer.",
)
@output_option()
def command(
    subject: tuple[str, ...],
    files: tuple[Path, ...],
    more: tuple[Path, ...],
    fleet: Path | None,
    facts: tuple[str, ...],
    context: int | None,
    config: Path | None,
    namespace: str,
    sums: bool,
    tenant: str | None,
    endpoint: str,
    headers: tuple[str, ...],
    size: int,
    kubeconfig: str | None,
    kube_context: str | None,
    operator_namespace: str,
    output: str,
) -> None:
    """Explain where Models would run: the operator's placement decision, without a cluster.

    Shows for each GPU class the GPUs of a replica, tokens of its KV cache, concurrent requests and cost, or why a
    replica does not fit. Exit code: 0 if every Model is placed, 1 if not, 2 for a usage error.

    `shoal explain route NAME` explains where requests for a ModelRoute of the cluster go: the rule that is for a
    request, and the share of each target; of external targets also whether they answer. Exit code: 0 if the request
    has a target.
    """
    if subject:
        if len(subject) != 2 or subject[0] not in ("route", "mroute", "modelroute"):
            raise click.UsageError("besides files, `explain` takes: route NAME")
        question = RouteQuestion(subject[1], namespace, tenant, endpoint, headers, size, operator_namespace)
        raise SystemExit(run_route(question, output, kubeconfig=kubeconfig, context=kube_context))
    logs.configure("warning")  # Retries of a source are of no interest to users; failures are in the table.
    if not files + more:
        raise click.UsageError("name a file with Models: -f FILE")
    declared = inputs.read_models(files + more, namespace)
    if fleet:
        fleet_read = inputs.read_fleet(fleet)
    else:
        fleet_read = inputs.ExplainedFleet(declared.classes or built_in(), None, built_in=not declared.classes)
    settings = read_config(config)
    known = artifacts.of_models(declared.models, given(facts, declared.models))
    report = explain(declared, fleet_read, known, settings, context)
    document = data.as_object(report, fleet_read)
    if not emit(output, document, data.rows(document), data.COLUMNS):
        show.tables(report, fleet_read, console(), sums=sums)
    raise SystemExit(0 if report.all_placed else 1)


def given(options: tuple[str, ...], models: Sequence[Model]) -> dict[str, ArtifactFacts]:
    """--facts by Model: named as namespace/name or name, or unnamed if there is only one source."""
    given: dict[str, ArtifactFacts] = {}
    for option in options:
        name, equals, path = option.rpartition("=")
        chosen = [m for m in models if not equals or name in (m.key, m.metadata.name)]
        if not chosen:
            have = ", ".join(m.key for m in models)
            raise click.UsageError(f"--facts {option}: there is no Model {name!r} in the files; there are: {have}")
        if len({m.spec.source.uri for m in chosen}) > 1:
            raise click.UsageError(f"--facts {option}: name the Model of these facts: --facts NAME={path}")
        given |= dict.fromkeys((m.key for m in chosen), artifacts.from_file(Path(path)))
    return given
