"""Reads the metadata of a model without its weights: configs, and the headers of safetensors files."""

import asyncio

from shoal.artifacts import folders, safetensors
from shoal.artifacts.inside import read_inside
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.modelmetadata import TEXTS, Metadata, require_text
from shoal.artifacts.safetensors import Tensors
from shoal.artifacts.source import ArtifactSource

HEAD_BYTES = 256 << 10
"""Bytes read from the start of each safetensors file; most headers are shorter."""


async def read_metadata(source: ArtifactSource, manifest: Manifest) -> Metadata:
    """Reads the metadata of a source. Raises ArtifactError."""
    if manifest.archive:
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


async def _tensors(source: ArtifactSource, file: File, manifest: Manifest) -> Tensors:
    what = f"{manifest.source}: {file.name}"
    head = await source.read(file, 0, HEAD_BYTES)
    length = safetensors.header_bytes(head, file.size, what)
    start = safetensors.PREFIX_BYTES
    if len(head) < start + length:
        head += await source.read(file, len(head), start + length - len(head))
    return safetensors.tensors(head[start : start + length], file.size, what)
