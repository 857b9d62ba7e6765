"""Follows the cache's PersistentVolumes: each stands for a namespace, whose folder is created here.

A kubelet does not create the path of a `local` volume: the namespace's pods wait for the folder.
"""

import asyncio
import re
import time
from typing import Final

import structlog

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cache.disk import CacheDisk
from shoal.cache.index import Index
from shoal.cache.server import CacheServer
from shoal.core.cachevolumes import Share
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import PERSISTENTVOLUMES
from shoal.manifests.cache import volume_name

POLL_SECONDS: Final = 5.0
_NAMESPACE: Final = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")

log = structlog.get_logger()


def namespace_of(volume: JsonObject) -> str | None:
    """Namespace of a PersistentVolume; None: it is not one of the cache's."""
    claim: JsonObject = volume["spec"].get("claimRef") or {}
    namespace = str(claim.get("namespace", ""))
    own = volume["metadata"]["name"] == volume_name(Share(namespace, str(claim.get("name", ""))))
    return namespace if own and _NAMESPACE.fullmatch(namespace) else None


class NamespaceVolumes:
    """Serves every namespace with a volume, and, until volumes are listed, every namespace with a folder of an earlier
    run."""

    def __init__(self, client: KubeClient, disk: CacheDisk, index: Index, server: CacheServer, grace: float) -> None:
        self._disk = disk
        self._index = index
        self._server = server
        self._grace = grace
        self._changed = asyncio.Event()
        self._gone: dict[str, float] = {}
        """Namespace without a volume -> monotonic time at which the volume disappeared."""
        self._reflector = Reflector(
            client,
            PERSISTENTVOLUMES,
            label_selector=f"{names.LABEL_COMPONENT}={names.COMPONENT_CACHE}",
            project=namespace_of,
            on_event=self._on_event,
        )

    @property
    def synced(self) -> bool:
        return self._reflector.synced.is_set()

    def _on_event(self, event: ReflectorEvent, value: object) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled. Raises FileNotFoundError when the cache's folder was emptied."""
        for namespace in await asyncio.to_thread(self._disk.namespaces):
            await self._serve(namespace)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reflector.run())
            await self._reflector.synced.wait()
            while True:
                self._changed.clear()
                await self._settle(set(self._reflector.objects.values()))
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _settle(self, wanted: set[str]) -> None:
        if lost := await asyncio.to_thread(self._server.lost):
            # Only a new process is sure to know what is there: of the models, the free space and the sockets.
            log.error("cache.folder_emptied", namespaces=lost, consequence="the daemon restarts with what is there")
            raise FileNotFoundError(f"the cache's folder was emptied: the sockets of {', '.join(lost)} are gone")
        for namespace in sorted(wanted - self._server.namespaces):
            await self._serve(namespace)
        now = time.monotonic()
        unwanted = self._server.namespaces - wanted
        self._gone = {namespace: self._gone.get(namespace, now) for namespace in unwanted}
        for namespace, since in list(self._gone.items()):
            # A recreated volume appears within moments, and a terminating pod may still read.
            if now - since >= self._grace and not self._index.held_in(namespace):
                await self._server.remove(namespace)

    async def _serve(self, namespace: str) -> None:
        try:
            await self._server.add(namespace)
        except OSError as error:
            log.error("cache.namespace_not_served", namespace=namespace, problem=str(error))
