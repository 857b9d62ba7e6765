"""Folders of files: size, digest, and whether they contain a model."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from shoal.api import reasons
from shoal.artifacts import safetensors
from shoal.artifacts.errors import ArtifactError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
UNREAD = ".gguf"
"""Weights of other runtimes: the engines read no such file from a folder."""
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


def regular_files(folder: Path) -> Iterator[Path]:
    """Every regular file below, without following symlinks (as `find -type f`)."""
    for root, _, file_names in os.walk(folder):
        for name in file_names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                yield path


def size_of(folder: Path) -> int:
    """Total size of the files below. Files may appear and disappear meanwhile."""
    total = 0
    for root, _, file_names in os.walk(folder):
        for name in file_names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(folder: Path) -> str:
    """`sha256:` of the output of `find . -type f | LC_ALL=C sort | xargs sha256sum` (api/model.py, Source.digest)."""
    relative = sorted(os.fsencode(f"./{path.relative_to(folder).as_posix()}") for path in regular_files(folder))
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        hashes = pool.map(sha256_of, [folder / os.fsdecode(name) for name in relative])
        lines = [f"{value}  ".encode() + name + b"\n" for value, name in zip(hashes, relative, strict=True)]
    return "sha256:" + hashlib.sha256(b"".join(lines)).hexdigest()


def sync(folder: Path) -> None:
    """Syncs files and folders to disk, so that a marker never survives a crash that its files do not survive."""
    for root, _, file_names in os.walk(folder):
        for path in [root, *(os.path.join(root, name) for name in file_names)]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def model_root(folder: Path) -> Path:
    """The folder itself, or its only sub-folder: archives often wrap the model in one."""
    if (folder / "config.json").exists():
        return folder
    inner = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return inner[0] if len(inner) == 1 and inner[0].is_dir() and not inner[0].is_symlink() else folder


def check_model(folder: Path, source: str) -> None:
    """Raises ArtifactError(SourceInvalid) unless the folder contains a model: config.json, weights, complete
    safetensors."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    index = folder / INDEX
    check_names(names, index.read_bytes() if index.is_file() else None, source)
    json_object((folder / CONFIG).read_bytes(), CONFIG, source)
    for name in names:
        if name.endswith(".safetensors"):
            _check_safetensors(folder / name, name, source)


def check_names(names: Iterable[str], index: bytes | None, source: str) -> None:
    """Raises ArtifactError(SourceInvalid) unless these file names are those of a model: a config, weights, every shard.

    `index` is the content of model.safetensors.index.json, if it exists.
    """
    present = set(names)
    weights = any(name.endswith(WEIGHTS) for name in present)
    if not weights and any(name.endswith(UNREAD) for name in present):
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} has its weights as GGUF, which engines do not read: name a source with safetensors, "
            "where fewer bits are wanted with AWQ, GPTQ or FP8",
        )
    if CONFIG not in present:
        found = ", ".join(sorted({name.partition("/")[0] for name in present})[:5])
        raise ArtifactError(
            reasons.SOURCE_INVALID, f"{source} is not a model: it has no config.json (found: {found or 'nothing'})"
        )
    if not weights:
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} has no weights: expected files named {', '.join('*' + w for w in WEIGHTS)}",
        )
    if index is None:
        return
    shards = json_object(index, INDEX, source).get("weight_map")
    if not isinstance(shards, dict):
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {INDEX} has no weight_map")
    wanted = {str(name) for name in cast("dict[str, object]", shards).values()}
    if missing := sorted(wanted - present):
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source}: {len(missing)} of {len(wanted)} weight files are missing, the first is {missing[0]}",
        )


def json_object(content: bytes, name: str, source: str) -> dict[str, Any]:
    """The JSON object in the file `name`. Raises ArtifactError(SourceInvalid)."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {name} is not a JSON object")
    return cast("dict[str, Any]", value)


def _check_safetensors(path: Path, name: str, source: str) -> None:
    size = path.stat().st_size
    what = f"{source}: {name}"
    with path.open("rb") as file:
        length = safetensors.header_bytes(file.read(safetensors.PREFIX_BYTES), size, what)
        safetensors.tensors(file.read(length), size, what)
