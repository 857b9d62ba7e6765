"""Has the node cache bring the model, and points the engine's path into the namespace's folder of it."""

import os
import shutil
from pathlib import Path

from shoal.agent import cacheclient
from shoal.agent.credentials import credentials_of
from shoal.agent.stage.progress import DownloadProgress
from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.api.cache import FetchDone, FetchLine, FetchRequest
from shoal.api.sources import shown
from shoal.artifacts import folders


async def fetch(cache: Path, request: StageRequest, paths: StagePaths) -> FetchDone:
    """Waits until the model lies in `cache`, the namespace's folder. Raises ArtifactError and OSError."""
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

    def hear(line: FetchLine) -> None:
        nonlocal last
        last, progress.total = line, line.bytes_total

    progress = DownloadProgress(paths.progress, lambda: last.bytes_done)
    async with progress.fetching():
        done = await cacheclient.fetch(cache, fetch_request, hear)
    await progress.report("verifying")
    return done


def use(cache: Path, done: FetchDone, request: StageRequest, paths: StagePaths) -> None:
    """Checks that it is a model, and makes it the target. Blocks. Raises ArtifactError and OSError."""
    folder = cache / done.path
    folders.check_model(folder, shown(request.uri))
    # Before the link: the agent says from now on that this pod uses it.
    paths.cache_model.write_text(done.model)
    beside = paths.target.with_name(".linked")
    beside.unlink(missing_ok=True)
    os.symlink(folder, beside)
    if paths.target.is_dir() and not paths.target.is_symlink():
        shutil.rmtree(paths.target)  # fetched into this pod, before the node had a cache
    os.replace(beside, paths.target)
