"""The downloaded part of a file: `<name>.part`, and a note of the missing spans beside it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from shoal.artifacts.manifest import File

Span = tuple[int, int]
"""First byte, and the byte after the last."""
_BLOCK = 4 << 20


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Part:
    """A partially downloaded file. All methods block (call them in a thread) and raise OSError."""

    def __init__(self, path: Path, file: File) -> None:
        self._path = path
        self._file = file
        self._part = path.with_name(f"{path.name}.part")
        self._note = path.with_name(f"{path.name}.part.json")
        self._descriptor = -1

    def open(self) -> list[Span]:
        """Opens the part and returns the missing spans: the whole file, unless a valid note says otherwise."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        missing = self._known()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._part, flags if missing is not None else flags | os.O_TRUNC, 0o644)
        if missing is None:
            missing = [(0, self._file.size)] if self._file.size else []
            self._note.unlink(missing_ok=True)
        return missing

    def write(self, at: int, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            count = os.pwrite(self._descriptor, view, at)
            view, at = view[count:], at + count

    def save(self, missing: Iterable[Span]) -> None:
        """Notes the missing spans. The bytes are synced to disk before the note."""
        if not self._file.validator:
            return
        os.fdatasync(self._descriptor)
        note = {"validator": self._file.validator, "size": self._file.size, "missing": list(missing)}
        beside = self._note.with_name(f"{self._note.name}.new")
        beside.write_text(json.dumps(note))
        os.replace(beside, self._note)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        self.close()
        self._part.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def problem(self) -> str | None:
        """How the content contradicts the source's size or hash; None: it does not."""
        size = os.fstat(self._descriptor).st_size
        if size != self._file.size:
            return f"it has {size} bytes instead of {self._file.size}"
        if self._file.sha256 is not None and (found := self._hash(hashlib.sha256())) != self._file.sha256:
            return f"its SHA-256 is {found} instead of {self._file.sha256}"
        if self._file.validator.startswith("git:"):
            start = f"blob {size}\0".encode()
            found = self._hash(hashlib.sha1(start, usedforsecurity=False))
            if (wanted := self._file.validator.removeprefix("git:")) != found:
                return f"its git blob id is {found} instead of {wanted}"
        return None

    def finish(self) -> None:
        """Syncs the file to disk and gives it its final name."""
        os.fsync(self._descriptor)
        self.close()
        os.replace(self._part, self._path)
        self._note.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _known(self) -> list[Span] | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(self._note.read_text())
            spans = [(int(start), int(end)) for start, end in note["missing"]]
            size = self._file.size
            same = self._file.validator and (note["validator"], note["size"]) == (self._file.validator, size)
            # Spans that are not missing must be in the file, however it was truncated.
            reach = size
            for start, end in sorted(spans, reverse=True):
                reach = start if end == reach else reach
            if same and all(0 <= start < end <= size for start, end in spans):
                return spans if self._part.stat().st_size >= reach else None
        return None

    def _hash(self, hasher: "_Hasher") -> str:
        at = 0
        while block := os.pread(self._descriptor, _BLOCK, at):
            hasher.update(block)
            at += len(block)
        return hasher.hexdigest()
