"""The gateway in front of engines that generate nothing: the record has exactly what the engine counted."""

import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cohere
import pytest

from shoal.core.capabilities import Capability
from shoal.core.fields.kinds import Facts, Medium
from shoal.core.routing.resolve import ServedModel
from shoal.engine.wires import differences_of
from shoal.net.installkey import KeyRing
from tests.contract.conftest import ALL_KINDS, Client
from tests.support.behaviour import WORDS
from tests.support.classifiers import make_classifier
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.engines import CONTEXT, SERVED, EngineProcess, Kind, running_engine
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, replica, tenant

REAL = [1.7037e-4, 2.1015e-5, 3.1276e-2]
"""Probabilities that three tokens have after "hello a" in the suite's model, by both engines."""
DOCUMENTS = ["the quick brown fox", "hello there, world", "kubernetes pods"]


class OneKey(KeyRing):
    """The engine of these tests has a key of its own, which no install key leads to."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


@asynccontextmanager
async def in_front(
    engine: EngineProcess, folder: Path, *able: Capability, media: frozenset[Medium] = frozenset()
) -> AsyncGenerator[GatewayUnderTest]:
    runs = WORDS[engine.kind].name
    differences = differences_of(runs)
    if "generate" in able:
        differences = differences.generating or differences
    facts = Facts(vocabulary=361, context_length=CONTEXT, media=media, differences=differences)
    model = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None, frozenset(able), facts)
    async with gateway(folder) as it:
        it.models[SERVED] = model
        it.tenants["acme"] = tenant(models=[SERVED])
        it.pods[f"{SERVED}-1"] = replica(1, model, engine=runs)
        it.ports["pod-1"] = engine.port
        it.app.key_ring = OneKey(folder)
        it.changed()
        it.hear(1)
        yield it


def classifier(request: pytest.FixtureRequest, folder: Path, *labels: str) -> Iterator[EngineProcess]:
    kind: Kind = request.param
    model = make_classifier(folder / "model", labels)
    queue = () if WORDS[kind].name == "vLLM" else ("--max-queued-requests", "64")
    with running_engine(kind, folder / "run", *WORDS[kind].pooling, *queue, model=model) as process:
        yield process


@pytest.fixture(scope="module", params=ALL_KINDS)
def ranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    yield from classifier(request, tmp_path_factory.mktemp("ranker"), "LABEL_0")


@pytest.fixture(scope="module", params=ALL_KINDS)
def labeller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    yield from classifier(request, tmp_path_factory.mktemp("labeller"), "bad", "fair", "good")


async def counted(it: GatewayUnderTest, engine: EngineProcess) -> float:
    return await Client(engine, it.session).metric(WORDS[engine.kind].counter("prompt_tokens"))


async def test_a_ranking_is_metered_to_the_token(ranker: EngineProcess, tmp_path: Path):
    async with in_front(ranker, tmp_path, "rerank", "score") as it:
        before = await counted(it, ranker)
        body: dict[str, Any] = {"model": "tiny", "query": "hello", "documents": DOCUMENTS, "top_n": 2}
        response = await it.post(body, "/v1/rerank")
        answer = await response.json()
        assert (response.status, answer["model"], len(answer["results"])) == (200, "tiny", 2)
        for found in answer["results"]:
            assert set(found) == {"relevance_score", "document", "index"}
            assert found["document"] == {"text": DOCUMENTS[found["index"]]}
        data = (await it.records())[0].data
        assert answer["usage"] == {"prompt_tokens": data.input_tokens, "total_tokens": data.input_tokens}
        assert (data.count_source, data.documents, data.output_tokens) == ("final", 3, 0)
        assert data.input_tokens == await counted(it, ranker) - before


async def test_coheres_client_reads_a_ranking(ranker: EngineProcess, tmp_path: Path):
    async with in_front(ranker, tmp_path, "rerank", "score") as it:
        async with cohere.AsyncClient(API_KEY, base_url=it.url, timeout=120) as client:
            ranking = await client.rerank(
                model="tiny", query="hello", documents=DOCUMENTS, top_n=2, return_documents=True
            )
            with pytest.raises(cohere.BadRequestError) as refused:
                await client.rerank(model="tiny", query="hello", documents=[])
        assert [each.document.text for each in ranking.results if each.document] == [
            DOCUMENTS[each.index] for each in ranking.results
        ]
        assert len(ranking.results) == 2
        assert ranking.results[0].relevance_score >= ranking.results[1].relevance_score
        assert refused.value.body["error"]["param"] == "documents"
        assert [record.data.documents for record in await it.records()] == [3]


async def test_a_chat_does_not_reach_an_engine_that_it_would_end(ranker: EngineProcess, tmp_path: Path):
    async with in_front(ranker, tmp_path, "rerank", "score") as it:
        chat = await it.post({"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
        assert (chat.status, (await chat.json())["error"]["code"]) == (400, "wrong_endpoint")
        again = await it.post({"model": "tiny", "query": "hello", "documents": ["x"]}, "/v1/rerank")
        assert again.status == 200


async def scored(process: EngineProcess, folder: Path, able: tuple[Capability, ...], **more: Any) -> None:
    async with in_front(process, folder, *able) as it:
        before = await counted(it, process)
        body = {"model": "tiny", "query": "hello", "items": [" a", " b c"], **more}
        response = await it.post(body, "/v1/score")
        answer = await response.json()
        assert (response.status, answer["model"], len(answer["scores"])) == (200, "tiny", 2)
        data = (await it.records())[0].data
        assert (data.count_source, data.documents, data.output_tokens) == ("final", 2, 0)
        assert data.input_tokens == answer["usage"]["prompt_tokens"] == await counted(it, process) - before


async def test_scores_of_a_classifier_are_metered_to_the_token(ranker: EngineProcess, tmp_path: Path):
    await scored(ranker, tmp_path, ("rerank", "score"))


async def test_scores_of_a_model_that_generates_are_metered_to_the_token(any_engine: EngineProcess, tmp_path: Path):
    await scored(any_engine, tmp_path, ("generate", "score"), label_token_ids=[300, 301], apply_softmax=True)


async def test_a_model_that_generates_scores_alike_on_every_engine(any_engine: EngineProcess, tmp_path: Path):
    async with in_front(any_engine, tmp_path, "generate", "score") as it:

        async def ask(**more: Any) -> dict[str, Any]:
            body = {"model": "tiny", "query": "hello", "items": [" a", " b c"], "label_token_ids": [300, 301, 7]}
            response = await it.post({**body, **more}, "/v1/score")
            assert response.status == 200, await response.text()
            return await response.json()

        whole = await ask(return_token_logprobs=True)
        assert [len(row) for row in whole["scores"]] == [3, 3]
        assert all(0 <= score < 1 for row in whole["scores"] for score in row)
        for row, logs in zip(whole["scores"], whole["token_logprobs"], strict=True):
            assert row == pytest.approx([math.exp(log) for log in logs], rel=1e-4)
        if any_engine.kind in ("sglang", "vllm"):
            assert whole["scores"][0] == pytest.approx(REAL, rel=0.02)
        soft = await ask(apply_softmax=True)
        for row, logs in zip(soft["scores"], whole["token_logprobs"], strict=True):
            weights = [math.exp(log - max(logs)) for log in logs]
            assert row == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-3)
        warm = await ask(apply_softmax=True, temperature=100)
        assert warm["scores"][0] == pytest.approx([1 / 3] * 3, rel=0.3)
        ids = await ask(query=[300], items=[[301], [302, 303]])
        assert ids["usage"] == {"prompt_tokens": 5, "total_tokens": 5} | (
            {} if WORDS[any_engine.kind].name == "vLLM" else ids["usage"]
        )
        one = await ask(items=" a")
        assert one["scores"] == [pytest.approx(whole["scores"][0], rel=1e-2)]
        body = {"model": "tiny", "query": "hello", "items": ["hello world " * 8000], "label_token_ids": [300]}
        refused = await it.post(body, "/v1/score")
        assert refused.status == 400


async def test_labels_are_metered_to_the_token(labeller: EngineProcess, tmp_path: Path):
    async with in_front(labeller, tmp_path, "classify", "score") as it:
        before = await counted(it, labeller)
        response = await it.post({"model": "tiny", "input": ["hello world", "the fox"]}, "/v1/classify")
        answer = await response.json()
        assert (response.status, answer["model"], len(answer["data"])) == (200, "tiny", 2)
        data = (await it.records())[0].data
        assert (data.count_source, data.documents, data.output_tokens) == ("final", None, 0)
        assert data.input_tokens == answer["usage"]["prompt_tokens"] == await counted(it, labeller) - before
        rank = await it.post({"model": "tiny", "query": "x", "documents": ["y"]}, "/v1/rerank")
        message = (await rank.json())["error"]["message"]
        assert (rank.status, "it can classify and score: use /v1/score, /v1/classify" in message) == (400, True)
