"""External targets that take requests and never answer: noticed also where requests end before `firstByteSeconds`."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.core.routing import external
from shoal.gateway import fallbacks
from tests.support.gateway import MODEL, GatewayUnderTest, tenant
from tests.support.pictures import data_url, png
from tests.support.provider import CLOSING, DONE, Provider, beside, event, hanging, stream, whole
from tests.support.routes import put, target
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until_async

CHAT: dict[str, Any] = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
ONLY = {"targets": [{"external": {"name": "outside"}}]}
WITH_FALLBACK = {**ONLY, "fallback": {"targets": [target("llama")]}}
OTHER = "sk-test-globex"


def limited(it: GatewayUnderTest, provider: Provider, rule: dict[str, Any], seconds: int = 1, **more: Any) -> None:
    """Requests of the route may take less time than the provider's first byte."""
    it.tenants["globex"] = tenant("globex", OTHER, routes=[{"namespace": "chat"}])
    put(it, rule, externalTargets=[provider.target(**more)], limits={"requestSeconds": seconds})


def counted(it: GatewayUnderTest, outcome: str) -> float:
    return it.metric("shoal_gateway_external_requests_total", outcome=outcome)


async def statuses(it: GatewayUnderTest, body: dict[str, Any], times: int, **more: Any) -> list[int]:
    found: list[int] = []
    for _ in range(times):
        response = await it.post(body, **more)
        await response.read()
        found.append(response.status)
    return found


async def test_streams_of_a_target_that_never_answers_go_to_the_fallback_before_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "BEGIN_SHARE", 0.1)
    engine, provider = ScriptedEngine(), Provider(hanging)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        limited(it, provider, WITH_FALLBACK, 10)
        assert await statuses(it, STREAM, 5) == [200] * 5
        assert (len(provider.heads), len(engine.requests)) == (3, 5), "after three it rests"
        assert (counted(it, "too_slow"), counted(it, "resting")) == (3, 2)


SHOWN = {"type": "image_url", "image_url": {"url": data_url("image/png", png(32, 32))}}
BLIND = replace(MODEL.facts, media=frozenset())
SEES = {**STREAM, "messages": [{"role": "user", "content": [SHOWN]}]}


async def late(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1.0)
    await stream(event("Hello"), CLOSING, DONE)(writer)


@pytest.mark.parametrize(
    ("body", "models"), [(SEES, ["chat/llama"]), (STREAM, [])], ids=["it sees nothing", "it is not the tenant's"]
)
async def test_a_stream_that_no_fallback_can_take_has_all_the_time_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], models: list[str]
) -> None:
    monkeypatch.setattr(external, "BEGIN_SHARE", 0.05)
    engine, provider = ScriptedEngine(), Provider(late)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        it.tenants["acme"] = tenant(models=models, routes=[{"namespace": "chat"}])
        limited(it, provider, WITH_FALLBACK, 10)
        it.model(facts=BLIND)
        assert await statuses(it, body, 1) == [200]
        assert (len(provider.heads), len(engine.requests)) == (1, 0)
        assert (counted(it, "answered"), counted(it, "too_slow")) == (1, 0)


async def test_a_stream_that_no_fallback_can_take_ends_after_first_byte_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "BEGIN_SHARE", 0.05)
    engine, provider = ScriptedEngine(), Provider(hanging)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        limited(it, provider, WITH_FALLBACK, 10, timeouts={"firstByteSeconds": 1})
        it.model(facts=BLIND)
        began = asyncio.get_running_loop().time()
        assert await statuses(it, SEES, 1) == [503]
        assert asyncio.get_running_loop().time() - began >= 1.0
        assert (counted(it, "too_slow"), len(engine.requests)) == (1, 0)


async def test_a_large_stream_leaves_for_its_fallback_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "BEGIN_SHARE", 0.05)
    monkeypatch.setattr(fallbacks, "BIG", 0)
    engine, provider = ScriptedEngine(), Provider(hanging)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        limited(it, provider, WITH_FALLBACK, 10)
        assert await statuses(it, STREAM, 1) == [200]
        assert (counted(it, "too_slow"), len(engine.requests)) == (1, 1)


async def test_a_target_rests_for_all_whose_streams_have_not_begun_when_their_time_is_over(tmp_path: Path) -> None:
    provider = Provider(hanging)
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        limited(it, provider, ONLY)
        assert await statuses(it, STREAM, 4) == [504, 504, 504, 503]
        assert await statuses(it, STREAM, 1, key=OTHER) == [503]
        assert (counted(it, "too_slow"), counted(it, "resting")) == (3, 2)
        (seen,) = it.app.externals.observe()
        assert (seen.state, seen.reason, seen.rests) == ("Fails", "too_slow", True)


async def test_a_whole_answer_that_takes_too_long_lets_the_target_rest_for_its_tenant_only(tmp_path: Path) -> None:
    """It may be a long one."""
    engine, provider = ScriptedEngine(), Provider(hanging)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        limited(it, provider, WITH_FALLBACK)
        assert await statuses(it, CHAT, 4) == [504, 504, 504, 200]
        assert (counted(it, "too_slow"), counted(it, "resting_for_tenant")) == (3, 1)
        provider.answer = whole()
        assert await statuses(it, CHAT, 1, key=OTHER) == [200]
        assert (len(provider.heads), len(engine.requests)) == (4, 1)


async def test_a_whole_answer_has_all_the_time_of_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)
        await whole()(writer)

    monkeypatch.setattr(external, "BEGIN_SHARE", 0.05)

    engine, provider = ScriptedEngine(), Provider(late)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        limited(it, provider, WITH_FALLBACK, 10)
        assert await statuses(it, CHAT, 1) == [200]
        assert not engine.requests


@pytest.mark.parametrize(("enough", "asked"), [(0.0, 3), (10.0, 4)], ids=["waited", "left at once"])
async def test_clients_that_wait_in_vain_let_the_target_rest_for_their_tenant_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: float, asked: int
) -> None:
    monkeypatch.setattr(external, "LEFT_SECONDS", enough)
    engine, provider = ScriptedEngine(), Provider(hanging)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        it.tenants["globex"] = tenant("globex", OTHER, routes=[{"namespace": "chat"}])
        it.changed()
        for number in range(3):
            leaving = asyncio.create_task(it.post(STREAM))
            await until_async(lambda number=number: len(provider.heads) == number + 1)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await until_async(lambda: it.app.in_flight == 0)
        provider.answer = whole()
        await statuses(it, CHAT, 1)
        assert len(provider.heads) == asked
        await statuses(it, CHAT, 1, key=OTHER)
        assert len(provider.heads) == asked + 1, "others' requests go there"
