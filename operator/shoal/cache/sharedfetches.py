"""Fetches one model into the cache: reuses existing files, downloads the others, verifies and stores them."""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import structlog

from shoal.api import reasons
from shoal.api.cache import FetchLine
from shoal.artifacts import ArtifactError, ArtifactSource, File, Manifest, archive, folders
from shoal.artifacts.fetchslots import FetchSlots
from shoal.artifacts.threads import in_thread
from shoal.cache.disk import CachedFile, CacheDisk, CachedModel, inside, sha256_of
from shoal.cache.diskquota import DiskQuota
from shoal.cache.index import Index

PARALLEL: Final = 4
"""Concurrent downloads over all models, in the order of requests; and as many for adapters."""
SMALL_BYTES: Final = 1 << 30
"""Sources up to this size count as adapters, which do not queue behind models: clients wait for adapters."""
SLOW_SECONDS: Final = 5.0
"""A file of an adapter that takes longer gives up its slot: its source may hang."""
FEW_BYTES: Final = 16 << 20
"""Additional space for the content of a small archive: each file takes a block, and configs compress well."""
LARGE_SECONDS: Final = 300.0
"""The same for a model's file: a slow server does not block other models."""
_URIS: Final = 32
"""URIs remembered per model."""

log = structlog.get_logger()


@dataclass(slots=True)
class FetchProgress:
    """Progress of a fetch, shared by all of its waiters."""

    total: int
    done: int = 0
    fetched: int = 0
    state: Literal["waiting", "fetching", "verifying"] = "waiting"

    def line(self) -> FetchLine:
        return FetchLine(state=self.state, bytes_done=min(self.done, self.total), bytes_total=self.total)

    def arrived(self, count: int) -> None:
        """Adds new bytes; negative when bytes are discarded."""
        self.done += count
        self.fetched += count


