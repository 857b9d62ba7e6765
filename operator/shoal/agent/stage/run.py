"""Staging: brings a Model's source to where the engine reads it, whole and verified, or says why not.

The order makes a restart safe at every point: everything is gathered in a folder beside the target, checked, brought to
disk, promised by a marker, and only then renamed into place. A target with its marker is finished; anything else goes
on from the folder, if that is of the same source.
"""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from shoal.agent.stage import https, hub
from shoal.agent.stage.progress import Progress, write_progress
from shoal.api import names, reasons
from shoal.api.replica import StageProgress
from shoal.api.sources import SourceUri, parse_source, shown
from shoal.artifacts import archive, folders
from shoal.artifacts.errors import ArtifactError, of_os_error, require_room

_TERMINATION_LIMIT = 4096

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What to stage."""

    uri: str
    digest: str | None = None
    """`sha256:...` that the source must have (api/model.py, Source.digest)."""
    hub_endpoint: str | None = None
    """A mirror of the hub; None: the hub itself."""


@dataclass(frozen=True, slots=True)
class StagePaths:
    """Where the stage container reads and writes."""

    target: Path = Path(names.MODEL_PATH)
    source: Path = Path(names.SOURCE_DIR)
    secret: Path = Path(names.SOURCE_SECRET_DIR)
    progress: Path = Path(names.STAGE_PROGRESS_FILE)

    @property
    def work(self) -> Path:
        return self.target.with_name(".partial")

    @property
    def files(self) -> Path:
        return self.work / "files"

    @property
    def marker(self) -> Path:
        return self.target.with_name(".staged.json")


@dataclass(frozen=True, slots=True)
class StageResult:
    """A finished staging."""

    digest: str | None
    """As `Source.digest` defines it; None where it was neither asked for nor came along."""
    bytes: int
    seconds: float
    commit: str | None = None
    """hf: the commit that was fetched."""


async def stage(request: StageRequest, paths: StagePaths) -> StageResult:
    """Stages the source. Raises ArtifactError, after writing it to the progress file too."""
    started = time.monotonic()
    try:
        try:
            source = parse_source(request.uri)
        except ValueError as error:
            raise ArtifactError(reasons.SOURCE_INVALID, str(error)) from None
        result = await _stage(source, request, paths, started)
    except OSError as error:
        failure = of_os_error(error, f"staging {shown(request.uri)}")
        await asyncio.to_thread(_report_failure, paths, failure)
        raise failure from error
    except ArtifactError as failure:
        await asyncio.to_thread(_report_failure, paths, failure)
        raise
    await asyncio.to_thread(
        write_progress, paths.progress, StageProgress(state="done", bytes_done=result.bytes, bytes_total=result.bytes)
    )
    return result


async def _stage(source: SourceUri, request: StageRequest, paths: StagePaths, started: float) -> StageResult:
    def result(digest: str | None, size: int, commit: str | None = None) -> StageResult:
        return StageResult(digest, size, round(time.monotonic() - started, 3), commit)

    if source.scheme == "pvc":
        folder = paths.source / source.path if source.path else paths.source
        digest = await _verify_in_place(folder, source, request, paths)
        return result(digest, await asyncio.to_thread(folders.size_of, folder))

    done = await asyncio.to_thread(_finished, request, paths)
    if done is not None:
        log.info("stage.already_done", uri=shown(request.uri))
        return result(done.digest, done.bytes, done.commit)

    token = await asyncio.to_thread(_read_token, paths.secret)
    await asyncio.to_thread(_prepare, request, paths)
    progress = Progress(paths.progress, lambda: folders.size_of(paths.files))
    commit: str | None = None
    digest: str | None = None
    async with progress.fetching():
        match source.scheme:
            case "file":
                digest = await _copy(source, request, paths, progress)
            case "https":
                digest = await _fetch_archive(source, request, paths, progress, token)
            case "hf":
                commit = await _fetch_repository(source, request, paths, progress, token)
    await progress.report("verifying")
    if source.scheme == "hf" and request.digest:
        digest = await asyncio.to_thread(folders.digest_of, paths.files)
        _require_digest(source, request, digest)
    size = await asyncio.to_thread(_finish, request, paths, digest, commit)
    return result(digest, size, commit)


async def _verify_in_place(folder: Path, source: SourceUri, request: StageRequest, paths: StagePaths) -> str | None:
    if not await asyncio.to_thread(folder.is_dir):
        raise ArtifactError(
            reasons.SOURCE_NOT_FOUND,
            f"the volume of claim {source.claim} has no folder {source.path or '/'}: check source.uri",
        )
    await Progress(paths.progress, lambda: 0).report("verifying")
    await asyncio.to_thread(folders.check_model, folder, shown(source.uri))
    if not request.digest:
        return None
    digest = await asyncio.to_thread(folders.digest_of, folder)
    _require_digest(source, request, digest)
    return digest


async def _copy(source: SourceUri, request: StageRequest, paths: StagePaths, progress: Progress) -> str | None:
    folder = Path(source.path)
    if not await asyncio.to_thread(folder.is_dir):
        raise ArtifactError(
            reasons.SOURCE_NOT_FOUND,
            f"{source.uri} does not exist: file:// names a folder inside the image of the stage container",
        )
    progress.total = await asyncio.to_thread(folders.size_of, folder)
    digest = None
    if request.digest:
        digest = await asyncio.to_thread(folders.digest_of, folder)
        _require_digest(source, request, digest)
    await asyncio.to_thread(_require_room_anew, paths, progress.total)
    await asyncio.to_thread(folders.copy, folder, paths.files)
    return digest


async def _fetch_archive(
    source: SourceUri, request: StageRequest, paths: StagePaths, progress: Progress, token: str | None
) -> str:
    file = paths.work / "archive"
    progress.measure = lambda: https.size_of(file)

    def on_total(total: int) -> None:
        progress.total = total

    await https.download(source.uri, file, token=token, on_total=on_total)
    await progress.report("verifying")
    digest = "sha256:" + await asyncio.to_thread(folders.sha256_of, file)
    try:
        _require_digest(source, request, digest)
    except ArtifactError:
        await asyncio.to_thread(file.unlink)  # the next try must not resume from wrong bytes
        raise
    await asyncio.to_thread(_unpack_anew, file, paths, source)
    return digest


async def _fetch_repository(
    source: SourceUri, request: StageRequest, paths: StagePaths, progress: Progress, token: str | None
) -> str:
    endpoint = request.hub_endpoint
    note = paths.work / "commit"
    commit = await asyncio.to_thread(_read_text, note)
    if commit is None:  # once: a branch that moves between two restarts would mix two versions
        commit, _ = await asyncio.to_thread(hub.resolve, source, token=token, endpoint=endpoint)
        await asyncio.to_thread(note.write_text, commit)

    def on_total(total: int) -> None:
        progress.total = total

    await asyncio.to_thread(
        hub.fetch, source, paths.files, commit=commit, token=token, endpoint=endpoint, on_total=on_total
    )
    return commit


def _require_digest(source: SourceUri, request: StageRequest, found: str) -> None:
    if request.digest and found != request.digest:
        raise ArtifactError(
            reasons.DIGEST_MISMATCH,
            f"{shown(source.uri)} has digest {found}, but source.digest says {request.digest}: either the source "
            "changed, or the digest is not its own",
        )


def _prepare(request: StageRequest, paths: StagePaths) -> None:
    """Empties what another source or an unfinished rename left."""
    paths.marker.unlink(missing_ok=True)
    shutil.rmtree(paths.target, ignore_errors=True)
    note = paths.work / "source"
    if _read_text(note) != request.uri:
        shutil.rmtree(paths.work, ignore_errors=True)
    paths.files.mkdir(parents=True, exist_ok=True)
    note.write_text(request.uri)


def _require_room_anew(paths: StagePaths, needed: int) -> None:
    shutil.rmtree(paths.files)
    paths.files.mkdir()
    require_room(paths.files, needed)


def _unpack_anew(file: Path, paths: StagePaths, source: SourceUri) -> None:
    shutil.rmtree(paths.files)
    paths.files.mkdir()
    try:
        archive.unpack(file, paths.files, shown(source.uri))
    except ArtifactError as error:
        shutil.rmtree(paths.files, ignore_errors=True)
        if error.reason == reasons.SOURCE_INVALID:
            file.unlink()
        raise


def _finish(request: StageRequest, paths: StagePaths, digest: str | None, commit: str | None) -> int:
    root = folders.model_root(paths.files)
    folders.check_model(root, shown(request.uri))
    folders.sync(root)
    size = folders.size_of(root)
    promise = {"uri": request.uri, "wanted": request.digest, "digest": digest, "bytes": size, "commit": commit}
    # Before the rename: a target that exists was complete when the marker was written.
    write_text_synced(paths.marker, json.dumps(promise))
    os.rename(root, paths.target)
    _sync_folder(paths.target.parent)
    shutil.rmtree(paths.work, ignore_errors=True)
    return size


def _finished(request: StageRequest, paths: StagePaths) -> StageResult | None:
    text = _read_text(paths.marker)
    if text is None or not paths.target.is_dir():
        return None
    try:
        promise = json.loads(text)
        if (promise["uri"], promise["wanted"]) != (request.uri, request.digest):
            return None
        return StageResult(promise["digest"], promise["bytes"], 0.0, promise["commit"])
    except (ValueError, KeyError, TypeError):
        return None


def _read_token(secret: Path) -> str | None:
    if not secret.is_dir():
        return None
    token = _read_text(secret / "token")
    if not token:
        raise ArtifactError(
            reasons.GATED, "the Secret of source.secretRef has no key `token`: put the access token under that key"
        )
    return token


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def write_text_synced(path: Path, text: str) -> None:
    """Writes a file and brings it to disk."""
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


def termination_message(outcome: StageResult | ArtifactError) -> str:
    """What the stage container leaves for the operator: JSON of at most 4096 bytes (the kubelet cuts more off)."""
    if isinstance(outcome, ArtifactError):
        message = str(outcome)[:2000]
        while len(text := json.dumps({"reason": outcome.reason, "message": message})) > _TERMINATION_LIMIT:
            message = message[: len(message) // 2]
        return text
    content = {"digest": outcome.digest, "bytes": outcome.bytes, "seconds": outcome.seconds, "commit": outcome.commit}
    return json.dumps({key: value for key, value in content.items() if value is not None})


def run_stage(request: StageRequest, paths: StagePaths, write_termination: Callable[[str], None]) -> int:
    """The stage container: stages, leaves its termination message, returns the exit code."""
    outcome: StageResult | ArtifactError
    try:
        outcome = asyncio.run(stage(request, paths))
        log.info(
            "stage.done", uri=shown(request.uri), bytes=outcome.bytes, seconds=outcome.seconds, digest=outcome.digest
        )
    except ArtifactError as error:
        outcome = error
        log.error("stage.failed", uri=shown(request.uri), reason=error.reason, problem=str(error))
    write_termination(termination_message(outcome))
    return 1 if isinstance(outcome, ArtifactError) else 0
