"""file://, pvc:// and oci://: an existing folder."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.errors import ArtifactError, of_os_error
from shoal.artifacts.manifest import File, Manifest, require_count, sort, wanted_files
from shoal.artifacts.ranges import RangedSource
from shoal.artifacts.source import Settings

END_BYTES = 1 << 20
_PIECE = 8 << 20


class FolderSource(RangedSource):
    """A folder of this machine, or of a mounted volume.

    Its validators are computed here: `ends:` and the SHA-256 of the first and last MiB of each file (of a small file,
    of its content). Hashing all weights would take minutes at every start, and modification times differ between copies
    of a folder. A change in the middle of a file goes unnoticed; `source.digest` detects it.
    """

    def __init__(self, source: SourceUri, folder: Path, top: Path, settings: Settings) -> None:
        """`top` is the mount point of the volume: links inside it are allowed, as the hub's cache uses them."""
        super().__init__(settings)
        self._source, self._folder, self._top = source, folder, top

    async def manifest(self) -> Manifest:
        return await asyncio.to_thread(self._manifest)

    def _manifest(self) -> Manifest:
        top, folder = self._top.resolve(), self._folder.resolve()
        if self._source.scheme == "file" and (problem := self.settings.network.folder_problem(str(folder))) is not None:
            raise ArtifactError(reasons.SOURCE_REFUSED, problem)
        if not self._is_inside(folder, top):
            raise _leads_out(self._source, self._folder.relative_to(self._top))
        if not folder.is_dir():
            raise ArtifactError(reasons.SOURCE_NOT_FOUND, _missing(self._source))
        found = set(self._names(folder, top))
        # The folder of an image contains only the model; a volume may contain other files.
        names = wanted_files(found) if self._source.in_place else found
        try:
            files = sort(self._file(name) for name in names if (self._folder / name).is_file())
        except OSError as error:
            raise of_os_error(error, f"reading {self._source.uri}") from error
        if not files:
            raise ArtifactError(
                reasons.SOURCE_INVALID, f"{self._source.uri} is not a model: it has no config.json (found: nothing)"
            )
        return Manifest(source=self._source.uri, origin=self._source.uri, revision=None, files=files)

    async def authorise(self, manifest: Manifest) -> None:
        """No check: a process that has the folder mounted can read it."""

    async def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        try:
            descriptor = await asyncio.to_thread(os.open, self._folder / file.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while start < end:
                    piece = await asyncio.to_thread(os.pread, descriptor, min(_PIECE, end - start), start)
                    if not piece:
                        raise ArtifactError(
                            reasons.SOURCE_CHANGED,
                            f"{self._source.uri}: {file.name} became shorter while it was read: do not write "
                            "there while it is in use",
                        )
                    yield piece
                    start += len(piece)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise of_os_error(error, f"reading {self._source.uri}") from error

    def _is_inside(self, real: Path, top: Path) -> bool:
        if self._source.scheme == "file":
            return self.settings.network.folder_problem(str(real)) is None
        return real.is_relative_to(top)

    def _names(self, folder: Path, top: Path) -> Iterator[str]:
        """Names of all files below, also behind links. Raises ArtifactError for a link that leads out, or too many
        files."""
        waiting: list[tuple[Path, tuple[Path, ...]]] = [(folder, (folder,))]
        count = 0
        while waiting:
            here, parents = waiting.pop()
            for entry in _entries(here):
                path = Path(entry.path)
                real = path.resolve() if entry.is_symlink() else path
                if entry.is_symlink() and not self._is_inside(real, top):
                    raise _leads_out(self._source, path.relative_to(folder))
                count += 1
                require_count(count, self._source.uri)
                if not entry.is_dir():
                    yield path.relative_to(folder).as_posix()
                elif real not in parents:  # a link to a parent folder would never end
                    waiting.append((path, (*parents, real)))

    def _file(self, name: str) -> File:
        with (self._folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            hasher = hashlib.sha256(file.read(END_BYTES))
            if size > END_BYTES:
                file.seek(max(END_BYTES, size - END_BYTES))
                hasher.update(file.read(END_BYTES))
        return File(name, size, f"ends:{hasher.hexdigest()}", hasher.hexdigest() if size <= 2 * END_BYTES else None)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except PermissionError:  # such as lost+found
        return []


def _leads_out(source: SourceUri, name: Path) -> ArtifactError:
    return ArtifactError(
        reasons.SOURCE_REFUSED, f"{source.uri}: {name} is a link that leads out of the volume; copy what it leads to"
    )


def _missing(source: SourceUri) -> str:
    match source.scheme:
        case "pvc":
            return f"the volume of claim {source.claim} has no folder {source.path or '/'}: check source.uri"
        case "oci":
            return f"the image of {source.uri} is not mounted: the cluster has to support image volumes"
        case _:
            return f"{source.uri} does not exist: file:// names a folder inside the image of the stage container"
