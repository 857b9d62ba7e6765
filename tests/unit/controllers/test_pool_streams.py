"""Where loads come from Prometheus: whose adapters are heard all the same."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.api.keys import InstallKey
from shoal.api.meta import API_VERSION, JsonObject
from shoal.controllers.installkey import InstallKeys
from shoal.controllers.scaling.signals import SignalStreams
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.net.stream import ListenerIdentity
from tests.support.signals import gateway_pod
from tests.unit.controllers.test_fleet_metrics import engine_pod
from tests.unit.controllers.test_scale_writes import Plane

POOL: JsonObject = {
    "apiVersion": API_VERSION,
    "kind": "LoRAPool",
    "metadata": {"name": "pool", "namespace": "ns", "uid": "pool", "resourceVersion": "1", "generation": 1},
    "spec": {"modelRef": {"name": "chat"}},
}


class Ring:
    """An install key that is known from the start."""

    def __init__(self) -> None:
        self.keys = InstallKeys(InstallKey(b"k" * 32))
        self.changed: list[Any] = []
        self.known = asyncio.Event()
        self.known.set()


class Heard:
    """Whom the operator listens to."""

    def __init__(self, streams: SignalStreams) -> None:
        self.replicas: set[str] = set()
        self.gateways: set[str] = set()
        streams.listener = cast("Any", self)

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def listen_to_replica(self, _model: str, peer: SimpleNamespace) -> None:
        self.replicas.add(peer.uid)

    def listen_to_gateway(self, peer: SimpleNamespace) -> None:
        self.gateways.add(peer.uid)

    def forget(self, uid: str) -> None:
        self.replicas.discard(uid)
        self.gateways.discard(uid)


@contextlib.asynccontextmanager
async def listening(*, pooled: bool) -> AsyncGenerator[tuple[World, Heard]]:
    """A replica of one Model and a gateway."""
    world = Plane().world
    streams = SignalStreams(world, cast("Any", Ring()), lambda *_: None, ListenerIdentity(), pooled=pooled)
    subscribe(world.pods, streams.on_pod)
    subscribe(world.pools, streams.on_pool)
    heard = Heard(streams)
    for raw, uid in ((engine_pod("a", ready=True), "a"), (gateway_pod(), "g")):
        raw["metadata"] |= {"uid": uid, "resourceVersion": "1"}
        world.pods.upsert({**raw, "status": {**raw.get("status", {}), "podIP": "10.0.0.1"}})
    task = asyncio.create_task(streams.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        yield world, heard
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_replicas_are_heard_from_when_their_model_has_a_pool_until_it_has_none() -> None:
    async with listening(pooled=True) as (world, heard):
        assert heard.replicas == set()
        assert heard.gateways == {"g"}
        world.pools.upsert(POOL)
        assert heard.replicas == {"a"}
        world.pools.remove("ns/pool")
        assert heard.replicas == set()
        assert heard.gateways == {"g"}


async def test_a_replica_that_comes_later_is_heard_too() -> None:
    async with listening(pooled=True) as (world, heard):
        world.pools.upsert(POOL)
        raw = engine_pod("b", ready=False)
        world.pods.upsert({**raw, "status": {**raw["status"], "podIP": "10.0.0.2"}})
        assert heard.replicas == {"a", "b"}


@pytest.mark.parametrize("pool", [POOL, None])
async def test_where_loads_come_by_streams_every_replica_is_heard(pool: JsonObject | None) -> None:
    async with listening(pooled=False) as (world, heard):
        if pool is not None:
            world.pools.upsert(pool)
        assert heard.replicas == {"a"}
