"""Requests to routes, judged as a storm judges them. And without what the rules rest on, as the storm's mutations take
it away: then the judge must say so."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.core.hold.limits import Limits
from shoal.core.quota.month import PICO
from shoal.gateway.canaries import Canaries
from shoal.gateway.preparation import Preparation
from shoal.metering.meter import Meter
from shoal.metering.spool import FILE_NAME
from tests.storm import journals, mutants
from tests.storm.journals import Attempt, Journals, Routed
from tests.storm.verdict import Findings, judge
from tests.support.gateway import GatewayUnderTest, gateway, replica, tenant
from tests.support.pricelist import PriceList, flat
from tests.support.routes import put, served, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine
from tests.support.streams import until

ROUTE = Routed("chat/front", ("chat/llama", "chat/other", "chat/trial"), mirror="chat/shadow")
CENT = PICO // 100


async def ask(it: GatewayUnderTest, model: str, status: int = 200) -> Attempt:
    response = await it.post(
        {"model": model, "messages": [{"role": "user", "content": "hi"}]}, headers={"x-request-id": "a"}
    )
    await response.read()
    assert response.status == status
    return Attempt("a", "a", model, "chat", 0.0, outcome="answered", ended=1.0)


async def judged(it: GatewayUnderTest, tmp_path: Path, *attempts: Attempt) -> Findings:
    await it.records(count=len(attempts))
    journals.copy_spool(it.settings.spool_dir / FILE_NAME, tmp_path / "spools" / "gateway")
    rows = journals.read_spools(tmp_path / "spools")
    return judge(Journals({each.id: each for each in attempts}, rows, routes={"front": ROUTE}))


FALLBACK: dict[str, Any] = {"targets": [target("llama")], "fallback": {"targets": [target("other")]}}


async def fallen_back(tmp_path: Path) -> Findings:
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), FALLBACK) as it:
        del it.pods["chat/llama-1"]
        it.model(limits=Limits(max_requests=0))
        return await judged(it, tmp_path, await ask(it, "front"))


@pytest.mark.parametrize("model", ["front", "llama"])
async def test_each_request_has_one_record_with_its_route_and_its_model(tmp_path: Path, model: str) -> None:
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), FALLBACK) as it:
        assert (await judged(it, tmp_path, await ask(it, model))).violations == []


async def test_after_a_fallback_the_record_has_the_model_that_answered(tmp_path: Path) -> None:
    assert (await fallen_back(tmp_path)).violations == []


async def test_a_route_with_a_canary_that_halts_a_fallback_by_cost_and_a_mirror_has_one_record_per_request(
    tmp_path: Path,
) -> None:
    """All of them at once, while what they go by changes."""
    engines = {name: ScriptedEngine() for name in ("llama", "other", "trial", "shadow")}
    rule: dict[str, Any] = {
        "targets": [target("llama")],
        "canary": {"target": target("trial"), "percent": 100, "haltOn": {"minRequests": 3, "errorPercent": 0}},
        "fallback": {"targets": [target("other")], "whenCostAbove": {"amount": "1", "currency": "USD"}},
        "mirror": {"model": {"name": "shadow"}, "percent": 100},
    }
    attempts: dict[str, Attempt] = {}
    sent: list[str] = []
    async with gateway(tmp_path, *engines.values()) as it:
        for number, name in enumerate(engines, 1):
            one = served(f"chat/{name}", uid=f"uid-{name}", limits=Limits(max_requests=0))
            it.models[one.key], it.pods[f"chat/llama-{number}"] = one, replica(number, model=one)
        it.tenants["acme"] = tenant(models=[f"chat/{name}" for name in engines])
        prices = [flat("chat/llama", CENT), flat("chat/trial", CENT), flat("chat/other", CENT // 10)]
        it.app.quotas.ledger = PriceList(*prices)
        put(it, rule)

        async def asks(kind: str) -> str:
            """The gateway's id of a request."""
            id = f"{kind}-{len(attempts)}"
            attempts[id] = Attempt(id, id, "front", "chat", 0.0, outcome="answered", ended=1.0)
            length = 10 if kind == "small" else 200
            body = {"model": "front", "messages": [{"role": "user", "content": "hi"}], "max_tokens": length}
            response = await it.post(body, headers={"x-request-id": id})
            await response.read()
            assert response.status == 200
            sent.append(response.headers["x-shoal-request-id"])
            return sent[-1]

        async def several() -> tuple[set[str], set[str]]:
            """Some of both kinds, at once: the Models that the records of small ones name, and those of large ones."""
            ids = await asyncio.gather(*(asks(kind) for kind in ("small", "large") * 4))
            models = await named()
            return {models[id] for id in ids[::2]}, {models[id] for id in ids[1::2]}

        async def named() -> dict[str, str]:
            """The Model of each record, by the gateway's id of its request."""
            return {each.data.request_id: each.data.model for each in await it.records(count=len(sent))}

        assert await several() == ({"chat/trial"}, {"chat/other"})
        trial, it.ports["pod-3"] = it.ports["pod-3"], 1
        small, large = await several()
        assert small >= {"chat/other"}, "what the canary refuses goes to the fallback too"
        assert small | large <= {"chat/other", "chat/llama"}
        assert it.app.canaries.halts
        it.ports["pod-3"] = trial
        assert await several() == ({"chat/llama"}, {"chat/other"})
        cheap = it.pods.pop("chat/llama-2")
        it.changed()
        assert await several() == ({"chat/llama"}, {"chat/llama"}), "the cheaper one has no replica"
        it.pods["chat/llama-2"] = cheap
        put(it, rule | {"canary": rule["canary"] | {"percent": 99}})
        it.app.quotas.ledger = PriceList(*prices[:1])
        small, large = await several()
        assert small | large <= {"chat/trial", "chat/llama"}, "another canary, and no price of the cheaper one"
        await until(lambda: not it.app.in_flight and not it.app.copies.in_progress)

        findings = await judged(it, tmp_path, *attempts.values())
        assert findings.violations == []
        assert findings.lost() == []
        records = await named()
        assert records.keys() == set(sent)
        for name in ("llama", "other", "trial"):
            answered = {request.body["rid"] for request in engines[name].requests}
            assert answered == {id for id, model in records.items() if model == f"chat/{name}"}
        copies = await it.records("attempt", count=len(engines["shadow"].requests))
        assert {each.data.mirror_of for each in copies} <= records.keys()
        assert {each.data.request_id for each in copies} == {
            request.body["rid"] for request in engines["shadow"].requests
        }
        assert engines["shadow"].requests
        assert it.metric("shoal_gateway_route_fallbacks_total", reason="cost") == 12


