"""Two replicas, the first of which breaks off: invariants 1 and 2, judged as a storm judges them. And without what they
rest on, as the storm's mutations take it away: then the judge must say so."""

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import pytest

from shoal.gateway.dispatch import Dispatch
from shoal.gateway.relay import AnswerRelay
from tests.storm import mutants
from tests.storm.journals import Attempt, Journals, Kill, Sequence, UsageRow
from tests.storm.verdict import Findings, judge
from tests.support.gateway import gateway, lines
from tests.support.scripted_engine import Behaviour, EngineRequest, ScriptedEngine, serve_normally

STREAM = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "stream": True}
ANSWER = "abc"
ROWS = [
    UsageRow("gateway", "req", "a", kind, "2026-01-01T00:00:00Z", None, None, 1, None) for kind in ("open", "final")
]


async def break_off(request: EngineRequest) -> None:
    request.writer.transport.abort()


async def break_off_in_mid_answer(request: EngineRequest) -> None:
    await request.begin_stream()
    await request.chunk(request.delta("a", 1))
    await asyncio.sleep(0.1)
    request.writer.transport.abort()


async def judged(tmp_path: Path, first: Behaviour) -> Findings:
    """One stream: whichever replica gets it first behaves so, and is killed; the other one is as it should be."""
    sequences: list[Sequence] = []

    def engine(name: str) -> ScriptedEngine:
        async def behave(request: EngineRequest) -> None:
            sequences.append(Sequence("req", name, "boot", time.time()))
            await (first if len(sequences) == 1 else serve_normally)(request)

        return ScriptedEngine(behave)

    one = Attempt("a", "a", "m", "stream", time.time(), gateway_id="req")
    async with gateway(tmp_path, engine("engine-1"), engine("engine-2")) as it:
        response = await it.post(STREAM)
        one.head = time.time()
        one.outcome, one.why = await _end(one, response)
        one.ended = time.time()
    kill = Kill("engine", sequences[0].engine, one.sent, one.ended, "engine_killed")
    return judge(Journals({"a": one}, ROWS, sequences, kills=[kill]))


async def _end(one: Attempt, response: aiohttp.ClientResponse) -> tuple[str, str]:
    """As a storm's client calls it."""
    if response.status != 200:
        return "lost", f"status {response.status}"
    text = ""
    async for line in lines(response):
        one.first = one.first or time.time()
        if line == b"[DONE]":
            return ("answered", "") if text == ANSWER else ("lost", f"wrong content: {text}")
        event = json.loads(line)
        if "error" in event:
            return "failed", event["error"]["code"]
        text += event["choices"][0]["delta"]["content"] if event["choices"] else ""
    return "broken", "no end"


async def test_a_request_whose_engine_is_lost_before_its_first_byte_is_answered(tmp_path: Path) -> None:
    findings = await judged(tmp_path, break_off)
    assert findings.totals == {"answered": 1}
    assert findings.good


async def test_without_another_try_it_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatch, "_attempt", Dispatch._attempt)  # put back afterwards
    mutants.no_retry()
    findings = await judged(tmp_path, break_off)
    assert findings.totals == {"lost": 1}
    assert not findings.good


async def test_a_request_whose_engine_is_lost_after_its_first_byte_has_failed_and_goes_nowhere_else(
    tmp_path: Path,
) -> None:
    findings = await judged(tmp_path, break_off_in_mid_answer)
    assert findings.totals == {"failed": 1}
    assert findings.good


async def test_a_gateway_that_forgets_its_first_byte_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerRelay, "answering", AnswerRelay.answering)  # put back afterwards
    mutants.sends_again()
    findings = await judged(tmp_path, break_off_in_mid_answer)
    assert any(v.startswith("invariant 2") for v in findings.violations)
    assert not findings.good
