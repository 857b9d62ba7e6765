"""The files of a LoRA adapter: selects them from a source, reads their facts, and fetches them into a folder.

An adapter consists of three files of its source: config, weights, and optionally added tokens. Other files in the
folder (checkpoints, a tokenizer, a merged model) must not reach the engine: SGLang loads every safetensors file in the
folder that it is given.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.api import reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.artifacts import archive, folders, safetensors
from shoal.artifacts.errors import ArtifactError, gib
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.source import ArtifactSource
from shoal.artifacts.threads import in_thread
from shoal.core.lora.format import peft
from shoal.core.status.observed import ModelProblem

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
TOKENS: Final = "added_tokens.json"
FILES: Final = (CONFIG, WEIGHTS, TOKENS)
"""Files of an adapter in the source's folder; the last one is optional."""
_TEXT_LIMIT: Final = 1 << 20
_HEADER_LIMIT: Final = 2 << 20
"""Limit in bytes. An adapter of all linear layers of a base model with 126 layers has a header of 0.3 MiB. Parsing
takes a multiple of the header's size in the memory of the agent, which is small."""
_HEAD_BYTES: Final = 128 << 10
_PIECE: Final = 8 << 20


def files_of(manifest: Manifest) -> tuple[File, ...]:
    """The files of a source that belong to the adapter. Raises ArtifactError(Corrupt)."""
    found = {file.name: file for file in manifest.files}
    require_names(found, manifest.source)
    files = tuple(found[name] for name in FILES if name in found)
    _require_validators(files, manifest.source)
    return files


def require_names(names: Iterable[str], source: str) -> None:
    """Raises ArtifactError(Corrupt) unless these are the file names of an adapter."""
    present = set(names)
    if CONFIG not in present:
        shown = ", ".join(sorted({name.partition("/")[0] for name in present})[:5]) or "nothing"
        inside = next((name for name in sorted(present) if name.endswith(f"/{CONFIG}")), None)
        hint = f"; {inside} is further down: name that folder" if inside else ""
        raise ArtifactError(reasons.CORRUPT, f"{source} has no {CONFIG} (found: {shown}){hint}")
    if WEIGHTS not in present:
        old = "adapter_model.bin" in present
        raise ArtifactError(
            reasons.CORRUPT,
            f"{source} has no {WEIGHTS}"
            + (": its weights are a pickle (adapter_model.bin), save them as safetensors" if old else ""),
        )


def require_size(size: int, limit: int, source: str) -> None:
    """Raises ArtifactError(TooLarge) if `size` exceeds `limit` bytes."""
    if size > limit:
        raise ArtifactError(
            reasons.TOO_LARGE, f"{source} has {gib(size)}, and an adapter of this pool may have {gib(limit)}"
        )


async def read_adapter(source: ArtifactSource, manifest: Manifest) -> AdapterFacts:
    """Reads config and weights header from the source, not from an archive and never the weights. Raises
    ArtifactError."""
    files = {file.name: file for file in files_of(manifest)}
    texts = {name: await _text(source, files[name], manifest) for name in (CONFIG, TOKENS) if name in files}
    weights = files[WEIGHTS]
    head = await source.read(weights, 0, _HEAD_BYTES)
    length = _header_bytes(head, weights.size, manifest.source)
    if (missing := safetensors.PREFIX_BYTES + length - len(head)) > 0:
        head += await source.read(weights, len(head), missing)
    header = head[safetensors.PREFIX_BYTES : safetensors.PREFIX_BYTES + length]
    sizes = {name: file.size for name, file in files.items()}
    return _facts(_Files(manifest.source, manifest.digest, manifest.revision, texts, sizes, header))


def read_folder(folder: Path, source: str, revision: str, commit: str | None = None) -> AdapterFacts:
    """Reads the facts of local files; `source` is their name in messages. Blocks. Raises ArtifactError and OSError."""
    sizes = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
    require_names(sizes, source)
    texts: dict[str, bytes] = {}
    for name in (CONFIG, TOKENS):
        if name in sizes:
            _require_text(name, sizes[name], source)
            texts[name] = (folder / name).read_bytes()
    with (folder / WEIGHTS).open("rb") as file:
        length = _header_bytes(file.read(safetensors.PREFIX_BYTES), sizes[WEIGHTS], source)
        header = file.read(length)
    return _facts(_Files(source, revision, commit, texts, sizes, header))


