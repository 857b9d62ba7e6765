"""The engine pods that have proved that they are replicas, as a reflector keeps them: for gateways and the ledger.

Besides the pods it watches ReplicaSets and Deployments with Shoal's labels, of these the metadata only.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from shoal.api.meta import JsonObject
from shoal.core import ownership
from shoal.core.ownership import Link
from shoal.kube.client import KubeClient
from shoal.kube.ownership import ENGINES, Ownership
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import DEPLOYMENTS, PODS, REPLICASETS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Observed(Generic[T]):
    link: Link
    value: T


class EnginePods(Generic[T]):
    """`project` is as for a reflector. `on_event` is called for proven pods only. The caller reports Models to
    `ownership`."""

    def __init__(
        self,
        client: KubeClient,
        *,
        project: Callable[[JsonObject], T | None],
        on_event: Callable[[ReflectorEvent, T], None],
    ) -> None:
        self.ownership = Ownership()
        self.ownership.proved.append(self._proved)
        self._project, self._on_event = project, on_event
        self._objects: dict[str, T] = {}
        self._unproven: dict[str, _Observed[T]] = {}
        """Not proven yet."""
        self._pods = Reflector(client, PODS, label_selector=ENGINES, project=self._see, on_event=self._pod)
        self._owners = (
            Reflector(
                client,
                REPLICASETS,
                label_selector=ENGINES,
                project=ownership.link,
                on_event=self._replica_set,
                metadata_only=True,
            ),
            Reflector(
                client,
                DEPLOYMENTS,
                label_selector=ENGINES,
                project=ownership.link,
                on_event=self._deployment,
                metadata_only=True,
            ),
        )
        self.synced = asyncio.Event()
        """Set when each list was read once; stays set."""

    @property
    def objects(self) -> Mapping[str, T]:
        """Proven pods by `namespace/name`. A live view."""
        return MappingProxyType(self._objects)

    @property
    def connected(self) -> bool:
        return self._pods.connected

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in (self._pods, *self._owners):
                tasks.create_task(reflector.run())
            for reflector in (self._pods, *self._owners):
                await reflector.synced.wait()
            self.synced.set()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _see(self, raw: JsonObject) -> _Observed[T] | None:
        value = self._project(raw)
        return None if value is None else _Observed(ownership.link(raw), value)

    def _pod(self, kind: ReflectorEvent, seen: _Observed[T]) -> None:
        link = seen.link
        if kind == "delete":
            self.ownership.forget(link.uid)
            self._unproven.pop(link.key, None)
            self._remove(link.key)
        elif self.ownership.pod(link):
            self._unproven.pop(link.key, None)
            self._put(seen)
        else:
            self._unproven[link.key] = seen
            self._remove(link.key)

    def _proved(self, link: Link) -> None:
        seen = self._unproven.get(link.key)
        if seen is not None and seen.link.uid == link.uid:
            del self._unproven[link.key]
            self._put(seen)

    def _put(self, seen: _Observed[T]) -> None:
        self._objects[seen.link.key] = seen.value
        self._on_event("upsert", seen.value)

    def _remove(self, key: str) -> None:
        if key in self._objects:
            self._on_event("delete", self._objects.pop(key))

    def _replica_set(self, kind: ReflectorEvent, link: Link) -> None:
        if kind == "delete":
            self.ownership.replica_set_gone(link.uid)
        else:
            self.ownership.replica_set(link)

    def _deployment(self, kind: ReflectorEvent, link: Link) -> None:
        if kind == "delete":
            self.ownership.deployment_gone(link.uid)
        else:
            self.ownership.deployment(link)
