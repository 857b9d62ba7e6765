"""The content of a source at one moment: its files, and validators that later detect changes."""

import fnmatch
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from shoal.api import reasons
from shoal.artifacts import folders
from shoal.artifacts.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source."""

    name: str
    """Relative to the model's folder, with "/" as separator."""
    size: int
    """Size in bytes."""
    validator: str
    """Changes with the content: `sha256:<hex>`, `git:<blob id>`, `etag:<entity tag>`, `modified:<HTTP date>`,
    `ends:<sha256 of both ends>` (see `folder`). "": the source provides none."""
    sha256: str | None = None
    """SHA-256 of the content in hex, if the source provides it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one revision of a source that an engine reads."""

    source: str
    """The URI as shown in messages."""
    origin: str
    """Server and container that the validators are valid for: scheme, host and repository or bucket, normalized.
    Validators of two origins are not comparable: the operator of a server can return another server's entity tags."""
    revision: str | None
    """hf: commit."""
    files: tuple[File, ...]
    """Sorted by name."""
    archive: bool = False
    """The only file is an archive (`archive.unpack`), and not part of the model itself."""

    @property
    def total_bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """`sha256:` over one line per file, sorted by name in UTF-8: the JSON array [name, size, validator] without
        spaces, with no more escapes than JSON requires, and a newline."""
        lines = [
            json.dumps([file.name, file.size, file.validator], ensure_ascii=False, separators=(",", ":")) + "\n"
            for file in sort(self.files)
        ]
        return "sha256:" + hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()

    def identity(self, file: File) -> str | None:
        """Key for reusing `file`: files with equal keys have equal content, whatever their names.

        None: there is no validator, so the file must be fetched.
        """
        if not file.validator:
            return None
        # A commit fixes its files, but such a validator only identifies the commit, so the name is needed too.
        name = "" if file.validator.startswith(("sha256:", "git:")) else file.name
        text = json.dumps([self.origin, name, file.size, file.validator])
        return hashlib.sha256(text.encode()).hexdigest()


FILES_LIMIT: Final = 20_000
"""Limit of files per source; the largest model repositories have a few thousand."""
_NAME_BYTES: Final = 1024
_PART_BYTES: Final = 255


def require_count(count: int, source: str) -> None:
    """Raises ArtifactError(SourceInvalid): a bucket may contain more names than fit into the memory of a small
    container."""
    if count > FILES_LIMIT:
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} has more than {FILES_LIMIT} files, which no model has: name the folder of the model",
        )


def sort(files: Iterable[File]) -> tuple[File, ...]:
    """Sorts by name as bytes, the same everywhere. Raises ArtifactError for a name that leads out of the model's
    folder."""
    ordered = tuple(sorted(files, key=lambda file: file.name.encode(errors="replace")))
    for file in ordered:
        parts = file.name.split("/")
        if _too_long(file.name):
            raise ArtifactError(
                reasons.SOURCE_INVALID, f"the source names a file {file.name[:100]!r}..., longer than a disk takes"
            )
        if not file.name.isprintable() and "\0" not in file.name:
            raise ArtifactError(reasons.SOURCE_INVALID, f"the source names a file {file.name!r}, which no disk takes")
        if any(part in ("", ".", "..") for part in parts) or "\0" in file.name:
            raise ArtifactError(
                reasons.SOURCE_INVALID, f"the source names a file {file.name!r}, which leads out of its folder"
            )
    return ordered


def _too_long(name: str) -> bool:
    content = name.encode(errors="replace")
    return len(content) > _NAME_BYTES or any(len(part) > _PART_BYTES for part in content.split(b"/"))


_TEXT = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".yaml", ".yml")
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*")
_COPIES = ("original", "onnx", "openvino", "coreml", "metal", "flax")
"""Folders in which repositories keep copies of the weights for other runtimes."""


def wanted_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that an engine reads: safetensors (or else older formats), configs and tokenizer."""
    kept = [
        name
        for name in names
        if not name.startswith(".")
        and PurePosixPath(name).parts[0] not in _COPIES
        and not any(fnmatch.fnmatch(PurePosixPath(name).name, pattern) for pattern in _NOT_WEIGHTS)
    ]
    safetensors = [name for name in kept if name.endswith(".safetensors")]
    # Mistral's repositories contain every weight twice: model-*.safetensors and consolidated*.safetensors.
    sharded = [name for name in safetensors if not PurePosixPath(name).name.startswith("consolidated")]
    weights = sharded or safetensors or [name for name in kept if name.endswith(folders.WEIGHTS)]
    # So that a source which has no others is refused by name.
    weights = weights or [name for name in kept if name.endswith(folders.UNREAD)]
    return sorted({*weights, *(name for name in kept if name.endswith(_TEXT))})
