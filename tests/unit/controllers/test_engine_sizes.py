"""What engines say of their KV caches, and who hears of it."""

import asyncio
from typing import Any, cast

import aiohttp
import pytest

from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.api.replica import ReplicaKeys
from shoal.controllers import enginesizes as module
from shoal.controllers.enginesizes import EngineSizes
from shoal.controllers.placementrequest import PlacementRequest
from shoal.kube.queue import WorkQueue
from tests.unit.controllers.test_fleet_metrics import engine_pod
from tests.unit.controllers.test_pool_streams import Ring
from tests.unit.controllers.test_scale_writes import UID, Plane


class Asked:
    """A fleet in which each engine that is asked says the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int = 12_000) -> None:
        self.plane, self.told, self.count = Plane(replicas=1), list[str | None](), 0
        self.sizes = EngineSizes(
            self.plane.world,
            self.plane.planner.sizes,
            self.plane.planner.calibration,
            cast("Any", Ring()),
            WorkQueue("engine-sizes", workers=1),
            self.told.append,
        )

        async def read_once(_peer: object, _session: aiohttp.ClientSession, *, seconds: float) -> ReplicaKeys:
            assert seconds > 0
            self.count += 1
            return ReplicaKeys(phase="ready", engine_boot="e", kv_tokens_total=tokens)

        monkeypatch.setattr(module, "read_once", read_once)

    async def start(self, name: str) -> None:
        """A replica becomes Ready and is asked."""
        before = self.count
        pod = engine_pod(name, ready=True)
        pod["status"]["podIP"] = "10.0.0.1"
        self.plane.world.pods.upsert(pod)
        key = f"ns/{name}"
        running = asyncio.create_task(self.sizes.run())
        self.sizes.on_pod(key, None, self.plane.world.pods.get(key))
        async with asyncio.timeout(10):
            while self.count == before:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    @property
    def tokens(self) -> dict[str, int]:
        return self.plane.state.record(UID).kv_tokens

    def edit(self, spec: dict[str, object]) -> None:
        raw = self.plane.model.model_dump(mode="json", by_alias=True, exclude_none=True)
        changed = Model.model_validate(raw | {"spec": raw["spec"] | spec})
        request = self.plane.state.record(UID).request
        assert request is not None
        self.plane.state.enter(PlacementRequest(changed, request.facts, "placed", request.pool))

    def pool(self, **spec: object) -> None:
        """The Model gets this pool of adapters."""
        raw = {
            "metadata": {"name": "pool", "namespace": "ns", "uid": "p"},
            "spec": {"modelRef": {"name": "chat"}} | spec,
        }
        request = self.plane.state.record(UID).request
        assert request is not None
        pool = LoRAPool.model_validate(raw)
        self.plane.state.enter(PlacementRequest(request.model, request.facts, "placed", pool))


async def test_a_models_status_is_written_again_when_an_engine_says_another_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch)
    await asked.start("chat-a")
    assert asked.tokens == {"l4": 12_000}
    assert asked.told == [UID], "the plan may stay as it is, and the status shows the figure all the same"
    await asked.start("chat-b")
    assert asked.told == [UID], "it said the same"


async def test_what_an_engine_said_outlives_a_change_of_how_many_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    await asked.start("chat-a")
    asked.edit({"scaling": {"minReplicas": 1, "maxReplicas": 4}, "servedNames": ["other"], "priority": 7})
    assert asked.tokens == {"l4": 12_000}, "its pods stay, so nobody would say it again"
    asked.edit({"variants": [{"class": "l4"}, {"class": "h100", "quantization": "FP8"}]})
    assert asked.tokens == {"l4": 12_000}, "another class beside it"
    asked.edit({"variants": [{"class": "l4", "tensor": 2}]})
    assert asked.tokens == {}, "two GPUs hold more than one"
    asked.tokens["l4"] = 24_000
    asked.edit({"source": {"uri": "hf://acme/larger"}})
    assert asked.tokens == {}, "another model"


async def test_what_an_engine_said_outlives_a_change_of_the_pool_that_rolls_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch)
    asked.pool()
    await asked.start("chat-a")
    asked.pool(baseNames=["org/base"], allowedNamespaces={"from": "All"})
    assert asked.tokens == {"l4": 12_000}, "its pods stay, so nobody would say it again"
    asked.pool(maxRank=128)
    assert asked.tokens == {}, "slots of a larger rank leave less room"
