"""The ledger beside a real agent, an API server that is a fake, and a database of its own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, select

from shoal.api import keys, names
from shoal.kube.client import KubeClient
from shoal.ledger.reconcile import watch
from shoal.ledger.reconcile.watch import Reconciler
from shoal.ledger.schema import engine_hours, engines, gpu_pods
from shoal.ledger.store import DatabaseUnavailable, LedgerStore
from shoal.net.installkey import KeyRing
from tests.support.agentpod import KEYS, Pod, make_quick
from tests.support.gateway import INSTALL_KEY
from tests.support.gateway_process import FakeApiServer, kubeconfig
from tests.support.rolekeys import give
from tests.support.waiting import until_async

T = TypeVar("T")

MODEL_UID = "uid-llama"
TEN = 1_795_341_600_000  # 2026-11-22T10:00:00Z
MINUTE = 60_000


def engine_pod(name: str = "llama-1", uid: str = "pod-1", **status: Any) -> dict[str, Any]:
    container = {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-22T10:00:00Z"}
    return {
        "metadata": {
            "name": name,
            "namespace": "chat",
            "uid": uid,
            "creationTimestamp": "2026-11-22T09:59:00Z",
            "labels": {
                names.LABEL_MODEL: "llama",
                names.LABEL_MODEL_UID: MODEL_UID,
                names.LABEL_GPU_CLASS: "h100",
                names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
            },
            "annotations": {names.ANNOTATION_INSTALL_KEY: keys.fingerprint(INSTALL_KEY)},
        },
        "spec": {"nodeName": "n1", "containers": [container]},
        "status": {"phase": "Running", "podIP": "127.0.0.1", "conditions": [scheduled], **status},
    }


GPU_CLASS = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "GPUClass",
    "metadata": {"name": "h100", "uid": "c", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {
        "nodeSelector": {"gpu": "h100"},
        "memoryPerGPU": "80Gi",
        "hourlyCost": {"amount": "3.6", "currency": "EUR"},
    },
}


class World:
    """All that is around a ledger, which can come and go."""

    def __init__(self, folder: Path, pod: Pod) -> None:
        self.folder = folder
        self.pod = pod
        self.server = FakeApiServer()
        self.server.crds = True
        self.server.objects["gpuclasses"] = []
        self.store = LedgerStore(f"sqlite:///{folder}/ledger.sqlite")
        self.away = False
        self.now = TEN + 10 * MINUTE

    async def write(self, work: Callable[[Connection], T]) -> T:
        if self.away:
            raise DatabaseUnavailable("the database is away")
        return await self.store.write(work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self.store.read(work)

    async def rows(self, table: Any) -> list[dict[str, Any]]:
        return await self.store.read(
            lambda c: [dict(row) for row in c.execute(select(table).order_by(*table.primary_key.columns)).mappings()]
        )

    def counts(self, prompt: int, generation: int) -> None:
        """What the engine's counters say from now on."""
        self.pod.engine.metrics = f"sglang:prompt_tokens_total {prompt}\nsglang:generation_tokens_total {generation}\n"

    @contextlib.asynccontextmanager
    async def ledger(self) -> AsyncGenerator[Reconciler]:
        ring = KeyRing(self.folder / "key")
        ring.refresh()
        client = await KubeClient.from_environment(kubeconfig=kubeconfig(self.folder, self.server))
        async with client:
            port = int(self.pod.url.rpartition(":")[2])
            reconciler = Reconciler(client, ring, self, now=lambda: self.now, agent_port=port)
            task = asyncio.create_task(reconciler.run())
            try:
                yield reconciler
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def kept(self, *counters: tuple[str, int, int]) -> None:
        """Waits until the engines' last readings are these."""
        async with asyncio.timeout(20):
            while True:
                rows = await self.rows(engines)
                if [(row["boot"], row["prompt_tokens"], row["generation_tokens"]) for row in rows] == list(counters):
                    return
                await asyncio.sleep(0.02)

    async def booked(self) -> dict[str, tuple[int, int]]:
        """By hour of the day."""
        sums: dict[str, tuple[int, int]] = {}
        for row in await self.rows(engine_hours):
            hour = f"{row['hour'] % 86_400_000 // 3_600_000:02}"
            before = sums.get(hour, (0, 0))
            sums[hour] = (before[0] + row["prompt_tokens"], before[1] + row["generation_tokens"])
        return sums


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    make_quick(monkeypatch)
    monkeypatch.setattr("shoal.agent.observe.COUNTERS_SECONDS", 0.05)
    monkeypatch.setattr(watch, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(watch, "GPU_SECONDS", 0.05)
    (tmp_path / "key").mkdir()
    give(tmp_path / "key", INSTALL_KEY, "ledger")
    (tmp_path / "run").mkdir()
    pod = Pod(tmp_path / "run")
    pod.keys.write_text(
        json.dumps(KEYS | {"callers": {"ledger": keys.derive(INSTALL_KEY, "ledger", MODEL_UID), "gateway": "g"}})
    )
    pod.boot("boot-1")
    it = World(tmp_path, pod)
    it.store.start()
    await until_async(lambda: it.store.error is None)
    await it.server.up()
    await it.server.change("gpuclasses", GPU_CLASS)
    await it.server.change("models", {"metadata": {"name": "llama", "namespace": "chat", "uid": MODEL_UID}})
    async with pod.running():
        yield it
    await it.server.down()
    await it.store.stop()


async def test_counters_are_read_and_a_restarted_ledger_goes_on(world: World):
    await world.server.change("pods", engine_pod())
    world.counts(100, 20)
    async with world.ledger() as ledger:
        await world.kept(("boot-1", 100, 20))
        assert (ledger.coverage.watching, ledger.coverage.live, ledger.coverage.stale) == (True, 1, ())
        assert world.pod.drain.gateways == (), "who only reads must not hold up a drain"
        world.counts(130, 25)
        await world.kept(("boot-1", 130, 25))
    world.counts(170, 30)  # while there is no ledger
    world.now += 60 * MINUTE
    async with world.ledger():
        await world.kept(("boot-1", 170, 30))
        assert await world.booked() == {"10": (130, 25), "11": (40, 5)}
        (engine,) = await world.rows(engines)
        assert (engine["model"], engine["gpu_class"], engine["replica"], engine["node"]) == (
            "chat/llama",
            "h100",
            "chat/llama-1",
            "n1",
        )


async def test_an_engine_that_restarts_is_another_and_a_killed_one_keeps_its_last_reading(world: World):
    await world.server.change("pods", engine_pod())
    world.counts(100, 20)
    async with world.ledger():
        await world.kept(("boot-1", 100, 20))
        world.pod.engine.metrics = ""
        world.pod.boot("boot-2")
        world.counts(14, 8)
        await world.kept(("boot-1", 100, 20), ("boot-2", 14, 8))
        assert await world.booked() == {"10": (114, 28)}


async def test_an_agent_that_is_away_is_said_and_caught_up_with(world: World):
    await world.server.change("pods", engine_pod())
    await world.server.change("pods", engine_pod("llama-2", "pod-2", podIP="127.0.0.9"))
    world.counts(100, 20)
    async with world.ledger() as ledger:
        await world.kept(("boot-1", 100, 20))
        assert ledger.coverage.stale == ("chat/llama-2",)
        for reader in world.pod.hub:
            reader.end()
        world.counts(140, 20)
        await world.kept(("boot-1", 140, 20))
        assert await world.booked() == {"10": (140, 20)}


async def test_a_database_that_is_away_loses_no_growth(world: World):
    await world.server.change("pods", engine_pod())
    world.counts(100, 20)
    async with world.ledger() as ledger:
        await world.kept(("boot-1", 100, 20))
        world.away = True
        world.counts(130, 20)
        await until_async(lambda: _said(ledger, "boot-1", 130))
        world.pod.boot("boot-2")
        world.counts(5, 1)
        await until_async(lambda: _said(ledger, "boot-2", 5))
        assert ledger.readings.waiting == 2
        world.away = False
        await world.kept(("boot-1", 130, 20), ("boot-2", 5, 1))
        assert await world.booked() == {"10": (135, 21)}


async def test_what_was_heard_is_kept_when_the_ledger_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "ROUND_SECONDS", 3600.0)
    await world.server.change("pods", engine_pod())
    world.counts(100, 20)
    async with world.ledger() as ledger:
        await until_async(lambda: ledger.coverage.watching)
        await ledger.round()  # begins to listen
        await until_async(lambda: _said(ledger, "boot-1", 100))
        assert await world.rows(engines) == []
    await world.kept(("boot-1", 100, 20))


