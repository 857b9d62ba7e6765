"""Which files of a model are its metadata, and what was found in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.api import reasons
from shoal.artifacts import folders
from shoal.artifacts.errors import ArtifactError
from shoal.artifacts.safetensors import Tensors

QUANTIZATION = "hf_quant_config.json"
TOKENIZER = "tokenizer_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Alternative locations of the chat template in newer repositories."""
TEXTS = (folders.CONFIG, folders.INDEX, QUANTIZATION, TOKENIZER)
TEXT_LIMIT = 16 << 20
"""Limit in bytes; the index of a model with 100,000 tensors has 10 MiB."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata that was found. Names are relative to the model's folder."""

    sizes: Mapping[str, int]
    """Size of each file in bytes."""
    texts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Content of the existing files in `TEXTS`."""
    tensors: Mapping[str, Tensors] = field(default_factory=dict[str, Tensors])
    """By safetensors file."""
    whole: bool = True
    """Whether all files were seen: reading a compressed archive stops early."""


def require_text(name: str, size: int, source: str) -> None:
    """Raises ArtifactError(SourceInvalid) for an oversized config."""
    if size > TEXT_LIMIT:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {name} has {size} bytes, which no config has")
