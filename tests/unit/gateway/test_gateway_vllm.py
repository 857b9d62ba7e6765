"""Replicas that run vLLM behind the gateway: what they are asked, and what a client gets of their answers."""

import asyncio
import dataclasses
import json
import math
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from shoal.api import names
from shoal.core.fields.table import TABLE
from shoal.core.hold.limits import Limits
from shoal.engine.wires import SPECIAL, differences_of, wire_of
from shoal.gateway.directory import project_pod
from tests.support.adapter_agents import V1, AdapterAgent, name_of, tuned
from tests.support.gateway import FACTS, GatewayUnderTest, gateway, lines, replica, tenant
from tests.support.pictures import data_url, png
from tests.support.recordings import TYPE, asked, wav
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.vllm_engine import (
    BUSY,
    DIED,
    NOT_FOUND,
    SHUT_DOWN,
    VLLMWords,
    compact,
    error,
    error_event,
    says,
    unknown_model,
    vllm_engine,
)
from tests.support.waiting import until_async

CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
ADAPTER = name_of()
OTHER = "zeta.secret-project@0123456789ab"


def runs_vllm(it: GatewayUnderTest, *numbers: int, declared: bool = True) -> None:
    """These replicas run vLLM; `declared`: and their Model says so."""
    for number in numbers:
        it.pods[f"chat/llama-{number}"] = replica(number, engine="vLLM")
    if declared:
        differences = differences_of("vLLM")
        it.model(facts=FACTS.__class__(vocabulary=32_000, context_length=8192, differences=differences))
    it.changed()


async def events(response: Any) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in lines(response) if line != b"[DONE]"]


# --- a whole answer and a stream --------------------------------------------------------------------------------------


async def test_an_answer_has_the_clients_words_and_is_metered(tmp_path: Path):
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        response = await it.post({**CHAT, "temperature": 0})
        answer = await response.json()
        assert (response.status, answer["model"]) == (200, "llama")
        assert answer["id"] == response.headers["x-shoal-request-id"]
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "hm"
        assert "reasoning" not in message
        assert '"model":"chat/llama" "usage":{' in message["content"]  # text stays as it is
        (request,) = engine.requests
        assert set(request.body) == {"model", "messages", "temperature", "cache_salt"}
        assert request.body["model"] == "chat/llama"
        assert request.headers["x-request-id"] == answer["id"]
        data = (await it.records())[0].data
        assert (data.input_tokens, data.cached_tokens, data.output_tokens) == (40, 32, 3)
        assert (data.count_source, data.outcome) == ("final", "answered")


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_a_stream_has_the_clients_words_and_is_metered(tmp_path: Path, options: dict[str, Any] | None):
    async with gateway(tmp_path, vllm_engine()) as it:
        runs_vllm(it, 1)
        response = await it.post({**CHAT, "stream": True, **({"stream_options": options} if options else {})})
        chunks = await events(response)
        assert {chunk["id"] for chunk in chunks} == {response.headers["x-shoal-request-id"]}
        assert {chunk["model"] for chunk in chunks} == {"llama"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert deltas[1:] == [{"reasoning_content": "hm"}, {"content": "a b"}, {"content": " c"}]
        assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * 4 + ([True] if options else [])
        data = (await it.records())[0].data
        assert (data.input_tokens, data.cached_tokens, data.output_tokens, data.count_source) == (40, 32, 3, "final")


async def test_tokens_of_images_are_billed_as_such(tmp_path: Path):
    words = VLLMWords()

    async def sees(request: EngineRequest) -> None:
        whole = words.whole(request) or {}
        details = {"cached_tokens": 0, "created_cache_tokens": 0, "multimodal_tokens": {"image": 16}}
        whole["usage"] = {**whole["usage"], "prompt_tokens_details": details}
        await request.answer(200, compact(whole))

    async with gateway(tmp_path, vllm_engine(sees)) as it:
        runs_vllm(it, 1)
        assert (await it.post(CHAT)).status == 200
        data = (await it.records())[0].data
        assert (data.input_tokens, data.image_tokens, data.audio_tokens) == (40, 16, None)


async def test_what_engines_answer_elsewhere_comes_in_the_same_shapes(tmp_path: Path):
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)

        async def ask(path: str, **body: Any) -> dict[str, Any]:
            response = await it.post({"model": "llama", **body}, path)
            assert response.status == 200, await response.text()
            return await response.json()

        ranked = await ask("/v1/rerank", query="q", documents=["one", "two"], top_n=1)
        assert ranked == {
            "object": "list",
            "model": "llama",
            "results": [{"index": 1, "relevance_score": 0.9, "document": {"text": "two"}}],
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        }
        bare = await ask("/v1/rerank", query="q", documents=["one", "two"], return_documents=False)
        assert [set(result) for result in bare["results"]] == [{"index", "relevance_score"}] * 2
        scored = await ask("/v1/score", query="q", items=["one", "two"])
        assert (scored["scores"], scored["object"]) == ([[0.0], [0.25]], "scoring")
        labels = await ask("/v1/classify", input="x")
        assert (labels["model"], labels["data"][0]["label"]) == ("llama", "cat")
        embedded = await ask("/v1/embeddings", input="x")
        assert (embedded["model"], len(embedded["data"])) == ("llama", 1)
        assert (await ask("/v1/tokenize", prompt="a b"))["tokens"] == [1, 2]
        assert await ask("/v1/detokenize", tokens=[1, 2], skip_special_tokens=False) == {"text": "a b"}
        assert await ask("/v1/messages/count_tokens", messages=[{"role": "user", "content": "hi"}]) == {
            "input_tokens": 2
        }
        paths = [request.path for request in engine.requests]
        assert paths[3:] == ["/classify", "/v1/embeddings", "/tokenize", "/detokenize", "/tokenize"]
        assert engine.requests[2].body["queries"] == "q"
        data = [record.data for record in await it.records(count=8)]
        assert {d.input_tokens for d in data} == {9, 0}
        assert {d.count_source for d in data} == {"final"}


