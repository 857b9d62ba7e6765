"""Streams whose connection breaks after their last event, before HTTP's own end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


def breaks_after(*last: bytes) -> ScriptedEngine:
    async def behave(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.chunk(request.closing())
        for event in last:
            await request.chunk(event)
        await asyncio.sleep(0.1)  # what was sent arrives before the reset
        request.writer.transport.abort()

    return ScriptedEngine(behave)


async def events(tmp_path: Path, engine: ScriptedEngine, path: str) -> tuple[list[Any], Any]:
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "llama", "stream": True, **BODIES[path]}, path)
        lines = [line[6:] for line in (await response.read()).split(b"\n") if line.startswith(b"data: ")]
        assert len(engine.requests) == 1
        return [line if line == b"[DONE]" else json.loads(line) for line in lines], (await it.records())[0].data


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_that_is_whole_ends_as_one(tmp_path: Path, path: str) -> None:
    found, data = await events(tmp_path, breaks_after(b"data: [DONE]\n\n"), path)
    assert found[-1] == b"[DONE]" or found[-1]["type"] in ("message_stop", "response.completed")
    assert (data.outcome, data.count_source) == ("answered", "final")


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_of_the_engine_is_the_only_one(tmp_path: Path, path: str) -> None:
    error = b'data: {"error":{"message":"no","type":"server_error","code":500}}\n\n'
    found, data = await events(tmp_path, breaks_after(error), path)
    told = [one for one in found if "error" in one or one.get("type") in ("error", "response.failed")]
    assert told == found[-1:]
    assert data.outcome == "failed"


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_without_its_last_event_is_lost(tmp_path: Path, path: str) -> None:
    found, data = await events(tmp_path, breaks_after(), path)
    last = found[-1]
    assert "error" in last or last["type"] == "response.failed"
    assert data.outcome == "failed"
