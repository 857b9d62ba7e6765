"""Requests to routes, judged as a storm judges them. And without what the rules rest on, as the storm's mutations take
it away: then the judge must say so."""

from pathlib import Path
from typing import Any

import pytest

from shoal.core.hold.limits import Limits
from shoal.gateway.canaries import Canaries
from shoal.metering.meter import Meter
from shoal.metering.spool import FILE_NAME
from tests.storm import journals, mutants
from tests.storm.journals import Attempt, Journals, Routed
from tests.storm.verdict import Findings, judge
from tests.support.gateway import GatewayUnderTest
from tests.support.routes import target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

ROUTE = Routed("chat/front", ("chat/llama", "chat/other"))


async def ask(it: GatewayUnderTest, model: str, status: int = 200) -> Attempt:
    response = await it.post(
        {"model": model, "messages": [{"role": "user", "content": "hi"}]}, headers={"x-request-id": "a"}
    )
    await response.read()
    assert response.status == status
    return Attempt("a", "a", model, "chat", 0.0, outcome="answered", ended=1.0)


async def judged(it: GatewayUnderTest, tmp_path: Path, attempt: Attempt) -> Findings:
    await it.records()
    journals.copy_spool(it.settings.spool_dir / FILE_NAME, tmp_path / "spools" / "gateway")
    rows = journals.read_spools(tmp_path / "spools")
    return judge(Journals({"a": attempt}, rows, routes={"front": ROUTE}))


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


async def test_a_record_that_keeps_the_model_that_was_left_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "reroute", Meter.reroute)  # put back afterwards
    mutants.keeps_model()
    findings = await fallen_back(tmp_path)
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
