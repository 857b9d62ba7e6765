"""Stages one revision of a LoRA adapter: fetches, verifies and checks its files in the folder that the engine loads.

This happens before any call to the engine, because SGLang would fetch in its scheduler and stop all requests meanwhile.
Files are collected in a sibling folder with a leading dot, which is renamed when it is complete.
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
from shoal.core.lora.format.rules import AdapterRules
from shoal.core.lora.format.sources import credentials_for, pinned_commit

CACHE_TIMEOUT_SECONDS = 5.0
"""Silence of the node cache after which the source itself is used: a client is waiting."""
DISK_ADVICE = "fewer or smaller adapters fit there: lower cachedPerReplica or maxRank of the pool"
IMPATIENT = Settings(disk_advice=DISK_ADVICE, connect_seconds=5.0, stall_seconds=20.0)
"""Settings of adapter sources: clients wait for them, so a silent source is retried soon."""

log = structlog.get_logger()


async def stage_adapter(
    wanted: AdapterWanted,
    folder: Path,
    settings: AdapterSettings,
    *,
    rules: AdapterRules,
    secrets: Path = Path(names.ADAPTER_SECRETS_DIR),
    cache: Path | None = None,
    sources: Settings | None = None,
) -> AdapterFacts:
    """Stages the adapter in `folder`; an existing folder is only checked. `rules` are the engine's; `cache` is the
    namespace's folder of the node cache. Cancellation at any time leaves nothing incomplete.

    Raises ArtifactError with one of `reasons.ADAPTER_REASONS`.
    """
    try:
        facts = await _staged(wanted, folder, settings, rules, secrets, cache, sources or IMPATIENT)
    except ArtifactError as error:
        raise of_pool(error) from error
    except OSError as error:
        raise of_os_error(error, f"staging {shown(wanted.uri)}", DISK_ADVICE) from error
    return facts


def of_pool(error: ArtifactError) -> ArtifactError:
    """Rewrites an error of a source for a pool: an adapter's credentials are those of the pool, not of the object."""
    text = str(error).replace("the credentials of source.secretRef", "the pool's credentials")
    return ArtifactError(error.reason, text.replace("source.secretRef", "the pool's credentials"))


async def _staged(
    wanted: AdapterWanted,
    folder: Path,
    settings: AdapterSettings,
    rules: AdapterRules,
    secrets: Path,
    cache: Path | None,
    sources: Settings,
) -> AdapterFacts:
    if await asyncio.to_thread(folder.is_dir):
        return await asyncio.to_thread(_checked, wanted, folder, settings, rules)
    work = folder.with_name(f".{folder.name}.{random.token_hex(4)}")
    try:
        await in_thread(lambda: work.mkdir(parents=True))
        await _fetch(wanted, work, settings, secrets, cache, sources)
        return await in_thread(lambda: _finish(wanted, work, folder, settings, rules))
    finally:
        # Not cancellable: leftovers would count against the folder's size limit.
        await in_thread(lambda: shutil.rmtree(work, ignore_errors=True))


async def _fetch(
    wanted: AdapterWanted, work: Path, settings: AdapterSettings, secrets: Path, cache: Path | None, sources: Settings
) -> None:
    index = credentials_for(wanted.uri, settings.credentials)
    credentials = (
        StoreCredentials() if index is None else await asyncio.to_thread(StoreCredentials.read, secrets / str(index))
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
    # As a pin and not as the address's own revision: a commit that was read and is gone is a source that changed.
    uri, commit = pinned_commit(wanted.uri)
    async with open_source(uri, credentials, sources, revision=commit) as source:
        manifest = await source.manifest()
        if manifest.digest != wanted.revision:
            raise _changed(wanted, f"its manifest has digest {manifest.digest} and not {wanted.revision}")
        await adapter.fetch_adapter(source, manifest, work, settings.max_bytes)


async def _from_cache(
    wanted: AdapterWanted, work: Path, settings: AdapterSettings, credentials: StoreCredentials, cache: Path
) -> None:
    uri, commit = pinned_commit(wanted.uri)
    request = FetchRequest(
        uri=uri,
        revision=commit,
        manifest=wanted.revision,
        files=adapter.FILES,
        credentials=dict(credentials.values),
        credentials_given=credentials.given,
    )
    try:
        done = await cacheclient.fetch(cache, request, lambda _: None, timeout=CACHE_TIMEOUT_SECONDS)
    except ArtifactError as error:
        if error.reason == reasons.SOURCE_CHANGED:
            what = "its manifest is another one" + (", or its commit is gone" if commit is not None else "")
            raise _changed(wanted, what) from error
        raise
    # Copied: the cache evicts models that no pod holds, but an engine may read the files again at any time.
    await in_thread(lambda: adapter.copy_adapter(cache / done.path, work, settings.max_bytes, shown(wanted.uri)))


def _checked(wanted: AdapterWanted, folder: Path, settings: AdapterSettings, rules: AdapterRules) -> AdapterFacts:
    facts = adapter.read_folder(folder, shown(wanted.uri), wanted.revision)
    limits, base = of_settings(settings, rules)
    if (problem := check_adapter(facts, limits, base)) is not None:
        raise ArtifactError(problem.reason, problem.message)
    return facts


def _finish(
    wanted: AdapterWanted, work: Path, folder: Path, settings: AdapterSettings, rules: AdapterRules
) -> AdapterFacts:
    facts = _checked(wanted, work, settings, rules)
    folders.sync(work)
    os.rename(work, folder)
    return facts


def _changed(wanted: AdapterWanted, difference: str) -> ArtifactError:
    return ArtifactError(
        reasons.SOURCE_CHANGED,
        f"{shown(wanted.uri)} is not what it was when it was read: {difference}. Publish another version under another "
        "address, and name that in spec.source.uri",
    )
