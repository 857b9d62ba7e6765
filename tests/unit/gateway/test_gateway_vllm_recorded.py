"""Recorded answers of vLLM (`fixtures/vllm/`) through the gateway: what a client gets, and what is billed."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.core.hold.limits import Limits
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.gateway import GatewayUnderTest, gateway, replica
from tests.support.scripted_engine import EngineRequest, ScriptedEngine
from tests.support.vllm_engine import vllm_engine

FOLDER = Path(__file__).parent / "fixtures/vllm"
RECORDED: dict[str, dict[str, Any]] = {
    name: one for path in sorted(FOLDER.glob("*.json")) for name, one in json.loads(path.read_text()).items()
}
ADAPTER = "chat.support@111111111111"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ANSWERS = [
    name
    for name, one in RECORDED.items()
    if one["status"] == 200 and one["path"].startswith("/v1/c") and not name.startswith(("adapter", "died"))
]
REFUSALS = [name for name, r in RECORDED.items() if r["status"] == 400]
UNLIKE = ("chatcmpl-", "cmpl-", "embd-", "chat/llama", '"reasoning":', '"stop_reason":')


def replays(recorded: Mapping[str, Any], pieces: int = 1 << 30) -> Callable[[EngineRequest], Awaitable[None]]:
    """Answers as recorded, with the id of the request; a stream in pieces of so many bytes."""

    async def behave(request: EngineRequest) -> None:
        body = recorded["body"].replace("RID", request.headers["x-request-id"]).replace(ADAPTER, name_of()).encode()
        if "event-stream" not in recorded["contentType"]:
            await request.answer(recorded["status"], body)
            return
        await request.begin_stream()
        for start in range(0, len(body), pieces):
            await request.chunk(body[start : start + pieces])
        await request.end_stream()

    return behave


def asked(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A client's request for the recorded answer."""
    request = {**recorded["request"], "model": "llama"}
    for name in ("structured_outputs", "cache_salt", "add_generation_prompt"):
        request.pop(name, None)
    if request.get("stream_options") is not None:
        request["stream_options"] = {"include_usage": True}
    return request


def usage_of(body: str) -> dict[str, Any]:
    """The last usage that the engine reported."""
    texts = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")] or [body]
    return [found for text in texts if (found := json.loads(text).get("usage"))][-1]


def on_vllm(it: GatewayUnderTest, *numbers: int) -> None:
    for number in numbers:
        it.pods[f"chat/llama-{number}"] = replica(number, engine="vLLM")
    it.changed()


@pytest.mark.parametrize("pieces", [1 << 30, 7, 100])
@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_has_the_clients_words_and_its_usage_is_billed(tmp_path: Path, name: str, pieces: int):
    recorded = RECORDED[name]
    async with gateway(tmp_path, vllm_engine(replays(recorded, pieces))) as it:
        on_vllm(it, 1)
        response = await it.post(asked(recorded), recorded["path"])
        text = await response.text()
        assert response.status == 200, text
        assert not [unlike for unlike in UNLIKE if unlike in text]
        assert response.headers["x-shoal-request-id"] in text
        assert '"model":"llama"' in text
        used = usage_of(recorded["body"])
        data = (await it.records())[0].data
        assert (data.input_tokens, data.output_tokens) == (used["prompt_tokens"], used["completion_tokens"])
        assert data.cached_tokens == used["prompt_tokens_details"]["cached_tokens"]
        assert data.reasoning_tokens == (used.get("completion_tokens_details") or {}).get("reasoning_tokens")
        assert data.count_source == "final"
        if recorded["request"].get("stream"):
            assert text.rstrip().endswith("data: [DONE]")
            for line in text.splitlines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert ("usage" in chunk) == (chunk["choices"] == [])


@pytest.mark.parametrize("name", ["adapter", "adapter-stream"])
async def test_an_adapter_answers_by_the_clients_name(tmp_path: Path, name: str):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.engines[0].behave = replays(RECORDED[name])
        on_vllm(it.it, 1)
        it.changed()
        response = await it.ask(stream=name.endswith("stream"))
        text = await response.text()
        assert response.status == 200
        assert '"model":"support"' in text
        assert name_of() not in text


@pytest.mark.parametrize("name", ["unknown-adapter", "unknown-adapter-stream"])
async def test_a_replica_without_the_adapter_is_not_the_end(tmp_path: Path, name: str):
    async with tuned(tmp_path, AdapterAgent(1), AdapterAgent(2)) as it:
        it.engines[0].behave = replays(RECORDED[name])
        it.engines[1].behave = replays(RECORDED["adapter"])
        on_vllm(it.it, 1, 2)
        it.changed()
        for _ in range(3):
            response = await it.ask()
            assert response.status == 200
            assert "secret-project" not in await response.text()


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_is_told_in_openais_shape_and_costs_nothing(tmp_path: Path, name: str):
    recorded = RECORDED[name]
    async with gateway(tmp_path, vllm_engine(replays(recorded))) as it:
        on_vllm(it, 1)
        stream = bool(recorded["request"].get("stream"))
        response = await it.post({**CHAT, "model": "llama", "stream": stream})
        wrong = (await response.json())["error"]
        assert response.status == 400
        assert set(wrong) == {"message", "type", "param", "code"}
        assert wrong["type"] == "invalid_request_error"
        for unlike in ("validation error", "(parameter=", "{'type'", "body."):
            assert unlike not in wrong["message"]
        assert not str(wrong["param"]).startswith("body.")
        assert (await it.records())[0].data.count_source == "none"


