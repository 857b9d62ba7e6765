"""The facts container: reads a source's metadata once per revision and reports it to the operator.

Success: exit code 0 and the termination message `{"facts": {...}}`, an `ArtifactFacts` by alias without unknown fields,
in at most 4096 bytes. Failure: exit code 1 and `{"reason", "message"}`.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog

from shoal.agent import outcome
from shoal.api import names, reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import MOST_COUNT
from shoal.api.sources import shown
from shoal.artifacts import ArtifactError, Manifest, Settings, folders, open_source, safetensors
from shoal.artifacts.errors import of_os_error
from shoal.artifacts.identity import credentials_of
from shoal.artifacts.metadata import read_metadata
from shoal.artifacts.modelmetadata import QUANTIZATION, TEMPLATES, TOKENIZER, Metadata
from shoal.core.architectures import UnknownConfig, facts_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FactsRequest:
    """The source to read, and where its volume and its Secret are mounted."""

    uri: str
    source: Path = Path(names.SOURCE_DIR)
    secret: Path = Path(names.SOURCE_SECRET_DIR)
    settings: Settings = field(default_factory=Settings)
    identity: bool = False
    """Whether the pod's ServiceAccount identity is used for a bucket without keys in the Secret."""


async def read_facts(request: FactsRequest) -> ArtifactFacts:
    """Reads the metadata of a source, never its weights. Raises ArtifactError."""
    try:
        credentials = await credentials_of(request.uri, request.secret, request.settings, identity=request.identity)
        async with open_source(request.uri, credentials, request.settings, mounted=request.source) as source:
            manifest = await source.manifest()
            metadata = await read_metadata(source, manifest)
            # The right to list a gated repository does not imply the right to read it: checked here rather than by
            # every replica.
            await source.authorise(manifest)
    except OSError as error:
        raise of_os_error(error, f"reading {shown(request.uri)}") from error
    return summary(manifest, metadata)


def summary(manifest: Manifest, metadata: Metadata) -> ArtifactFacts:
    """Facts from the metadata. Raises ArtifactError(SourceInvalid)."""
    config = folders.json_object(metadata.texts[folders.CONFIG], folders.CONFIG, manifest.source)
    index = _json(metadata, folders.INDEX, manifest.source)
    separate = _json(metadata, QUANTIZATION, manifest.source)
    if separate is not None and "quantization_config" not in config:
        config["quantization_config"] = separate.get("quantization")
    loaded = [metadata.tensors[name] for name in _loaded(metadata.tensors, index)]
    tensors = safetensors.total(loaded) if loaded and metadata.whole else None
    try:
        facts = facts_of(
            config,
            source=manifest.source,
            revision=manifest.revision,
            digest=manifest.digest,
            parameters=tensors.parameters if tensors else None,
            weight_bytes=tensors.bytes if tensors else _weight_bytes(metadata, index),
            file_bytes=_file_bytes(manifest, metadata),
            tensor_dtypes=tensors.by_type if tensors else None,
        )
    except UnknownConfig as error:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{manifest.source}: {error}") from None
    return facts.model_copy(update={"chat_template": _chat_template(metadata, manifest.source)})


def _chat_template(metadata: Metadata, source: str) -> bool | None:
    tokenizer = _json(metadata, TOKENIZER, source) or {}
    if tokenizer.get("chat_template") or any(name in metadata.sizes for name in TEMPLATES):
        return True
    return False if metadata.whole else None


def _json(metadata: Metadata, name: str, source: str) -> dict[str, Any] | None:
    content = metadata.texts.get(name)
    return None if content is None else folders.json_object(content, name, source)


def _loaded(names: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """The weights files that an engine loads: those in the index, or else those beside config.json."""
    existing = list(names)
    shards = index.get("weight_map") if index is not None else None
    if isinstance(shards, dict):
        named = {str(name) for name in cast("dict[str, object]", shards).values()}
        return [name for name in existing if name in named]
    return [name for name in existing if "/" not in name] or existing


def _weight_bytes(metadata: Metadata, index: Mapping[str, Any] | None) -> int | None:
    """Size of weights without readable headers: from the index, or else the size of files in older formats."""
    totals = index.get("metadata") if index is not None else None
    size = cast("dict[str, object]", totals).get("total_size") if isinstance(totals, dict) else None
    if isinstance(size, int | float) and 0 < size <= MOST_COUNT:
        return int(size)
    older = _loaded((name for name in metadata.sizes if name.endswith(folders.WEIGHTS)), None)
    return sum(metadata.sizes[name] for name in older) if older and metadata.whole else None


def _file_bytes(manifest: Manifest, metadata: Metadata) -> int:
    """Disk space that a replica needs: an archive and its content exist at the same time."""
    if not manifest.archive:
        return manifest.total_bytes
    return manifest.total_bytes + (sum(metadata.sizes.values()) if metadata.whole else manifest.total_bytes)


def facts_message(result: ArtifactFacts | ArtifactError) -> str:
    """Termination message of the container."""
    if isinstance(result, ArtifactError):
        return outcome.failure_message(result)
    content = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    while (text := outcome.fits({"facts": content})) is None:
        # The reader knows the source. Only a URI with many non-ASCII characters can be so long.
        content["source"] = content["source"][: len(content["source"]) // 2]
    return text


def run_facts(request: FactsRequest, write_termination: Callable[[str], None]) -> int:
    """Runs the facts container: reads, writes the termination message, returns the exit code."""
    result: ArtifactFacts | ArtifactError
    try:
        result = asyncio.run(read_facts(request))
        log.info("facts.read", uri=shown(request.uri), revision=result.revision, architecture=result.architecture)
    except ArtifactError as error:
        result = error
        log.error("facts.failed", uri=shown(request.uri), reason=error.reason, problem=str(error))
    write_termination(facts_message(result))
    return 1 if isinstance(result, ArtifactError) else 0