async def test_the_stop_sequence_that_ended_an_answer_is_named(tmp_path: Path):
    words = VLLMWords()

    async def stops(request: EngineRequest) -> None:
        whole = words.whole(request) or {}
        whole["choices"][0]["stop_reason"] = "\n\nHuman"
        await request.answer(200, compact(whole))

    async with gateway(tmp_path, vllm_engine(stops)) as it:
        runs_vllm(it, 1)
        choice = (await (await it.post({**CHAT, "stop": ["\n\nHuman"]})).json())["choices"][0]
        assert (choice["matched_stop"], "stop_reason" in choice) == ("\n\nHuman", False)
        message = {"model": "llama", "max_tokens": 5, "stop_sequences": ["\n\nHuman"], "messages": CHAT["messages"]}
        answer = await (await it.post(message, "/v1/messages")).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\nHuman")


async def test_translated_apis_show_a_models_thoughts(tmp_path: Path):
    async with gateway(tmp_path, vllm_engine()) as it:
        runs_vllm(it, 1)
        message = {"model": "llama", "max_tokens": 5, "messages": CHAT["messages"]}
        answer = await (await it.post(message, "/v1/messages")).json()
        assert answer["content"][0] == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert answer["usage"] == {
            "input_tokens": 8, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 32, "output_tokens": 3,
        }  # fmt: skip
        streamed = await (await it.post({**message, "stream": True}, "/v1/messages")).text()
        assert '"thinking_delta","thinking":"hm"' in streamed
        assert "chat/llama" not in streamed


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "field", "value", "there"),
    [
        ("/v1/chat/completions", "regex", "[ab]+", {"structured_outputs": {"regex": "[ab]+"}}),
        ("/v1/completions", "json_schema", '{"type":"object"}', {"structured_outputs": {"json": '{"type":"object"}'}}),
        ("/v1/chat/completions", "no_stop_trim", True, {"include_stop_str_in_output": True}),
        ("/v1/chat/completions", "reasoning", {"effort": "low"}, {"reasoning_effort": "low"}),
        ("/v1/chat/completions", "continue_final_message", True, {"add_generation_prompt": False}),
        ("/v1/tokenize", "continue_final_message", True, {"add_generation_prompt": False}),
        ("/v1/chat/completions", "separate_reasoning", True, {}),
        ("/v1/chat/completions", "stop", [f"{n}." for n in range(32)], {"stop": [f"{n}." for n in range(32)]}),
    ],
)
async def test_fields_that_have_another_name(tmp_path: Path, path: str, field: str, value: Any, there: dict[str, Any]):
    engine = vllm_engine()
    body = CHAT if "chat" in path else {"model": "llama", "prompt": "hi"}
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        assert (await it.post({**body, field: value}, path)).status == 200
        assert engine.requests[0].body.items() >= there.items()


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/chat/completions", "stop", CHAT),
        ("/v1/completions", "stop", {"model": "llama", "prompt": "hi"}),
        ("/v1/messages", "stop_sequences", {**CHAT, "max_tokens": 5}),
    ],
)
async def test_more_stops_than_the_engine_takes_are_refused_before_it(
    tmp_path: Path, path: str, field: str, body: dict[str, Any]
):
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        response = await it.post({**body, field: [f"{n}." for n in range(33)]}, path)
        assert response.status == 400
        assert "at most 32 strings" in (await response.json())["error"]["message"]
        assert not engine.requests


async def test_a_field_of_the_clients_own_wins_over_one_that_is_made_from_another(tmp_path: Path):
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        await it.post({**CHAT, "reasoning": {"effort": "low"}, "reasoning_effort": "high"})
        assert engine.requests[0].body["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "task", "query"),
        ("/v1/chat/completions", "separate_reasoning", False),
        ("/v1/chat/completions", "stream_reasoning", False),
        ("/v1/chat/completions", "return_cached_tokens_details", True),
        ("/v1/chat/completions", "return_prompt_token_ids", True),
        ("/v1/chat/completions", "reasoning_effort", "ultra"),
        ("/v1/chat/completions", "reasoning_effort", 0.5),
        ("/v1/chat/completions", "reasoning", {"enabled": True}),
        (
            "/v1/chat/completions",
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        ),
        ("/v1/completions", "suffix", "x"),
        ("/v1/tokenize", "prompt", ["a", "b"]),
        ("/v1/detokenize", "tokens", [[1], [2]]),
        ("/v1/score", "label_token_ids", [1]),
        ("/v1/score", "items", [[1], [2]]),
    ],
)
async def test_what_the_engine_would_ignore_is_refused_by_name(tmp_path: Path, path: str, field: str, value: Any):
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/tokenize": {},
        "/v1/detokenize": {},
        "/v1/score": {"query": [1] if field == "items" else "q", "items": ["x"]},
    }
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        response = await it.post({**CHAT, **{field: value}} if "chat" in path else {
            "model": "llama", **bodies[path], field: value
        }, path)  # fmt: skip
        wrong = (await response.json())["error"]
        assert (response.status, wrong["code"]) == (400, "unsupported_field")
        assert wrong["param"] in (field, "query")
        assert not engine.requests


