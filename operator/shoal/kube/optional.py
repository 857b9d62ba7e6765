"""Kinds that a cluster may lack: another project's CustomResourceDefinitions may be absent, be installed later, or be
removed.

An absent kind is no fault: nothing waits for it, nothing is unready, and the API server is asked at a slow pace.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import Resource
from shoal.kube.resync import object_key
from shoal.kube.store import AnyTable

log = structlog.get_logger()

SLOW_SECONDS: Final = 300.0
"""Between two looks for a group that nobody needs."""
SOON_SECONDS: Final = 15.0
"""The same for a kind that is needed."""
RETRY_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 5.0
"""How often it is seen that a kind has gone, or come back."""


@dataclass(frozen=True, slots=True)
class OptionalKind:
    """One kind to watch into a table, once its group is served."""

    resource: Resource
    table: AnyTable
    label_selector: str | None = None
    slim: Callable[[JsonObject], JsonObject | None] | None = None
    """What is kept of an object before the table sees it."""
    with_need: bool = False
    """Watched only once it is needed."""


class OptionalKinds:
    """Feeds tables. `run` until cancelled; `known` is set once it is known what there is."""

    def __init__(self, client: KubeClient, resource: Resource, kinds: list[OptionalKind]) -> None:
        """`resource`: the kind whose absence means that all of it is absent."""
        self._client, self._resource, self._kinds = client, resource, kinds
        self.installed: bool | None = None
        """None: the API server has not been asked yet."""
        self.known = asyncio.Event()
        self.changed: list[Callable[[], None]] = []
        """Called when `installed` changes."""
        self._need = asyncio.Event()
        self._needed = asyncio.Event()
        """Set once the kinds are watched that wait for need."""
        self._later_reflectors: list[Reflector] = []

    @property
    def complete(self) -> bool:
        """All kinds are listed, also those that are watched for need."""
        late = self._later_reflectors
        return bool(self.installed) and bool(late) and all(r.synced.is_set() for r in late)

    def need(self) -> None:
        """Marks these kinds as needed, from now on."""
        self._need.set()

    async def listed(self) -> None:
        """Returns when all kinds that are needed are listed, or when it is known that they are absent."""
        await self.known.wait()
        if not self.installed:
            return
        await self._needed.wait()
        for reflector in self._later_reflectors:
            await reflector.synced.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not await self._served():
                self._set_installed(False)
                self.known.set()
                await self._pause()
            reflectors = [self._reflect(kind) for kind in self._kinds if not kind.with_need]
            tasks = [group.create_task(r.run()) for r in reflectors]
            group.create_task(self._later(group))
            while tasks:
                if all(r.synced.is_set() or r.missing for r in reflectors):
                    gone = any(r.missing for r in reflectors)
                    if gone and self.installed:
                        for kind in self._kinds:
                            kind.table.absent(set(), since=kind.table.mark())
                    self._set_installed(not gone)
                    self.known.set()
                await asyncio.sleep(CHECK_SECONDS if self.known.is_set() else 0.05)

    async def _later(self, group: asyncio.TaskGroup) -> None:
        await self._need.wait()
        self._later_reflectors = [self._reflect(kind) for kind in self._kinds if kind.with_need]
        for reflector in self._later_reflectors:
            group.create_task(reflector.run())
        self._needed.set()

    def _reflect(self, kind: OptionalKind) -> Reflector:
        table = kind.table

        def heard(event: ReflectorEvent, obj: JsonObject) -> None:
            if event == "delete":
                table.remove(object_key(obj), str(obj["metadata"].get("uid", "")))
            else:
                table.upsert(obj)

        return Reflector(
            self._client, kind.resource, label_selector=kind.label_selector, project=kind.slim, on_event=heard
        )

    async def _served(self) -> bool:
        while True:
            try:
                return self._resource.plural in await self._client.discover(
                    self._resource.group, self._resource.version
                )
            except KubeError as error:
                log.warning("waiting for the API server", error=error.message)
                await asyncio.sleep(RETRY_SECONDS)

    async def _pause(self) -> None:
        """Waits for the next check. A call of `need` shortens the wait."""
        if not self._need.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SLOW_SECONDS):
                    await self._need.wait()
            return
        await asyncio.sleep(SOON_SECONDS)

    def _set_installed(self, installed: bool) -> None:
        if installed != self.installed:
            self.installed = installed
            log.info("optional kinds", group=self._resource.group, installed=installed)
            for listener in self.changed:
                listener()
