"""Watches, through kopf: its handlers only hand on the events. The only importer of kopf.

Kopf runs in a thread and an event loop of its own, because it ends with its loop: it cancels every task made after its
start. When it gives up (a CRD was deleted, a watcher died) it is started again; the store keeps what it knows.
A paged list per kind, at the start and every few minutes, is what makes a kind synced, and finds missed deletions. So
does one soon after kopf was started: kopf lists for itself, later than the first list here or after a pause, and no
watch reports what was deleted before.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import kopf
import prometheus_client
import structlog

from shoal.api.meta import GROUP, VERSION, JsonObject
from shoal.kube import auth
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError
from shoal.kube.resources import Resource
from shoal.kube.resync import Backoff, EndlessBackoff, list_all, object_key
from shoal.kube.store import AnyTable

log = structlog.get_logger()

EVENTS = prometheus_client.Counter("shoal_watch_events", "Events received from watches.", ["resource"])
SYNCED = prometheus_client.Gauge("shoal_synced", "1 once all objects of the kind have been listed.", ["resource"])
RESYNCS = prometheus_client.Counter(
    "shoal_resyncs", "Complete lists, and deletions that were found only by a list.", ["outcome"]
)

RETRY_SECONDS: Final = 2.0
CRD_SECONDS: Final = 2.0
EXIT_SECONDS: Final = 1.0
BEGIN_SECONDS: Final = 20.0
"""After so long all watches have begun, and a list finds what was deleted before."""


@dataclass(frozen=True, slots=True)
class Watched:
    """One kind to watch into a table."""

    resource: Resource
    table: AnyTable
    label_selector: str | None = None


@dataclass(slots=True)
class Health:
    """What the probes read. Times are monotonic."""

    missing_kinds: frozenset[str] = frozenset()
    """Shoal's own kinds that the API server does not know."""
    synced: set[str] = field(default_factory=set[str])
    last_event: float = field(default_factory=time.monotonic)
    """Last event of a watch or complete list."""