@pytest.mark.parametrize("indices", [[], [0], [1, 1], [0, 2], [0, None], [0, 1, 2]])
@pytest.mark.parametrize(("path", "name"), [("/v1/rerank", "results"), ("/v1/score", "data")])
async def test_a_reranker_that_does_not_answer_for_each_text_is_an_error_of_the_engine(
    tmp_path: Path, path: str, name: str, indices: list[int | None]
):
    async def miscounts(request: EngineRequest) -> None:
        found = [{"index": index, "score": 0.5, "relevance_score": 0.5} for index in indices]
        await request.answer(200, compact({"model": request.model, name: found, "usage": {"prompt_tokens": 9}}))

    async with gateway(tmp_path, ScriptedEngine(miscounts)) as it:
        runs_vllm(it, 1)
        texts = {"documents" if path == "/v1/rerank" else "items": ["one", "two"]}
        response = await it.post({"model": "llama", "query": "q", **texts}, path)
        assert (response.status, (await response.json())["error"]["code"]) == (502, "bad_answer")


# --- scores by the tokens of labels -----------------------------------------------------------------------------------

LOGS = [{"token_id:7": -0.5, "token_id:300": -2.0, "token_id:301": -3.0}, {"token_id:300": -1.0, "token_id:301": -4.0}]


async def tells_labels(request: EngineRequest) -> None:
    choices = [
        {"index": at, "text": "x", "logprobs": {"tokens": ["token_id:7"], "top_logprobs": [LOGS[at]]}}
        for at in reversed(range(len(request.body["prompt"])))
    ]
    usage = {"prompt_tokens": 9, "total_tokens": 11, "completion_tokens": 2, "prompt_tokens_details": None}
    await request.answer(
        200, compact({"id": "cmpl-1", "model": request.model, "choices": choices, "usage": usage})
    )  # fmt: skip


def scores(it: GatewayUnderTest, *, shares: bool = False) -> None:
    """The Model generates, on vLLM."""
    differences = differences_of("vLLM").generating
    assert differences is not None
    it.pods["chat/llama-1"] = replica(1, engine="vLLM")
    facts = FACTS.__class__(vocabulary=32_000, context_length=8192, differences=differences)
    it.model(capabilities=frozenset({"generate", "score"}), facts=facts, shares_prefixes=shares)
    it.changed()


SCORED: dict[str, Any] = {"model": "llama", "query": "a fox", "items": [" one", " two"], "label_token_ids": [301, 300]}


async def test_a_model_that_generates_scores_by_a_completion_of_one_token(tmp_path: Path):
    engine = ScriptedEngine(tells_labels)
    async with gateway(tmp_path, engine) as it:
        scores(it)
        response = await it.post(SCORED, "/v1/score")
        answer = await response.json()
        assert response.status == 200, answer
        assert answer == {
            "scores": [
                [pytest.approx(math.exp(-3)), pytest.approx(math.exp(-2))],
                [pytest.approx(math.exp(-4)), pytest.approx(math.exp(-1))],
            ],
            "token_logprobs": None,
            "model": "llama",
            "object": "scoring",
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        }
        (request,) = engine.requests
        assert request.path == "/v1/completions"
        salt = request.body.pop("cache_salt")
        assert request.body == {
            "model": "chat/llama",
            "prompt": ["a fox one", "a fox two"],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "logprob_token_ids": [301, 300],
            "return_tokens_as_token_ids": True,
        }
        data = (await it.records())[0].data
        assert (data.input_tokens, data.output_tokens, data.documents) == (9, 0, 2)
        assert (data.count_source, data.endpoint) == ("final", "/v1/score")
        it.tenants["zeta"] = tenant("zeta", "sk-test-zeta")
        it.changed()
        await it.post(SCORED, "/v1/score", key="sk-test-zeta")
        assert engine.requests[1].body["cache_salt"] != salt
        scores(it, shares=True)
        await it.post(SCORED, "/v1/score")
        assert "cache_salt" not in engine.requests[2].body


