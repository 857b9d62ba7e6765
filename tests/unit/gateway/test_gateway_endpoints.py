"""What holds for every endpoint that an engine answers: keys, waiting for a replica, retries before the first byte."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from shoal.core.fields.table import FORMS, TABLE, TOKENIZING
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway
from tests.support.recordings import TYPE, asked, wav
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
    "/v1/audio/transcriptions": {},
}
endpoints = pytest.mark.parametrize("path", BODIES)


async def post(it: GatewayUnderTest, path: str, key: str | None = API_KEY) -> aiohttp.ClientResponse:
    if path in FORMS:
        return await it.post(asked(wav(0.1)), path, key, headers={"content-type": TYPE.decode()})
    return await it.post({"model": "llama", **BODIES[path]}, path, key)


def read(path: str) -> int | None:
    """Tokens that the engine has counted."""
    return None if path in FORMS else 0 if path in TOKENIZING else 3


async def answer(request: EngineRequest) -> None:
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    found: Any = {"model": request.body.get("model"), "usage": usage}
    if request.path == "/v1/rerank":
        found = [{"score": 0.5, "index": 0, "meta_info": usage}]
    elif request.path in FORMS:
        found = {"text": "hi", "usage": {"type": "duration", "seconds": 1}}
    await request.answer(200, json.dumps(found, separators=(",", ":")).encode())


def test_each_endpoint_is_here() -> None:
    assert BODIES.keys() == TABLE.keys()


@endpoints
async def test_nobody_is_served_without_a_key(tmp_path: Path, path: str):
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        for key in (None, "sk-wrong"):
            assert (await post(it, path, key)).status == 401
        async with it.session.get(it.url + path) as wrong:
            assert wrong.status == 405
        assert engine.requests == []
        assert await it.records("open", 0) == []


@endpoints
async def test_a_request_waits_for_a_replica(tmp_path: Path, path: str):
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        it.hear(1, phase="stalled")
        asked = asyncio.create_task(post(it, path))
        async with asyncio.timeout(20):
            while not it.app.holds.waiting:
                await asyncio.sleep(0.005)
        assert engine.requests == []
        it.hear(1)
        assert (await asked).status == 200
        data = (await it.records())[0].data
        assert data.hold_ms is not None
        assert data.input_tokens == read(path)


@endpoints
async def test_a_replica_that_is_lost_before_it_answers_costs_the_client_nothing(tmp_path: Path, path: str):
    async def hang_up(request: EngineRequest) -> None:
        request.writer.close()

    broken, sound = ScriptedEngine(hang_up), ScriptedEngine(answer)
    async with gateway(tmp_path, broken, sound) as it:
        for _ in range(3):
            assert (await post(it, path)).status == 200
        assert broken.requests
        records = await it.records(count=3)
        assert {record.data.input_tokens for record in records} == {read(path)}
        assert max(record.data.attempts for record in records) == 2
