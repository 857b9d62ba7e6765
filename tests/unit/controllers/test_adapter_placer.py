"""What agents are told to hold, when gateways are sent to a newer revision, and when an adapter has to be told."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.api.adapters import DesiredAdapter
from shoal.api.demand import AdapterDemand
from shoal.api.keys import InstallKey
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter, engine_name
from shoal.api.meta import JsonObject
from shoal.api.replica import AdapterState, ReplicaKeys
from shoal.controllers.installkey import InstallKeys
from shoal.controllers.lora import placer as room
from shoal.controllers.lora.choices import Choices
from shoal.controllers.lora.desired import DesiredAdaptersRefused, DesiredAdapterWriter
from shoal.controllers.lora.placer import Placer
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.core import artifacts
from shoal.core.lora.lifecycle.revisions import Revisions
from shoal.kube.queue import WorkQueue
from shoal.net.stream import ListenerIdentity, StreamPeer
from tests.support.lora_fleet import POOLED_FACTS, adapter, pool, revision_of
from tests.support.operators import CONFIG, model
from tests.support.owners import LabelsSuffice
from tests.support.streams import until

V1 = AdapterRevision(revision=revision_of("v1"), uri="s3://a/v1", rank=16, size_bytes=27)
V2 = AdapterRevision(revision=revision_of("v2"), uri="s3://a/v2", rank=16, size_bytes=27)
POET1, POET2 = (engine_name("chat/poet", v.revision) for v in (V1, V2))


@dataclass
class FakeAdapterSignals:
    said: dict[str, ReplicaKeys] = field(default_factory=dict[str, ReplicaKeys])
    boots: dict[str, str] = field(default_factory=dict[str, str])

    def keys(self, pod_uid: str) -> ReplicaKeys | None:
        return self.said.get(pod_uid)

    def agent_boot(self, pod_uid: str) -> str | None:
        return self.boots.get(pod_uid)

    def boot(self, gateway_uid: str) -> str | None:
        return None

    def adapter_demand(self, gateway_uid: str) -> Mapping[str, AdapterDemand] | None:
        return None


class Told(DesiredAdapterWriter):
    """Keeps what agents would be told."""

    def __init__(self, world: World, signals: FakeAdapterSignals) -> None:
        super().__init__(world, cast("Any", None), signals, WorkQueue("t"), ListenerIdentity("op", "b"))
        self.floors: dict[str, tuple[DesiredAdapter, ...]] = {}

    def set(self, pod: Any, desired: tuple[DesiredAdapter, ...]) -> None:
        self.floors[pod.name] = desired

    def names(self, pod: str) -> list[str]:
        return [a.name for a in self.floors.get(pod, ())]


class LostAnswers(DesiredAdapterWriter):
    """One agent that takes what it is sent, while its answer may be lost."""

    def __init__(self, world: World, signals: FakeAdapterSignals) -> None:
        install: Any = SimpleNamespace(keys=InstallKeys(InstallKey(b"k" * 32)))
        super().__init__(world, install, signals, WorkQueue("t"), ListenerIdentity("op", "b"))
        self.has: tuple[DesiredAdapter, ...] = ()
        self.answers = True

    async def _put(self, peer: StreamPeer, floor: tuple[DesiredAdapter, ...]) -> None:
        self.has = floor
        if not self.answers:
            raise DesiredAdaptersRefused("TimeoutError: ")


class Fixture:
    def __init__(self) -> None:
        self.world = World(cast("Any", None), CONFIG, "shoal-system", cast("Any", None), ownership=LabelsSuffice())
        self.signals = FakeAdapterSignals()
        self.told = Told(self.world, self.signals)
        self.woken: list[str] = []
        self.placer = Placer(self.world, Choices(self.world), self.told, self.signals, self.woken.append)
        subscribe(self.world.pods, self.placer.on_pod)
        base = model("base", "chat")
        base["metadata"] |= {"uid": "m", "resourceVersion": "1"}
        self.world.models.upsert(base)
        stored = self.world.models.get("chat/base")
        assert stored is not None
        assert stored.object is not None
        read = POOLED_FACTS | {"readBy": artifacts.source_key(stored.object)}
        self.world.models.upsert(
            base | {"metadata": base["metadata"] | {"resourceVersion": "2"}, "status": {"artifact": read}}
        )
        self.pool(slotsPerReplica=4, cachedPerReplica=8)

    def pool(self, **spec: Any) -> None:
        body = pool("chat", **spec)
        body["metadata"] |= {"uid": "p", "resourceVersion": str(hash(str(spec)))}
        self.world.pools.upsert(body)

    def replica(self, name: str, *, adapters: dict[str, str] | None = None, slots: int | None = 3) -> None:
        """A ready replica that says this of adapters; again: it says something else."""
        if self.world.pods.get(f"chat/{name}") is None:
            self.world.pods.upsert(_pod(name))
        states = None if adapters is None else {n: AdapterState(state=cast("Any", s)) for n, s in adapters.items()}
        self.signals.said[name] = ReplicaKeys(phase="ready", engine_boot="e", adapters=states, adapter_slots=slots)
        self.placer.reported("m", True)

    def enter(self, revisions: Revisions, **spec: Any) -> LoRAAdapter:
        body = adapter("chat", "poet", **spec)
        one = LoRAAdapter.model_validate(body | {"metadata": body["metadata"] | {"uid": "poet"}})
        self.placer.enter("chat/pool", one, revisions)
        return one


def _pod(name: str) -> JsonObject:
    labels = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE, names.LABEL_MODEL_UID: "m"}
    ready = {"type": "Ready", "status": "True"}
    return {
        "metadata": {"name": name, "namespace": "chat", "uid": name, "labels": labels, "resourceVersion": "1"},
        "spec": {},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]},
    }


@pytest.fixture
async def it(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Fixture]:
    monkeypatch.setattr(room, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(room, "PACE_SECONDS", 0.0)
    fixture = Fixture()
    task = asyncio.create_task(fixture.placer.run())
    await asyncio.sleep(0)
    try:
        yield fixture
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_pinned_adapter_is_on_the_floor_of_replicas_that_take_adapters(it: Fixture) -> None:
    it.replica("new", adapters={})
    it.replica("old", slots=None)
    one = it.enter(Revisions(V1), residency="Pinned")
    assert it.placer.held(one) is None, "not planned yet"
    await until(lambda: it.told.names("new") == [POET1])
    assert it.told.floors["new"][0].pinned
    assert it.told.floors["new"][0].uri == V1.uri
    assert "old" not in it.told.floors, "it was started before there was a pool"
    held = it.placer.held(one)
    assert held is not None
    assert (held.replicas, held.loaded) == (1, 0)
    it.replica("new", adapters={POET1: "loaded"})
    await until(lambda: (h := it.placer.held(one)) is not None and h.loaded == 1)


async def test_the_same_files_at_another_address_are_fetched_from_there_from_now_on(it: Fixture) -> None:
    it.replica("r", adapters={POET1: "loaded"})
    one = it.enter(Revisions(V1), residency="Warm")
    await until(lambda: it.told.names("r") == [POET1])
    await until(lambda: it.placer.held(one) is not None)
    moved = V1.model_copy(update={"uri": "s3://a/v1-copied"})
    it.enter(Revisions(moved), residency="Warm")
    await until(lambda: it.told.floors["r"][0].uri == moved.uri)
    assert it.told.names("r") == [POET1]
    await until(lambda: it.placer.held(one) is not None)


async def test_gateways_are_sent_to_the_next_revision_when_it_is_loaded_and_the_old_one_goes_after(it: Fixture) -> None:
    it.replica("r", adapters={POET1: "loaded"})
    one = it.enter(Revisions(V1, V2), residency="Warm")
    await until(lambda: set(it.told.names("r")) == {POET1, POET2})
    assert it.placer.switches_to(one) is None
    it.woken.clear()
    it.replica("r", adapters={POET1: "loaded", POET2: "loaded"})
    await until(lambda: it.placer.switches_to(one) == POET2)
    assert "chat/poet" in it.woken
    assert set(it.told.names("r")) == {POET1, POET2}, "both stay until gateways are sent to the newer one"
    it.enter(Revisions(V2), residency="Warm")
    await until(lambda: it.told.names("r") == [POET2])


async def test_one_replica_that_hangs_does_not_keep_the_next_revision_from_all(
    it: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SWITCH_TIMEOUT_SECONDS", 0.1)
    for name in ("a", "b"):
        it.replica(name, adapters={POET1: "loaded"})
    one = it.enter(Revisions(V1, V2), residency="Warm", minCopies=2)
    await until(lambda: POET2 in it.told.names("a") and POET2 in it.told.names("b"))
    await asyncio.sleep(0.2)
    assert it.placer.switches_to(one) is None, "nobody has loaded it"
    it.replica("a", adapters={POET1: "loaded", POET2: "loaded"})
    it.replica("b", adapters={POET1: "loaded", POET2: "loading"})
    await until(lambda: it.placer.switches_to(one) == POET2)


async def test_where_an_adapter_on_demand_is_wakes_nobody(it: Fixture) -> None:
    it.replica("r", adapters={})
    one = it.enter(Revisions(V1))
    await until(lambda: it.placer.held(one) is not None)
    it.woken.clear()
    it.replica("r", adapters={POET1: "loaded"})
    await until(lambda: (h := it.placer.held(one)) is not None and h.loaded == 1)
    assert it.woken == []
    it.replica("r", adapters={POET1: "failed"})
    await until(lambda: it.woken == ["chat/poet"])


async def test_a_deleted_adapter_leaves_the_floors(it: Fixture) -> None:
    it.replica("r", adapters={})
    it.enter(Revisions(V1), residency="Pinned")
    await until(lambda: it.told.names("r") == [POET1])
    it.placer.leave("poet")
    await until(lambda: it.told.names("r") == [])


async def test_an_agent_whose_answer_was_lost_is_told_again_even_what_it_was_told_before() -> None:
    """What it took then is not known. Else it would go on without the adapters that belong there."""
    it = Fixture()
    it.replica("r", adapters={})
    it.signals.boots["r"] = "agent"
    pod = it.world.pods.get("chat/r")
    assert pod is not None
    pinned = (DesiredAdapter(name=POET1, revision=V1.revision, uri=V1.uri, pinned=True),)
    agent = LostAnswers(it.world, it.signals)
    agent.set(pod, pinned)
    await agent.write("r")
    agent.set(pod, ())
    agent.answers = False
    with pytest.raises(DesiredAdaptersRefused):
        await agent.write("r")
    assert agent.has == (), "the agent took it all the same"
    agent.set(pod, pinned)
    agent.answers = True
    await agent.write("r")
    assert agent.has == pinned
