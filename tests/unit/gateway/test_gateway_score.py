"""/v1/score through the gateway: bounds, what the engine gets, and what is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_agents import AdapterAgent, tuned
from tests.support.gateway import gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

SCORE = "/v1/score"
ASKED = {"model": "llama", "query": "a fox", "items": ["one", "two"], "label_token_ids": [5, 6]}


async def scores(request: EngineRequest) -> None:
    body = {
        "scores": [[0.1, 0.2], [0.3, 0.4]],
        "pooled_hidden_states": None,
        "token_logprobs": None,
        "model": request.model,
        "usage": {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None},
        "object": "scoring",
    }
    await request.answer(200, json.dumps(body, separators=(",", ":")).encode())


async def test_scores_and_their_record(tmp_path: Path):
    engine = ScriptedEngine(scores)
    async with gateway(tmp_path, engine) as it:
        asked = {**ASKED, "apply_softmax": True, "temperature": 2, "item_first": False, "user": "me"}
        response = await it.post(asked, SCORE)
        answer = await response.json()
        assert (response.status, answer["model"], answer["scores"]) == (200, "llama", [[0.1, 0.2], [0.3, 0.4]])
        del asked["user"]
        assert engine.requests[0].body == {**asked, "model": "chat/llama"}
        data = (await it.records())[0].data
        assert (data.endpoint, data.documents) == (SCORE, 2)
        assert (data.input_tokens, data.output_tokens, data.count_source) == (9, 0, "final")


@pytest.mark.parametrize(
    "answer",
    [
        *({"scores": found, "usage": {"prompt_tokens": 9}} for found in ([], [[0.1]], [[0.1]] * 3, None, {"0": [0.1]})),
        {"data": []},
        [[0.1], [0.2]],
    ],
)
async def test_an_answer_without_one_score_for_each_item_is_an_engine_error(tmp_path: Path, answer: Any):
    """Both would be billed, and clients pair scores with items by their order."""

    async def miscounts(request: EngineRequest) -> None:
        await request.answer(200, json.dumps(answer).encode())

    async with gateway(tmp_path, ScriptedEngine(miscounts)) as it:
        response = await it.post(ASKED, SCORE)
        assert (response.status, (await response.json())["error"]["code"]) == (502, "bad_answer")
        data = (await it.records())[0].data
        assert (data.outcome, data.status, data.count_source) == ("failed", 502, "estimated")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        # Without a query it would end SGLang's scheduler.
        ({"items": [""], "query": None}, "items[0]"),
        ({"items": ""}, "items"),
        ({"items": [[]], "query": None}, "items"),
        ({"items": [" "]}, "items[0]"),
        ({"query": ""}, "query"),
        ({"query": []}, "query"),
        ({"query": [5], "items": ["x"]}, "items"),
        ({"query": "x", "items": [[5]]}, "items"),
        ({"items": ["x", [5]]}, "items[1]"),
        ({"items": [[5], ["x"]], "query": [5]}, "items"),
        ({"items": [[32_000]], "query": [5]}, "items"),
        ({"items": [[-1]], "query": [5]}, "items"),
        ({"items": [[5]], "query": [32_000]}, "query"),
        ({"items": [[5]] * 1025, "query": [5]}, "items"),
        ({"items": ["x"] * 1025}, "items"),
        ({"items": ["x"] * 1024, "query": "x" * 4096}, "items"),
        ({"items": [[5] * 100] * 1024, "query": [5] * 100}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [5, 5]}, "label_token_ids"),
        ({"label_token_ids": [32_000]}, "label_token_ids"),
        ({"label_token_ids": [True]}, "label_token_ids"),
        ({"label_token_ids": [[5], [6]]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
        ({"score_extraction_token": "x"}, "score_extraction_token"),
        ({"item_embed_overrides": [[[0.1]]]}, "item_embed_overrides"),
        ({"embed_override_token_id": 1}, "embed_override_token_id"),
    ],
)
async def test_bounds(tmp_path: Path, change: dict[str, Any], param: str):
    engine = ScriptedEngine(scores)
    async with gateway(tmp_path, engine) as it:
        response = await it.post({**ASKED, **change}, SCORE)
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
        assert engine.requests == []


async def test_an_adapter_scores_nothing(tmp_path: Path):
    """SGLang's /v1/score has no field for an adapter: the base would answer under the adapter's name."""
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        response = await it.it.post({**ASKED, "model": "support"}, SCORE)
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "wrong_endpoint")
        assert error["message"].startswith("The adapter `support` does not serve /v1/score; it can embed and generate")
        assert it.engines[0].requests == []