async def test_scores_are_made_of_the_labels_as_the_request_wants_them(tmp_path: Path):
    engine = ScriptedEngine(tells_labels)
    async with gateway(tmp_path, engine) as it:
        scores(it)

        async def ask(**more: Any) -> dict[str, Any]:
            response = await it.post({**SCORED, **more}, "/v1/score")
            assert response.status == 200, await response.text()
            return await response.json()

        soft = await ask(apply_softmax=True)
        assert [sum(row) for row in soft["scores"]] == pytest.approx([1, 1])
        assert soft["scores"][0][1] == pytest.approx(1 / (1 + math.exp(-1)))
        warm = await ask(apply_softmax=True, temperature=2)
        assert warm["scores"][0][1] == pytest.approx(1 / (1 + math.exp(-0.5)))
        assert (await ask(return_token_logprobs=True))["token_logprobs"] == [[-3.0, -2.0], [-4.0, -1.0]]
        await ask(item_first=True, query=" fox", items=["one", "two"])
        await ask(query=None, items=["one", "two"])
        await ask(query=[1, 2], items=[[3], [4, 5]])
        await ask(items="one")
        prompts = [request.body["prompt"] for request in engine.requests[3:]]
        assert prompts == [["one fox", "two fox"], ["one", "two"], [[1, 2, 3], [1, 2, 4, 5]], ["a foxone"]]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": list(range(21))}, "label_token_ids"),
        ({"temperature": 0.5}, "temperature"),
        ({"query": "a " * 50_000, "items": ["x"] * 50}, "items"),
    ],
)
async def test_what_is_not_scored_is_refused_by_name(tmp_path: Path, more: dict[str, Any], param: str):
    engine = ScriptedEngine(tells_labels)
    async with gateway(tmp_path, engine) as it:
        scores(it)
        if "query" in more:
            facts = it.models["chat/llama"].facts
            it.model(
                capabilities=frozenset({"generate", "score"}), facts=dataclasses.replace(facts, context_length=131_072)
            )
        response = await it.post({**SCORED, **more}, "/v1/score")
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
        assert not engine.requests


@pytest.mark.parametrize("logprobs", [None, {}, {"top_logprobs": [{"token_id:300": -1}]}])
async def test_an_answer_without_the_labels_is_an_error_of_the_engine(tmp_path: Path, logprobs: Any):
    async def forgets(request: EngineRequest) -> None:
        choices = [{"index": 0, "text": "x", "logprobs": logprobs}]
        await request.answer(200, compact({"model": request.model, "choices": choices, "usage": {}}))

    async with gateway(tmp_path, ScriptedEngine(forgets)) as it:
        scores(it)
        response = await it.post(SCORED, "/v1/score")
        assert (response.status, (await response.json())["error"]["code"]) == (502, "bad_answer")


@pytest.mark.parametrize("indices", [[], [0], [1], [0, 0], [0, 2], [0, 1, 2]])
async def test_an_answer_without_one_score_for_each_item_is_an_error_of_the_engine(tmp_path: Path, indices: list[int]):
    async def miscounts(request: EngineRequest) -> None:
        logprobs = {"top_logprobs": [{"token_id:300": -1.0, "token_id:301": -2.0}]}
        choices = [{"index": index, "text": "x", "logprobs": logprobs} for index in indices]
        await request.answer(200, compact({"model": request.model, "choices": choices, "usage": {"prompt_tokens": 9}}))

    async with gateway(tmp_path, ScriptedEngine(miscounts)) as it:
        scores(it)
        response = await it.post(SCORED, "/v1/score")
        assert (response.status, (await response.json())["error"]["code"]) == (502, "bad_answer")


async def test_a_replica_that_cannot_separate_tenants_gets_no_score(tmp_path: Path):
    """Of a Model that changed from SGLang to vLLM."""
    old, new = ScriptedEngine(serve_normally), ScriptedEngine(tells_labels)
    async with gateway(tmp_path, new, old) as it:
        scores(it)
        for _ in range(4):
            assert (await it.post(SCORED, "/v1/score")).status == 200
        assert (len(old.requests), len(new.requests)) == (0, 4)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "mine"),
        ("priority", -5),
        ("cache_salt", "another-tenants"),
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("vllm_xargs", {"a": 1}),
        ("prompt_embeds", "AAAA"),
        ("mm_processor_kwargs", {"a": 1}),
        ("chat_template", "{{ 1 }}"),
        ("structured_outputs", {"grammar": "root ::= root"}),
        ("guided_regex", "a"),
        ("lora_path", OTHER),
        ("truncate_prompt_tokens", 1),
        ("stream_interval", 1000),
        ("echo_", True),
    ],
)
async def test_what_a_client_may_not_steer_never_gets_there(tmp_path: Path, path: str, field: str, value: Any):
    engine = vllm_engine()
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": {"model": "llama", "prompt": "hi"}}
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        response = await it.post({**bodies.get(path, {"model": "llama", "input": "hi"}), field: value}, path)
        assert (response.status, (await response.json())["error"]["param"]) == (400, field)
        assert not engine.requests


def test_each_field_that_the_engine_treats_differently_is_one_of_the_table():
    for path, special in SPECIAL.items():
        assert special <= TABLE[path].keys()
    wire = wire_of("vLLM")
    assert wire is not None
    for path, lesser in wire.differences.fields.items():
        assert lesser.keys() <= TABLE[path].keys()


async def test_a_thought_that_a_client_sends_back_is_a_text(tmp_path: Path):
    """vLLM's templates read it, where SGLang's do not."""
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        turn = {"role": "assistant", "content": "a", "reasoning": {"deep": [1]}}
        response = await it.post({**CHAT, "messages": [turn, *CHAT["messages"]]})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "messages[0].reasoning")


