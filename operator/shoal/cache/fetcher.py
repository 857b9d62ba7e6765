"""Fetches each model into the cache once, however many pods request it, and links it into the folder of each permitted
namespace."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import structlog
from prometheus_client import Counter

from shoal.api import reasons
from shoal.api.cache import CACHED_SCHEMES, LINE_SECONDS, FetchDone, FetchLine, FetchRequest
from shoal.api.sources import shown
from shoal.artifacts import ArtifactError, ArtifactSource, Manifest, Settings, StoreCredentials, open_source
from shoal.artifacts.errors import of_os_error
from shoal.cache.disk import CacheDisk, CachedModel
from shoal.cache.diskquota import ADVICE, DiskQuota
from shoal.cache.index import Index
from shoal.cache.sharedfetches import FetchProgress, SharedFetches

ATTEMPTS: Final = 3
"""Attempts: when a fetch with another pod's credentials fails, it is started again with the own ones."""

log = structlog.get_logger()
FETCHES = Counter("shoal_cache_fetches", "Answered requests of stage containers.", ["result"])


class OpenSource(Protocol):
    """`artifacts.open_source`, or a test's."""

    def __call__(
        self, uri: str, credentials: StoreCredentials, settings: Settings, *, revision: str | None = None
    ) -> ArtifactSource: ...


OnProgress = Callable[[FetchLine], Awaitable[None]]
_WAITING: Final = FetchLine(state="waiting")


@dataclass(slots=True)
class _RunningFetch:
    """A running fetch, and the number of its waiters."""

    key: str
    task: asyncio.Task[CachedModel]
    progress: FetchProgress
    waiters: int = 0


class _Abandoned(ConnectionResetError):
    """The fetch was cancelled because its earlier waiters left, or because the cache stops."""


