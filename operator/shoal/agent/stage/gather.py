"""Downloads the files of a manifest into the work folder, continuing where an earlier run stopped."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.agent.stage.request import StagePaths
from shoal.artifacts import ArtifactSource, File, Manifest
from shoal.artifacts.errors import require_space

_FILES = 4
"""Files downloaded concurrently; the source decides the number of connections."""


def folder_of(manifest: Manifest, paths: StagePaths) -> Path:
    """Folder of the downloads. An archive is kept apart, because it is not part of the model."""
    return paths.archive if manifest.archive else paths.files


def keep_only(manifest: Manifest, paths: StagePaths) -> None:
    """Deletes files of another manifest. Blocks. Raises OSError."""
    note = paths.work / "manifest"
    if not note.exists() or note.read_text() != manifest.digest:
        shutil.rmtree(paths.files, ignore_errors=True)
        shutil.rmtree(paths.archive, ignore_errors=True)
    paths.files.mkdir(parents=True, exist_ok=True)
    paths.archive.mkdir(parents=True, exist_ok=True)
    note.write_text(manifest.digest)


async def download_all(
    source: ArtifactSource, manifest: Manifest, paths: StagePaths, on_bytes: Callable[[int], None]
) -> None:
    """Downloads the missing files. `on_bytes` as in `Source.download`. Raises ArtifactError and OSError."""
    folder = folder_of(manifest, paths)
    missing, present = await asyncio.to_thread(_missing, manifest, folder)
    on_bytes(present)
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
    present = 0
    for file in manifest.files:
        path = folder / file.name
        # A file has its final name only after it was complete and verified.
        if file.validator and path.is_file() and path.stat().st_size == file.size:
            present += file.size
        else:
            missing.append(file)
    return missing, present


def _require_space(folder: Path, missing: list[File], source: ArtifactSource) -> None:
    parts = [folder / f"{file.name}.part" for file in missing]
    begun = sum(part.stat().st_blocks * 512 for part in parts if part.exists())
    require_space(folder, sum(file.size for file in missing) - begun, source.settings.disk_advice)
