"""Unpacks an archive from outside: regular files and folders only, and none outside the target."""

import gzip
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError, gib, require_room

ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20
_SKIPPED_LIMIT = 2 << 30
"""Bytes of files that nobody wants: a compressed archive has to be read through them."""
BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)
"""What the archives' libraries raise for content that is not what it should be."""


def unpack(archive: Path, target: Path, source: str, *, only: Collection[str] = (), limit: int | None = None) -> None:
    """Unpacks a tar (plain, gzip, bzip2, xz) or a zip into `target`. `source` names it in messages.

    `only`: files with other names are skipped. Raises ArtifactError(TooLarge) when what is kept has more than `limit`
    bytes, or what is skipped more than any archive needs.

    Raises ArtifactError(SourceInvalid) for anything that is not a file or a folder inside the target: links, devices,
    absolute or climbing names. Links are refused altogether: without them no name can lead out.
    """
    wanted = _Wanted(source, only, limit)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, target, source, wanted)
        else:
            _unpack_tar(archive, target, source, wanted)
    except BROKEN as error:
        with archive.open("rb") as file:
            first = file.read(len(ZSTD))
        raise broken(error, first, source) from None


class _Wanted:
    """Which files are unpacked, and how many bytes they may have."""

    def __init__(self, source: str, only: Collection[str], limit: int | None) -> None:
        self._source, self._only, self._limit = source, only, limit
        self._kept = self._skipped = 0

    def take(self, path: Path, size: int) -> bool:
        """Raises ArtifactError(TooLarge): a few kilobytes may unpack to more than any disk has, or take hours."""
        keep = not self._only or path.name in self._only
        self._kept += size if keep else 0
        self._skipped += 0 if keep else size
        for seen, limit in ((self._kept, self._limit), (self._skipped, _SKIPPED_LIMIT)):
            if limit is not None and seen > limit:
                raise ArtifactError(
                    reasons.TOO_LARGE, f"{self._source} unpacks to more than {gib(limit)}: pack what is needed only"
                )
        return keep


def broken(error: Exception, first: bytes, source: str) -> ArtifactError:
    """What an error of `BROKEN` means for an archive that begins with the bytes `first`."""
    if first == ZSTD:
        return ArtifactError(reasons.SOURCE_INVALID, f"{source} is compressed with zstd: use .tar, .tar.gz or .zip")
    detail = next(iter(str(error).splitlines()), "").rstrip(":") or "it ends too early"
    return ArtifactError(reasons.SOURCE_INVALID, f"{source} is not a whole tar or zip archive: {detail}")


def _unpack_tar(archive: Path, target: Path, source: str, wanted: _Wanted) -> None:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            path = _inside(member.name, target, source)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isreg() and (content := tar.extractfile(member)) is not None:
                with content:
                    if wanted.take(path, member.size):
                        _write(content, path, member.size)
            else:
                raise _unwanted(member.name, source)


def _unpack_zip(archive: Path, target: Path, source: str, wanted: _Wanted) -> None:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            path = _inside(member.filename, target, source)
            kind = (member.external_attr >> 28) & 0xF  # the file type of a Unix mode: 0 unknown, 4 folder, 8 file
            if member.is_dir():
                path.mkdir(parents=True, exist_ok=True)
            elif kind not in (0, 8):
                raise _unwanted(member.filename, source)
            elif member.flag_bits & 1:
                raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {member.filename} is encrypted")
            elif wanted.take(path, member.file_size):
                with file.open(member) as content:
                    _write(content, path, member.file_size)


def _write(content: IO[bytes], path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    require_room(path.parent, size)
    with path.open("wb") as out:
        shutil.copyfileobj(content, out, _CHUNK)


def _inside(name: str, target: Path, source: str) -> Path:
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or "\0" in name:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source}: {name!r} leads out of the archive; nothing was kept")
    return target.joinpath(*pure.parts)


def _unwanted(name: str, source: str) -> ArtifactError:
    return ArtifactError(
        reasons.SOURCE_INVALID,
        f"{source}: {name!r} is neither a file nor a folder; pack files only (tar -h follows links)",
    )
