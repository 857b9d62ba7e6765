"""Fetches the files of a manifest into the work folder, going on where an earlier run stopped."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.agent.stage.request import StagePaths
from shoal.artifacts import ArtifactSource, File, Manifest
from shoal.artifacts.errors import require_space

_FILES = 4
"""Files on their way at the same time; how many connections that makes is the source's affair."""


def folder_of(manifest: Manifest, paths: StagePaths) -> Path:
    """Where the manifest's files are gathered: an archive is not part of the model."""
    return paths.archive if manifest.archive else paths.files


def keep_only(manifest: Manifest, paths: StagePaths) -> None:
    """Throws away what was gathered for another manifest. Blocks. Raises OSError."""
    note = paths.work / "manifest"
    if not note.exists() or note.read_text() != manifest.digest:
        shutil.rmtree(paths.files, ignore_errors=True)
        shutil.rmtree(paths.archive, ignore_errors=True)
    paths.files.mkdir(parents=True, exist_ok=True)
    paths.archive.mkdir(parents=True, exist_ok=True)
    note.write_text(manifest.digest)


async def gather(
    source: ArtifactSource, manifest: Manifest, paths: StagePaths, on_bytes: Callable[[int], None]
) -> None:
    """Fetches what is missing. `on_bytes` as in `Source.download`. Raises ArtifactError and OSError."""
    folder = folder_of(manifest, paths)
    missing, there = await asyncio.to_thread(_missing, manifest, folder)
    on_bytes(there)
    await asyncio.to_thread(_require_space, folder, missing, source)
    waiting = list(reversed(missing))

    async def work() -> None:
        while waiting:
            file = waiting.pop()
            await source.download(file, folder / file.name, on_bytes)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_FILES, len(missing))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _missing(manifest: Manifest, folder: Path) -> tuple[list[File], int]:
    missing: list[File] = []
    there = 0
    for file in manifest.files:
        path = folder / file.name
        # A file stands under its name only when it was whole and verified.
        if file.validator and path.is_file() and path.stat().st_size == file.size:
            there += file.size
        else:
            missing.append(file)
    return missing, there


def _require_space(folder: Path, missing: list[File], source: ArtifactSource) -> None:
    parts = [folder / f"{file.name}.part" for file in missing]
    begun = sum(part.stat().st_blocks * 512 for part in parts if part.exists())
    require_space(folder, sum(file.size for file in missing) - begun, source.settings.disk_advice)
