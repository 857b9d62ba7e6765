"""Metadata of a model without its weights: configs, and the headers of safetensors files."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.api import reasons
from shoal.artifacts import folders, safetensors
from shoal.artifacts.errors import ArtifactError
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.safetensors import Tensors
from shoal.artifacts.source import ArtifactSource

QUANTIZATION = "hf_quant_config.json"
TOKENIZER = "tokenizer_config.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Alternative locations of the chat template in newer repositories."""
TEXTS = (folders.CONFIG, folders.INDEX, QUANTIZATION, TOKENIZER)
TEXT_LIMIT = 16 << 20
"""Limit in bytes; the index of a model with 100,000 tensors has 10 MiB."""
HEAD_BYTES = 256 << 10
"""Bytes read from the start of each safetensors file; most headers are shorter."""


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


async def read_metadata(source: ArtifactSource, manifest: Manifest) -> Metadata:
    """Reads the metadata of a source. Raises ArtifactError."""
    if manifest.archive:
        from shoal.artifacts.inside import read_inside

        return await read_inside(source, manifest)
    files = {file.name: file for file in manifest.files}
    texts = {name: await _text(source, files[name], manifest) for name in TEXTS if name in files}
    folders.check_names(files, texts.get(folders.INDEX), manifest.source)
    heads = [file for file in manifest.files if file.name.endswith(".safetensors")]
    try:
        async with asyncio.TaskGroup() as group:  # the source limits concurrent reads
            reading = {file.name: group.create_task(_tensors(source, file, manifest)) for file in heads}
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return Metadata(
        {file.name: file.size for file in manifest.files},
        texts,
        {name: task.result() for name, task in reading.items()},
    )


async def _text(source: ArtifactSource, file: File, manifest: Manifest) -> bytes:
    require_text(file.name, file.size, manifest.source)
    return await source.read(file, 0, file.size)


def require_text(name: str, size: int, source: str) -> None:
    """Raises ArtifactError(SourceInvalid) for an oversized config."""
    if size > TEXT_LIMIT:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {name} has {size} bytes, which no config has")


async def _tensors(source: ArtifactSource, file: File, manifest: Manifest) -> Tensors:
    what = f"{manifest.source}: {file.name}"
    head = await source.read(file, 0, HEAD_BYTES)
    length = safetensors.header_bytes(head, file.size, what)
    start = safetensors.PREFIX_BYTES
    if len(head) < start + length:
        head += await source.read(file, len(head), start + length - len(head))
    return safetensors.tensors(head[start : start + length], file.size, what)