async def test_a_name_in_a_tools_schema_is_not_taken_for_the_model(tmp_path: Path):
    """The body is edited as bytes: what a client writes before `model` must not be taken for it."""
    engine = vllm_engine(VLLMWords(adapters=lambda: {ADAPTER}).behave)
    schema = {"type": "object", "properties": {"a": {"const": {"model": "chat/llama"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.engines[0].behave = engine.behave
        it.it.pods["chat/llama-1"] = replica(1, engine="vLLM")
        it.changed()
        response = await it.it.post({"tools": tools, "messages": CHAT["messages"], "model": "support"})
        assert response.status == 200
        assert it.engines[0].requests[0].body["model"] == ADAPTER
        assert it.engines[0].requests[0].body["tools"] == tools


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_is_asked_for_by_its_name_in_the_engine_and_answers_by_the_clients(
    tmp_path: Path, stream: bool
):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        it.engines[0].behave = VLLMWords(adapters=lambda: agent.has).behave
        it.it.pods["chat/llama-1"] = replica(1, engine="vLLM")
        it.changed()
        response = await it.ask(stream=stream)
        raw = await response.read()
        assert response.status == 200
        assert b'"model":"support"' in raw
        assert ADAPTER.encode() not in raw
        (request,) = it.engines[0].requests
        assert request.model == ADAPTER
        assert "lora_path" not in request.body
        data = (await it.it.records())[0].data
        assert (data.adapter, data.adapter_revision, data.output_tokens) == ("chat/support", V1, 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [OTHER, "chat/llama"])
async def test_an_answer_of_other_weights_reaches_no_client(tmp_path: Path, stream: bool, named: str):
    """The engine says who answered: another tenant's adapter, or the base."""
    agents = [AdapterAgent(1), AdapterAgent(2)]
    async with tuned(tmp_path, *agents) as it:
        it.it.model(limits=Limits(max_requests=0))
        for number, agent in enumerate(agents, 1):
            it.engines[number - 1].behave = VLLMWords(adapters=lambda agent=agent: agent.has, named=named).behave
            it.it.pods[f"chat/llama-{number}"] = replica(number, engine="vLLM")
        it.changed()
        response = await it.ask(stream=stream)
        raw = await response.read()
        assert response.status == 503
        assert OTHER.encode() not in raw
        assert b"a b" not in raw
        assert sum(len(engine.requests) for engine in it.engines) <= 3


async def test_other_weights_in_the_middle_of_a_stream_end_it(tmp_path: Path):
    """The first event does not say who answers. What was sent cannot be sent again by another replica."""

    async def late(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"first"}}]}\n\n')
        await asyncio.sleep(0.3)  # the client has it
        await request.chunk(
            b'data: {"id":"1","model":"%b","choices":[{"index":0,"delta":{"content":"second"}}]}\n\n' % OTHER.encode()
        )
        await request.end_stream()

    engines = ScriptedEngine(late), ScriptedEngine(late)
    async with gateway(tmp_path, *engines) as it:
        runs_vllm(it, 1, 2)
        response = await it.post({**CHAT, "stream": True})
        raw = await response.read()
        assert raw.count(b'"first"') == 1
        assert b"second" not in raw
        assert OTHER.encode() not in raw
        assert b"replica_lost" in raw
        assert sum(len(engine.requests) for engine in engines) == 1


async def test_one_that_answers_with_other_weights_is_passed_over(tmp_path: Path):
    async with gateway(tmp_path, vllm_engine(VLLMWords(named=OTHER).behave), vllm_engine()) as it:
        runs_vllm(it, 1, 2)
        for _ in range(4):
            response = await it.post(CHAT)
            assert (response.status, (await response.json())["model"]) == (200, "llama")


@pytest.mark.parametrize("stream", [False, True])
async def test_replicas_that_all_lack_the_adapter_are_not_asked_forever(tmp_path: Path, stream: bool):
    async with tuned(tmp_path, *[AdapterAgent(n) for n in (1, 2, 3)]) as it:
        for number in (1, 2, 3):
            it.engines[number - 1].behave = VLLMWords().behave  # it knows no adapter, whatever its agent says
            it.it.pods[f"chat/llama-{number}"] = replica(number, engine="vLLM")
        it.changed()
        async with asyncio.timeout(20):
            response = await it.ask(stream=stream)
        raw = await response.read()
        assert response.status == 503
        assert ADAPTER.encode() not in raw
        assert {request.model for engine in it.engines for request in engine.requests} == {ADAPTER}
        assert sum(len(engine.requests) for engine in it.engines) <= 3


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "refusal", [says(500, SHUT_DOWN), says(500, DIED), says(503, BUSY), says(401, b'{"error":"Unauthorized"}')]
)
async def test_a_replica_that_cannot_is_passed_over(tmp_path: Path, stream: bool, refusal: Any):
    one, two = vllm_engine(refusal), vllm_engine()
    async with gateway(tmp_path, one, two, routing="PrefixHeads") as it:
        runs_vllm(it, 1, 2)
        for _ in range(4):
            assert (await it.post({**CHAT, "stream": stream})).status == 200
        assert one.requests
        assert len(two.requests) == 4


