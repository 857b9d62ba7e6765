"""The stage container: puts a Model's source where the engine reads it, complete and verified, or reports why not.

A restart is safe at every point: files are collected in a sibling folder, checked, synced to disk, recorded in a
marker, and only then renamed to the target. A target with its marker is complete. Otherwise staging continues from the
folder, if it belongs to the same source.
"""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from shoal.agent import cacheclient, outcome
from shoal.agent.stage.gather import download_all, folder_of, keep_only
from shoal.agent.stage.progress import DownloadProgress, write_progress
from shoal.agent.stage.request import StagePaths, StageRequest, StageResult
from shoal.api import reasons
from shoal.api.cache import CACHED_SCHEMES, FetchDone, FetchLine, FetchRequest
from shoal.api.replica import StageProgress
from shoal.api.sources import SourceUri, parse_source, shown
from shoal.artifacts import ArtifactError, ArtifactSource, Manifest, StoreCredentials, archive, folders, open_source
from shoal.artifacts.errors import of_os_error
from shoal.artifacts.identity import credentials_of


async def _fetch_cached(cache: Path, request: StageRequest, paths: StagePaths) -> FetchDone:
    """Waits until the model is in `cache`, the namespace's folder. Raises ArtifactError and OSError."""
    credentials = await credentials_of(request.uri, paths.secret, request.settings, identity=request.identity)
    fetch_request = FetchRequest(
        uri=request.uri,
        revision=request.revision,
        manifest=request.manifest,
        credentials=dict(credentials.values),
        credentials_given=credentials.given,
        credentials_identity=credentials.identity,
    )
    last = FetchLine(state="waiting")

    def receive(line: FetchLine) -> None:
        nonlocal last
        last, progress.total = line, line.bytes_total

    progress = DownloadProgress(paths.progress, lambda: last.bytes_done)
    async with progress.fetching():
        done = await cacheclient.fetch(cache, fetch_request, receive)
    await progress.report("verifying")
    return done


def _use_cached(cache: Path, done: FetchDone, request: StageRequest, paths: StagePaths) -> None:
    """Checks that the folder contains a model and links the target to it. Blocks. Raises ArtifactError and OSError."""
    folder = cache / done.path
    folders.check_model(folder, shown(request.uri))
    # Written before the link: from now on the agent holds this model in the cache.
    paths.cache_model.write_text(done.model)
    link = paths.target.with_name(".linked")
    link.unlink(missing_ok=True)
    os.symlink(folder, link)
    if paths.target.is_dir() and not paths.target.is_symlink():
        shutil.rmtree(paths.target)  # fetched by this pod before the node had a cache
    os.replace(link, paths.target)


log = structlog.get_logger()


async def stage(request: StageRequest, paths: StagePaths) -> StageResult:
    """Stages the source. Raises ArtifactError, which is also written to the progress file."""
    started = time.monotonic()
    try:
        try:
            source = parse_source(request.uri)
        except ValueError as error:
            raise ArtifactError(reasons.SOURCE_INVALID, str(error)) from None
        stage_source = _in_place if source.in_place else _fetch
        if paths.cache is not None and source.scheme in CACHED_SCHEMES:
            stage_source = _from_cache
        digest, size, commit = await stage_source(source, request, paths)
    except OSError as error:
        failure = of_os_error(error, f"staging {shown(request.uri)}")
        await asyncio.to_thread(_report_failure, paths, failure)
        raise failure from error
    except ArtifactError as failure:
        await asyncio.to_thread(_report_failure, paths, failure)
        raise
    await asyncio.to_thread(
        write_progress, paths.progress, StageProgress(state="done", bytes_done=size, bytes_total=size)
    )
    return StageResult(digest, size, round(time.monotonic() - started, 3), commit)


_Outcome = tuple[str | None, int, str | None]
"""Digest of the content if known, bytes, commit."""


async def _in_place(source: SourceUri, request: StageRequest, paths: StagePaths) -> _Outcome:
    """The engine reads the mounted volume; only checks it."""
    folder = paths.source / source.path
    await DownloadProgress(paths.progress, lambda: 0).report("verifying")
    async with open_source(request.uri, StoreCredentials(), request.settings, mounted=paths.source) as opened:
        _require_manifest(request, await opened.manifest())
    await asyncio.to_thread(folders.check_model, folder, shown(source.uri))
    digest = await asyncio.to_thread(folders.digest_of, folder) if request.digest else None
    if digest is not None:
        _require_digest(request, digest)
    return digest, await asyncio.to_thread(folders.size_of, folder), None


async def _from_cache(source: SourceUri, request: StageRequest, paths: StagePaths) -> _Outcome:
    """The engine reads the namespace's folder of the node cache."""
    assert paths.cache is not None  # noqa: S101 - the caller looked
    done = await _fetch_cached(paths.cache, request, paths)
    if done.digest is not None:
        _require_digest(request, done.digest)
    await asyncio.to_thread(_use_cached, paths.cache, done, request, paths)
    return done.digest, done.bytes, done.revision


async def _fetch(source: SourceUri, request: StageRequest, paths: StagePaths) -> _Outcome:
    """Downloads the files to the target."""
    done = await asyncio.to_thread(_finished, request, paths)
    if done is not None:
        log.info("stage.already_done", uri=shown(request.uri))
        return done
    credentials = await credentials_of(request.uri, paths.secret, request.settings, identity=request.identity)
    commit = await asyncio.to_thread(_prepare, request, paths)
    arrived = 0

    def on_bytes(count: int) -> None:
        nonlocal arrived
        arrived += count

    progress = DownloadProgress(paths.progress, lambda: arrived)
    async with (
        progress.fetching(),
        open_source(request.uri, credentials, request.settings, revision=commit) as opened,
    ):
        manifest = await _manifest(opened, request, paths)
        progress.total = manifest.total_bytes
        await asyncio.to_thread(keep_only, manifest, paths)
        await download_all(opened, manifest, paths, on_bytes)
    await progress.report("verifying")
    digest = await asyncio.to_thread(_verified, manifest, request, paths)
    size = await asyncio.to_thread(_finish, request, paths, digest, manifest.revision)
    return digest, size, manifest.revision


