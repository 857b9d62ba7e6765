"""/v1/tokenize and /v1/detokenize through the gateway: bounds, adapters, and records that cost nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_agents import AdapterAgent, tuned
from tests.support.gateway import gateway, tenant
from tests.support.pictures import data_url, png
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
USER = {"role": "user", "content": "hello"}


async def tokens(request: EngineRequest) -> None:
    found: dict[str, Any] = {"tokens": [5, 6], "count": 2, "max_model_len": 8192}
    if request.path == DETOKENIZE:
        # Such a text is no usage, and no name of a model.
        found = {"text": 'abc "model":"chat/llama" "usage":{"prompt_tokens":9}'}
    await request.answer(200, json.dumps(found, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENIZE, {"prompt": "hello", "add_special_tokens": False}),
        (TOKENIZE, {"prompt": ["hello", ""]}),
        (TOKENIZE, {"messages": [USER], "add_generation_prompt": True, "chat_template_kwargs": {"thinking": True}}),
        (DETOKENIZE, {"tokens": [5, 6], "skip_special_tokens": False}),
        (DETOKENIZE, {"tokens": [[5], [6, 7]]}),
    ],
)
async def test_the_engine_answers_and_nothing_is_billed(tmp_path: Path, path: str, body: dict[str, Any]):
    engine = ScriptedEngine(tokens)
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "llama", "user": "me", **body}, path)
        answer = await response.json()
        assert response.status == 200
        assert answer == (
            {"tokens": [5, 6], "count": 2, "max_model_len": 8192}
            if path == TOKENIZE
            else {"text": 'abc "model":"chat/llama" "usage":{"prompt_tokens":9}'}
        )
        assert engine.requests[0].body == {"model": "chat/llama", **body}
        data = (await it.records())[0].data
        assert (data.endpoint, data.outcome, data.count_source) == (path, "answered", "final")
        assert (data.input_tokens, data.output_tokens) == (0, 0)


async def test_an_engine_that_is_lost_leaves_no_estimate(tmp_path: Path):
    async def hang_up(request: EngineRequest) -> None:
        request.writer.close()

    async with gateway(tmp_path, ScriptedEngine(hang_up)) as it:
        assert (await it.post({"model": "llama", "prompt": "x" * 4000}, TOKENIZE)).status in (502, 503)
        data = (await it.records())[0].data
        assert (data.count_source, data.input_tokens) == ("none", None)


async def test_a_limit_of_tokens_does_not_count_it_and_one_of_requests_does(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine(tokens)) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 100, "requestsPerMinute": 2})
        it.changed()
        found = [(await it.post({"model": "llama", "prompt": "x" * 4000}, TOKENIZE)).status for _ in range(2)]
        assert found == [200, 200]
        refused = await it.post({"model": "llama", "prompt": "x"}, TOKENIZE)
        assert (refused.status, (await refused.json())["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_an_adapter_has_the_tokens_of_its_base(tmp_path: Path):
    """No replica has to load it."""
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.engines[0].behave = tokens
        response = await it.it.post({"model": "support", "prompt": "hello"}, TOKENIZE)
        assert (response.status, (await response.json())["count"]) == (200, 2)
        (sent,) = it.engines[0].requests
        assert sent.body == {"model": "chat/llama", "prompt": "hello"}
        assert it.agents[0].ensured == []
        assert (await it.it.records())[0].data.adapter == "chat/support"


PICTURE = {"type": "image_url", "image_url": {"url": data_url("image/png", png(56, 56))}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "x", "messages": [USER]}, "messages"),
        (TOKENIZE, {"prompt": [5, 6]}, "prompt"),
        (TOKENIZE, {"prompt": []}, "prompt"),
        (TOKENIZE, {"prompt": ["x"] * 129}, "prompt"),
        (TOKENIZE, {"prompt": "x" * 400_000}, "prompt"),
        (TOKENIZE, {"prompt": ["x" * 5000] * 128}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0]"),
        (TOKENIZE, {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (TOKENIZE, {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        # SGLang takes any further field for a field of a chat.
        (TOKENIZE, {"messages": [USER], "temperature": 1}, "temperature"),
        (TOKENIZE, {"messages": [USER], "lora_path": "x"}, "lora_path"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": []}, "tokens"),
        (DETOKENIZE, {"tokens": "x"}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens"),
        (DETOKENIZE, {"tokens": [32_000]}, "tokens"),
        (DETOKENIZE, {"tokens": [True]}, "tokens"),
        (DETOKENIZE, {"tokens": [[5], []]}, "tokens"),
        (DETOKENIZE, {"tokens": [[5], 6]}, "tokens"),
        (DETOKENIZE, {"tokens": [[5]] * 129}, "tokens"),
        (DETOKENIZE, {"tokens": [5] * 131_073}, "tokens"),
    ],
)
async def test_bounds(tmp_path: Path, path: str, body: dict[str, Any], param: str):
    engine = ScriptedEngine(tokens)
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "llama", **body}, path)
        error = (await response.json())["error"]
        assert response.status == 400
        assert error["param"].startswith(param)
        assert engine.requests == []
