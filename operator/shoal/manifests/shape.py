"""What the objects of a Model are made from, and what they all carry."""

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
    """One variant of a Model, decided."""

    model: Model
    gpu_class: GPUClass
    gpus: int
    """Per replica."""
    version: str
    """Engine version that the Model gets."""
    config: OperatorConfig
    install_key: str
    """Fingerprint of the install key whose keys the pods carry."""
    facts: ArtifactFacts | None = None
    """What the source was resolved to once: the pods fetch exactly that."""
    mtls: bool = False
    """Its pods speak mutual TLS: everybody who calls them does."""
    pool: LoRAPool | None = None
    """The pool whose adapters its engines serve; the facts are known then."""

    @property
    def variant(self) -> Variant | None:
        """What the Model says of the class; None where it names none."""
        return next((v for v in self.model.spec.variants if v.gpu_class == self.gpu_class.metadata.name), None)


def engine_version(model: Model, config: OperatorConfig) -> str:
    """The version that the Model asks for, or the table's default."""
    return model.spec.engine.version or config.engines.default_version


def engine_row(model: Model, config: OperatorConfig) -> EngineVersion:
    """The row of the engine table for the Model, with its own image if it names one, and with what lets it trace.

    Raises KeyError for a version that is not in the table when there is no image of the Model's own.
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
    """What the row itself says comes after this, and so does what the Model says."""
    if not (tracing.endpoint and tracing.engines):
        return row
    args = ("--enable-trace", f"--otlp-traces-endpoint={tracing.endpoint.rstrip('/')}/v1/traces")
    env = (
        NamedValue(name="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", value="http/protobuf"),
        # What the gateway samples and nothing else: probes and warm-ups come without a trace, and would begin one each.
        NamedValue(name="OTEL_TRACES_SAMPLER", value="parentbased_always_off"),
    )
    return row.model_copy(update={"args": (*args, *row.args), "env": (*env, *row.env)})


class Named(Protocol):
    """A Model, or what is left of one that this version does not understand."""

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
    """Selects all engine pods of a Model, and none of a namesake that was deleted."""
    return {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL_UID: model.metadata.uid}


def metadata(model: Named, name: str, **extra_labels: str) -> JsonObject:
    """Name, labels and owner of a child: deleting the Model deletes it."""
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