async def test_a_stream_that_begins_with_the_engines_death_is_sent_again(tmp_path: Path):
    async def dies(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(error_event(DIED))
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    one = vllm_engine(dies)
    async with gateway(tmp_path, one, vllm_engine(), routing="PrefixHeads") as it:
        runs_vllm(it, 1, 2)
        for _ in range(4):
            chunks = await events(await it.post({**CHAT, "stream": True}))
            assert "error" not in chunks[0]
        assert one.requests


async def test_a_request_that_ends_two_engines_is_not_sent_to_a_third(tmp_path: Path):
    engines = [vllm_engine(says(500, DIED)) for _ in range(4)]
    for engine in engines:
        engine.ready = 503
    async with gateway(tmp_path, *engines) as it:
        runs_vllm(it, 1, 2, 3, 4)
        response = await it.post(CHAT)
        assert (response.status, (await response.json())["error"]["code"]) == (502, "replica_lost_twice")
        assert sum(len(engine.requests) for engine in engines) == 2


async def test_a_request_to_engines_that_were_dead_before_is_not_suspect(tmp_path: Path):
    """vLLM goes on to answer for seconds after its core has died."""
    dead = [vllm_engine(says(500, DIED)) for _ in range(2)]
    for engine in dead:
        engine.ready = 503
    async with gateway(tmp_path, *dead, vllm_engine()) as it:
        runs_vllm(it, 1, 2, 3)
        answers = [await it.post({**CHAT, "seed": number}) for number in range(8)]
        # Whoever was there when they died may be the reason; nobody who came later is.
        assert [answer.status for answer in answers[2:]] == [200] * 6
        assert it.metric("shoal_gateway_suspects_total", next="sent_again") <= 2
        # A restarted engine may die again, and of a request.
        for number, engine in enumerate(dead, 1):
            it.hear(number, engine_boot=f"boot-{number}-again")
            engine.requests.clear()
        again = [(await it.post(CHAT)).status for _ in range(3)]
        assert 502 in again or it.metric("shoal_gateway_suspects_total", next="sent_again") > 2


async def test_engines_that_are_alive_are_no_reason_to_suspect_a_request(tmp_path: Path):
    async def breaks(request: EngineRequest) -> None:
        request.writer.transport.abort()

    engines = [vllm_engine(breaks), vllm_engine(breaks), vllm_engine()]
    async with gateway(tmp_path, *engines) as it:
        runs_vllm(it, 1, 2, 3)
        for _ in range(3):
            assert (await it.post(CHAT)).status == 200
        assert engines[0].requests
        assert engines[1].requests


async def test_a_death_in_the_middle_of_a_stream(tmp_path: Path):
    """An error event with blanks in it, and after it a [DONE]."""

    async def dies(request: EngineRequest) -> None:
        words = VLLMWords()
        await request.begin_stream()
        await request.chunk(words.chunk(request, {"content": "a"}, 1))
        await request.chunk(error_event(DIED))
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, vllm_engine(dies)) as it:
        runs_vllm(it, 1)
        chunks = await events(await it.post({**CHAT, "stream": True}))
        assert chunks[-1]["error"]["code"] == "replica_lost"
        assert "EngineCore" not in json.dumps(chunks)
        data = (await it.records())[0].data
        assert (data.outcome, data.output_tokens, data.count_source) == ("failed", 1, "continuous")


@pytest.mark.parametrize(
    "body",
    [
        unknown_model(OTHER),
        error(400, f"Loading lora {OTHER} failed: No adapter found for <path>", "BadRequestError"),
        error(400, "/shoal/models/model has no such thing", "BadRequestError"),
        error(500, f"Call to add_lora method failed: {OTHER}", "InternalServerError"),
        json.dumps({"detail": f"in /usr/lib/vllm/serving.py: {OTHER}"}).encode(),
    ],
)
@pytest.mark.parametrize("status", [400, 404, 500])
async def test_nothing_of_its_inside_gets_out(tmp_path: Path, body: bytes, status: int):
    async with gateway(tmp_path, vllm_engine(says(status, body))) as it:
        runs_vllm(it, 1)
        it.model(limits=Limits(max_requests=0))
        response = await it.post(CHAT)
        raw = await response.text()
        assert response.status >= 400
        for secret in (OTHER, "/shoal", "/usr", ".py", "<path>", "Valid aliases"):
            assert secret not in raw
        assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}


async def test_a_model_without_a_parser_says_that_it_takes_no_tools(tmp_path: Path):
    text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    async with gateway(tmp_path, vllm_engine(says(400, error(400, text, "BadRequestError")))) as it:
        runs_vllm(it, 1)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        wrong = (await (await it.post({**CHAT, "tools": tools})).json())["error"]
        assert wrong["message"] == "`tools` cannot be used: this model has no parser of tool calls."
        assert (wrong["param"], wrong["type"]) == ("tools", "invalid_request_error")


async def test_an_endpoint_that_the_engine_lacks_is_told_as_that(tmp_path: Path):
    engine = vllm_engine(says(404, NOT_FOUND))
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        response = await it.post({"model": "llama", "input": "x"}, "/v1/embeddings")
        wrong = (await response.json())["error"]
        assert (response.status, wrong["code"], wrong["param"]) == (400, "wrong_endpoint", "model")
        assert (await it.records())[0].data.count_source == "none"
        assert len(engine.requests) == 1


