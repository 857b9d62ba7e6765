"""/v1/classify through the gateway: bounds, what the engine gets, and what is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

CLASSIFY = "/v1/classify"


async def labels(request: EngineRequest) -> None:
    given = request.body["input"]
    body = {
        "id": "classify-1",
        "object": "list",
        "created": 1,
        "model": request.model,
        # A label is the model's own text, which must not pass for a field.
        "data": [
            {"index": index, "label": 'x"usage":{"prompt_tokens":9},"index":7', "probs": [0.9, 0.1], "num_classes": 2}
            for index in range(len(given) if isinstance(given[0], str) and isinstance(given, list) else 1)
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": None},
    }
    await request.answer(200, json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize("given", ["one", ["one", "two"], [5, 6]])
async def test_labels_and_their_record(tmp_path: Path, given: Any):
    engine = ScriptedEngine(labels)
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "llama", "input": given, "user": "me"}, CLASSIFY)
        answer = await response.json()
        assert (response.status, answer["model"], answer["usage"]["prompt_tokens"]) == (200, "llama", 4)
        assert engine.requests[0].body == {"model": "chat/llama", "input": given}
        data = (await it.records())[0].data
        assert (data.endpoint, data.input_tokens, data.output_tokens) == (CLASSIFY, 4, 0)
        assert (data.count_source, data.documents) == ("final", None)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[5], [6]]}, "input"),
        ({"input": ["x", 5]}, "input"),
        ({"input": [32_000]}, "input"),
        ({"input": ["x"] * 1025}, "input"),
        ({"input": ["x" * 600] * 1024}, "input"),
        ({"input": "x" * 400_000}, "input"),
        ({"rid": "x"}, "rid"),
        ({"priority": 1}, "priority"),
        ({"stream": True}, "stream"),
    ],
)
async def test_bounds(tmp_path: Path, change: dict[str, Any], param: str):
    engine = ScriptedEngine(labels)
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "llama", "input": "x", **change}, CLASSIFY)
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
        assert engine.requests == []
