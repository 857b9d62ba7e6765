"""/v1/rerank through the gateway: what the engine gets, what the client gets, and what is recorded."""

import json
from pathlib import Path
from typing import Any

import cohere
import pytest

from shoal.core.capabilities import Capability
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

RERANK = "/v1/rerank"
ASKED = {"model": "llama", "query": "a fox", "documents": ["one", "two", "three"]}
ABLE: frozenset[Capability] = frozenset({"rerank", "score"})


def ranked(*results: tuple[int, float, int | None], documents: bool = True) -> bytes:
    """An answer of SGLang: (index, score, tokens of the pair)."""
    found: list[dict[str, Any]] = []
    for index, score, tokens in results:
        one: dict[str, Any] = {"score": score, "index": index}
        if documents:
            one["document"] = ASKED["documents"][index]
        if tokens is not None:
            one["meta_info"] = {"id": "x", "prompt_tokens": tokens, "e2e_latency": 0.1, "weight_version": "default"}
        found.append(one)
    return json.dumps(found, separators=(",", ":")).encode()


class Ranker(ScriptedEngine):
    def __init__(self, answer: bytes, status: int = 200) -> None:
        async def behave(request: EngineRequest) -> None:
            await request.answer(status, answer)

        super().__init__(behave)


def rerankers(it: GatewayUnderTest) -> None:
    it.model(capabilities=ABLE)


async def test_the_ranks_and_their_record(tmp_path: Path):
    engine = Ranker(ranked((2, 0.9, 8), (0, 0.5, 6), (1, 0.1, 7)))
    async with gateway(tmp_path, engine) as it:
        rerankers(it)
        response = await it.post(ASKED, RERANK)
        assert response.status == 200
        assert await response.json() == {
            "object": "list",
            "model": "llama",
            "results": [
                {"index": 2, "relevance_score": 0.9, "document": {"text": "three"}},
                {"index": 0, "relevance_score": 0.5, "document": {"text": "one"}},
                {"index": 1, "relevance_score": 0.1, "document": {"text": "two"}},
            ],
            "usage": {"prompt_tokens": 21, "total_tokens": 21},
        }
        (request,) = engine.requests
        assert (request.path, request.body) == (RERANK, {**ASKED, "model": "chat/llama"})
        data = (await it.records())[0].data
        assert (data.endpoint, data.outcome, data.status) == (RERANK, "answered", 200)
        assert (data.input_tokens, data.output_tokens, data.count_source) == (21, 0, "final")
        assert (data.documents, data.cached_tokens) == (3, None)


async def test_top_n_cuts_the_answer_and_not_the_count(tmp_path: Path):
    """SGLang drops the token counts of a document together with it."""
    engine = Ranker(ranked((2, 0.9, 8), (0, 0.5, 6), (1, 0.1, 7), documents=False))
    async with gateway(tmp_path, engine) as it:
        rerankers(it)
        response = await it.post({**ASKED, "top_n": 1, "return_documents": False}, RERANK)
        answer = await response.json()
        assert answer["results"] == [{"index": 2, "relevance_score": 0.9}]
        assert answer["usage"]["total_tokens"] == 21
        assert engine.requests[0].body == {**ASKED, "model": "chat/llama", "return_documents": False}
        assert (await it.records())[0].data.input_tokens == 21
        many = await it.post({**ASKED, "top_n": 1000}, RERANK)
        assert len((await many.json())["results"]) == 3


async def test_a_list_without_counts_is_estimated(tmp_path: Path):
    """One document without a count makes the sum unknown. The query counts once more for each further document."""
    async with gateway(tmp_path, Ranker(ranked((2, 0.9, 8), (0, 0.5, None), (1, 0.1, 7)))) as it:
        rerankers(it)
        long = {**ASKED, "query": "x" * 4000}
        response = await it.post(long, RERANK)
        assert response.status == 200
        assert "usage" not in await response.json()
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source, data.output_tokens) == ("answered", "estimated", None)
        assert 3000 <= (data.input_tokens or 0) < 3100


@pytest.mark.parametrize("answer", [b"{}", b"[1]", b"no json", b'"x"'])
async def test_an_answer_that_is_no_list_does_not_reach_the_client(tmp_path: Path, answer: bytes):
    async with gateway(tmp_path, Ranker(answer)) as it:
        rerankers(it)
        response = await it.post(ASKED, RERANK)
        assert (response.status, (await response.json())["error"]["code"]) == (502, "bad_answer")
        data = (await it.records())[0].data
        assert (data.outcome, data.status, data.count_source) == ("failed", 502, "estimated")


@pytest.mark.parametrize("indices", [[], [2, 0], [0, 0, 1], [0, 1, 3], [0, 1, None], [0, 1, 2, 2], [False, True, 2]])
async def test_a_list_without_one_result_for_each_document_is_an_engine_error(tmp_path: Path, indices: list[Any]):
    """All three would be billed. `top_n` does not excuse it: the missing document may be the best."""
    found = [{"index": index, "score": 0.5, "meta_info": {"prompt_tokens": 5}} for index in indices]
    async with gateway(tmp_path, Ranker(json.dumps(found).encode())) as it:
        rerankers(it)
        response = await it.post({**ASKED, "top_n": 1}, RERANK)
        assert (response.status, (await response.json())["error"]["code"]) == (502, "bad_answer")
        data = (await it.records())[0].data
        assert (data.outcome, data.status, data.count_source) == ("failed", 502, "estimated")