async def test_its_key_reads_and_does_nothing_else(world: World):
    key = keys.derive(INSTALL_KEY, "ledger", MODEL_UID)
    async with world.pod.stream(key) as stream:
        await stream.until(engineBoot="boot-1")
        status, why = await world.pod.ack(stream, 0, key=key)
        assert (status, "a gateway's key" in why) == (401, True)
    status, why = await world.pod.floor(key=key)
    assert (status, "a gateway's or an operator's key" in why) == (401, True)
    assert world.pod.drain.gateways == ()


def _said(ledger: Reconciler, boot: str, prompt: int) -> bool:
    """Whether the ledger has heard it."""
    said = ledger.streams.keys().get("pod-1")
    return said is not None and (said.engine_boot, said.prompt_tokens_total) == (boot, prompt)


async def gpu_seconds(world: World) -> dict[str, tuple[float, int]]:
    rows = await world.rows(engine_hours)
    return {row["currency"]: (row["gpu_seconds"], row["cost"]) for row in rows if row["gpu_seconds"]}


async def test_gpus_cost_from_the_first_look_to_the_end_of_the_pod(world: World):
    await world.server.change("pods", engine_pod())
    async with world.ledger():
        await _looked(world, TEN + 10 * MINUTE, 0)
        # The fleet is older than its ledger: what was before is not counted.
        world.now = TEN + 20 * MINUTE
        await _looked(world, world.now, 1200)
        world.now = TEN + 25 * MINUTE
        await world.server.remove("pods", "llama-1")
        await _looked(world, world.now, 1800)
        world.now = TEN + 55 * MINUTE
        # Its successor was put on its node at ten by its own clock, after the first look at least.
        await world.server.change("pods", engine_pod("llama-2", "pod-2"))
        await _looked(world, world.now, 1800 + 2 * 45 * 60)
    assert await gpu_seconds(world) == {"EUR": (7200.0, 7_200_000_000)}


