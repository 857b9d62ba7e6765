"""Prometheus as the source of load and demand, against the real one: what is read, how old it is, what it may do."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from shoal.agent.stream import AgentStream
from shoal.agent.streammetrics import AgentMetrics
from shoal.api import config, reasons
from shoal.core import facts
from shoal.core.scaling import (
    Demand,
    Load,
    ModelSnapshot,
    Policy,
    Replica,
    ScalingMemory,
    ScalingVariant,
    SignalSource,
    decide,
)
from shoal.signals import history, promql
from shoal.signals.history import History
from shoal.signals.prometheus import PrometheusSignals
from tests.support.prometheus import Prometheus, prometheus
from tests.support.streams import ToldGateway, told_gateway, until

MODEL = "uid-llama"
BUSY = {
    "phase": "ready",
    "engine_boot": "e1",
    "running": 7,
    "max_running": 64,
    "waiting": 3,
    "waiting_tokens": 900,
    "kv_tokens_used": 4000,
    "tokens_per_step": 2.25,
    "kv_tokens_total": 8000,
    "prompt_tokens_total": 100,
    "generation_tokens_total": 50,
}


def pod(name: str, **changes: object) -> facts.Pod:
    made = facts.Pod(
        namespace="chat",
        name=name,
        uid=f"uid-of-{name}",
        node="node-1",
        finished=False,
        deleting=False,
        ready=True,
        requests={},
        model_uid=MODEL,
        created=datetime.now(UTC) - timedelta(minutes=5),
        was_ready=True,
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


ENGINE = pod("llama-1")
GATEWAY = pod("gateway-0", namespace="shoal-system", model_uid=None, gateway=True)


class Scraped:
    """An agent's /metrics."""

    def __init__(self) -> None:
        self.hub = AgentStream()
        self.hub.update(BUSY)
        self.registry = CollectorRegistry()
        self.registry.register(AgentMetrics(self.hub.boot, lambda: self.hub.published))
        self.spoil: Callable[[bytes], bytes] = lambda text: text
        """What a test does to the text on its way."""

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.spoil(generate_latest(self.registry)), content_type="text/plain")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[int]:
        app = web.Application()
        app.router.add_get("/metrics", self.metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


class World:
    """An agent, a gateway, Prometheus, and the operator's signals."""

    agent: Scraped
    gateway: ToldGateway
    prometheus: Prometheus
    signals: PrometheusSignals

    def __init__(self) -> None:
        self.pods = [ENGINE, GATEWAY]
        self.changed: list[tuple[str | None, bool]] = []


@contextlib.asynccontextmanager
async def world(folder: Path, every: int = 1, dropped: str = "", **settings: object) -> AsyncGenerator[World]:
    it = World()
    it.agent = Scraped()
    async with it.agent.running() as port, told_gateway() as it.gateway:
        targets = {
            f"127.0.0.1:{port}": {"namespace": "chat", "pod": ENGINE.name, "cluster": "east"}
            | {"shoal_dev_model": "llama", "shoal_dev_gpu_class": "l4-24gb"},
            f"127.0.0.1:{it.gateway.port}": {"namespace": "shoal-system", "pod": GATEWAY.name, "cluster": "east"},
        }
        with prometheus(folder, targets, every, dropped) as it.prometheus:
            read = config.Prometheus.model_validate({"url": it.prometheus.url, "scrapeSeconds": 1, **settings})
            it.signals = PrometheusSignals(read, lambda: it.pods, lambda model, now: it.changed.append((model, now)))
            task = asyncio.create_task(it.signals.run())
            try:
                yield it
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def test_load_and_demand_are_those_that_were_scraped(tmp_path: Path):
    async with world(tmp_path) as it:
        await until(lambda: it.signals.load(ENGINE.uid) is not None)
        assert it.signals.load(ENGINE.uid) == Load(
            "e1", "ready", 7, 64, 3, 900, 4000, 8000, 100, 50, tokens_per_step=2.25
        )
        await until(lambda: it.signals.demand(GATEWAY.uid, MODEL) == Demand(0, 0, 0, 0, 0.0))
        assert it.signals.boot(GATEWAY.uid) == it.gateway.hub.boot
        assert it.signals.boot(ENGINE.uid) is not None
        it.gateway.book.arrived(MODEL)
        it.gateway.book.held(MODEL, 77, 0.0)
        await until(lambda: (MODEL, True) in it.changed)
        demand = it.signals.demand(GATEWAY.uid, MODEL)
        assert demand is not None
        assert (demand.arrivals, demand.held, demand.held_tokens) == (1, 1, 77)
        it.agent.hub.update({**BUSY, "kv_tokens_used": 7000, "waiting": None, "generation_tokens_total": 950})
        await until(lambda: (it.signals.load(ENGINE.uid) or Load()).kv_tokens_used == 7000)
        load = it.signals.load(ENGINE.uid)
        assert load is not None
        assert load.waiting is None  # what the agent does not know is not zero
        await until(lambda: (it.signals.tokens_per_second(ENGINE.uid) or 0) > 0)
        for _ in range(10):
            it.gateway.book.arrived(MODEL)
        await until(lambda: (it.signals.arrivals_per_second(MODEL) or 0) > 0)


async def test_what_prometheus_no_longer_scrapes_is_unknown_and_nothing_goes_down(tmp_path: Path):
    async with world(tmp_path) as it:
        await until(
            lambda: it.signals.load(ENGINE.uid) is not None and it.signals.demand(GATEWAY.uid, MODEL) is not None
        )
        assert wanted(it) < 3  # all are heard: there is nothing to do for three
        await it.gateway.down()
        await until(lambda: it.signals.demand(GATEWAY.uid, MODEL) is None)
        await until(lambda: it.signals.load(ENGINE.uid) is not None)
        assert wanted(it) == 3
        await it.gateway.up()
        await until(lambda: it.signals.demand(GATEWAY.uid, MODEL) is not None)


async def test_a_prometheus_that_is_gone_leaves_nothing_known(tmp_path: Path):
    async with world(tmp_path) as it:
        await until(lambda: it.signals.load(ENGINE.uid) is not None)
        it.prometheus.stop()
        await until(lambda: it.signals.failures > 0)
        await until(lambda: it.signals.load(ENGINE.uid) is None and it.signals.demand(GATEWAY.uid, MODEL) is None)
        assert it.signals.age(ENGINE.uid) is None
        assert wanted(it) == 3
        it.prometheus.start()
        await until(lambda: it.signals.load(ENGINE.uid) is not None)


async def test_a_sample_is_as_old_as_its_scrape_and_not_as_the_answer(tmp_path: Path):
    """Prometheus answers with it until the next scrape, and for five minutes when that never comes."""
    async with world(tmp_path, every=8) as it:
        await until(lambda: it.signals.load(ENGINE.uid) is not None)
        await until(lambda: it.signals.load(ENGINE.uid) is None)
        async with aiohttp.ClientSession() as session:
            query = {"query": "shoal_replica_running"}
            async with session.get(f"{it.prometheus.url}/api/v1/query", params=query) as answer:
                (sample,) = (await answer.json())["data"]["result"]
        assert sample["value"][1] == "7"
        assert it.signals.failures == 0


async def test_samples_of_a_former_pod_of_the_same_name_are_not_the_new_ones(tmp_path: Path):
    async with world(tmp_path) as it:
        await until(lambda: it.signals.boot(GATEWAY.uid) is not None)
        another = replace(GATEWAY, uid="another", created=datetime.now(UTC) + timedelta(hours=1))
        it.pods = [ENGINE, another]
        await until(lambda: it.signals.boot(GATEWAY.uid) is None)
        assert it.signals.boot("another") is None


@pytest.mark.parametrize(("match", "heard"), [('cluster="east"', True), ('cluster="west"', False)])
async def test_one_cluster_of_several(tmp_path: Path, match: str, heard: bool):
    async with world(tmp_path, match=match) as it:
        if heard:
            await until(lambda: it.signals.load(ENGINE.uid) is not None)
        else:
            await asyncio.sleep(3)
            assert it.signals.load(ENGINE.uid) is None


async def test_what_is_wrong_with_the_query_is_said_in_prometheus_own_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    async with world(tmp_path, match="cluster=east") as it:
        await until(lambda: it.signals.failures > 0)
    assert "parse error" in capfd.readouterr().out


async def test_history_says_what_a_replica_did_while_requests_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "STEP", "1s")
    monkeypatch.setattr(history, "READ_SECONDS", 0.5)
    monkeypatch.setattr(history, "WINDOW_SECONDS", 5)
    async with world(tmp_path) as it:
        past = History(config.Prometheus.model_validate({"url": it.prometheus.url, "scrapeSeconds": 1}))
        task = asyncio.create_task(past.run())
        try:
            told, began = dict(BUSY), time.monotonic()
            async with asyncio.timeout(60):
                while (past.work_rate("chat", "llama", "l4-24gb") or 0) < 300:
                    done = int(100 * (time.monotonic() - began))
                    told.update(prompt_tokens_total=100 + done, generation_tokens_total=50 + done)
                    it.agent.hub.update(told)
                    await asyncio.sleep(0.2)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        rate = past.work_rate("chat", "llama", "l4-24gb")
        assert rate is not None
        # 100 prompt tokens and 100 generated ones each second, the latter counted fourfold; at first there were none.
        assert 300 <= rate < 600
        assert past.work_rate("chat", "llama", "another") is None


