"""The cache's folder: file operations that survive interruption at any point. They block: call them in a thread."""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.api import reasons
from shoal.artifacts import ArtifactError
from shoal.manifests.cache import NAMESPACES

log = structlog.get_logger()
_READ_ONLY: Final = 0o444
_FOLDER: Final = 0o755


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CachedFile(_Stored):
    """One file of a cached model."""

    name: str
    size: int
    sha256: str
    identity: str | None
    """`Manifest.identity`; None: the file has no validator."""
    modified_ns: int
    """mtime of the blob when it was verified. A blob with another mtime or size is hashed again before it is used."""


class CachedModel(_Stored):
    """A cached model. `key` is derived from its origin and its manifest."""

    key: str
    source: str
    manifest: str
    revision: str | None
    digest: str | None
    """Digest as defined by a Model's `Source.digest`."""
    files: tuple[CachedFile, ...]
    uris: tuple[str, ...]
    """SHA-256 of the URIs that the model was requested by. URIs are not stored, because they may contain signatures."""
    lasting: bool
    """Whether every file has a validator; otherwise the model is fetched again each time."""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class CacheDisk:
    """`root` and everything below it belong to the cache."""

    root: Path

    # --- paths ------------------------------------------------------------------------------------------------------

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / "sha256" / sha256[:2] / sha256

    def partial(self, key: str) -> Path:
        return self.root / "partial" / key

    def namespace(self, name: str) -> Path:
        return self.root / NAMESPACES / name

    def linked(self, namespace: str, key: str) -> Path:
        return self.namespace(namespace) / "models" / key

    def _record(self, key: str) -> Path:
        return self.root / "models" / f"{key}.json"

    def _work(self) -> Path:
        return self.root / "work" / secrets.token_hex(8)

    # --- start ------------------------------------------------------------------------------------------------------

    def open(self) -> list[tuple[CachedModel, float]]:
        """Creates the folders, removes leftovers of an interrupted run, and returns the models with their last use.

        Raises OSError.
        """
        shutil.rmtree(self.root / "work", ignore_errors=True)
        for folder in ("blobs/sha256", "models", "partial", NAMESPACES, "work"):
            path = self.root / folder
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(_FOLDER if folder == NAMESPACES else 0o700)
        found: list[tuple[CachedModel, float]] = []
        for path in sorted((self.root / "models").glob("*.json")):
            try:
                found.append((CachedModel.model_validate_json(path.read_bytes()), path.stat().st_mtime))
            except ValidationError:
                log.warning("cache.record_unreadable", record=path.name, consequence="fetched again when asked for")
                path.unlink()
        known = {file.sha256 for model, _ in found for file in model.files}
        for blob in (self.root / "blobs").glob("sha256/*/*"):
            if blob.name not in known:
                blob.unlink()
        keys = {model.key for model, _ in found}
        for folder in (self.root / NAMESPACES).glob("*/models/*"):
            if folder.name not in keys:
                self._discard(folder)
        return found

    # --- models -----------------------------------------------------------------------------------------------------

    def store(self, model: CachedModel, files: dict[str, Path]) -> CachedModel:
        """Stores a model whose new blobs are at `files` (SHA-256 -> path). Returns it with their mtimes.

        The record is written first: after a crash in between, the next request finds the remaining files in `partial`.
        """
        for path in files.values():
            path.chmod(_READ_ONLY)
        times = {sha: path.stat().st_mtime_ns for sha, path in files.items()}
        kept = model.model_copy(
            update={
                "files": tuple(
                    f.model_copy(update={"modified_ns": times.get(f.sha256, f.modified_ns)}) for f in model.files
                )
            }
        )
        self.write(kept)
        for sha, path in files.items():
            blob = self.blob(sha)
            blob.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, blob)
            _sync(blob.parent)
        shutil.rmtree(self.partial(model.key), ignore_errors=True)
        return kept

    def write(self, model: CachedModel) -> None:
        """Writes the record atomically."""
        record, beside = self._record(model.key), self._work()
        with beside.open("w") as file:
            file.write(model.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, record)
        _sync(record.parent)

    def touch(self, key: str) -> None:
        """Records that the model is used now."""
        try:
            os.utime(self._record(key))
        except FileNotFoundError:
            log.debug("cache.touch_missed", model=key)

    def damaged(self, files: Iterable[CachedFile]) -> list[CachedFile]:
        """The files that are missing, have another size, or were modified and have other content."""
        return [file for file in files if not self._intact(file)]

    def _intact(self, file: CachedFile) -> bool:
        path = self.blob(file.sha256)
        try:
            seen = path.stat()
            if seen.st_size != file.size:
                return False
            return seen.st_mtime_ns == file.modified_ns or sha256_of(path) == file.sha256
        except OSError:
            return False

    def evict(self, keys: Iterable[str], blobs: Iterable[str]) -> None:
        """Removes models and blobs. Files that a running engine has mapped stay readable for it."""
        for key in keys:
            self._record(key).unlink(missing_ok=True)
            for folder in (self.root / NAMESPACES).glob(f"*/models/{key}"):
                self._discard(folder)
        self.drop_blobs(blobs)

    def drop_blobs(self, blobs: Iterable[str]) -> None:
        for sha in blobs:
            self.blob(sha).unlink(missing_ok=True)

    # --- unfinished fetches -----------------------------------------------------------------------------------------

    def partials(self) -> dict[str, tuple[int, float]]:
        """Key -> size in bytes and time of the last change."""
        return {folder.name: _disk_use(folder) for folder in (self.root / "partial").iterdir()}

    def drop_partial(self, key: str) -> None:
        shutil.rmtree(self.partial(key), ignore_errors=True)

    # --- namespaces -------------------------------------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        return sorted(folder.name for folder in (self.root / NAMESPACES).iterdir() if folder.is_dir())

    def make_namespace(self, name: str) -> Path:
        """Creates and returns the namespace's folder. Raises OSError."""
        for folder in (self.namespace(name), self.namespace(name) / "models"):
            folder.mkdir(exist_ok=True)
            folder.chmod(_FOLDER)
        return self.namespace(name)

    def remove_namespace(self, name: str) -> None:
        self._discard(self.namespace(name))

    def is_linked(self, namespace: str, model: CachedModel) -> bool:
        """Whether the namespace's folder contains the model as links to the current blobs."""
        folder = self.linked(namespace, model.key)
        try:
            return all(os.path.samefile(folder / file.name, self.blob(file.sha256)) for file in model.files)
        except OSError:
            return False

    def link(self, namespace: str, model: CachedModel) -> Path:
        """Adds hard links to the model's files to the namespace's folder, atomically. Raises OSError."""
        target, work = self.linked(namespace, model.key), self._work()
        work.mkdir()
        work.chmod(_FOLDER)
        for file in model.files:
            path = work / inside(file.name, model.source)
            for folder in reversed(path.relative_to(work).parents[:-1]):
                (work / folder).mkdir(exist_ok=True)
                (work / folder).chmod(_FOLDER)
            os.link(self.blob(file.sha256), path)
        if target.exists():
            self._discard(target)
        os.rename(work, target)
        return target

    def _discard(self, folder: Path) -> None:
        """Renames the folder away, then deletes it."""
        out = self._work()
        try:
            os.rename(folder, out)
        except FileNotFoundError:
            return
        shutil.rmtree(out, ignore_errors=True)


def inside(name: str, source: str) -> PurePosixPath:
    """A file name as a path below the model's folder. Raises ArtifactError(SourceInvalid) if it leads out."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: the file name {name!r} leads out of the model's folder")
    return path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stale(partials: dict[str, tuple[int, float]], older_than: float) -> Iterator[str]:
    """Unfinished fetches without changes for this many seconds."""
    now = time.time()
    return (key for key, (_, changed) in partials.items() if now - changed > older_than)


def _disk_use(folder: Path) -> tuple[int, float]:
    size, changed = 0, 0.0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                seen = os.stat(os.path.join(root, name))
            except OSError:
                continue
            # Allocated size rather than length: a part is filled at several positions concurrently.
            size, changed = size + seen.st_blocks * 512, max(changed, seen.st_mtime)
    return size, changed


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
