"""Answers that are none of a chat, on their way to a client of another API."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import gateway, replica
from tests.support.provider import DONE, Provider, beside, event, stream, whole
from tests.support.routes import target
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
MESSAGE: dict[str, Any] = {"model": "llama", "max_tokens": 50, "messages": HI}
RESPONSE: dict[str, Any] = {"model": "llama", "input": "hi"}
PATHS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)], ids=["messages", "responses"]
)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@PATHS
@pytest.mark.parametrize(
    "garbled", [b"[1]", b"no JSON", *(json.dumps({"choices": c}).encode() for c in ([], [7], [{"message": "hi"}], "x"))]
)
async def test_an_engines_answer_that_is_none_is_an_error_and_costs_nothing(
    tmp_path: Path, path: str, body: dict[str, Any], garbled: bytes
) -> None:
    async def garble(request: EngineRequest) -> None:
        counted = garbled.replace(b'{"choices"', b'{"usage":%b,"choices"' % json.dumps(USAGE).encode())
        await request.answer(200, counted)

    async with gateway(tmp_path, ScriptedEngine(garble)) as it:
        response = await it.post(body, path)
        answer = await response.json()
        assert (response.status, "shape of its API" in answer["error"]["message"]) == (502, True)
        assert ("type" in answer) == (path == "/v1/messages")
        data = (await it.records())[0].data
        assert (data.outcome, data.status, data.count_source) == ("failed", 502, "estimated")


async def test_a_count_of_tokens_that_is_none_is_an_error(tmp_path: Path) -> None:
    async def garble(request: EngineRequest) -> None:
        await request.answer(200, b'{"count":"many"}')

    async with gateway(tmp_path, ScriptedEngine(garble)) as it:
        response = await it.post({"model": "llama", "messages": HI}, "/v1/messages/count_tokens")
        assert (response.status, (await response.json())["error"]["type"]) == (502, "api_error")


@PATHS
async def test_a_provider_whose_answer_is_none_is_left_for_the_fallback(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    garbled = whole({"choices": [{"message": "hi"}], "usage": USAGE})
    rule = {"targets": [{"external": {"name": "outside"}}], "fallback": {"targets": [target("llama")]}}
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(garbled), engine, rule) as it:
        response = await it.post({**body, "model": "front"}, path)
        assert response.status == 200, await response.text()
        assert len(engine.requests) == 1
        data = (await it.records())[0].data
        assert (data.model, data.outcome, data.count_source) == ("chat/llama", "answered", "final")


@PATHS
async def test_chunks_that_are_none_leave_a_stream_whole(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    odd = [
        b"data: %b\n\n" % json.dumps({"created": "now", **chunk}).encode()
        for chunk in (
            {"choices": [7]},
            {"choices": [{"delta": ["x"]}]},
            {"choices": [{"delta": {"content": ["x"], "tool_calls": [3]}}]},
            {"choices": [], "usage": {"prompt_tokens": "7", "completion_tokens": 1e300}},
        )
    ]
    rule = {"targets": [{"external": {"name": "outside"}}]}
    provider = Provider(stream(odd[0], event("a "), *odd, event("fox"), DONE))
    async with beside(tmp_path, provider, ScriptedEngine(), rule) as it:
        response = await it.post({**body, "model": "front", "stream": True}, path)
        raw = await response.read()
        events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: ")]
        assert events[-1]["type"] in ("message_stop", "response.completed")
        assert b'"a "' in raw
        assert b'"fox"' in raw
        assert (await it.records())[0].data.outcome == "answered"


async def test_arguments_that_are_nested_too_deeply_are_kept_as_a_text(tmp_path: Path) -> None:
    deep = '{"a":' * 300 + "1" + "}" * 300

    async def calls(request: EngineRequest) -> None:
        call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": deep}}
        choices = [{"index": 0, "message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]
        await request.answer(200, json.dumps({"model": request.model, "choices": choices, "usage": USAGE}).encode())

    async with gateway(tmp_path, ScriptedEngine(calls)) as it:
        response = await it.post(MESSAGE, "/v1/messages")
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["content"] == [{"type": "tool_use", "id": "t", "name": "f", "input": {"arguments": deep}}]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify"])
@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
@pytest.mark.parametrize("indices", [[], [0], [0, 0], [1, 2], [0, 1, 2]])
async def test_an_answer_without_one_result_for_each_text_is_an_error(
    tmp_path: Path, path: str, engine: str, indices: list[int]
) -> None:
    async def garble(request: EngineRequest) -> None:
        data = [{"object": "embedding", "embedding": [0.5], "index": index} for index in indices]
        answer = {"object": "list", "data": data, "model": request.model, "usage": USAGE}
        await request.answer(200, json.dumps(answer, separators=(",", ":")).encode())

    async with gateway(tmp_path, ScriptedEngine(garble)) as it:
        it.pods["chat/llama-1"] = replica(1, engine=engine)
        it.changed()
        response = await it.post({"model": "llama", "input": ["a", "b"]}, path)
        answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (502, "bad_answer")
        assert answer["error"]["message"] == "The engine's answer does not have one result for each text that was sent."
        data = (await it.records())[0].data
        assert (data.outcome, data.status) == ("failed", 502)