async def test_a_replica_in_which_nothing_waited_has_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "STEP", "1s")
    monkeypatch.setattr(history, "WINDOW_SECONDS", 5)
    async with world(tmp_path) as it:
        it.agent.hub.update({**BUSY, "waiting": 0})
        await until(lambda: (it.signals.tokens_per_second(ENGINE.uid)) is not None)
        settings = config.Prometheus.model_validate({"url": it.prometheus.url, "scrapeSeconds": 1})
        async with promql.PromQLClient(settings) as client:
            assert await history.read(client, settings) == {}


def wanted(it: World) -> int:
    """What the decider makes of it, for three idle replicas of which one could do."""
    it.agent.hub.update({**BUSY, "running": 0, "waiting": 0, "waiting_tokens": 0, "kv_tokens_used": 0})
    load = it.signals.load(ENGINE.uid)
    idle = None if load is None else replace(load, running=0, waiting=0, waiting_tokens=0, kv_tokens_used=0)
    memory: ScalingMemory | None = None
    count = 3
    for now in range(0, 4000, 5):
        replicas = tuple(Replica(f"r{n}", f"r{n}", "l4", True, True, False, False, -1000.0, idle) for n in range(count))
        source = SignalSource("gateway-0", it.signals.boot(GATEWAY.uid), it.signals.demand(GATEWAY.uid, MODEL))
        snapshot = ModelSnapshot(
            Policy(), count, replicas, (source,), (ScalingVariant("l4", count, 5, kv_tokens=8000),), False, -1000.0
        )
        decision, memory = decide(snapshot, memory, float(now))
        count = decision.wanted
        if count != 3:
            assert decision.reason in (reasons.SCALING_DOWN, reasons.SCALED_TO_ZERO)
            return count
    return count
