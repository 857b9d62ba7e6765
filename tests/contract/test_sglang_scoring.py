"""SGLang's endpoints that generate nothing: ranks, scores and labels, besides embeddings (test_sglang_life.py)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.engine.sglang.wire import EMBEDS_ARG, NO_PREFIX_CACHE
from tests.contract.conftest import KINDS, Client
from tests.support.classifiers import make_classifier
from tests.support.engines import SERVED, EngineProcess, Kind, running_engine
from tests.support.shapes import Const, mismatch

ARGS = (EMBEDS_ARG, NO_PREFIX_CACHE, "--max-queued-requests", "64")
"""Each document waits in the queue by itself."""
DOCUMENTS = ["the quick brown fox", "hello there, world", "kubernetes pods"]


@pytest.fixture(scope="module", params=KINDS)
def ranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of a model with one label."""
    kind: Kind = request.param
    folder: Path = tmp_path_factory.mktemp(f"ranker-{kind}")
    model = make_classifier(folder / "model", ("LABEL_0",))
    with running_engine(kind, folder / "run", *ARGS, model=model) as process:
        yield process


@pytest.fixture(scope="module", params=KINDS)
def labeller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of a model with three labels."""
    kind: Kind = request.param
    folder: Path = tmp_path_factory.mktemp(f"labeller-{kind}")
    model = make_classifier(folder / "model", ("bad", "fair", "good"))
    with running_engine(kind, folder / "run", *ARGS, model=model) as process:
        yield process


@pytest.fixture
async def labelling(labeller: EngineProcess) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(labeller, session)


@pytest.fixture
async def ranking(ranker: EngineProcess) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(ranker, session)


async def test_documents_are_ranked_and_each_has_the_tokens_of_its_pair(ranking: Client):
    result: dict[str, Any] = {
        "score": float,
        "document": str,
        "index": int,
        "meta_info": {"id": str, "prompt_tokens": int, "finish_reason": {"type": Const("length"), "length": Const(0)}},
    }
    before = await ranking.metric("sglang:prompt_tokens_total")
    answer = await ranking.post("/v1/rerank", {"model": SERVED, "query": "hello", "documents": DOCUMENTS})
    assert answer.status == 200
    results = answer.json
    for found in results:
        shown = {**found, "meta_info": {name: found["meta_info"].get(name) for name in result["meta_info"]}}
        assert mismatch(shown, result) is None
    assert sorted(found["index"] for found in results) == [0, 1, 2]
    assert all(found["document"] == DOCUMENTS[found["index"]] for found in results)
    scores = [found["score"] for found in results]
    assert scores == sorted(scores, reverse=True)
    # The query counts with each document: that is where a meter finds what the engine computed.
    tokens = sum(found["meta_info"]["prompt_tokens"] for found in results)
    lone = await ranking.post("/v1/rerank", {"query": "hello", "documents": DOCUMENTS[:1]})
    assert lone.json[0]["meta_info"]["prompt_tokens"] < tokens
    counted = await ranking.metric("sglang:prompt_tokens_total") - before
    assert counted == tokens + lone.json[0]["meta_info"]["prompt_tokens"]


async def test_top_n_drops_token_counts_too(ranking: Client):
    """Why a gateway keeps `top_n` to itself."""
    body = {"query": "hello", "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    answer = await ranking.post("/v1/rerank", body)
    assert (answer.status, len(answer.json)) == (200, 1)
    assert answer.json[0].get("document") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": "", "documents": ["x"]},
        {"query": " ", "documents": ["x"]},
        {"query": "x", "documents": []},
        {"query": "x", "documents": [""]},
        {"query": "x", "documents": ["\n"]},
        {"query": "x", "documents": ["y"], "top_n": 0},
        {"query": "x"},
        {"documents": ["x"]},
        {"query": "x", "documents": [3]},
    ],
)
async def test_what_cannot_be_ranked_is_refused(ranking: Client, wrong: dict[str, Any]):
    assert (await ranking.post("/v1/rerank", wrong)).status == 400


async def test_a_pair_longer_than_the_context_is_refused_and_the_engine_lives(ranking: Client):
    answer = await ranking.post("/v1/rerank", {"query": "x", "documents": ["hello world " * 8000]})
    assert answer.status == 400
    assert (await ranking.post("/v1/rerank", {"query": "x", "documents": ["y"]})).status == 200


async def test_an_engine_that_generates_ranks_nothing(client: Client):
    answer = await client.post("/v1/rerank", {"query": "x", "documents": ["y"]})
    assert answer.status == 400


# --- /v1/score --------------------------------------------------------------------------------------------------------

SCORES = {
    "scores": [[float]],
    "pooled_hidden_states": None,
    "token_logprobs": None,
    "model": Const(SERVED),
    "usage": {
        "prompt_tokens": int,
        "total_tokens": int,
        "completion_tokens": Const(0),
        "prompt_tokens_details": None,
        "reasoning_tokens": Const(0),
        "completion_tokens_details": None,
    },
    "object": Const("scoring"),
}


async def test_a_classifier_scores_items_by_its_labels(ranking: Client):
    body = {"model": SERVED, "query": "hello", "items": [" a", " b c"]}
    answer = await ranking.post("/v1/score", body)
    assert answer.status == 200
    assert mismatch(answer.json, SCORES) is None
    assert [len(row) for row in answer.json["scores"]] == [1, 1]
    # "hello" is two tokens, and counts with each item.
    assert answer.json["usage"]["prompt_tokens"] == 9
    soft = await ranking.post("/v1/score", {**body, "apply_softmax": True})
    assert soft.json["scores"] == [[1.0], [1.0]]
    alone = await ranking.post("/v1/score", {"items": "a"})
    assert alone.json["usage"]["prompt_tokens"] == 1
    nothing = await ranking.post("/v1/score", {"query": "hello", "items": []})
    assert (nothing.json["scores"], nothing.json["usage"]["prompt_tokens"]) == ([], 0)


async def test_a_model_that_generates_scores_by_the_tokens_of_labels(client: Client):
    body = {"model": SERVED, "query": "hello", "items": [" a", " b c"], "label_token_ids": [300, 301]}
    before = [await client.metric(f"sglang:{name}_tokens_total") for name in ("prompt", "generation")]
    answer = await client.post("/v1/score", body)
    assert answer.status == 200
    assert mismatch(answer.json, SCORES) is None
    assert all(0 < score < 1 for row in answer.json["scores"] for score in row)
    after = [await client.metric(f"sglang:{name}_tokens_total") for name in ("prompt", "generation")]
    assert (after[0] - before[0], after[1] - before[1]) == (answer.json["usage"]["prompt_tokens"], 0)
    soft = await client.post("/v1/score", {**body, "apply_softmax": True})
    assert [sum(row) for row in soft.json["scores"]] == pytest.approx([1, 1])
    encoded = {"query": [300], "items": [[301], [302, 303]], "label_token_ids": [300]}
    answer = await client.post("/v1/score", encoded)
    assert answer.json["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"items": [" a"]},
        {"items": [" a"], "label_token_ids": []},
        {"items": [" a"], "label_token_ids": [300, 300]},
        {"items": [" a"], "label_token_ids": [512]},
        {"items": [" a"], "label_token_ids": [300], "temperature": 0.5},
        {"items": [" a"], "label_token_ids": [300], "temperature": 0},
        {"label_token_ids": [300]},
    ],
)
async def test_what_cannot_be_scored_is_refused(client: Client, wrong: dict[str, Any]):
    assert (await client.post("/v1/score", {"query": "hello", **wrong})).status == 400


async def test_an_empty_prompt_ends_the_engine(kind: Kind, tmp_path: Path):
    """Why a gateway refuses empty items."""
    with running_engine(kind, tmp_path) as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            with pytest.raises(aiohttp.ClientError):
                await Client(engine, session).post("/v1/score", {"items": [""], "label_token_ids": [300]})
        await asyncio.to_thread(engine.process.wait, 200)
        assert engine.process.returncode != 0


# --- /v1/classify -----------------------------------------------------------------------------------------------------


async def test_texts_get_labels(labelling: Client):
    shape = {
        "id": str,
        "object": Const("list"),
        "created": int,
        "model": Const(SERVED),
        "data": [{"index": int, "label": str, "probs": [float], "num_classes": Const(3)}],
        "usage": SCORES["usage"],
    }
    answer = await labelling.post("/v1/classify", {"model": SERVED, "input": ["hello world", "the fox"]})
    assert answer.status == 200
    assert mismatch(answer.json, shape) is None
    for index, found in enumerate(answer.json["data"]):
        assert (found["index"], len(found["probs"])) == (index, 3)
        assert sum(found["probs"]) == pytest.approx(1)
        assert found["label"] == ("bad", "fair", "good")[found["probs"].index(max(found["probs"]))]
    one = await labelling.post("/v1/classify", {"model": "nobody's", "input": "hello world"})
    assert (one.json["model"], one.json["usage"]["prompt_tokens"]) == (SERVED, 3)
    ids = await labelling.post("/v1/classify", {"model": SERVED, "input": [300, 301]})
    assert (len(ids.json["data"]), ids.json["usage"]["prompt_tokens"]) == (1, 2)
    scores = await labelling.post("/v1/score", {"items": ["hello world"]})
    assert [len(row) for row in scores.json["scores"]] == [3]


@pytest.mark.parametrize("wrong", [{"input": []}, {"input": ""}, {"input": " "}, {"input": [[300], [301]]}, {}])
async def test_what_cannot_be_labelled_is_refused(labelling: Client, wrong: dict[str, Any]):
    assert (await labelling.post("/v1/classify", wrong)).status == 400


async def test_an_engine_that_generates_labels_nothing(client: Client):
    assert (await client.post("/v1/classify", {"input": "x"})).status == 400
