"""One child of a Model: applied where it differs from what stands, and never over an object that is not the Model's."""

import hashlib
from collections import OrderedDict
from typing import Final

import orjson

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.world import World
from shoal.kube.drift import covers
from shoal.kube.errors import Conflict, NotFound
from shoal.kube.projections import Child
from shoal.kube.resources import MODELS, Resource
from shoal.kube.store import Table
from shoal.manifests.shape import Named

_REMEMBERED: Final = 20_000


class NameTaken(Exception):
    """An object of the name that Shoal needs exists and is not this Model's."""


class Children:
    """Server-side apply of whole objects as `shoal-model`, compared with the store first."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._applied: OrderedDict[str, str] = OrderedDict()
        """Child's uid -> digest of what was last sent and of what stood there afterwards. Should the API server ever
        store something in another way than it was sent, it is sent once, not for ever."""

    async def ensure(self, resource: Resource, table: Table[Child], model: Model, wanted: JsonObject) -> None:
        """Raises NameTaken, KubeError."""
        metadata = wanted["metadata"]
        live = table.get(f"{metadata['namespace']}/{metadata['name']}")
        if live is not None and live.model_uid != model.metadata.uid:
            check_owner(resource, model, live.decode())
        compared = _without_version(wanted)
        if live is None:
            await self.is_free(resource, model, wanted)
        elif covers(live.decode(), compared) or self._applied.get(live.uid) == _digest(compared, live):
            return
        since = table.mark()
        answer = await self._world.client.apply(resource, wanted, manager=names.MANAGER_MODEL)
        table.upsert(answer, since=since)
        stored = table.get(f"{metadata['namespace']}/{metadata['name']}")
        if stored is not None:
            self._applied[stored.uid] = _digest(compared, stored)
            while len(self._applied) > _REMEMBERED:
                self._applied.popitem(last=False)

    async def is_free(self, resource: Resource, model: Model, wanted: JsonObject) -> bool:
        """True when no object has the name; False when this Model's own does. Raises NameTaken, and Conflict where it
        is a former Model's."""
        metadata = wanted["metadata"]
        try:
            found = await self._world.client.get_metadata(resource, metadata["name"], metadata["namespace"])
        except NotFound:
            return True
        check_owner(resource, model, found)
        return False

    async def delete(self, resource: Resource, table: Table[Child], child: Child) -> None:
        await self._world.client.delete(resource, child.name, child.namespace, uid=child.uid)
        table.remove(child.key, child.uid)


def check_owner(resource: Resource, model: Named, found: JsonObject) -> None:
    """Raises NameTaken where an object is not this Model's, and Conflict where it is that of a former Model of the same
    name: such a one is deleted with its owner, in a moment."""
    reference = _owner(found)
    if reference.get("uid") == model.metadata.uid:
        return
    what = f"{resource.kind} {model.metadata.namespace}/{found['metadata']['name']}"
    if (reference.get("kind"), reference.get("name")) == (MODELS.kind, model.metadata.name):
        raise Conflict(f"{what} is still there of a former Model of this name")
    raise NameTaken(f"{what} exists and does not belong to this Model: rename or delete one of them")


def owner(found: JsonObject) -> str | None:
    return _owner(found).get("uid")


def _owner(found: JsonObject) -> JsonObject:
    """The reference to its controller; empty if it has none."""
    owners: list[JsonObject] = found["metadata"].get("ownerReferences") or []
    for each in owners:
        if each.get("controller"):
            return each
    return {}


def _without_version(wanted: JsonObject) -> JsonObject:
    return wanted | {"metadata": {k: v for k, v in wanted["metadata"].items() if k != "resourceVersion"}}


def _digest(wanted: JsonObject, stored: Child) -> str:
    return hashlib.sha256(orjson.dumps(wanted) + stored.raw).hexdigest()