async def fetch_adapter(source: ArtifactSource, manifest: Manifest, folder: Path, limit: int) -> None:
    """Fetches the adapter's files into `folder`, which exists and is empty. Raises ArtifactError and OSError."""
    if manifest.archive:
        (packed,) = manifest.files
        _require_validators(manifest.files, manifest.source)
        require_size(packed.size, limit, manifest.source)
        path = folder / packed.name
        await source.download(packed, path, _ignore)
        await in_thread(lambda: _unpack(path, folder, limit, manifest.source))
        return
    files = files_of(manifest)
    require_size(sum(file.size for file in files), limit, manifest.source)
    try:
        async with asyncio.TaskGroup() as group:
            for file in files:
                group.create_task(source.download(file, folder / file.name, _ignore))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def copy_adapter(found: Path, folder: Path, limit: int, source: str) -> None:
    """Copies the adapter's files of a folder into another. Blocks. Raises ArtifactError and OSError."""
    names = [name for name in FILES if (found / name).is_file()]
    require_names(names, source)
    require_size(sum((found / name).stat().st_size for name in names), limit, source)
    for name in names:
        shutil.copyfile(found / name, folder / name)


async def content_digest(source: ArtifactSource, manifest: Manifest) -> str:
    """Digest of the content as defined by a Model's `Source.digest`; reads all of it. Raises ArtifactError."""
    hashes: dict[str, str] = {}
    for file in manifest.files:
        hasher = hashlib.sha256()
        for at in range(0, file.size, _PIECE):
            await asyncio.to_thread(hasher.update, await source.read(file, at, _PIECE))
        hashes[file.name] = hasher.hexdigest()
    if manifest.archive:
        (value,) = hashes.values()
        return f"sha256:{value}"
    lines = sorted((os.fsencode(f"./{name}"), value) for name, value in hashes.items())
    text = b"".join(f"{value}  ".encode() + name + b"\n" for name, value in lines)
    return "sha256:" + hashlib.sha256(text).hexdigest()


@dataclass(frozen=True, slots=True)
class _Files:
    source: str
    revision: str
    commit: str | None
    texts: Mapping[str, bytes]
    sizes: Mapping[str, int]
    header: bytes


def _facts(files: _Files) -> AdapterFacts:
    with _corrupt():
        entries = safetensors.entries(files.header, files.sizes[WEIGHTS], f"{files.source}: {WEIGHTS}")
        config = folders.json_object(files.texts[CONFIG], CONFIG, files.source)
        tokens = folders.json_object(files.texts.get(TOKENS, b"{}"), TOKENS, files.source)
    found = peft.facts_of(
        peft.RevisionFiles(
            revision=files.revision,
            commit=files.commit,
            size_bytes=files.sizes[WEIGHTS],
            file_bytes=sum(files.sizes.values()),
            config=config,
            tensors={name: peft.Tensor(entry.dtype, entry.shape, entry.bytes) for name, entry in entries.items()},
            added_tokens=tokens,
        )
    )
    if isinstance(found, ModelProblem):
        raise ArtifactError(found.reason, f"{files.source}: {found.message}")
    return found


def _require_validators(files: Iterable[File], source: str) -> None:
    """Raises ArtifactError for a file without validator: other weights could then be served under the same revision."""
    if unvalidated := [file.name for file in files if not file.validator]:
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} has no validator for {unvalidated[0]} (no ETag, no Last-Modified), so a change would go "
            "unnoticed: serve it from a store that sends one",
        )


async def _text(source: ArtifactSource, file: File, manifest: Manifest) -> bytes:
    _require_text(file.name, file.size, manifest.source)
    return await source.read(file, 0, file.size)


def _require_text(name: str, size: int, source: str) -> None:
    if size > _TEXT_LIMIT:
        raise ArtifactError(reasons.CORRUPT, f"{source}: {name} has {gib(size)}, which no config has")


def _header_bytes(head: bytes, size: int, source: str) -> int:
    with _corrupt():
        length = safetensors.header_bytes(head, size, f"{source}: {WEIGHTS}", size)
    if length > _HEADER_LIMIT:
        raise ArtifactError(reasons.CORRUPT, f"{source}: {WEIGHTS} has a header of {gib(length)}, which no adapter has")
    return length


@contextlib.contextmanager
def _corrupt() -> Generator[None]:
    """Converts errors about models to the reason Corrupt."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(reasons.CORRUPT, str(error)) from None


def _unpack(packed: Path, folder: Path, limit: int, source: str) -> None:
    """Unpacks the archive in `folder` and leaves only the adapter's files present."""
    inside = folder / ".unpacked"
    inside.mkdir()
    archive.unpack(packed, inside, source, only=FILES, limit=limit)
    packed.unlink()
    # Like the archive of a model, it may wrap everything in one folder.
    tops = list(inside.iterdir())
    root = tops[0] if len(tops) == 1 and tops[0].is_dir() else inside
    for name in FILES:
        if (root / name).is_file():
            os.replace(root / name, folder / name)
    shutil.rmtree(inside)
    require_names([path.name for path in folder.iterdir()], source)


def _ignore(_: int) -> None:
    """Progress of adapters is not reported: they arrive quickly."""