async def test_a_replica_that_is_full_leaves_it_to_another(tmp_path: Path):
    full = Ranker(b'{"object":"error","message":"The request queue is full.","code":503}', 503)
    free = Ranker(ranked((0, 0.5, 6), (1, 0.2, 6), (2, 0.1, 6)))
    async with gateway(tmp_path, full, free) as it:
        rerankers(it)
        for _ in range(4):
            assert (await it.post(ASKED, RERANK)).status == 200
        assert full.requests
        records = await it.records(count=4)
        assert {record.data.input_tokens for record in records} == {18}


async def test_the_engines_own_refusal_shows_nothing_of_it(tmp_path: Path):
    said = {"object": "error", "message": 'File "/opt/sglang/http_server.py", line 1: oh', "code": 400}
    async with gateway(tmp_path, Ranker(json.dumps(said).encode(), 400)) as it:
        rerankers(it)
        response = await it.post(ASKED, RERANK)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (400, "refused_by_engine", "invalid_request_error")
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source, data.input_tokens) == ("rejected", "none", None)


async def test_documents_may_be_objects_with_a_text(tmp_path: Path):
    engine = Ranker(ranked((0, 0.5, 6), (1, 0.2, 6)))
    async with gateway(tmp_path, engine) as it:
        rerankers(it)
        response = await it.post({**ASKED, "documents": [{"text": "one"}, "two"], "max_chunks_per_doc": None}, RERANK)
        assert response.status == 200
        assert engine.requests[0].body["documents"] == ["one", "two"]


async def test_the_path_of_coheres_second_api_is_the_same_endpoint(tmp_path: Path):
    engine = Ranker(ranked((2, 0.9, 8), (0, 0.5, 6), (1, 0.1, 7)))
    async with gateway(tmp_path, engine) as it:
        rerankers(it)
        async with cohere.AsyncClientV2(API_KEY, base_url=it.url) as client:
            found = await client.rerank(model="llama", query="a fox", documents=["one", "two", "three"], top_n=2)
        assert [(one.index, one.relevance_score) for one in found.results] == [(2, 0.9), (0, 0.5)]
        assert engine.requests[0].path == RERANK
        assert (await it.records())[0].data.endpoint == RERANK


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "llama", "documents": ["x"]}, "query"),
        ({"model": "llama", "query": "x"}, "documents"),
        ({**ASKED, "query": " "}, "query"),
        ({**ASKED, "query": [{"type": "image_url", "image_url": {"url": "http://inside/"}}]}, "query"),
        ({**ASKED, "documents": []}, "documents"),
        ({**ASKED, "documents": "x"}, "documents"),
        ({**ASKED, "documents": ["x", ""]}, "documents[1]"),
        ({**ASKED, "documents": ["x", ["y"]]}, "documents[1]"),
        ({**ASKED, "documents": ["x", {"text": "y", "title": "z"}]}, "documents[1]"),
        ({**ASKED, "documents": ["x", {"text": ["y"]}]}, "documents[1]"),
        ({**ASKED, "max_tokens_per_doc": 512}, "max_tokens_per_doc"),
        ({**ASKED, "documents": ["x"] * 1025}, "documents"),
        ({**ASKED, "documents": ["x" * 400_000]}, "documents"),
        ({**ASKED, "query": "x" * 400_000}, "query"),
        ({**ASKED, "query": "x" * 4096, "documents": ["x"] * 1024}, "documents"),
        ({**ASKED, "top_n": 0}, "top_n"),
        ({**ASKED, "top_n": True}, "top_n"),
        ({**ASKED, "return_documents": "yes"}, "return_documents"),
        ({**ASKED, "instruct": "x"}, "instruct"),
        ({**ASKED, "stream": True}, "stream"),
        ({**ASKED, "rid": "x"}, "rid"),
        ({**ASKED, "lora_path": "x"}, "lora_path"),
        ({**ASKED, "priority": 1}, "priority"),
        ({**ASKED, "max_tokens": 1}, "max_tokens"),
    ],
)
async def test_bounds(tmp_path: Path, body: dict[str, Any], param: str):
    engine = Ranker(ranked((0, 0.5, 6)))
    async with gateway(tmp_path, engine) as it:
        rerankers(it)
        response = await it.post(body, RERANK)
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
        assert engine.requests == []


async def test_a_model_that_generates_ranks_nothing_and_says_what_it_does(tmp_path: Path):
    engine = Ranker(ranked((0, 0.5, 6)))
    async with gateway(tmp_path, engine) as it:
        it.model(capabilities=frozenset({"generate"}))
        response = await it.post(ASKED, RERANK)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "wrong_endpoint", "model")
        assert error["message"] == (
            "The model `llama` does not serve /v1/rerank; it can generate: use /v1/chat/completions, /v1/completions."
        )
        rerankers(it)
        response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "x"}]})
        message = (await response.json())["error"]["message"]
        assert response.status == 400
        assert "it can rerank and score: use /v1/rerank" in message
        assert engine.requests == []
        async with it.session.get(f"{it.url}/v1/models", headers={"authorization": f"Bearer {API_KEY}"}) as models:
            assert (await models.json())["data"][0]["capabilities"] == ["rerank", "score"]


async def test_a_limit_counts_the_query_with_each_document(tmp_path: Path):
    """The body alone would fit."""
    engine = Ranker(ranked((0, 0.5, 6), (1, 0.2, 6), (2, 0.1, 6)))
    async with gateway(tmp_path, engine) as it:
        rerankers(it)
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 5000})
        it.changed()
        response = await it.post({**ASKED, "query": "x" * 8000}, RERANK)
        assert response.status == 429
        assert (await it.post(ASKED, RERANK)).status == 200
        assert len(engine.requests) == 1
