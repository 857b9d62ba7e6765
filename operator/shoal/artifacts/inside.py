"""Reads metadata inside a remote archive by ranges: file list, configs, headers of the weights.

A plain tar and a zip are read by seeking. A compressed tar can only be read from its start, which stops after
`COMPRESSED_LIMIT` bytes with what was found until then. The archive libraries block, so they run in a thread and
request bytes from the event loop.
"""

import asyncio
import io
import tarfile
import zipfile
from collections.abc import AsyncGenerator, Callable
from typing import IO, Any, cast

from shoal.api import reasons
from shoal.artifacts import archive, folders, safetensors
from shoal.artifacts.errors import ArtifactError, NoRanges, gib
from shoal.artifacts.manifest import File, Manifest, require_count, wanted_files
from shoal.artifacts.modelmetadata import TEXTS, Metadata, require_text
from shoal.artifacts.safetensors import Tensors
from shoal.artifacts.source import ArtifactSource
from shoal.artifacts.unpacker import ENCRYPTED, BoundedHeader, members

COMPRESSED_LIMIT = 512 << 20
"""Bytes read of a compressed archive at most."""
_AHEAD = (64 << 10, 8 << 20)
"""Bytes per request: initially, and at most for sequential reads."""
_READ_SECONDS = 900.0
_READ_BYTES = 512 << 20
"""Limit of one read: the libraries trust a file's own size fields."""
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Methods of which zipfile unpacks no more than it is asked for. A few hundred bytes of bzip2 may be a gigabyte."""
_DIRECTORY_BYTES = 8 << 20
"""Size limit of a zip's directory."""


class _LimitReached(Exception):
    """The byte limit is reached."""


async def read_inside(source: ArtifactSource, manifest: Manifest) -> Metadata:
    """Metadata of the model in the archive. Raises ArtifactError."""
    (file,) = manifest.files
    loop = asyncio.get_running_loop()
    try:
        first = await source.read(file, 0, len(archive.ZSTD))
    except NoRanges:
        stream = source.stream(file, 0, file.size)
        try:
            return await asyncio.to_thread(_read_archive, ForwardReader(loop, stream), manifest, forward=True)
        finally:
            await stream.aclose()
    return await asyncio.to_thread(_read_archive, Ranged(loop, source, file, first), manifest, forward=False)


def _read_archive(file: "Ranged | ForwardReader", manifest: Manifest, *, forward: bool) -> Metadata:
    found = _Findings(manifest.source, archive.content_limit(manifest.total_bytes))
    try:
        if not forward and zipfile.is_zipfile(cast("Any", file)):
            _read_zip(file, found)
        else:
            if not forward:
                file.seek(0)  # the search for a zip's directory moved the position
            _read_tar(file, found, forward=forward)
        found.whole = True
    except _LimitReached:
        pass
    except archive.UNREADABLE as error:
        raise archive.broken(error, file.first, manifest.source) from None
    return found.metadata()


class _Findings:
    """Files found so far, by their names in the archive."""

    def __init__(self, source: str, limit: int) -> None:
        self.source, self.limit = source, limit
        self.sizes: dict[str, int] = {}
        self.texts: dict[str, bytes] = {}
        self.tensors: dict[str, Tensors] = {}
        self.whole = False

    def add(self, name: str, size: int, content: Callable[[], IO[bytes] | None]) -> None:
        name = "/".join(part for part in name.split("/") if part not in ("", "."))
        self.sizes[name] = size
        require_count(len(self.sizes), self.source)
        what, last = f"{self.source}: {name}", name.rpartition("/")[2]
        if last not in TEXTS and not name.endswith(".safetensors"):
            return
        if last in TEXTS:
            require_text(name, size, self.source)
        file = content()
        if file is None:
            return
        with file:
            if last in TEXTS:
                self.texts[name] = file.read(size)  # a number: without one, zipfile unpacks all that there is at once
                return
            length = safetensors.header_bytes(file.read(safetensors.PREFIX_BYTES), size, what)
            self.tensors[name] = safetensors.tensors(file.read(length), size, what)

    def metadata(self) -> Metadata:
        """The result relative to the model's folder. Raises ArtifactError(SourceInvalid)."""
        if not self.whole and not any(name.rpartition("/")[2] == folders.CONFIG for name in self.sizes):
            raise ArtifactError(
                reasons.SOURCE_INVALID,
                f"{self.source} is compressed and has no config.json within its first {gib(COMPRESSED_LIMIT)}: pack it "
                "as a plain .tar (weights hardly compress), or with config.json first",
            )
        root = self._root()
        inside = {name.removeprefix(root): size for name, size in self.sizes.items() if name.startswith(root)}
        wanted = set(wanted_files(inside))
        texts = {name: content for name in TEXTS if (content := self.texts.get(root + name)) is not None}
        if self.whole:
            folders.check_names(inside, texts.get(folders.INDEX), self.source)
        tensors = {name: self.tensors[root + name] for name in wanted if root + name in self.tensors}
        return Metadata(inside, texts, tensors, self.whole)

    def _root(self) -> str:
        """As `folders.model_root`: the archive may wrap the model in one folder."""
        tops = {name.partition("/")[0] for name in self.sizes if not name.startswith(".")}
        if folders.CONFIG in self.sizes or len(tops) != 1:
            return ""
        top = tops.pop()
        return f"{top}/" if all("/" in name for name in self.sizes if not name.startswith(".")) else ""