async def test_a_record_that_keeps_the_model_that_was_left_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "reroute", Meter.reroute)  # put back afterwards
    mutants.keeps_model()
    findings = await fallen_back(tmp_path)
    assert any("has the Model chat/llama and the replica chat/other-2" in text for text in findings.violations)


async def too_dear(tmp_path: Path) -> Findings:
    fallback = {"targets": [target("other")], "whenCostAbove": {"amount": "1", "currency": "USD"}}
    rule = {"targets": [target("llama")], "fallback": fallback}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it:
        it.app.quotas.ledger = PriceList(flat("chat/llama", PICO), flat("chat/other", 1))
        return await judged(it, tmp_path, await ask(it, "front"))


async def test_after_a_fallback_by_cost_the_record_has_the_model_that_answered(tmp_path: Path) -> None:
    assert (await too_dear(tmp_path)).violations == []


async def test_a_record_that_keeps_the_model_that_was_too_dear_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preparation, "_count", Preparation._count)  # pyright: ignore[reportPrivateUsage]
    mutants.keeps_dear()
    findings = await too_dear(tmp_path)
    assert any("has the Model chat/llama and the replica chat/other-2" in text for text in findings.violations)


async def test_a_gateway_that_notes_nothing_of_a_canary_never_halts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(request: EngineRequest) -> None:
        await request.answer(500, b"{}")

    monkeypatch.setattr(Canaries, "ended", Canaries.ended)  # put back afterwards
    mutants.no_halt()
    rule = {"targets": [target("llama")], "canary": {"target": target("other"), "percent": 100}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(breaks), rule) as it:
        for _ in range(5):
            await ask(it, "front", 500)
        assert not it.app.canaries.halts