class Watcher:
    """Feeds tables. `run` until cancelled; `synced` is set once every kind was listed."""

    def __init__(
        self, client: KubeClient, watched: list[Watched], *, credentials: Callable[[], Any], resync_seconds: float
    ):
        self._client = client
        self._watched = watched
        self._load_credentials = credentials
        self._resync_seconds = resync_seconds
        self.synced = asyncio.Event()
        self._begun = asyncio.Event()
        """Kopf was started since the last list."""
        self.resynced: list[Callable[[], None]] = []
        """Called after each round of lists, for comparisons of the whole world."""
        self.health = Health()

    async def run(self) -> None:
        await self._wait_for_kinds()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kopf())
            group.create_task(self._resync())

    # --- kinds that are not installed yet ---------------------------------------------------------------------------

    async def _wait_for_kinds(self) -> None:
        """Returns when the API server serves all of Shoal's kinds."""
        wanted = {w.resource.plural for w in self._watched if w.resource.group == GROUP}
        told: frozenset[str] = frozenset()
        while wanted:
            try:
                missing = frozenset(wanted - await self._client.discover(GROUP, VERSION))
            except KubeError as error:
                log.warning("waiting for the API server", error=error.message)
                await asyncio.sleep(CRD_SECONDS)
                continue
            self.health.missing_kinds = missing
            if not missing:
                return
            if missing != told:
                names = ", ".join(f"{plural}.{GROUP}" for plural in sorted(missing))
                log.warning("waiting for CustomResourceDefinitions; install the chart shoal-crds", missing=names)
                told = missing
            await asyncio.sleep(CRD_SECONDS)

    # --- lists ------------------------------------------------------------------------------------------------------

    async def _resync(self) -> None:
        while True:
            await self._list_all()
            self.health.last_event = time.monotonic()
            self.synced.set()
            for listener in self.resynced:
                listener()
            await self._until_next()

    async def _list_all(self) -> None:
        """Returns when every kind was listed. One that cannot be listed is tried again alone, for a right may be
        missing for long; the others are listed again when their time has come."""
        clock, backoff = asyncio.get_running_loop().time, Backoff()
        left, until = self._watched, clock() + self._resync_seconds
        while left := [w for w in left if not await self._list(w)]:
            await asyncio.sleep(backoff.delay())
            if self._begun.is_set():
                self._begun.clear()
                until = min(until, clock() + BEGIN_SECONDS)
            if clock() >= until:
                left, until = self._watched, clock() + self._resync_seconds

    async def _until_next(self) -> None:
        seconds = self._resync_seconds * random.uniform(0.9, 1.1)  # noqa: S311
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._begun.wait()
                await asyncio.sleep(BEGIN_SECONDS)
        self._begun.clear()

    async def _list(self, watched: Watched) -> bool:
        resource, table = watched.resource, watched.table
        since, seen = table.mark(), set[str]()

        def receive(items: Sequence[JsonObject]) -> None:
            for obj in items:
                table.upsert(obj, since=since)

        try:
            for space in self._client.spaces(resource):
                selector = watched.label_selector
                listed = await list_all(self._client, resource, receive, namespace=space, label_selector=selector)
                seen |= listed.keys
        except KubeError as error:
            if error.status == 404 and resource.group == GROUP:
                self.health.missing_kinds |= {resource.plural}
            log.warning("list failed; keeping the last state", resource=resource.plural, error=error.message)
            return False
        missed = table.absent(seen, since=since)
        self.health.missing_kinds -= {resource.plural}
        self.health.synced.add(resource.plural)
        SYNCED.labels(resource.plural).set(1)
        RESYNCS.labels("list").inc()
        RESYNCS.labels("missed deletion").inc(missed)
        return True

    # --- kopf -------------------------------------------------------------------------------------------------------

    def _event(self, watched: Watched, event: Mapping[str, Any]) -> None:
        """In our own loop, called from kopf's."""
        self.health.last_event = time.monotonic()
        EVENTS.labels(watched.resource.plural).inc()
        raw = cast("JsonObject", event["object"])
        if event.get("type") == "DELETED":
            watched.table.remove(object_key(raw), str(raw["metadata"].get("uid", "")))
        else:
            watched.table.upsert(raw)

    async def _kopf(self) -> None:
        loop = asyncio.get_running_loop()
        stop = threading.Event()
        while True:
            done: asyncio.Future[str] = loop.create_future()
            thread = threading.Thread(target=self._thread, args=(loop, stop, done), name="kopf", daemon=True)
            thread.start()
            self._begun.set()
            try:
                why = await asyncio.shield(done)
            except asyncio.CancelledError:
                stop.set()
                begun = time.monotonic()
                await asyncio.wait([done], timeout=EXIT_SECONDS)  # so that its streams are closed and not just cut
                log.debug("kopf stopped", seconds=round(time.monotonic() - begun, 1), ended=done.done())
                raise
            log.warning("the watches ended, starting them again", error=why)
            await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.0))  # noqa: S311
            await self._wait_for_kinds()

    def _thread(self, loop: asyncio.AbstractEventLoop, stop: threading.Event, done: asyncio.Future[str]) -> None:
        why = "kopf ended"
        try:
            asyncio.run(
                kopf.operator(
                    registry=self._registry(loop),
                    settings=_settings(self._watched),
                    clusterwide=not self._client.scope,
                    namespaces=self._client.scope,
                    # Named, since kopf would ask the system for a user's name, which a numeric user does not have.
                    identity="shoal",  # pyright: ignore[reportArgumentType] - a NewType that kopf does not export
                    stop_flag=stop,
                )
            )
        except Exception as error:
            why = str(error) or type(error).__name__
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(why))

    def _registry(self, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.ConnectionInfo:
            credentials: auth.ClusterCredentials = await self._load_credentials()
            return kopf.ConnectionInfo(
                server=credentials.server,
                ca_data=credentials.ca,
                insecure=credentials.insecure,
                scheme="Bearer" if credentials.token else None,
                token=credentials.token,
                certificate_data=credentials.certificate,
                private_key_data=credentials.key,
                default_namespace=credentials.namespace,
                proxy_url=credentials.proxy,
            )

        kopf.on.login(registry=registry, id="login")(login)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]

        def watch(watched: Watched) -> None:
            async def heard(event: Mapping[str, Any], **_: Any) -> None:
                loop.call_soon_threadsafe(self._event, watched, event)

            resource = watched.resource
            kopf.on.event(  # pyright: ignore[reportUnknownMemberType]
                resource.group, resource.version, resource.plural, registry=registry, id=f"watch-{resource.plural}"
            )(heard)  # pyright: ignore[reportArgumentType]

        for watched in self._watched:
            watch(watched)
        return registry


class _NoDiffs(kopf.DiffBaseStorage):
    """Nobody asks kopf what has changed: copying each object for the answer would be a sixth of its work."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast("kopf.BodyEssence", {})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


def _settings(watched: list[Watched]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    logging.getLogger("kopf").setLevel(logging.ERROR)  # it tells of every event it handled
    settings.posting.enabled = False  # we have a recorder of our own
    settings.posting.level = logging.CRITICAL
    settings.peering.standalone = True
    settings.scanning.disabled = True  # no watch of CRDs and namespaces: narrower RBAC, and no stray restarts
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = EndlessBackoff()  # pyright: ignore[reportAttributeAccessIssue]
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.chunk_size = 500
    # Never used: Shoal leaves no finalizer and no annotation of kopf's. Named all the same, should one ever appear.
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = _NoDiffs()
    for entry in watched:
        if entry.label_selector:
            resource = entry.resource
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = entry.label_selector
    return settings
