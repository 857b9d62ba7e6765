"""What a source holds at one moment: its files, and what proves later that they are still the same."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source."""

    name: str
    """Relative to the model's folder, with "/" between its parts."""
    size: int
    """Bytes."""
    validator: str
    """What changes when the content does: `sha256:<hex>`, `git:<blob id>`, `etag:<entity tag>`,
    `modified:<HTTP date>`, `ends:<sha256 of both ends>` (see `folder`). "": the source offers nothing."""
    sha256: str | None = None
    """Of the content, in hex, where the source tells it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one revision of a source: those that an engine reads."""

    source: str
    """The address as it may be shown."""
    origin: str
    """Who vouches for the files: scheme, host and repository or bucket, in one spelling. Validators of two origins say
    nothing of each other: whoever runs a server can answer with another's entity tags."""
    revision: str | None
    """hf: the commit."""
    files: tuple[File, ...]
    """Sorted by name."""
    archive: bool = False
    """The one file is an archive (`archive.unpack`), and not part of the model itself."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """`sha256:` over one line per file, sorted by name in UTF-8: the JSON array [name, size, validator] without
        spaces, not escaped beyond what JSON asks for, and a newline."""
        lines = [
            json.dumps([file.name, file.size, file.validator], ensure_ascii=False, separators=(",", ":")) + "\n"
            for file in sort(self.files)
        ]
        return "sha256:" + hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()

    def identity(self, file: File) -> str | None:
        """A key under which `file` may be found again: files of one key have one content, whatever they are called.

        None where nothing vouches for that: such a file has to be fetched to know.
        """
        if not file.validator:
            return None
        # A commit fixes its files, but a validator of a commit is no more than the name of one of them.
        name = "" if file.validator.startswith(("sha256:", "git:")) else file.name
        text = json.dumps([self.origin, name, file.size, file.validator])
        return hashlib.sha256(text.encode()).hexdigest()


FILES_LIMIT: Final = 20_000
"""Files of one source; the largest repositories of models have some thousand."""
_NAME_BYTES: Final = 1024
_PART_BYTES: Final = 255


def require_count(count: int, source: str) -> None:
    """Raises ArtifactError(SourceInvalid): a bucket may hold more names than a small container has memory."""
    if count > FILES_LIMIT:
        raise ArtifactError(
            reasons.SOURCE_INVALID,
            f"{source} has more than {FILES_LIMIT} files, which no model has: name the folder of the model",
        )


def sort(files: Iterable[File]) -> tuple[File, ...]:
    """By name, as bytes: the same everywhere. Raises ArtifactError for a name that leads out of the model's folder."""
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
