"""Inputs of a Model's objects, and the metadata that all of them have."""

from dataclasses import dataclass
from typing import Protocol

from shoal.api import names, reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import EngineTable, EngineVersion, NamedValue, OperatorConfig, TracingConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import API_VERSION, JsonObject, ObjectMeta
from shoal.api.model import Model, Variant
from shoal.core.status.observed import ModelProblem
from shoal.engine.kinds import kind_of
from shoal.engine.port import PodSide


@dataclass(frozen=True, slots=True)
class VariantShape:
    """One variant of a Model with its decided properties."""

    model: Model
    gpu_class: GPUClass
    gpus: int
    """GPUs per replica."""
    version: str
    """Engine version of the Model."""
    config: OperatorConfig
    install_key: str
    """Fingerprint of the install key that the pods' keys are derived from."""
    facts: ArtifactFacts | None = None
    """Facts of the source: the pods fetch exactly this revision."""
    mtls: bool = False
    """The pods serve mutual TLS, and all of their callers use it."""
    pool: LoRAPool | None = None
    """Pool whose adapters the engines serve; the facts are then known."""

    @property
    def variant(self) -> Variant | None:
        """The Model's entry for the class; None: there is none."""
        return next((v for v in self.model.spec.variants if v.gpu_class == self.gpu_class.metadata.name), None)


def engine_table(model: Model, config: OperatorConfig) -> EngineTable:
    """The versions of the Model's engine."""
    return kind_of(model).pod.table(config.engines)


def engine_version(model: Model, config: OperatorConfig) -> str:
    """The version in the Model, or the default of the engine table."""
    return model.spec.engine.version or engine_table(model, config).default_version


def engine_problems(
    model: Model, config: OperatorConfig, facts: ArtifactFacts | None = None
) -> tuple[ModelProblem, ...]:
    """What the Model's engine cannot do of what the Model asks for, or not in this installation. `facts` are those
    of the weights, once they are known."""
    kind = kind_of(model)
    refused = kind.pod.problems(model, engine_version(model, config), facts)
    found = [ModelProblem(reasons.ARGUMENTS_REFUSED, text) for text in refused]
    if kind.pod.needs_mtls is not None and not config.transport.mtls.enabled:
        found.append(
            ModelProblem(
                reasons.ENGINE_NEEDS_MTLS,
                f"spec.engine.type: {kind.type} needs mutual TLS, which is off: {kind.pod.needs_mtls}; "
                "set transport.mtls.enabled of the chart, or another type",
            )
        )
    return tuple(found)


def engine_row(model: Model, config: OperatorConfig) -> EngineVersion:
    """The row of the engine table for the Model, with the Model's own image if it has one, with a command, and with the
    environment for tracing.

    Raises KeyError for a version that is not in the table, unless the Model has its own image.
    """
    version = engine_version(model, config)
    image = model.spec.engine.image
    versions, kind = engine_table(model, config).versions, kind_of(model).pod
    if image is None:
        row = versions[version]
    elif version in versions:
        row = versions[version].model_copy(update={"image": image})
    else:
        row = EngineVersion(image=image)
    if not row.command:
        row = row.model_copy(update={"command": kind.command})
    return _traced(row, config.tracing, kind)


def _traced(row: EngineVersion, tracing: TracingConfig, kind: PodSide) -> EngineVersion:
    """Adds arguments and environment for tracing; the row's own and the Model's override them."""
    if not (tracing.endpoint and tracing.engines):
        return row
    more = kind.tracing(tracing.endpoint.rstrip("/"))
    env = tuple(NamedValue(name=name, value=value) for name, value in more.env.items())
    return row.model_copy(update={"args": (*more.args, *row.args), "env": (*env, *row.env)})


class Named(Protocol):
    """A Model, or a stored one that this version cannot parse."""

    @property
    def metadata(self) -> ObjectMeta: ...


def labels(model: Named) -> dict[str, str]:
    """Labels of every object that is made for a Model."""
    return {
        names.LABEL_NAME: "shoal-engine",
        names.LABEL_INSTANCE: model.metadata.name,
        names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        names.LABEL_PART_OF: "shoal",
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_MODEL: model.metadata.name,
        names.LABEL_MODEL_UID: model.metadata.uid,
    }


def selector(model: Model) -> dict[str, str]:
    """Selects all engine pods of a Model, and none of a deleted Model of the same name."""
    return {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL_UID: model.metadata.uid}


def metadata(model: Named, name: str, **extra_labels: str) -> JsonObject:
    """Name, labels and owner reference of a child, which is deleted with the Model."""
    return {
        "name": name,
        "namespace": model.metadata.namespace,
        "labels": labels(model) | extra_labels,
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": Model.kind_name,
                "name": model.metadata.name,
                "uid": model.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
