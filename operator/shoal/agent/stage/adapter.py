"""Stages one revision of a LoRA adapter: its files, verified and checked, in the folder that the engine is told.

Before any call to the engine: SGLang would fetch inside its scheduler, while every request stands still. Everything is
gathered in a folder beside the target whose name begins with a dot, and renamed into place when it is whole.
"""

import asyncio
import os
import secrets as random
import shutil
from pathlib import Path

import structlog

from shoal.agent import cacheclient
from shoal.api import names, reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.api.adapters import AdapterSettings, AdapterWanted
from shoal.api.cache import CACHED_SCHEMES, FetchRequest
from shoal.api.sources import shown
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, adapter, folders, open_source
from shoal.artifacts.errors import of_os_error
from shoal.artifacts.threads import in_thread
from shoal.core.lora.format.check import check_adapter, of_settings
from shoal.core.lora.format.sources import credentials_for

CACHE_TIMEOUT_SECONDS = 5.0
"""How long a node cache may be silent before the source itself is asked: a client waits for the answer."""
DISK_ADVICE = "fewer or smaller adapters fit there: lower cachedPerReplica or maxRank of the pool"
IN_A_HURRY = Settings(disk_advice=DISK_ADVICE, connect_seconds=5.0, stall_seconds=20.0)
"""Sources of adapters: clients wait for them, and one that is silent is tried again soon."""

log = structlog.get_logger()


async def stage_adapter(
    wanted: AdapterWanted,
    folder: Path,
    settings: AdapterSettings,
    *,
    secrets: Path = Path(names.ADAPTER_SECRETS_DIR),
    cache: Path | None = None,
    sources: Settings | None = None,
) -> AdapterFacts:
    """Brings the adapter to `folder`; one that is there already is only looked at. `cache`: the namespace's folder of
    the node cache. May be cancelled at any time, and then leaves nothing half done.

    Raises ArtifactError with one of `reasons.ADAPTER_REASONS`.
    """
    try:
        facts = await _staged(wanted, folder, settings, secrets, cache, sources or IN_A_HURRY)
    except ArtifactError as error:
        raise of_pool(error) from error
    except OSError as error:
        raise of_os_error(error, f"staging {shown(wanted.uri)}", DISK_ADVICE) from error
    return facts


def of_pool(error: ArtifactError) -> ArtifactError:
    """An error of a source in the words of a pool: the credentials do not stand on the object that names the source."""
    text = str(error).replace("the credentials of source.secretRef", "the pool's credentials")
    return ArtifactError(error.reason, text.replace("source.secretRef", "the pool's credentials"))


async def _staged(
    wanted: AdapterWanted, folder: Path, settings: AdapterSettings, secrets: Path, cache: Path | None, sources: Settings
) -> AdapterFacts:
    if await asyncio.to_thread(folder.is_dir):
        return await asyncio.to_thread(_checked, wanted, folder, settings)
    work = folder.with_name(f".{folder.name}.{random.token_hex(4)}")
    try:
        await in_thread(lambda: work.mkdir(parents=True))
        await _fetch(wanted, work, settings, secrets, cache, sources)
        return await in_thread(lambda: _finish(wanted, work, folder, settings))
    finally:
        # Not to be cut off: what is left counts against the folder's limit.
        await in_thread(lambda: shutil.rmtree(work, ignore_errors=True))


async def _fetch(
    wanted: AdapterWanted, work: Path, settings: AdapterSettings, secrets: Path, cache: Path | None, sources: Settings
) -> None:
    place = credentials_for(wanted.uri, settings.credentials)
    credentials = (
        StoreCredentials() if place is None else await asyncio.to_thread(StoreCredentials.read, secrets / str(place))
    )
    if cache is not None and wanted.uri.partition("://")[0] in CACHED_SCHEMES:
        try:
            await _from_cache(wanted, work, settings, credentials, cache)
        except ArtifactError as error:
            if error.reason != reasons.CACHE_UNAVAILABLE:
                raise
            log.warning("adapter.without_cache", adapter=wanted.name, problem=str(error))
        else:
            return
    async with open_source(wanted.uri, credentials, sources) as source:
        manifest = await source.manifest()
        if manifest.digest != wanted.revision:
            raise _changed(wanted, f"its manifest has digest {manifest.digest} and not {wanted.revision}")
        await adapter.fetch_adapter(source, manifest, work, settings.max_bytes)


async def _from_cache(
    wanted: AdapterWanted, work: Path, settings: AdapterSettings, credentials: StoreCredentials, cache: Path
) -> None:
    request = FetchRequest(
        uri=wanted.uri,
        manifest=wanted.revision,
        files=adapter.FILES,
        credentials=dict(credentials.values),
        credentials_given=credentials.given,
    )
    try:
        done = await cacheclient.fetch(cache, request, lambda _: None, timeout=CACHE_TIMEOUT_SECONDS)
    except ArtifactError as error:
        if error.reason == reasons.SOURCE_CHANGED:
            raise _changed(wanted, "its manifest is another one") from error
        raise
    # A copy: the cache evicts what no pod holds, and an engine may read its files again at any time.
    await in_thread(lambda: adapter.copy_adapter(cache / done.path, work, settings.max_bytes, shown(wanted.uri)))


def _checked(wanted: AdapterWanted, folder: Path, settings: AdapterSettings) -> AdapterFacts:
    facts = adapter.read_folder(folder, shown(wanted.uri), wanted.revision)
    limits, base = of_settings(settings)
    if (problem := check_adapter(facts, limits, base)) is not None:
        raise ArtifactError(problem.reason, problem.message)
    return facts


def _finish(wanted: AdapterWanted, work: Path, folder: Path, settings: AdapterSettings) -> AdapterFacts:
    facts = _checked(wanted, work, settings)
    folders.sync(work)
    os.rename(work, folder)
    return facts


def _changed(wanted: AdapterWanted, how: str) -> ArtifactError:
    return ArtifactError(
        reasons.SOURCE_CHANGED,
        f"{shown(wanted.uri)} is not what it was when it was read: {how}. Publish another version under another "
        "address, and name that in spec.source.uri",
    )