def _read_tar(file: "Ranged | ForwardReader", found: _Findings, *, forward: bool) -> None:
    content: Any = file
    with tarfile.open(fileobj=content, mode="r|*" if forward else "r:*", tarinfo=BoundedHeader) as tar:
        for seen, member in enumerate(members(tar)):
            require_count(seen, found.source)
            if member.offset_data > found.limit:
                raise ArtifactError(
                    reasons.TOO_LARGE,
                    f"{found.source} unpacks to more than {gib(found.limit)}: pack it as a plain .tar",
                )
            if member.isreg():
                found.add(member.name, member.size, lambda member=member: tar.extractfile(member))


def _read_zip(file: "Ranged | ForwardReader", found: _Findings) -> None:
    file.most = _DIRECTORY_BYTES
    content: Any = file
    with zipfile.ZipFile(content) as packed:
        file.most = _READ_BYTES
        for member in packed.infolist():
            if member.flag_bits & ENCRYPTED:
                raise ArtifactError(reasons.SOURCE_INVALID, f"{found.source}: {member.filename!r} is encrypted")
            if member.compress_type not in _BOUNDED:
                raise NotImplementedError("That compression method is not supported")  # as zipfile says of others
            if not member.is_dir():
                found.add(member.filename, member.file_size, lambda member=member: packed.open(member))


class Ranged(io.RawIOBase):
    """A file of a source as a blocking file object. Used in a thread beside the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, source: ArtifactSource, file: File, first: bytes) -> None:
        super().__init__()
        self._loop, self._source, self._file = loop, source, file
        self._at, self._start, self._buffer = 0, 0, b""
        self._ahead, self._budget = _AHEAD[0], COMPRESSED_LIMIT
        self.first = first
        self.most = _READ_BYTES
        """Limit of one read in bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes | None:
        if size > self.most:
            raise zipfile.BadZipFile(f"a list of {size} bytes")
        return super().read(size)

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fills the buffer, up to the file's end: `tarfile` takes less than it asked for as the end of the archive."""
        filled = 0
        while filled < len(buffer) and self._at < self._file.size:
            inside = self._at - self._start
            if not 0 <= inside < len(self._buffer):
                self._fetch()
                inside = 0
            piece = self._buffer[inside : inside + len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._at += len(piece)
        return filled

    def _fetch(self) -> None:
        if self._budget <= 0:
            raise _LimitReached
        follows = self._at == self._start + len(self._buffer)
        self._ahead = min(self._ahead * 2, _AHEAD[1]) if follows else _AHEAD[0]
        reading = asyncio.run_coroutine_threadsafe(self._source.read(self._file, self._at, self._ahead), self._loop)
        self._start, self._buffer = self._at, reading.result(_READ_SECONDS)
        self._budget -= len(self._buffer)


class ForwardReader(io.RawIOBase):
    """The same for a server without range support: one transfer from the start, without seeking."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._loop, self._pieces = loop, pieces
        self._rest, self._budget = b"", COMPRESSED_LIMIT
        self.first = b""
        self.most = _READ_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._rest:
            if self._budget <= 0:
                raise _LimitReached
            self._rest = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result(_READ_SECONDS)
            self._budget -= len(self._rest)
            self.first = self.first or self._rest[:4]
        piece = self._rest[: len(buffer)]
        self._rest = self._rest[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)

    async def _next(self) -> bytes:
        return await anext(self._pieces, b"")
