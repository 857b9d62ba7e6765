"""Shares of namespaces in the node cache: what is refused in one namespace keeps no other from its own."""

import asyncio
from typing import Any, cast

import pytest

from shoal.api.meta import JsonObject
from shoal.controllers.cachevolumes import RECHECK_SECONDS, SHARES, CacheVolumesController
from shoal.controllers.world import World
from shoal.kube.errors import from_status
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import Resource
from shoal.manifests import cache
from tests.support.operators import CONFIG, NAMESPACE, model

CONFIGURED = CONFIG.model_copy(update={"cache": CONFIG.cache.model_copy(update={"enabled": True})})
REFUSAL = from_status(403, {"message": "a policy wants claims to stay", "reason": "Forbidden"})


class Cluster:
    """An API server that refuses some calls."""

    def __init__(self, *refused: tuple[str, str]) -> None:
        self.refused = refused
        self.done: list[tuple[str, str, str]] = []
        """Verb, plural, and namespace or name."""

    async def delete(self, resource: Resource, name: str, namespace: str | None, *, uid: str) -> None:
        self._do("delete", resource, namespace or name)

    async def merge_patch(self, resource: Resource, name: str, namespace: str | None, *_: Any, **__: Any) -> None:
        self._do("patch", resource, namespace or name)

    async def apply(self, resource: Resource, obj: JsonObject, *, manager: str) -> JsonObject:
        metadata = obj["metadata"]
        self._do("apply", resource, metadata.get("namespace") or metadata["name"])
        return stored(obj)

    def _do(self, verb: str, resource: Resource, of: str) -> None:
        if (verb, resource.plural) in self.refused:
            raise REFUSAL
        self.done.append((verb, resource.plural, of))


def stored(obj: JsonObject, **status: Any) -> JsonObject:
    metadata = obj["metadata"]
    uid = f"{metadata.get('namespace', '')}-{metadata['name']}"
    return obj | {"metadata": metadata | {"uid": uid, "resourceVersion": "1"}, "status": status}


@pytest.mark.parametrize(
    "refused",
    [("delete", "persistentvolumeclaims"), ("delete", "persistentvolumes"), ("patch", "persistentvolumes")],
    ids=["a claim stays", "a volume stays", "a volume is not released"],
)
def test_what_cannot_go_keeps_no_other_namespace_from_its_share(refused: tuple[str, str]) -> None:
    cluster = Cluster(refused)
    world = World(cast("Any", cluster), CONFIGURED, NAMESPACE, cast("Any", None))
    config = CONFIGURED.cache
    # Shares that are not wanted any more: of one the claim is there, of the other only the volume is left.
    world.cache_volumes.upsert(stored(cache.volume("old", config), phase="Bound"))
    world.cache_claims.upsert(stored(cache.claim("old", config), phase="Bound"))
    world.cache_volumes.upsert(stored(cache.volume("older", config), phase="Available"))
    # One that is wanted, and whose volume names a claim that is gone.
    released = cache.volume("back", config)
    claimed = released["spec"]["claimRef"] | {"uid": "gone"}
    world.cache_volumes.upsert(stored(released | {"spec": released["spec"] | {"claimRef": claimed}}, phase="Released"))
    for namespace in ("back", "new"):
        made = model("chat", namespace, source={"uri": "hf://org/model"})
        world.models.upsert(made | {"metadata": made["metadata"] | {"uid": namespace, "resourceVersion": "1"}})
    controller = CacheVolumesController(world, WorkQueue("cache-volumes", workers=1))
    assert asyncio.run(controller.reconcile(SHARES)) == RECHECK_SECONDS
    assert ("apply", "persistentvolumeclaims", "new") in cluster.done
    possible = {("delete", "persistentvolumeclaims"), ("delete", "persistentvolumes"), ("patch", "persistentvolumes")}
    assert possible - {refused} <= {call[:2] for call in cluster.done}
