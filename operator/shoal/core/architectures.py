"""What a model's config.json says of its size: heads, layers, context, and what one token takes in the KV cache."""

from collections.abc import Mapping
from typing import Any

from shoal.api.artifact import ArtifactFacts


class UnknownConfig(ValueError):
    """The file is no model's config."""


def facts_of(
    config: Mapping[str, Any],
    *,
    source: str,
    revision: str | None = None,
    digest: str | None = None,
    parameters: int | None = None,
    weight_bytes: int | None = None,
    file_bytes: int | None = None,
    tensor_dtypes: Mapping[str, int] | None = None,
) -> ArtifactFacts:
    """The facts of weights with this config.json.

    `tensor_dtypes` are bytes per tensor type of the safetensors headers (BF16, F8_E4M3, ...). An architecture that is
    not known is no error: its `kv.kind` is Unknown. Raises UnknownConfig for a config that is no model's.
    """
    return ArtifactFacts(source=source, revision=revision, digest=digest)