class SharedFetches:
    """The caller ensures one concurrent call per model."""

    def __init__(self, disk: CacheDisk, index: Index, quota: DiskQuota) -> None:
        self._disk = disk
        self._index = index
        self._quota = quota
        self._large, self._small = FetchSlots(PARALLEL, LARGE_SECONDS), FetchSlots(PARALLEL, SLOW_SECONDS)

    async def fetch(
        self, key: str, uri: str, source: ArtifactSource, manifest: Manifest, progress: FetchProgress
    ) -> CachedModel:
        """Fetches the model. `uri` is the hash of the URI. Raises ArtifactError and OSError."""
        for file in manifest.files:
            inside(file.name, manifest.source)
        known = self._index.get(key)
        if known is not None and not await self._damaged(known.files):
            progress.done = progress.total
            return await self._remember(known, uri)
        if all(manifest.identity(file) for file in manifest.files):
            lasting = True
        else:  # an earlier unfinished fetch may be of other content
            lasting = False
            await asyncio.to_thread(self._disk.drop_partial, key)
        if manifest.archive:
            return await self._fetch_archive(key, uri, source, manifest, progress, lasting)
        return await self._fetch_files(key, uri, source, manifest, progress, lasting)

    # --- models of files --------------------------------------------------------------------------------------------

    async def _fetch_files(
        self, key: str, uri: str, source: ArtifactSource, manifest: Manifest, progress: FetchProgress, lasting: bool
    ) -> CachedModel:
        known = self._index.files()
        here = {f.name: known[i] for f in manifest.files if (i := manifest.identity(f)) is not None and i in known}
        with ExitStack() as pins:
            for owner in self._index.owners(file.sha256 for file in here.values()):
                pins.enter_context(self._index.pin(owner))
            bad = {file.sha256 for file in await self._damaged(here.values())}
            missing = [f for f in manifest.files if f.name not in here or here[f.name].sha256 in bad]
            progress.done = manifest.total_bytes - sum(file.size for file in missing)
            async with self._quota.reserve(key, sum(f.size for f in missing), await self._arrived(key)):
                paths = await self._download(key, source, missing, manifest.total_bytes, progress)
                progress.state = "verifying"
                hashes = {f.name: f.sha256 or await asyncio.to_thread(sha256_of, paths[f.name]) for f in missing}
                files = tuple(
                    CachedFile(
                        name=file.name,
                        size=file.size,
                        sha256=hashes.get(file.name) or here[file.name].sha256,
                        identity=manifest.identity(file),
                        modified_ns=0 if file.name in hashes else here[file.name].modified_ns,
                    )
                    for file in manifest.files
                )
                new = {hashes[name]: path for name, path in paths.items()}
                return await self._store(key, uri, manifest, files, new, folder_digest(files), lasting)

    async def _download(
        self, key: str, source: ArtifactSource, files: Sequence[File], whole: int, progress: FetchProgress
    ) -> dict[str, Path]:
        """Downloads files. `whole`: total size of the model they belong to."""
        folder = self._disk.partial(key)
        await asyncio.to_thread(folder.mkdir, exist_ok=True)
        turns = self._small if whole <= SMALL_BYTES else self._large
        paths = {file.name: folder / hashlib.sha256(file.name.encode()).hexdigest()[:32] for file in files}

        async def one(file: File) -> None:
            async with turns.slot():
                progress.state = "fetching"
                if await asyncio.to_thread(_is_whole, paths[file.name], file.size):
                    progress.done += file.size
                else:
                    await source.download(file, paths[file.name], progress.arrived)

        with _first_error():
            async with asyncio.TaskGroup() as tasks:
                for file in files:
                    tasks.create_task(one(file))
        return paths

    # --- models in archives -----------------------------------------------------------------------------------------

    async def _fetch_archive(
        self, key: str, uri: str, source: ArtifactSource, manifest: Manifest, progress: FetchProgress, lasting: bool
    ) -> CachedModel:
        (packed,) = manifest.files
        # Space for the archive and its content, which is hardly smaller, since weights do not compress. More content
        # than this is reserved before it is unpacked.
        most = archive.content_limit(packed.size)
        for content in (max(packed.size, FEW_BYTES), most):
            last = content >= most
            async with self._quota.reserve(key, packed.size + content, await self._arrived(key)):
                (path,) = (await self._download(key, source, [packed], packed.size, progress)).values()
                progress.state = "verifying"
                digest = packed.sha256 or await asyncio.to_thread(sha256_of, path)
                folder = self._disk.partial(key) / "files"
                try:
                    root = await in_thread(partial(_unpack, path, folder, manifest.source, content))
                except ArtifactError as error:
                    await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))
                    if error.reason == reasons.TOO_LARGE and not last:
                        continue
                    raise
                files, new = await asyncio.to_thread(_files_of, root)
                return await self._store(key, uri, manifest, files, new, f"sha256:{digest}", lasting)
        raise AssertionError("unreachable")

    # --- storing ----------------------------------------------------------------------------------------------------

    async def _store(
        self,
        key: str,
        uri: str,
        manifest: Manifest,
        files: tuple[CachedFile, ...],
        new: dict[str, Path],
        digest: str,
        lasting: bool,
    ) -> CachedModel:
        if not lasting:  # the manifest does not identify the content
            text = key + "".join(f.name + f.sha256 for f in files)
            key = hashlib.sha256(text.encode()).hexdigest()[:40]
        async with self._quota.lock:
            for sha in list(new):
                # The same content is already stored from another source. These bytes were fetched, so the caller may
                # read them.
                same = self._index.content(sha)
                if same is not None and not await self._damaged([same]):
                    files = tuple(
                        f.model_copy(update={"modified_ns": same.modified_ns}) if f.sha256 == sha else f for f in files
                    )
                    del new[sha]
            model = CachedModel(
                key=key,
                source=manifest.source,
                manifest=manifest.digest,
                revision=manifest.revision,
                digest=digest,
                files=files,
                uris=(uri,),
                lasting=lasting,
            )
            kept = await asyncio.to_thread(self._disk.store, model, new)
            self._quota.release(key)
            self._index.add(kept)
        log.info("cache.kept", model=key, source=manifest.source, bytes=kept.bytes, files=len(files))
        return kept

    async def _remember(self, model: CachedModel, uri: str) -> CachedModel:
        if uri in model.uris:
            return model
        changed = model.model_copy(update={"uris": (*model.uris, uri)[-_URIS:]})
        async with self._quota.lock:
            await asyncio.to_thread(self._disk.write, changed)
            self._index.add(changed)
        return changed

    async def _damaged(self, files: Iterable[CachedFile]) -> list[CachedFile]:
        found = await asyncio.to_thread(self._disk.damaged, list(files))
        for file in found:
            log.warning("cache.damaged", file=file.name, sha256=file.sha256, consequence="it is fetched again")
        return found

    async def _arrived(self, key: str) -> int:
        return (await asyncio.to_thread(self._disk.partials)).get(key, (0, 0.0))[0]


def folder_digest(files: Iterable[CachedFile]) -> str:
    """Computes `artifacts.folders.digest_of` from known hashes."""
    lines = sorted((os.fsencode(f"./{file.name}"), file.sha256) for file in files)
    text = b"".join(f"{sha}  ".encode() + name + b"\n" for name, sha in lines)
    return "sha256:" + hashlib.sha256(text).hexdigest()


def _unpack(packed: Path, folder: Path, source: str, limit: int) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    archive.unpack(packed, folder, source, limit=limit)
    root = folders.model_root(folder)
    folders.sync(root)
    return root


def _files_of(root: Path) -> tuple[tuple[CachedFile, ...], dict[str, Path]]:
    found: list[CachedFile] = []
    new: dict[str, Path] = {}
    for path in sorted(folders.regular_files(root)):
        sha = sha256_of(path)
        name = path.relative_to(root).as_posix()
        found.append(CachedFile(name=name, size=path.stat().st_size, sha256=sha, identity=None, modified_ns=0))
        new[sha] = path
    return tuple(found), new


def _is_whole(path: Path, size: int) -> bool:
    """Whether the file is complete: `Source.download` renames a file only when it is verified and synced."""
    return path.is_file() and path.stat().st_size == size


@contextlib.contextmanager
def _first_error() -> Generator[None]:
    """Raises the error of a task group that cancelled the other tasks."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