async def test_a_client_that_leaves_closes_the_connection_and_is_billed_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def waits(request: EngineRequest) -> None:
        await request.gone.wait()

    engine = vllm_engine(waits)
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        asked: list[object] = []
        monkeypatch.setattr(it.app.cancellations, "begin", lambda *given: asked.append(given))
        post = asyncio.create_task(it.post(CHAT))
        await until_async(lambda: bool(engine.requests))
        post.cancel()
        async with asyncio.timeout(1):
            await engine.requests[0].gone.wait()
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source) == ("cancelled", "estimated")
        assert not asked  # it ends no request by its id


# --- both engines in one fleet ----------------------------------------------------------------------------------------


async def test_during_a_rollout_each_replica_is_asked_in_its_own_words(tmp_path: Path):
    old, new = ScriptedEngine(serve_normally), vllm_engine()
    async with gateway(tmp_path, old, new) as it:
        runs_vllm(it, 2, declared=False)
        answers = [await (await it.post({**CHAT, "regex": "[ab]+"})).json() for _ in range(4)]
        assert {answer["model"] for answer in answers} == {"llama"}
        assert {request.body.get("regex") for request in old.requests} == {"[ab]+"}
        assert {"rid" in request.body for request in old.requests} == {True}
        assert {json.dumps(r.body["structured_outputs"]) for r in new.requests} == {'{"regex": "[ab]+"}'}
        assert {"rid" in request.body for request in new.requests} == {False}