class Fetcher:
    """`fetch` serves a request of a stage container. Use it as an async context manager: leaving it cancels all
    fetches."""

    def __init__(
        self, disk: CacheDisk, index: Index, quota: DiskQuota, settings: Settings, open_source: OpenSource = open_source
    ) -> None:
        self._disk = disk
        self._index = index
        self._quota = quota
        self._settings = replace(settings, disk_advice=ADVICE)
        self._open = open_source
        self._fetches = SharedFetches(disk, index, quota)
        self._running: dict[str, _RunningFetch] = {}

    async def __aenter__(self) -> "Fetcher":
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def under_way(self) -> int:
        """Number of running fetches."""
        return len(self._running)

    async def fetch(self, namespace: str, request: FetchRequest, on_progress: OnProgress) -> FetchDone:
        """Fetches the model into the namespace's folder. `on_progress` is called at least every `LINE_SECONDS`.

        Raises ArtifactError, and what `on_progress` raises. A model that another namespace fetched is linked only after
        the source itself has accepted these credentials.
        """
        try:
            done = await self._fetch(namespace, request, on_progress)
        except ArtifactError:
            FETCHES.labels("failed").inc()
            raise
        except ConnectionError:  # of `on_progress`
            raise
        except OSError as error:
            FETCHES.labels("failed").inc()
            raise of_os_error(error, f"keeping {shown(request.uri)} in the node cache", ADVICE) from error
        except Exception as error:
            # Without an answer, the pod repeats its request without end, and its status has no reason.
            FETCHES.labels("failed").inc()
            log.exception("cache.fetch_broke", namespace=namespace)
            text = f"{shown(request.uri)} cannot be fetched: {type(error).__name__}"
            raise ArtifactError(reasons.SOURCE_UNREACHABLE, text) from error
        FETCHES.labels("fetched" if done.fetched_bytes else "hit").inc()
        log.info("cache.given", namespace=namespace, model=done.model, fetched_bytes=done.fetched_bytes)
        return done

    async def _fetch(self, namespace: str, request: FetchRequest, on_progress: OnProgress) -> FetchDone:
        if request.uri.partition("://")[0] not in CACHED_SCHEMES:
            raise ArtifactError(reasons.SOURCE_INVALID, f"{shown(request.uri)} is not a source that is cached")
        if (done := await self._already_linked(namespace, request)) is not None:
            return done
        await on_progress(_WAITING)
        for attempt in range(1, ATTEMPTS + 1):
            running, began = await self._join_or_start(request, on_progress)
            with self._index.pin(running.key):
                try:
                    model = await self._wait(running, on_progress)
                except (ArtifactError, OSError) as error:
                    ours = isinstance(error, ConnectionError) and not isinstance(error, _Abandoned)
                    if began or attempt == ATTEMPTS or ours:
                        raise
                    log.info("cache.begun_again", model=running.key, problem=str(error))
                    continue
                with self._index.pin(model.key):
                    await self._link(namespace, model)
            return _done(model, running.progress.fetched if began else 0)
        raise AssertionError("unreachable")

    async def _already_linked(self, namespace: str, request: FetchRequest) -> FetchDone | None:
        """The model if this namespace already has it: its pods can read it anyway, so the source is not contacted."""
        if request.manifest is None:
            return None
        # A request for some of the files has another manifest: the digest of the whole one is then part of the address.
        model = self._index.led_to(_address(request), None if request.files else request.manifest)
        if model is None:
            return None
        with self._index.pin(model.key):
            if not await asyncio.to_thread(self._disk.is_linked, namespace, model):
                return None
            if await asyncio.to_thread(self._disk.damaged, model.files):
                return None
            await asyncio.to_thread(self._disk.touch, model.key)
        return _done(model, 0)

    async def _join_or_start(self, request: FetchRequest, on_progress: OnProgress) -> tuple[_RunningFetch, bool]:
        """The fetch of the requested model, and whether it was started for this request.

        In either case the source is asked for its manifest, and whether these credentials may read it.
        """
        async with AsyncExitStack() as stack:
            asking = asyncio.create_task(self._open_source(stack, request))
            try:
                await _follow(asking, lambda: _WAITING, on_progress)
                source, manifest = asking.result()
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            key = key_of(manifest)
            if (running := self._running.get(key)) is not None:
                return running, False
            running = self._begin(key, request, source, manifest, stack.pop_all())
            return running, True

    async def _open_source(self, stack: AsyncExitStack, request: FetchRequest) -> tuple[ArtifactSource, Manifest]:
        credentials = StoreCredentials(
            request.credentials,
            given=request.credentials_given or bool(request.credentials),
            identity=request.credentials_identity,
        )
        source = await stack.enter_async_context(
            self._open(request.uri, credentials, self._settings, revision=request.revision)
        )
        manifest = await source.manifest()
        if request.manifest is not None and manifest.digest != request.manifest:
            raise ArtifactError(
                reasons.SOURCE_CHANGED,
                f"{manifest.source} is not what it was when the Model's facts were read (its manifest is "
                f"{manifest.digest}, not {request.manifest}): name a source that does not change, or make the Model "
                "anew to take what is there now",
            )
        manifest = _only(manifest, request.files)
        await source.authorise(manifest)
        return source, manifest

    def _begin(
        self, key: str, request: FetchRequest, source: ArtifactSource, manifest: Manifest, stack: AsyncExitStack
    ) -> _RunningFetch:
        progress = FetchProgress(manifest.total_bytes)

        async def fetch() -> CachedModel:
            async with stack:
                return await self._fetches.fetch(key, _address(request), source, manifest, progress)

        running = _RunningFetch(key, asyncio.create_task(fetch(), name=f"fetch {key}"), progress)
        self._running[key] = running
        running.task.add_done_callback(lambda _: self._running.pop(key, None))
        return running

    @staticmethod
    async def _wait(running: _RunningFetch, on_progress: OnProgress) -> CachedModel:
        running.waiters += 1
        try:
            await _follow(running.task, running.progress.line, on_progress)
            if running.task.cancelled():
                raise _Abandoned("cancelled without waiters")
            return running.task.result()
        finally:
            running.waiters -= 1
            if running.waiters == 0 and not running.task.done():
                running.task.cancel()  # there is no waiter any more; the part stays for the next request
                await asyncio.gather(running.task, return_exceptions=True)

    async def _link(self, namespace: str, model: CachedModel) -> None:
        async with self._quota.lock:
            if not await asyncio.to_thread(self._disk.is_linked, namespace, model):
                await asyncio.to_thread(self._disk.link, namespace, model)
        await asyncio.to_thread(self._disk.touch, model.key)


async def _follow(task: asyncio.Task[Any], line: Callable[[], FetchLine], on_progress: OnProgress) -> None:
    """Reports progress until the task has ended, with or without an error."""
    while True:
        await asyncio.wait({task}, timeout=LINE_SECONDS / 2)
        if task.done():
            return
        await on_progress(line())


def key_of(manifest: Manifest) -> str:
    """Key of a model: its origin and its manifest."""
    return _hash(f"{manifest.origin}\n{manifest.digest}")[:40]


def _address(request: FetchRequest) -> str:
    """Address under which a namespace finds its earlier requests."""
    if not request.files:
        return _hash(request.uri)
    return _hash("\n".join((request.uri, request.manifest or "", *request.files)))


def _only(manifest: Manifest, names: tuple[str, ...]) -> Manifest:
    if not names or manifest.archive:
        return manifest
    files = tuple(file for file in manifest.files if file.name in names)
    if not files:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{manifest.source} has none of {', '.join(names)}")
    return replace(manifest, files=files)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _done(model: CachedModel, fetched: int) -> FetchDone:
    return FetchDone(
        model=model.key,
        path=f"models/{model.key}",
        bytes=model.bytes,
        fetched_bytes=fetched,
        revision=model.revision,
        digest=model.digest,
    )
