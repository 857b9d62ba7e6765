"""Unpacks one untrusted archive, as a separate process with resource limits: `python unpacker.py`, its task on stdin.

It runs by path with the standard library only: it uses little memory beside an agent, and a malicious archive affects
only this process. The answer is one JSON object: {} on success, else `problem` (one of `PROBLEMS`) and `detail`. Only
regular files and folders inside the target are created. Links are refused, and without links no name can lead out.
"""

import gzip
import json
import lzma
import os
import resource
import shutil
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

ZSTD: Final = b"\x28\xb5\x2f\xfd"
BROKEN: Final = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)
"""Exceptions of the archive libraries for invalid content."""
UNREADABLE: Final = (*BROKEN, ValueError, ArithmeticError, LookupError, RuntimeError, struct.error)
"""The libraries are not hardened: whatever they fail on counts as an invalid archive."""
PROBLEMS: Final = ("invalid", "too-large", "too-many", "memory", "full", "io")
ENCRYPTED: Final = 1
"""Flag of a zip's member."""
ENTRIES: Final = 20_000
"""Limit of files and folders per archive: each takes an inode."""
BLOCK: Final = 4096
"""Least disk space of a file, and again for its inode."""
_NAME_BYTES: Final = 1024
_PART_BYTES: Final = 255
_PARTS: Final = 32
_CHUNK: Final = 1 << 20
_HEADER_BYTES: Final = 1 << 20


class ArchiveRefused(Exception):
    """`problem` is one of `PROBLEMS`."""

    def __init__(self, problem: str, detail: str) -> None:
        super().__init__(detail)
        self.problem, self.detail = problem, detail


class BoundedHeader(tarfile.TarInfo):
    """A member with small extended headers: the library reads each into memory, whatever its size."""

    _EXTENDED: Final = frozenset(b"xgXLK")

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type and self.type[0] in self._EXTENDED and not 0 <= self.size <= _HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]  # pyright: ignore


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members one by one. The library's own iterator keeps all of them in memory."""
    while (member := tar.next()) is not None:
        cast("Any", tar).members.clear()
        yield member


