"""Labels of namespaces, watched only while some pool chooses namespaces by them."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.controllers.world import World
from shoal.kube.projections import Custom
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import NAMESPACES


class Namespaces:
    """`labels` returns those of one namespace, None while they are not known. `changed` is called with a namespace
    whose labels changed, or "" when any may have changed."""

    def __init__(self, world: World, changed: Callable[[str], None]) -> None:
        self._world, self._changed = world, changed
        self._labels: dict[str, Mapping[str, str]] = {}
        self._synced = False
        self._needed = asyncio.Event()

    def labels(self, namespace: str) -> Mapping[str, str] | None:
        """One that does not exist has none: its objects are going too."""
        return self._labels.get(namespace, {}) if self._synced else None

    def on_pool(self, _key: str, before: Custom[LoRAPool] | None, after: Custom[LoRAPool] | None) -> None:
        if after is not None and _selects(after):
            self._needed.set()

    async def run(self) -> None:
        """Watches from the first pool on that needs it, until cancelled."""
        if any(_selects(custom) for custom in self._world.pools.values()):
            self._needed.set()
        await self._needed.wait()
        reflector = Reflector(self._world.client, NAMESPACES, project=_slim, on_event=self._event)
        watching = asyncio.create_task(reflector.run(), name="namespaces")
        try:
            await reflector.synced.wait()
            self._synced = True
            self._changed("")
            await watching
        finally:
            self._synced = False
            self._labels.clear()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    def _event(self, kind: ReflectorEvent, namespace: Any) -> None:
        name, labels = namespace
        before = self._labels.get(name)
        if kind == "delete":
            self._labels.pop(name, None)
        else:
            self._labels[name] = labels
        if self._synced and self._labels.get(name) != before:
            self._changed(name)


def _slim(raw: JsonObject) -> tuple[str, Mapping[str, str]]:
    metadata = raw["metadata"]
    return metadata["name"], metadata.get("labels") or {}


def _selects(custom: Custom[LoRAPool]) -> bool:
    return custom.object is not None and custom.object.spec.allowed_namespaces.from_ == "Selector"
