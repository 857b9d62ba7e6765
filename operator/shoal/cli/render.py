"""`shoal render`: makes the decision of `shoal explain` and prints the objects as YAML."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from shoal.api.cache import CACHED_SCHEMES
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.sources import parse_source
from shoal.api.yamltext import to_yaml
from shoal.cli.explain import artifacts, inputs
from shoal.cli.explain.command import FILE, given
from shoal.cli.explain.decide import ModelReport, explain
from shoal.cli.explain.settings import read_config
from shoal.controllers.artifacts import KEEP_SECONDS
from shoal.controllers.scaling.observe import policy
from shoal.core.disruption import min_available
from shoal.core.keda import bounds, ceilings, floors
from shoal.manifests import cache, devices, inferencepool, keda
from shoal.manifests import model as manifests
from shoal.manifests.facts import facts_job
from shoal.manifests.shape import VariantShape, engine_version

NO_UID: Final = "00000000-0000-0000-0000-000000000000"
"""Placeholder for the Model's uid in labels and owner references."""
NO_KEY: Final = "none"
"""Placeholder for the fingerprint of the install key in the name of the Model's key Secret."""


def children(
    report: ModelReport, classes: dict[str, GPUClass], config: OperatorConfig, shoal_namespace: str
) -> Iterator[JsonObject]:
    """The objects that the operator would apply, except the key Secret, which requires the install key.

    `shoal_namespace` is the namespace of gateways and operators, which the NetworkPolicy allows.
    """
    model = with_uid(report.model)
    yield facts_job(model, config, keep_seconds=KEEP_SECONDS)
    namespace = model.metadata.namespace or ""
    if config.cache.enabled and parse_source(model.spec.source.uri).scheme in CACHED_SCHEMES:
        yield cache.volume(namespace, config.cache)
        yield cache.claim(namespace, config.cache)
    variants = report.placement.variants if report.placement else ()
    # As the Deployments' replicas: what stands there once all of them are ready. Before, fewer count.
    replicas = sum(plan.replicas for plan in variants)
    yield manifests.disruption_budget(model, min_available(None, replicas, replicas))
    if config.pods.network_policy:
        yield manifests.network_policy(model, config, shoal_namespace)
    for plan in variants:
        shape = VariantShape(
            model=model,
            gpu_class=classes[plan.gpu_class],
            gpus=plan.gpus,
            version=engine_version(model, config),
            config=config,
            install_key=NO_KEY,
            facts=report.facts,
            pool=report.pool,
            mtls=config.transport.mtls.enabled,
        )
        driven = (model.spec.scaling.driver or config.scaling.driver) == "KEDA"
        if (template := devices.claim_template(shape)) is not None:
            yield template
        yield manifests.deployment(shape, surge=False, replicas=0 if driven else plan.replicas)
    if config.ext_proc.enabled:
        # Its EndpointSlice is left out: it has the addresses of gateways that run.
        yield inferencepool.service(model)
        yield inferencepool.pool(model, config)
    yield from _for_keda(model, report, config, shoal_namespace)


def _for_keda(model: Model, report: ModelReport, config: OperatorConfig, shoal_namespace: str) -> Iterator[JsonObject]:
    """The ScaledObjects. The ConfigMap with the CA is left out: it requires the installation's certificate."""
    scaling, settings = model.spec.scaling, config.scaling.keda
    if (scaling.driver or config.scaling.driver) != "KEDA" or report.placement is None:
        return
    if settings.tls:
        yield keda.authentication(model)
    planned = {v.gpu_class: v.replicas for v in report.placement.variants}
    limits = {v.gpu_class: v.max_replicas for v in model.spec.variants}
    least = floors(scaling.min_replicas, planned)
    most = ceilings(policy(model).maximum, {name: limits.get(name) for name in planned})
    for name, replicas in planned.items():
        within = bounds(replicas, floor=least[name], ceiling=most[name], existing=0, exact=True)
        yield keda.scaled_object(model, name, within, settings, shoal_namespace, ca=None if settings.tls else "")


def with_uid(model: Model) -> Model:
    """The Model with a uid; NO_UID if it has none."""
    if model.metadata.uid:
        return model
    return model.model_copy(update={"metadata": model.metadata.model_copy(update={"uid": NO_UID})})


_KNOWN_LATER = f"""\
# What only a cluster knows is replaced: uid {NO_UID} where a Model has none yet,
# '{NO_KEY}' for the fingerprint of the installation's key and for what is made of it. Secrets are not printed.
# `minAvailable` is the one once all replicas have become ready: a new Model begins with 0, and it rises with them."""


@click.command()
@click.option(
    "-f",
    "--filename",
    "files",
    type=FILE,
    multiple=True,
    required=True,
    help="YAML with Models and their LoRAPools; - is stdin.",
)
@click.option("--fleet", type=FILE, help="GPUClasses, and optionally Nodes and Pods, as for `shoal explain`.")
@click.option("--facts", multiple=True, metavar="[MODEL=]FILE", help="Facts of the weights, as for `shoal explain`.")
@click.option("--config", type=FILE, help="The operator's configuration. Default: the chart's defaults.")
@click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of Models without one.")
@click.option("--shoal-namespace", default="shoal-system", show_default=True, help="Namespace of Shoal.")
def command(
    files: tuple[Path, ...],
    fleet: Path | None,
    facts: tuple[str, ...],
    config: Path | None,
    namespace: str,
    shoal_namespace: str,
) -> None:
    """Print the objects that the operator would create for Models, as YAML.

    Exit code 1 if a Model cannot be placed: objects that do not depend on placement are printed nevertheless.
    """
    declared = inputs.read_models(files, namespace)
    if not fleet and not declared.classes:
        raise click.UsageError("GPUClasses are required: use --fleet FILE, or put them in the files with the Models")
    fleet_read = inputs.read_fleet(fleet) if fleet else inputs.ExplainedFleet(declared.classes, None)
    settings = read_config(config)
    report = explain(
        declared, fleet_read, artifacts.of_models(declared.models, given(facts, declared.models)), settings, None
    )
    click.echo(_KNOWN_LATER)
    printed: set[tuple[str, str, str]] = set()
    for each in report.models:
        if not each.placed:
            why = each.placement.message if each.placement else each.problem
            click.echo(f"{each.model.key}: no place for all of its replicas: {why}", err=True)
        if each.problem:
            continue
        for child in children(each, fleet_read.classes, settings, shoal_namespace):
            name = (child["kind"], child["metadata"].get("namespace", ""), child["metadata"]["name"])
            # Models with one source share its Job; Models of one namespace share its folder of the node cache.
            if name not in printed:
                printed.add(name)
                click.echo(f"---\n{to_yaml(child)}", nl=False)
    raise SystemExit(0 if report.all_placed else 1)