class Unpacker:
    """Unpacks one archive into one folder. `only`: files with other names are skipped, `skip` bytes at most. `limit`:
    disk space in bytes."""

    def __init__(
        self, archive: Path, target: Path, only: frozenset[str], limit: int, skip: int, entries: int = ENTRIES
    ) -> None:
        self._archive, self._target, self._only, self._limit, self._skip = archive, target, only, limit, skip
        self._kept = self._skipped = self._seen = 0
        self._entries = entries
        self._folders: set[Path] = {target}

    def run(self) -> None:
        """Raises ArchiveRefused, OSError, MemoryError and those of `BROKEN`."""
        if zipfile.is_zipfile(self._archive):
            self._zip()
        else:
            self._tar()

    def _tar(self) -> None:
        with tarfile.open(self._archive, "r:*", tarinfo=BoundedHeader) as tar:
            for member in members(tar):
                path = self._inside(member.name)
                if member.isdir():
                    self._folder(path)
                elif member.isreg() and (content := tar.extractfile(member)) is not None:
                    with content:
                        if self._take(path, member.size):
                            self._write(content, path, member.size)
                else:
                    raise _unwanted(member.name)

    def _zip(self) -> None:
        with zipfile.ZipFile(self._archive) as file:
            for member in file.infolist():
                path = self._inside(member.filename)
                kind = stat.S_IFMT(member.external_attr >> 16)
                if member.is_dir():
                    self._folder(path)
                elif kind not in (0, stat.S_IFREG):
                    raise _unwanted(member.filename)
                elif member.flag_bits & ENCRYPTED:
                    raise ArchiveRefused("invalid", f"{member.filename} is encrypted")
                elif self._take(path, member.file_size):
                    with file.open(member) as content:
                        self._write(content, path, member.file_size)

    def _take(self, path: Path, size: int) -> bool:
        """Accounts for a file before it is unpacked. Raises ArchiveRefused: a few kilobytes may unpack to more than the
        disk has, or take hours."""
        if size < 0:
            raise ArchiveRefused("invalid", f"{path.name!r} has a negative size")
        keep = not self._only or path.name in self._only
        if keep:
            self._charge(size)
        else:
            self._skipped += size
            if self._skipped > self._skip:
                raise ArchiveRefused("too-large", str(self._skip))
        return keep

    def _charge(self, size: int) -> None:
        self._kept += -(-size // BLOCK) * BLOCK + BLOCK
        if self._kept > self._limit:
            raise ArchiveRefused("too-large", str(self._limit))

    def _folder(self, path: Path) -> None:
        """Creates a folder and its parents. Each counts towards the limit."""
        missing: list[Path] = []
        while path not in self._folders:
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            self._count()
            self._charge(0)
            folder.mkdir(exist_ok=True)
            self._folders.add(folder)

    def _write(self, content: IO[bytes], path: Path, size: int) -> None:
        self._folder(path.parent)
        if size > shutil.disk_usage(path.parent).free:
            raise ArchiveRefused("full", str(size))
        left = size
        with path.open("wb") as out:
            while piece := content.read(min(_CHUNK, left + 1)):
                left -= len(piece)
                if left < 0:
                    raise ArchiveRefused("invalid", f"{path.name!r} is longer than it says")
                out.write(piece)
        if left:
            raise ArchiveRefused("invalid", f"{path.name!r} ends too early")

    def _inside(self, name: str) -> Path:
        self._count()
        pure = PurePosixPath(name.replace("\\", "/"))
        if pure.is_absolute() or ".." in pure.parts:
            raise ArchiveRefused("invalid", f"{name!r} leads out of the archive; nothing was kept")
        try:
            content = name.encode()
        except UnicodeEncodeError:
            raise ArchiveRefused("invalid", f"{name!r} is no name in UTF-8") from None
        if not name.isprintable():
            raise ArchiveRefused("invalid", f"{name[:100]!r} has characters that no name of a file has")
        long = len(content) > _NAME_BYTES or any(len(part.encode()) > _PART_BYTES for part in pure.parts)
        if long or len(pure.parts) > _PARTS:
            raise ArchiveRefused("invalid", f"{name[:100]!r}... is longer, or lies deeper, than a file of a model does")
        return self._target.joinpath(*pure.parts)

    def _count(self) -> None:
        self._seen += 1
        if self._seen > self._entries:
            raise ArchiveRefused("too-many", str(self._entries))


def _unwanted(name: str) -> ArchiveRefused:
    return ArchiveRefused("invalid", f"{name!r} is neither a file nor a folder; pack files only (tar -h follows links)")


def describe(error: Exception, first: bytes) -> str:
    """Describes an exception of `UNREADABLE`, for an archive that begins with the bytes `first`."""
    if first == ZSTD:
        return "is compressed with zstd: use .tar, .tar.gz or .zip"
    if isinstance(error, NotImplementedError):  # Windows packs large files so
        return f"is a zip that cannot be read here ({str(error)[:100]}): pack it as a plain .tar"
    if not isinstance(error, BROKEN):  # its text is about the library
        error = tarfile.TarError(type(error).__name__)
    detail = next(iter(str(error).splitlines()), "").rstrip(":") or "it ends too early"
    return f"is not a whole tar or zip archive: {detail}"


def limit_self(memory: int, seconds: int, file_bytes: int) -> None:
    """Applies resource limits to this process. `memory`: bytes beyond the interpreter's current use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for what, most in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def unpack(task: dict[str, Any]) -> dict[str, str]:
    """Executes the task and returns the answer."""
    archive = Path(task["archive"])
    with archive.open("rb") as file:
        first = file.read(len(ZSTD))
    try:
        only = frozenset[str](task["only"])
        Unpacker(archive, Path(task["target"]), only, task["limit"], task["skip"], task["entries"]).run()
    except ArchiveRefused as error:
        return {"problem": error.problem, "detail": error.detail}
    except MemoryError:
        return {"problem": "memory", "detail": ""}
    except UNREADABLE as error:
        return {"problem": "invalid", "detail": describe(error, first), "whole": "no"}
    except OSError as error:
        full = error.errno in (28, 122)  # ENOSPC, EDQUOT
        return {"problem": "full" if full else "io", "detail": error.strerror or type(error).__name__}
    return {}


def main() -> None:
    task = json.load(sys.stdin)
    limit_self(task["memory"], task["seconds"], task["limit"] + BLOCK)
    os.umask(0o022)
    sys.stdout.write(json.dumps(unpack(task)))


if __name__ == "__main__":
    main()
