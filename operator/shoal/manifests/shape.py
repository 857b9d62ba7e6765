"""Inputs of a Model's objects, and the metadata that all of them have."""

from dataclasses import dataclass
from typing import Protocol

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import EngineVersion, NamedValue, OperatorConfig, TracingConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import API_VERSION, JsonObject, ObjectMeta
from shoal.api.model import Model, Variant


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


def engine_version(model: Model, config: OperatorConfig) -> str:
    """The version in the Model, or the default of the engine table."""
    return model.spec.engine.version or config.engines.default_version


def engine_row(model: Model, config: OperatorConfig) -> EngineVersion:
    """The row of the engine table for the Model, with the Model's own image if it has one, and with the environment for
    tracing.

    Raises KeyError for a version that is not in the table, unless the Model has its own image.
    """
    version = engine_version(model, config)
    image = model.spec.engine.image
    row = config.engines.versions.get(version)
    if image is None:
        row = config.engines.versions[version]
    else:
        row = EngineVersion(image=image) if row is None else row.model_copy(update={"image": image})
    return _traced(row, config.tracing)


def _traced(row: EngineVersion, tracing: TracingConfig) -> EngineVersion:
    """Adds the environment for tracing; the row's own environment and the Model's override it."""
    if not (tracing.endpoint and tracing.engines):
        return row
    args = ("--enable-trace", f"--otlp-traces-endpoint={tracing.endpoint.rstrip('/')}/v1/traces")
    env = (
        NamedValue(name="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", value="http/protobuf"),
        # Only what the gateway samples: probes and warm-up requests carry no trace, and would start one each.
        NamedValue(name="OTEL_TRACES_SAMPLER", value="parentbased_always_off"),
    )
    return row.model_copy(update={"args": (*args, *row.args), "env": (*env, *row.env)})


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