async def _manifest(opened: ArtifactSource, request: StageRequest, paths: StagePaths) -> Manifest:
    manifest = await opened.manifest()
    _require_manifest(request, manifest)
    if manifest.revision is not None:
        # Recorded once: a branch that moves between two restarts would mix two versions.
        await asyncio.to_thread((paths.work / "commit").write_text, manifest.revision)
    return manifest


def _verified(manifest: Manifest, request: StageRequest, paths: StagePaths) -> str | None:
    """Unpacks an archive, and returns the digest of the content if requested or known. Blocks."""
    folder = folder_of(manifest, paths)
    try:
        if not manifest.archive:
            if request.digest is None:
                return None
            digest = folders.digest_of(folder)
            _require_digest(request, digest)
            return digest
        file = folder / manifest.files[0].name
        digest = "sha256:" + folders.sha256_of(file)
        _require_digest(request, digest)
        shutil.rmtree(paths.files)
        paths.files.mkdir()
        archive.unpack(file, paths.files, manifest.source, limit=archive.content_limit(file.stat().st_size))
    except ArtifactError as error:
        shutil.rmtree(paths.files, ignore_errors=True)
        if error.reason != reasons.DISK_FULL:  # the next attempt must not continue with wrong bytes
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return digest


def _require_digest(request: StageRequest, found: str) -> None:
    if request.digest and found != request.digest:
        raise ArtifactError(
            reasons.DIGEST_MISMATCH,
            f"{shown(request.uri)} has digest {found}, but source.digest says {request.digest}: either the source "
            "changed, or the digest is not its own",
        )


def _require_manifest(request: StageRequest, manifest: Manifest) -> None:
    if request.manifest and manifest.digest != request.manifest:
        raise ArtifactError(
            reasons.SOURCE_CHANGED,
            f"{manifest.source} is not what it was when it was pinned: its manifest has digest {manifest.digest} and "
            f"not {request.manifest}. Files were overwritten, added or removed: put them back, or publish them under "
            "another address and name that in source.uri",
        )


def _prepare(request: StageRequest, paths: StagePaths) -> str | None:
    """Deletes files of another source or of an incomplete rename. Returns the commit to fetch, if known."""
    paths.marker.unlink(missing_ok=True)
    shutil.rmtree(paths.target, ignore_errors=True)
    note, wanted = paths.work / "source", json.dumps([request.uri, request.revision])
    if _read_text(note) != wanted:
        shutil.rmtree(paths.work, ignore_errors=True)
    paths.work.mkdir(parents=True, exist_ok=True)
    note.write_text(wanted)
    return request.revision or _read_text(paths.work / "commit")


def _finish(request: StageRequest, paths: StagePaths, digest: str | None, commit: str | None) -> int:
    root = folders.model_root(paths.files)
    folders.check_model(root, shown(request.uri))
    folders.sync(root)
    size = folders.size_of(root)
    record = {"wanted": _wanted(request), "digest": digest, "bytes": size, "commit": commit}
    # Before the rename: an existing target was complete when the marker was written.
    write_text_synced(paths.marker, json.dumps(record))
    os.rename(root, paths.target)
    _sync_folder(paths.target.parent)
    shutil.rmtree(paths.work, ignore_errors=True)
    return size


def _wanted(request: StageRequest) -> list[str | None]:
    return [request.uri, request.digest, request.revision, request.manifest]


def _finished(request: StageRequest, paths: StagePaths) -> _Outcome | None:
    text = _read_text(paths.marker)
    if text is None or not paths.target.is_dir():
        return None
    try:
        record = json.loads(text)
        if record["wanted"] != _wanted(request):
            return None
        return record["digest"], record["bytes"], record["commit"]
    except (ValueError, KeyError, TypeError):
        return None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def write_text_synced(path: Path, text: str) -> None:
    """Writes a file and syncs it to disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _report_failure(paths: StagePaths, failure: ArtifactError) -> None:
    try:
        write_progress(
            paths.progress, StageProgress(state="failed", reason=failure.reason, message=str(failure)[:1024])
        )
    except OSError as error:
        log.warning("stage.progress_not_written", problem=str(error))


def termination_message(result: StageResult | ArtifactError) -> str:
    """Termination message of the stage container."""
    if isinstance(result, ArtifactError):
        return outcome.failure_message(result)
    content = {"digest": result.digest, "bytes": result.bytes, "seconds": result.seconds, "commit": result.commit}
    return json.dumps({key: value for key, value in content.items() if value is not None})


def run_stage(request: StageRequest, paths: StagePaths, write_termination: Callable[[str], None]) -> int:
    """Runs the stage container: stages, writes the termination message, returns the exit code."""
    result: StageResult | ArtifactError
    try:
        result = asyncio.run(stage(request, paths))
        log.info("stage.done", uri=shown(request.uri), bytes=result.bytes, seconds=result.seconds, digest=result.digest)
    except ArtifactError as error:
        result = error
        log.error("stage.failed", uri=shown(request.uri), reason=error.reason, problem=str(error))
    write_termination(termination_message(result))
    return 1 if isinstance(result, ArtifactError) else 0
