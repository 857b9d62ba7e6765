"""The namespaces' shares in the node cache: a PersistentVolume and a claim each, as long as they are used."""

import contextlib
from collections.abc import Awaitable, Iterator
from typing import Final

import structlog

from shoal.api import names
from shoal.api.cache import CACHED_SCHEMES
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.cachevolumes import CacheVolumes, Share, decide
from shoal.kube.cacheshares import CacheClaim, CacheVolume
from shoal.kube.errors import Forbidden, NotFound, ObjectInvalid
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import PERSISTENTVOLUMECLAIMS, PERSISTENTVOLUMES, Resource
from shoal.kube.store import AnyTable
from shoal.manifests import cache

log = structlog.get_logger()

SHARES: Final = "shares"
"""The one key of the queue: all namespaces are looked at together."""
RECHECK_SECONDS: Final = 30.0


class CacheVolumesController:
    def __init__(self, world: World, queue: WorkQueue) -> None:
        self._world, self.queue = world, queue

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if _cached(before) != _cached(after):
            self.queue.add(SHARES)

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if (before.cache_claim if before else None) != (after.cache_claim if after else None):
            self.queue.add(SHARES)

    def on_share(self, _key: str, before: object, after: object) -> None:
        self.queue.add(SHARES)

    def enqueue_all(self) -> None:
        self.queue.add(SHARES)

    async def reconcile(self, _key: str) -> float | None:
        """Returns seconds after which to look again, or None."""
        world = self._world
        volumes = {v.share: v for v in world.cache_volumes.values()}
        claims = {c.share: c for c in world.cache_claims.values()}
        found = decide(
            self._wanted(),
            {Share(p.namespace, p.cache_claim) for p in world.pods.values() if p.cache_claim and not p.finished},
            {share: v.seen for share, v in volumes.items()},
            {share: c.seen for share, c in claims.items()},
        )
        try:
            await self._carry_out(found, volumes, claims)
        except (Forbidden, ObjectInvalid) as error:  # a namespace that ends, a policy: the others are not to wait
            log.warning("a share in the node cache is refused", error=error.message)
            return RECHECK_SECONDS
        return None

    def _wanted(self) -> set[Share]:
        config = self._world.config.cache
        if not config.enabled:
            return set()
        return {cache.share(ns, config) for custom in self._world.models.values() if (ns := _cached(custom))}

    async def _carry_out(
        self, found: CacheVolumes, volumes: dict[Share, CacheVolume], claims: dict[Share, CacheClaim]
    ) -> None:
        """Raises Forbidden and ObjectInvalid once all is done that is not refused."""
        refused: Forbidden | ObjectInvalid | None = None
        for step in self._steps(found, volumes, claims):
            try:
                await step
            except (Forbidden, ObjectInvalid) as error:
                refused = error
        if refused is not None:
            raise refused

    def _steps(
        self, found: CacheVolumes, volumes: dict[Share, CacheVolume], claims: dict[Share, CacheClaim]
    ) -> Iterator[Awaitable[object]]:
        """One after the other, each of one share."""
        client = self._world.client
        for share in found.remove_claim:
            yield self._delete(PERSISTENTVOLUMECLAIMS, share.claim, share.namespace, claims[share].seen.uid)
        for share in found.remove_volume:
            yield self._delete(PERSISTENTVOLUMES, volumes[share].name, None, volumes[share].uid)
        for share in found.release:
            yield client.merge_patch(
                PERSISTENTVOLUMES, volumes[share].name, None, cache.RELEASE, manager=names.MANAGER_MODEL
            )
        for share in found.keep:
            yield self._keep(share, volume=share not in volumes, claim=share not in claims)

    async def _keep(self, share: Share, *, volume: bool, claim: bool) -> None:
        """Applies what is missing of a share."""
        config = self._world.config.cache
        if volume:
            await self._apply(PERSISTENTVOLUMES, cache.volume(share.namespace, config))
        if claim:
            await self._apply(PERSISTENTVOLUMECLAIMS, cache.claim(share.namespace, config))

    async def _apply(self, resource: Resource, body: JsonObject) -> None:
        table = self._table(resource)
        since = table.mark()
        table.upsert(await self._world.client.apply(resource, body, manager=names.MANAGER_MODEL), since=since)

    async def _delete(self, resource: Resource, name: str, namespace: str | None, uid: str) -> None:
        with contextlib.suppress(NotFound):
            await self._world.client.delete(resource, name, namespace, uid=uid)
        self._table(resource).remove(f"{namespace}/{name}" if namespace else name, uid)

    def _table(self, resource: Resource) -> AnyTable:
        return self._world.cache_volumes if resource is PERSISTENTVOLUMES else self._world.cache_claims


def _cached(custom: Custom[Model] | None) -> str | None:
    """The Model's namespace, if the node cache fetches its weights."""
    if custom is None or custom.object is None or custom.metadata.deletion_timestamp is not None:
        return None
    scheme = custom.object.spec.source.uri.partition("://")[0]
    return custom.metadata.namespace if scheme in CACHED_SCHEMES else None
