"""The children of a Model, as the operator's controllers put them together."""

from collections.abc import Iterator
from typing import Final

from shoal.api.cache import CACHED_SCHEMES
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.sources import parse_source
from shoal.cli.explain.decide import ModelReport
from shoal.controllers.artifacts import KEEP_SECONDS
from shoal.controllers.scaling.observe import policy
from shoal.core.keda import bounds, ceilings, floors
from shoal.manifests import cache, keda
from shoal.manifests import model as manifests
from shoal.manifests.facts import facts_job
from shoal.manifests.shape import VariantShape, engine_version

NO_UID: Final = "00000000-0000-0000-0000-000000000000"
"""Stands where the API server's uid of the Model would: in labels and owner references."""
NO_KEY: Final = "none"
"""Stands where the fingerprint of the installation's key would: in the name of the Model's key Secret."""


def children(
    report: ModelReport, classes: dict[str, GPUClass], config: OperatorConfig, shoal_namespace: str
) -> Iterator[JsonObject]:
    """What the operator would apply. The key Secret is left out: it is made of the installation's key.

    `shoal_namespace` is where gateways and operators run, whom the NetworkPolicy lets in.
    """
    model = with_uid(report.model)
    yield facts_job(model, config, keep_seconds=KEEP_SECONDS)
    namespace = model.metadata.namespace or ""
    if config.cache.enabled and parse_source(model.spec.source.uri).scheme in CACHED_SCHEMES:
        yield cache.volume(namespace, config.cache)
        yield cache.claim(namespace, config.cache)
    yield manifests.disruption_budget(model)
    if config.pods.network_policy:
        yield manifests.network_policy(model, config, shoal_namespace)
    for plan in report.placement.variants if report.placement else ():
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
        yield manifests.deployment(shape, surge=False, replicas=0 if driven else plan.replicas)
    yield from _for_keda(model, report, config, shoal_namespace)


def _for_keda(model: Model, report: ModelReport, config: OperatorConfig, shoal_namespace: str) -> Iterator[JsonObject]:
    """The ScaledObjects. The ConfigMap with the CA is left out: it is made of the installation's certificate."""
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
    """The Model, with a uid in any case."""
    if model.metadata.uid:
        return model
    return model.model_copy(update={"metadata": model.metadata.model_copy(update={"uid": NO_UID})})
