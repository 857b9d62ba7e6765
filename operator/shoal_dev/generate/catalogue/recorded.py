"""What is recorded of each model of the catalogue, and the object and facts that follow from it."""

from importlib.resources import files
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import API_VERSION, JsonObject
from shoal.api.model import Model
from shoal.core.architectures import facts_of
from shoal.core.fields.table import CHAT, EMBEDDINGS

Kind = Literal["Chat", "Code", "Vision", "Embedding", "Rerank", "Speech"]
ENDPOINTS: Final[dict[Kind, str]] = {
    "Chat": CHAT,
    "Code": CHAT,
    "Vision": CHAT,
    "Embedding": EMBEDDINGS,
    "Rerank": "/v1/rerank",
    "Speech": "/v1/audio/transcriptions",
}
"""Endpoint of the OpenAI-compatible API that a model of this kind is for."""
SECRET: Final = "hub"  # noqa: S105 - a name
"""Secret with the token for a gated repository."""


class CatalogueModel(BaseModel):
    """One entry of models.yaml, where the fields are described."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
    kind: Kind
    repository: str
    comment: str = ""
    gated: bool = False
    parameters: int
    counted: bool = True
    active: float | None = None
    weight_bytes: int
    spec: JsonObject = Field(default_factory=dict)
    config: JsonObject

    @property
    def uri(self) -> str:
        return f"hf://{self.repository}"

    @property
    def title(self) -> str:
        """Name of the repository without its owner."""
        return self.repository.rpartition("/")[2]

    @property
    def endpoint(self) -> str:
        return ENDPOINTS[self.kind]

    @property
    def facts(self) -> ArtifactFacts:
        """The facts, by the code that reads a source in the cluster. Raises UnknownConfig."""
        return facts_of(
            self.config,
            source=self.uri,
            parameters=self.parameters if self.counted else None,
            weight_bytes=self.weight_bytes,
        )

    def as_object(self) -> JsonObject:
        """The manifest: the Model, with the facts in its status. Raises UnknownConfig."""
        source: dict[str, Any] = {"uri": self.uri}
        if self.gated:
            source["secretRef"] = {"name": SECRET}
        return {
            "apiVersion": API_VERSION,
            "kind": Model.kind_name,
            "metadata": {"name": self.name},
            "spec": {"source": source, **self.spec},
            "status": {"artifact": self.facts.model_dump(mode="json", by_alias=True, exclude_none=True)},
        }


def _read() -> tuple[CatalogueModel, ...]:
    text = files("shoal_dev.generate.catalogue").joinpath("models.yaml").read_text(encoding="utf-8")
    return tuple(CatalogueModel.model_validate(each) for each in yaml.safe_load(text)["models"])


MODELS: Final = _read()
"""The models, smallest first."""
