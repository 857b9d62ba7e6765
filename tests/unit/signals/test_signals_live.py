"""The operator's signals: what decisions read of agents and gateways, and of which Model something is new."""

import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest

from shoal.agent.stream import AgentStream
from shoal.api.demand import FirstToken
from shoal.core.routing.canary import CanaryHalt
from shoal.core.scaling import Demand, Load
from shoal.net.stream import ListenerIdentity
from shoal.signals.live import LiveSignals
from shoal.signals.rates import CounterRate
from tests.support import streams
from tests.support.streams import agents, told_gateway, until

READY = {"phase": "ready", "engine_boot": "e1", "running": 2, "waiting": 0, "kv_tokens_used": 10, "kv_tokens_total": 99}


@contextlib.asynccontextmanager
async def listener(
    repriced: Callable[[LiveSignals], None] = lambda _: None,
    halted: Callable[[LiveSignals], None] = lambda _: None,
) -> AsyncGenerator[tuple[LiveSignals, list[tuple[str | None, bool]]]]:
    heard: list[tuple[str | None, bool]] = []
    it = LiveSignals(
        lambda model, urgent: heard.append((model, urgent)),
        ListenerIdentity("operator-1", "boot"),
        lambda: repriced(it),
        lambda: halted(it),
    )
    it.start()
    try:
        yield it, heard
    finally:
        await it.close()


async def test_a_replica_is_heard_until_its_stream_is_down():
    hub = AgentStream()
    hub.update(READY)
    async with agents(hub) as (peer,), listener() as (signals, heard):
        assert signals.load(peer.uid) is None
        signals.listen_to_replica("model-1", peer)
        await until(lambda: signals.load(peer.uid) is not None)
        assert signals.load(peer.uid) == Load(
            "e1", "ready", running=2, waiting=0, kv_tokens_used=10, kv_tokens_total=99
        )
        assert heard == [("model-1", True)]
        assert (signals.age(peer.uid) or 0) < 12
        # more of the same can wait; a queue cannot
        hub.update({**READY, "kv_tokens_used": 90})
        await until(lambda: len(heard) == 2)
        assert heard[-1] == ("model-1", False)
        hub.update({**READY, "kv_tokens_used": 90, "waiting": 3, "tokens_per_step": 2.25})
        await until(lambda: len(heard) == 3)
        assert heard[-1] == ("model-1", True)
        assert (signals.load(peer.uid) or Load()).tokens_per_step == 2.25
        hub.close()
        await until(lambda: signals.load(peer.uid) is None)
        assert heard[3:] == [("model-1", True)]
        assert signals.age(peer.uid) is None


async def test_a_pod_that_is_forgotten_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.05)
    hub = AgentStream()
    hub.update(READY)
    async with agents(hub) as (peer,), listener() as (signals, heard):
        signals.listen_to_replica("model-1", peer)
        await until(lambda: signals.load(peer.uid) is not None)
        signals.forget(peer.uid)
        assert signals.load(peer.uid) is None
        assert heard == [("model-1", True)] * 2
        await until(lambda: hub.readers == 0)


async def test_a_gateway_that_begins_to_hold_is_worth_a_decision_at_once():
    async with told_gateway() as gateway, listener() as (signals, heard):
        peer = gateway.peer()
        assert signals.demand(peer.uid, "model-1") is None
        signals.listen_to_gateway(peer)
        await until(lambda: signals.demand(peer.uid, "model-1") == Demand(0, 0, 0, 0, 0.0, frozenset()))
        assert heard == [(None, True)]
        assert signals.boot(peer.uid) == gateway.hub.boot
        gateway.book.arrived("model-1")
        gateway.book.held("model-1", 70, 0.0)
        await until(lambda: ("model-1", True) in heard)
        demand = signals.demand(peer.uid, "model-1")
        assert demand is not None
        assert (demand.arrivals, demand.held, demand.held_tokens) == (1, 1, 70)
        heard.clear()
        gateway.book.arrived("model-2")
        gateway.book.sent("model-2")
        await until(lambda: ("model-2", False) in heard)
        assert not any(urgent for _, urgent in heard)
        gateway.hub.close()
        await until(lambda: signals.demand(peer.uid, "model-1") is None)
        assert (None, True) in heard


async def test_first_tokens_that_a_gateway_tells_of_are_passed_on():
    told: list[tuple[str, dict[str, FirstToken]]] = []
    signals = LiveSignals(lambda _uid, _urgent: None, first_tokens=lambda uid, of: told.append((uid, dict(of))))
    signals.start()
    try:
        async with told_gateway() as gateway:
            gateway.book.arrived("model-1")
            signals.listen_to_gateway(gateway.peer())
            await until(lambda: bool(signals.gateways.live()))
            assert told == []
            gateway.book.first_token("model-1", "pod-1", 0.25, 2.5)
            await until(lambda: bool(told))
            assert told[-1] == ("model-1", {"pod-1": FirstToken(after=0.25, seconds=2.5)})
    finally:
        await signals.close()


