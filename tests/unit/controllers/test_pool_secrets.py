"""Secrets of a pool that come late: told while they are missing; what waited for them is read when they are there."""

from typing import Any, cast

from shoal.api import reasons
from shoal.api.lorapool import LoRAPool, LoRAPoolStatus
from shoal.api.meta import JsonObject
from shoal.controllers.lora.choices import Choices
from shoal.controllers.lora.pools import RECHECK_SECONDS, PoolController
from shoal.controllers.world import World
from shoal.core.status.conditions import find
from shoal.kube.errors import NotFound
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from tests.support.lora_fleet import pool
from tests.support.operators import CONFIG, model


class Api:
    def __init__(self) -> None:
        self.secrets: set[str] = set()

    async def get_metadata(self, _resource: object, name: str, _namespace: str) -> JsonObject:
        if name not in self.secrets:
            raise NotFound(name, status=404)
        return {}


class Pools(PoolController):
    """Keeps the status where the API server would."""

    def __init__(self, world: World) -> None:
        self.heard: list[str] = []
        super().__init__(world, Choices(world), self._mended, WorkQueue("t"))
        self.version = 1

    async def _mended(self, key: str) -> None:
        self.heard.append(key)

    async def _write(self, custom: Custom[LoRAPool], status: LoRAPoolStatus) -> None:
        self.version += 1
        self.declare(status)

    def declare(self, status: LoRAPoolStatus | None = None) -> None:
        credentials = [
            {"uriPrefix": f"s3://{name}/", "secretRef": {"name": f"{name}-read"}} for name in ("adapters", "others")
        ]
        body = pool("chat", credentials=credentials)
        body["metadata"] |= {"uid": "p", "resourceVersion": str(self.version)}
        told = {"status": status.model_dump(mode="json", by_alias=True, exclude_none=True)} if status else {}
        self._world.pools.upsert(body | told)

    @property
    def message(self) -> str:
        custom = self._world.pools.get("chat/pool")
        assert custom is not None
        assert custom.object is not None
        assert custom.object.status is not None
        ready = find(custom.object.status.conditions, reasons.READY)
        return f"{ready.reason}: {ready.message}" if ready is not None else ""


async def test_adapters_are_read_again_when_a_secret_comes_and_only_then() -> None:
    api = Api()
    world = World(cast("Any", api), CONFIG, "shoal-system", cast("Any", None))
    base = model("base", "chat")
    base["metadata"] |= {"uid": "m", "resourceVersion": "1"}
    world.models.upsert(base)
    pools = Pools(world)
    pools.declare()

    assert await pools.reconcile("chat/pool") == RECHECK_SECONDS
    assert await pools.reconcile("chat/pool") == RECHECK_SECONDS
    assert pools.message.startswith("SecretNotFound: spec.credentials: there is no Secret chat/adapters-read")
    assert pools.heard == []
    api.secrets.add("adapters-read")
    assert await pools.reconcile("chat/pool") == RECHECK_SECONDS
    assert pools.heard == ["chat/pool"], "of two that were missing one is there"
    assert "others-read" in pools.message
    api.secrets.add("others-read")
    assert await pools.reconcile("chat/pool") is None
    assert pools.heard == ["chat/pool"] * 2
    await pools.reconcile("chat/pool")
    assert pools.heard == ["chat/pool"] * 2
    assert not pools.message.startswith("SecretNotFound")
