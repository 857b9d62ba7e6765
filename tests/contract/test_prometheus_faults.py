"""A Prometheus that has nothing, nonsense, another time, or the same twice: what is not known is never zero."""

import math
import re
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.api import config
from shoal.core.scaling import Demand
from shoal.signals import prometheus as module
from shoal.signals.prometheus import PrometheusSignals, ScrapedReading, ScrapeTarget
from tests.contract.test_prometheus_signals import ENGINE, GATEWAY, MODEL, wanted, world
from tests.support.streams import until

CLOCKS = [-3600.0, 3600.0]
"""Seconds that the operator's clock is ahead of Prometheus'."""


async def test_an_engine_figure_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        it.agent.spoil = lambda text: re.sub(rb"(?m)^(shoal_replica_(kv_tokens_used|running)) \S+", rb"\1 NaN", text)
        await until(lambda: it.signals.load(ENGINE.uid) is not None)
        load = it.signals.load(ENGINE.uid)
        assert load is not None
        assert (load.running, load.kv_tokens_used, load.waiting) == (None, None, 3)
        it.agent.spoil = lambda text: text.replace(b"max_running 64.0", b"max_running +Inf")
        await until(lambda: (it.signals.load(ENGINE.uid) or load).running == 7)
        assert (it.signals.load(ENGINE.uid) or load).max_running is None


async def test_a_demand_of_which_a_part_does_not_come_is_unknown_as_a_whole(tmp_path: Path) -> None:
    """Somebody drops a series at the scrape: requests that are held there are not known, and not zero."""
    async with world(tmp_path, dropped="shoal_demand_held") as it:
        await until(lambda: it.signals.boot(GATEWAY.uid) is not None)
        it.gateway.book.arrived(MODEL)
        it.gateway.book.held(MODEL, 77, 0.0)
        await until(lambda: it.signals.demand(GATEWAY.uid, MODEL) is None)
        assert it.signals.boot(GATEWAY.uid) is not None
        assert wanted(it) == 3


def test_a_demand_that_is_no_number_is_unknown() -> None:
    signals = PrometheusSignals(config.Prometheus(url="http://x"), lambda: [GATEWAY], lambda *_: None)
    place = (GATEWAY.namespace, GATEWAY.name)
    target = ScrapeTarget(time.time(), {"namespace": place[0], "pod": place[1], "boot": "b"})
    for name in ("arrivals_total", "in_flight", "held", "held_tokens"):
        labels = {"__name__": f"shoal_demand_{name}", "model_uid": MODEL, **target.labels}
        value = math.nan if name == "held" else 3.0
        module._place({place: target}, labels, value)  # pyright: ignore[reportPrivateUsage]
    signals.take(ScrapedReading(target.at, time.monotonic(), 0.0, {place: target}))
    assert signals.boot(GATEWAY.uid) == "b"
    assert signals.demand(GATEWAY.uid, MODEL) is None
    assert signals.demand(GATEWAY.uid, "another") == Demand(0, 0, 0, 0, 0.0)


async def test_a_prometheus_without_samples_is_told_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, match='cluster="west"') as it:
        await until(lambda: it.signals.problem is not None)
        assert it.signals.failures == 0
        assert wanted(it) == 3
    said = capfd.readouterr().out
    assert "it answers, and has no samples of agents and gateways" in said
    assert said.count("no signals from Prometheus") == 1  # however often it is asked


@pytest.mark.parametrize("ahead", CLOCKS)
async def test_clocks_that_differ_by_an_hour_do_no_harm(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server's clock, by which pods have their ages, goes with the operator's."""

    clock = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", clock)
    async with world(tmp_path) as it:
        born = datetime.now(UTC) + timedelta(seconds=ahead - 60)
        it.pods = [replace(ENGINE, created=born), replace(GATEWAY, created=born)]
        await until(
            lambda: it.signals.load(ENGINE.uid) is not None and it.signals.demand(GATEWAY.uid, MODEL) is not None
        )
        age = it.signals.age(ENGINE.uid)
        assert age is not None
        assert age <= 3
        # A pod that was born a moment ago has nothing of the one before, which had its name.
        it.pods = [replace(ENGINE, uid="new", created=born + timedelta(seconds=600)), GATEWAY]
        await until(lambda: it.signals.load(ENGINE.uid) is None)
        assert it.signals.load("new") is None


def test_samples_of_another_scrape_of_the_same_pod_are_left_out() -> None:
    target = ScrapeTarget(100.0, {"namespace": "chat", "pod": "llama-1", "job": "a", "instance": "10.0.0.1:8300"})
    targets = {("chat", "llama-1"): target}
    labels = {"__name__": "shoal_replica_running", "namespace": "chat", "pod": "llama-1", "instance": "10.0.0.1:8300"}
    module._place(targets, {**labels, "job": "b"}, 5.0)  # pyright: ignore[reportPrivateUsage]
    assert target.values == {}
    module._place(targets, {**labels, "job": "a"}, 7.0)  # pyright: ignore[reportPrivateUsage]
    assert target.values == {"running": 7.0}


def test_an_answer_that_was_long_on_its_way_makes_samples_older_and_not_younger() -> None:
    """The pod of the same name was made 2 s before the scrape; the answer took 5 s, which looks like a clock ahead."""
    born = datetime(2026, 1, 1, tzinfo=UTC)
    signals = PrometheusSignals(
        config.Prometheus(url="http://x"), lambda: [replace(ENGINE, created=born)], lambda *_: None
    )
    at = born.timestamp() + 2
    signals.take(
        ScrapedReading(at + 5, time.monotonic(), 5.0, {("chat", ENGINE.name): ScrapeTarget(at, {"phase": "ready"})})
    )
    assert signals.load(ENGINE.uid) is None
    signals.take(
        ScrapedReading(at + 9, time.monotonic(), 5.0, {("chat", ENGINE.name): ScrapeTarget(at + 4, {"phase": "ready"})})
    )
    assert signals.load(ENGINE.uid) is not None