async def test_gpu_time_goes_on_after_a_restart_and_a_missed_end(world: World):
    await world.server.change("pods", engine_pod())
    async with world.ledger():
        await _looked(world, TEN + 10 * MINUTE, 0)
    world.now = TEN + 20 * MINUTE  # no ledger for ten minutes
    async with world.ledger():
        await _looked(world, world.now, 1200)
        world.now = TEN + 30 * MINUTE
        # Another pod has its name: nobody told of the end of the first.
        successor = engine_pod(uid="pod-2")
        successor["status"]["conditions"][0]["lastTransitionTime"] = "2026-11-22T10:25:00Z"
        await world.server.change("pods", successor)
        await _looked(world, world.now, 2400 + 600)
    assert {row["pod"]: row["counted_until"] for row in await world.rows(gpu_pods)} == {
        "pod-1": TEN + 30 * MINUTE,
        "pod-2": TEN + 30 * MINUTE,
    }


async def _looked(world: World, until: int, seconds: float) -> None:
    """Waits until GPU time was counted so far."""
    async with asyncio.timeout(20):
        while True:
            counted = [row["counted_until"] for row in await world.rows(gpu_pods)]
            booked = sum(row["gpu_seconds"] for row in await world.rows(engine_hours))
            if booked == seconds and counted and max(counted) == until:
                return
            await asyncio.sleep(0.02)
