"""What holds for every endpoint that an engine answers: keys, waiting for a replica, retries before the first byte."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from shoal.core.fields.table import TABLE
from tests.support.gateway import gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["x"]},
    "/v1/score": {"query": "hi", "items": ["x"]},
    "/v1/classify": {"input": "hi"},
    "/v1/tokenize": {"prompt": "hi"},
    "/v1/detokenize": {"tokens": [5]},
}
endpoints = pytest.mark.parametrize("path", BODIES)


async def answer(request: EngineRequest) -> None:
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    found: Any = {"model": request.model, "usage": usage}
    if request.path == "/v1/rerank":
        found = [{"score": 0.5, "index": 0, "meta_info": usage}]
    await request.answer(200, json.dumps(found, separators=(",", ":")).encode())


def test_each_endpoint_is_here() -> None:
    assert BODIES.keys() == TABLE.keys()


@endpoints
async def test_nobody_is_served_without_a_key(tmp_path: Path, path: str):
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        for key in (None, "sk-wrong"):
            assert (await it.post({"model": "llama", **BODIES[path]}, path, key)).status == 401
        async with it.session.get(it.url + path) as wrong:
            assert wrong.status == 405
        assert engine.requests == []
        assert await it.records("open", 0) == []


@endpoints
async def test_a_request_waits_for_a_replica(tmp_path: Path, path: str):
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        it.hear(1, phase="stalled")
        asked = asyncio.create_task(it.post({"model": "llama", **BODIES[path]}, path))
        async with asyncio.timeout(20):
            while not it.app.holds.waiting:
                await asyncio.sleep(0.005)
        assert engine.requests == []
        it.hear(1)
        assert (await asked).status == 200
        data = (await it.records())[0].data
        assert data.hold_ms is not None
        assert data.input_tokens == (0 if "tokenize" in path else 3)


@endpoints
async def test_a_replica_that_is_lost_before_it_answers_costs_the_client_nothing(tmp_path: Path, path: str):
    async def hang_up(request: EngineRequest) -> None:
        request.writer.close()

    broken, sound = ScriptedEngine(hang_up), ScriptedEngine(answer)
    async with gateway(tmp_path, broken, sound) as it:
        for _ in range(3):
            assert (await it.post({"model": "llama", **BODIES[path]}, path)).status == 200
        assert broken.requests
        records = await it.records(count=3)
        assert {record.data.input_tokens for record in records} == {0 if "tokenize" in path else 3}
        assert max(record.data.attempts for record in records) == 2