async def test_patterns_of_tools_are_checked_while_any_replica_makes_grammars_of_them(tmp_path: Path):
    """A rollout from a parser that bounds every call to one that does not, or settings of the chart."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    asked = {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}
    async with gateway(tmp_path, ScriptedEngine(serve_normally), vllm_engine()) as it:
        it.model(facts=dataclasses.replace(FACTS, compiles_tools=False))
        assert (await it.post(asked)).status == 200
        it.pods["chat/llama-2"] = replica(2, engine="vLLM", compiles_tools=True)
        it.changed()
        response = await it.post(asked)
        assert (response.status, (await response.json())["error"]["param"]) == (400, "tools...pattern")
        del it.pods["chat/llama-2"]
        it.changed()
        assert (await it.post(asked)).status == 200


async def test_what_only_one_engine_can_do_goes_to_that_one(tmp_path: Path):
    old, new = ScriptedEngine(serve_normally), vllm_engine()
    async with gateway(tmp_path, old, new) as it:
        runs_vllm(it, 2, declared=False)
        for _ in range(4):
            assert (await it.post({**CHAT, "task": "query"})).status == 200
        assert (len(old.requests), len(new.requests)) == (4, 0)
        it.pods.pop("chat/llama-1")
        it.model(limits=Limits(max_requests=0))
        response = await it.post({**CHAT, "task": "query"})
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica")
        assert not new.requests


async def test_many_replicas_of_the_other_engine_are_passed_over(tmp_path: Path):
    new = [vllm_engine() for _ in range(5)]
    async with gateway(tmp_path, *new, ScriptedEngine(serve_normally)) as it:
        runs_vllm(it, 1, 2, 3, 4, 5, declared=False)
        for _ in range(6):
            assert (await it.post({**CHAT, "task": "query"})).status == 200
        assert not any(engine.requests for engine in new)


async def test_what_no_replica_can_do_is_refused_at_once_and_not_tried_in_a_loop(tmp_path: Path):
    async with gateway(tmp_path, vllm_engine(), vllm_engine()) as it:
        runs_vllm(it, 1, 2, declared=False)
        async with asyncio.timeout(5):
            response = await it.post({**CHAT, "task": "query"})
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica")
        assert it.metric("shoal_gateway_retries_total", reason="unsupported") <= 3
        data = (await it.records())[0].data
        assert (data.outcome, data.attempts, data.count_source) == ("refused", 0, "none")


def with_part(kind: str, inside: dict[str, str]) -> dict[str, Any]:
    return {"model": "llama", "messages": [{"role": "user", "content": [{"type": kind, kind: inside}]}]}


LOOK = with_part("image_url", {"url": data_url("image/png", png(8, 6))})
HEAR = with_part("input_audio", {"data": b64encode(wav()).decode(), "format": "wav"})


@pytest.mark.parametrize("body", [LOOK, HEAR])
async def test_images_and_sounds_go_to_the_replicas_that_read_them(tmp_path: Path, body: dict[str, Any]):
    """A rollout of Gemma 3 from SGLang, which reads no images with it, to vLLM, which does."""
    old, new = ScriptedEngine(serve_normally), vllm_engine()
    async with gateway(tmp_path, old, new) as it:
        it.pods["chat/llama-1"] = replica(1, reads_media=False)
        runs_vllm(it, 2, declared=False)
        for _ in range(4):
            assert (await it.post(body)).status == 200
        assert (len(old.requests), len(new.requests)) == (0, 4)
        it.pods.pop("chat/llama-2")
        it.changed()
        response = await it.post(body)
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica")
        assert (await it.post(CHAT)).status == 200
        assert len(old.requests) == 1


async def test_what_waited_goes_to_a_replica_that_can_do_it(tmp_path: Path):
    """More images wait than the replica that reads them takes at a time; the other one takes the rest."""
    old, new = ScriptedEngine(serve_normally), vllm_engine()
    async with gateway(tmp_path, old, new) as it:
        it.pods.clear()
        it.changed()
        waiting = [asyncio.create_task(it.post(body)) for body in [LOOK] * 7 + [{**CHAT, "task": "query"}] * 3]
        await until_async(lambda: sum(queue.held.requests for queue in it.app.holds.queues.values()) == 10)
        it.pods["chat/llama-1"] = replica(1, reads_media=False)
        runs_vllm(it, 2, declared=False)
        assert [response.status for response in await asyncio.gather(*waiting)] == [200] * 10
        assert (len(old.requests), len(new.requests)) == (3, 7)
        assert not it.metric("shoal_gateway_retries_total", reason="unsupported")


async def test_recordings_go_to_the_replicas_that_read_sounds(tmp_path: Path):
    async def transcribes(request: EngineRequest) -> None:
        await request.answer(200, b'{"text":"a fox","usage":{"type":"duration","seconds":1}}')

    old, new = ScriptedEngine(transcribes), ScriptedEngine(transcribes)
    async with gateway(tmp_path, old, new) as it:
        it.pods["chat/llama-1"] = replica(1, reads_media=False)
        it.changed()
        for _ in range(4):
            form = {"content-type": TYPE.decode()}
            assert (await it.post(asked(wav()), "/v1/audio/transcriptions", headers=form)).status == 200
        assert (len(old.requests), len(new.requests)) == (0, 4)


@pytest.mark.parametrize("lacks", ["SGLang", "vLLM"])
async def test_an_endpoint_that_one_engine_lacks_is_asked_of_the_other(tmp_path: Path, lacks: str):
    old, new = ScriptedEngine(serve_normally), vllm_engine()
    one, other = (old, new) if lacks == "SGLang" else (new, old)
    one.behave = says(404, NOT_FOUND)
    async with gateway(tmp_path, old, new) as it:
        runs_vllm(it, 2, declared=False)
        for stream in (False, True, False, True):
            response = await it.post({**CHAT, "stream": stream})
            assert response.status == 200
            await response.read()
        assert one.requests
        assert len(other.requests) == 4


async def test_an_endpoint_that_one_engine_lacks_is_not_asked_of_another_that_lacks_a_field(tmp_path: Path):
    old, new = ScriptedEngine(says(404, NOT_FOUND)), vllm_engine()
    async with gateway(tmp_path, old, new) as it:
        runs_vllm(it, 2, declared=False)
        for _ in range(3):
            response = await it.post({**CHAT, "task": "query"})
            assert (response.status, (await response.json())["error"]["code"]) == (400, "wrong_endpoint")
        assert not new.requests


async def test_a_lost_replica_of_one_engine_is_replaced_by_one_of_the_other(tmp_path: Path):
    async def breaks(request: EngineRequest) -> None:
        request.writer.transport.abort()

    old, new = ScriptedEngine(breaks), vllm_engine()
    async with gateway(tmp_path, old, new) as it:
        runs_vllm(it, 2, declared=False)
        for _ in range(3):
            response = await it.post(CHAT)
            answer = await response.json()
            assert (response.status, answer["id"]) == (200, response.headers["x-shoal-request-id"])
        assert old.requests


async def test_an_engine_that_this_gateway_does_not_know_gets_nothing(tmp_path: Path):
    engine = ScriptedEngine(serve_normally)
    async with gateway(tmp_path, engine, vllm_engine()) as it:
        it.pods["chat/llama-1"] = replica(1, engine="Another")
        runs_vllm(it, 2)
        for _ in range(4):
            assert (await it.post(CHAT)).status == 200
        assert not engine.requests


def test_a_pod_says_which_engine_runs_in_it():
    labels = {names.LABEL_MODEL: "llama", names.LABEL_MODEL_UID: "uid-llama"}

    def engine(**annotations: str) -> tuple[str, str | None, bool, bool]:
        pod = project_pod(
            {"metadata": {"name": "a", "namespace": "chat", "labels": labels, "annotations": annotations}}
        )
        assert pod is not None
        return pod.engine, pod.engine_version, pod.compiles_tools, pod.reads_media

    assert engine() == ("SGLang", None, False, True)
    assert engine(**{names.ANNOTATION_MEDIA: names.MEDIA_NONE}) == ("SGLang", None, False, False)
    compiled = {names.ANNOTATION_TOOLS: names.TOOLS_COMPILED}
    version = {names.ANNOTATION_ENGINE_VERSION: "0.32.0"}
    assert engine(**{names.ANNOTATION_ENGINE: "vLLM", **version, **compiled}) == ("vLLM", "0.32.0", True, True)


async def test_tenants_do_not_share_a_prefix(tmp_path: Path):
    engine = vllm_engine()
    async with gateway(tmp_path, engine) as it:
        runs_vllm(it, 1)
        it.tenants["zeta"] = tenant("zeta", "sk-test-zeta")
        it.changed()
        await it.post(CHAT)
        await it.post(CHAT, key="sk-test-zeta")
        salts = [request.body["cache_salt"] for request in engine.requests]
        assert len(set(salts)) == 2
        # vLLM takes at most 128 characters, and none of these.
        assert all(len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in salts)
