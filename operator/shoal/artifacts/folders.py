"""Folders of files: their size, their digest, a copy of one, and whether one is a model."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


def regular_files(folder: Path) -> Iterator[Path]:
    """Every regular file below, symlinks not followed (as `find -type f`)."""
    for root, _, file_names in os.walk(folder):
        for name in file_names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                yield path


def size_of(folder: Path) -> int:
    """Bytes in the files below. Files may come and go meanwhile."""
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
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing lets go of the interpreter's lock
        hashes = pool.map(sha256_of, [folder / os.fsdecode(name) for name in relative])
        lines = [f"{value}  ".encode() + name + b"\n" for value, name in zip(hashes, relative, strict=True)]
    return "sha256:" + hashlib.sha256(b"".join(lines)).hexdigest()


def copy(source: Path, target: Path) -> None:
    """Copies a folder; links are followed, so that the copy stands alone. Raises OSError.

    Content only: with the modes of the source's folders the copy might not be writable, and could not be moved.
    """
    for root, _, file_names in os.walk(source, followlinks=True):
        into = target / Path(root).relative_to(source)
        into.mkdir(parents=True, exist_ok=True)
        for name in file_names:
            shutil.copyfile(Path(root, name), into / name)


def sync(folder: Path) -> None:
    """Brings files and folders to the disk, so that a marker never outlives what it promises."""
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
    """Raises ArtifactError(SourceInvalid) unless the folder holds a model: config.json, weights, whole safetensors."""
    _check_config(folder, source)
    weights = [path for path in folder.rglob("*") if path.suffix in WEIGHTS and path.is_file()]
    if not weights:
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} has no weights: expected files named {', '.join('*' + w for w in WEIGHTS)}",
        )
    index = folder / _INDEX
    if index.exists():
        shards = _json_object(index, source).get("weight_map")
        if not isinstance(shards, dict):
            raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {_INDEX} has no weight_map")
        wanted = {str(name) for name in cast("dict[str, object]", shards).values()}
        missing = sorted(name for name in wanted if not (folder / name).exists())
        if missing:
            raise ArtifactError(
                reasons.SOURCE_INVALID,
                f"{source}: {len(missing)} of {len(wanted)} weight files are missing, the first is {missing[0]}",
            )
    for path in weights:
        if path.suffix == ".safetensors":
            _check_safetensors(path, path.relative_to(folder).as_posix(), source)


def _check_config(folder: Path, source: str) -> None:
    config = folder / "config.json"
    if not config.is_file():
        found = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else []
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} is not a model: it has no config.json (found: {', '.join(found) or 'nothing'})",
        )
    _json_object(config, source)


def _json_object(path: Path, source: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {path.name} is not a JSON object")
    return cast("dict[str, Any]", value)


def _check_safetensors(path: Path, name: str, source: str) -> None:
    """Reads the header only (8 bytes of length, JSON, then data) and holds its offsets against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _HEADER_LIMIT):
            raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {name} is not a whole safetensors file")
        try:
            header = json.loads(file.read(length))
            ends = [int(tensor["data_offsets"][1]) for key, tensor in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ArtifactError(
                reasons.SOURCE_INVALID, f"{source}: the header of {name} is not that of a safetensors file"
            ) from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ArtifactError(
            reasons.SOURCE_INVALID, f"{source}: {name} has {size} bytes where its header promises {expected}"
        )