async def test_arrivals_per_second_need_a_gateway_that_is_heard():
    async with told_gateway() as gateway, listener() as (signals, _):
        assert signals.arrivals_per_second("model-1") is None
        signals.listen_to_gateway(gateway.peer())
        await until(lambda: signals.arrivals_per_second("model-1") == 0.0)
        gateway.book.arrived("model-1")
        await until(lambda: signals.demand("gateway-1", "model-1") == Demand(1, 0, 0, 0, 0.0, frozenset()))
        assert signals.arrivals_per_second("model-1") is None  # not a second has been seen yet


async def test_adapters_in_use_are_heard_by_their_uid_and_by_the_model_that_serves_them():
    async with told_gateway() as gateway, listener() as (signals, _):
        peer = gateway.peer()
        assert signals.adapter_demand(peer.uid) is None
        signals.listen_to_gateway(peer)
        await until(lambda: signals.adapter_demand(peer.uid) == {})
        adapters = gateway.book.adapters
        adapters.arrived("support", "model-1", missed=True)
        adapters.held("support", "model-1")
        adapters.arrived("legal", "model-2", missed=False)
        await until(lambda: len(signals.adapter_demand(peer.uid) or {}) == 2)
        before = signals.adapter_demand(peer.uid)
        assert before is not None
        assert (before["support"].arrivals, before["support"].held, before["support"].misses) == (1, 1, 1)
        demand = signals.demand(peer.uid, "model-1")
        assert demand is not None
        assert demand.adapters == {"support"}
        adapters.released("support", "model-1")
        adapters.sent("support", "model-1")
        adapters.ended("support", "model-1")
        await until(lambda: signals.adapter_demand(peer.uid) != before)
        demand = signals.demand(peer.uid, "model-1")
        assert demand is not None
        assert demand.adapters == frozenset()
        assert before["support"].held == 1  # what was handed out does not change
        gateway.hub.close()
        await until(lambda: signals.adapter_demand(peer.uid) is None)


def test_a_rate_is_that_of_the_last_half_minute():
    rate = CounterRate()
    for second in range(100):
        rate.note(float(second), "boot", 10 * second if second < 50 else 500 + 2 * (second - 50))
    assert rate.per_second(99.0) == 2.0


def test_a_restart_is_never_a_negative_rate():
    rate = CounterRate()
    rate.note(0.0, "first", 1000)
    rate.note(10.0, "first", 2000)
    assert rate.per_second(10.0) == 100.0
    rate.note(11.0, "second", 3)
    assert rate.per_second(11.0) is None
    rate.note(21.0, "second", 13)
    assert rate.per_second(21.0) == 1.0


def test_a_counter_that_stands_still_is_a_rate_of_nothing():
    rate = CounterRate()
    rate.note(0.0, "boot", 0)
    rate.note(10.0, "boot", 100)
    assert rate.per_second(100.0) == 0.0


async def test_the_currency_of_the_price_list_is_heard_and_another_one_is_news():
    news: list[str | None] = []
    async with (
        told_gateway() as one,
        told_gateway() as two,
        listener(lambda signals: news.append(signals.currency())) as (signals, _),
    ):
        one.publisher.set_currency("USD")
        signals.listen_to_gateway(one.peer("g1"))
        await until(lambda: news == ["USD"])
        signals.listen_to_gateway(two.peer("g2"))
        await until(lambda: signals.boot("g2") is not None)
        assert signals.currency() == "USD"  # the other one knows none yet
        two.publisher.set_currency("EUR")
        await until(lambda: news == ["USD", None])  # they do not agree
        one.publisher.set_currency("EUR")
        await until(lambda: news == ["USD", None, "EUR"])
        signals.forget("g1")
        assert signals.currency() == "EUR"


async def test_why_price_lists_are_refused_is_heard_and_news():
    news: list[str | None] = []
    async with (
        told_gateway() as one,
        listener(lambda signals: news.append(signals.prices_refused())) as (signals, _),
    ):
        one.publisher.set_prices_refused("mine.yaml:2: wrong")
        signals.listen_to_gateway(one.peer("g1"))
        await until(lambda: news == ["mine.yaml:2: wrong"])
        one.publisher.set_prices_refused(None)
        await until(lambda: news == ["mine.yaml:2: wrong", None])


async def test_a_halted_canary_is_heard_of_each_gateway():
    news: list[dict[str, CanaryHalt]] = []
    errors, slow = CanaryHalt("Errors", 3, 5), CanaryHalt("Slow", 11, 20)
    async with (
        told_gateway() as one,
        told_gateway() as two,
        listener(halted=lambda signals: news.append(dict(signals.canaries()))) as (signals, _),
    ):
        one.publisher.set_canaries({"r1": errors})
        signals.listen_to_gateway(one.peer("g1"))
        signals.listen_to_gateway(two.peer("g2"))
        await until(lambda: news == [{"r1": errors}] and signals.boot("g2") is not None)
        two.publisher.set_canaries({"r2": slow})
        await until(lambda: news[1:] == [{"r1": errors, "r2": slow}])
        one.publisher.set_canaries({})
        await until(lambda: news[2:] == [{"r2": slow}])