async def test_what_is_wrong_is_told_in_one_sentence(tmp_path: Path):
    expected = {
        "wrong-type": "Input should be a valid integer, unable to parse string as an integer",
        "greedy-two": "n must be 1 when using greedy sampling, got 2.",
        "too-many-tokens": "max_tokens=100000 cannot be greater than max_model_len=4096. Please request fewer output "
        "tokens.",
    }
    for name, message in expected.items():
        folder = tmp_path / name
        folder.mkdir()
        async with gateway(folder, vllm_engine(replays(RECORDED[name]))) as it:
            on_vllm(it, 1)
            wrong = (await (await it.post({**CHAT, "model": "llama"})).json())["error"]
            assert wrong["message"] == message


@pytest.mark.parametrize("name", ["shut-down", "died"])
async def test_an_engine_that_stops_or_has_died_is_passed_over(tmp_path: Path, name: str):
    engines: list[ScriptedEngine] = [vllm_engine(replays(RECORDED[each])) for each in (name, "chat")]
    async with gateway(tmp_path, *engines) as it:
        on_vllm(it, 1, 2)
        it.model(limits=Limits(max_requests=0))
        for _ in range(4):
            assert (await it.post({**CHAT, "model": "llama"})).status == 200
        assert engines[0].requests


@pytest.mark.parametrize("pieces", [1 << 30, 7])
async def test_an_engine_that_dies_in_the_middle_of_a_stream(tmp_path: Path, pieces: int):
    async with gateway(tmp_path, vllm_engine(replays(RECORDED["died-in-the-stream"], pieces))) as it:
        on_vllm(it, 1)
        text = await (await it.post({**CHAT, "model": "llama", "stream": True})).text()
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "replica_lost"
        assert "EngineCore" not in text
        data = (await it.records())[0].data
        assert (data.outcome, data.input_tokens, data.output_tokens) == ("failed", 5, 48)


@pytest.mark.parametrize("name", ["embeddings-on-generating", "rerank-on-generating", "chat-on-reranker"])
async def test_an_engine_of_another_kind_does_not_serve_the_endpoint(tmp_path: Path, name: str):
    recorded = RECORDED[name]
    async with gateway(tmp_path, vllm_engine(replays(recorded))) as it:
        on_vllm(it, 1)
        response = await it.post(asked(recorded), recorded["path"])
        assert (response.status, (await response.json())["error"]["code"]) == (400, "wrong_endpoint")


@pytest.mark.parametrize(
    ("name", "path", "answer"),
    [
        ("tokenize", "/v1/tokenize", {"count": 3, "max_model_len": 4096, "tokens": [70, 226, 71], "token_strs": None}),
        ("detokenize", "/v1/detokenize", {"text": "a b"}),
    ],
)
async def test_tokens_come_in_the_shapes_of_the_other_engine(
    tmp_path: Path, name: str, path: str, answer: dict[str, Any]
):
    async with gateway(tmp_path, vllm_engine(replays(RECORDED[name]))) as it:
        on_vllm(it, 1)
        response = await it.post(asked(RECORDED[name]), path)
        assert (response.status, await response.json()) == (200, answer)


async def test_a_rerankers_answers_come_in_the_shapes_of_the_other_engine(tmp_path: Path):
    texts = {"model": "llama", "query": "q"}
    requests = [
        ("rerank", "/v1/rerank", {**texts, "documents": ["one", "two"]}),
        ("score", "/v1/score", {**texts, "items": ["one", "two"]}),
        ("classify", "/v1/classify", {"model": "llama", "input": "a"}),
    ]
    answers: dict[str, dict[str, Any]] = {}
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        on_vllm(it, 1)
        for name, path, body in requests:
            engine.behave = replays(RECORDED[name])
            response = await it.post(body, path)
            assert response.status == 200
            answers[name] = await response.json()
            assert "chat/llama" not in json.dumps(answers[name])
        billed = {r.data.endpoint: (r.data.input_tokens, r.data.count_source) for r in await it.records(count=3)}
    assert [result["index"] for result in answers["rerank"]["results"]] == [0, 1]
    assert answers["rerank"]["results"][0]["document"] == {"text": "one"}
    # One number for each item, the same as the reranker's.
    assert answers["score"]["scores"] == [[result["relevance_score"]] for result in answers["rerank"]["results"]]
    assert answers["score"]["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert answers["classify"]["data"][0]["label"] == "LABEL_0"
    assert billed == {"/v1/rerank": (14, "final"), "/v1/score": (14, "final"), "/v1/classify": (3, "final")}
