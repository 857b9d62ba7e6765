"""Engines that generate nothing: embeddings, ranks and classes, and what a chat does to them."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.fields.table import CLASSIFY
from tests.contract.conftest import ALL_KINDS, Client
from tests.support.behaviour import WORDS
from tests.support.classifiers import make_classifier
from tests.support.engines import SERVED, EngineProcess, Kind, running_engine

DOCUMENTS = ["the quick brown fox", "hello there, world", "kubernetes pods"]


def results_of(answer: Any) -> list[tuple[int, float]]:
    """Places and scores of a rerank, in the order of the answer."""
    found = answer["results"] if isinstance(answer, dict) else answer
    return [(item["index"], item.get("relevance_score", item.get("score"))) for item in found]


def tokens_of(answer: Any) -> int:
    """What the engine computed for a rerank, by its own answer."""
    if isinstance(answer, dict):
        return answer["usage"]["prompt_tokens"]
    return sum(item["meta_info"]["prompt_tokens"] for item in answer)


@pytest.fixture(scope="module", params=ALL_KINDS)
def ranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of a model with one label."""
    kind: Kind = request.param
    folder: Path = tmp_path_factory.mktemp(f"any-ranker-{kind}")
    model = make_classifier(folder / "model", ("LABEL_0",))
    queue = () if WORDS[kind].name == "vLLM" else ("--max-queued-requests", "64")
    with running_engine(kind, folder / "run", *WORDS[kind].pooling, *queue, model=model) as process:
        yield process


async def test_documents_are_ranked_and_the_answer_tells_what_was_computed(ranker: EngineProcess):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(ranker, session)
        name = client.words.counter("prompt_tokens")
        before = await client.metric(name)
        answer = await client.post("/v1/rerank", {"model": SERVED, "query": "hello", "documents": DOCUMENTS})
        assert answer.status == 200
        found = results_of(answer.json)
        assert sorted(index for index, _ in found) == [0, 1, 2]
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
        lone = await client.post("/v1/rerank", {"query": "hello", "documents": DOCUMENTS[:1]})
        assert tokens_of(lone.json) < tokens_of(answer.json)
        counted = tokens_of(answer.json) + tokens_of(lone.json)
        async with asyncio.timeout(10):
            while await client.metric(name) - before != counted:
                await asyncio.sleep(0.05)


async def test_top_n_cuts_the_list_of_a_rerank(ranker: EngineProcess):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(ranker, session)
        whole = await client.post("/v1/rerank", {"query": "hello", "documents": DOCUMENTS})
        best = await client.post("/v1/rerank", {"query": "hello", "documents": DOCUMENTS, "top_n": 1})
        # In a batch of another size the last digits differ.
        assert [index for index, _ in results_of(best.json)] == [results_of(whole.json)[0][0]]


@pytest.mark.parametrize(
    "wrong",
    [{}, {"query": "x", "documents": []}, {"query": "x"}, {"documents": ["x"]}, {"query": "x", "documents": [3]},
     {"query": "x", "documents": ["hello world " * 8000]}],
    ids=lambda wrong: str(wrong)[:30],
)  # fmt: skip
async def test_what_cannot_be_ranked_is_refused_and_the_engine_lives(ranker: EngineProcess, wrong: dict[str, Any]):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(ranker, session)
        answer = await client.post("/v1/rerank", wrong)
        assert (answer.status, client.words.code(answer.json)) == (400, 400)
        assert (await client.post("/v1/rerank", {"query": "x", "documents": ["y"]})).status == 200


@pytest.mark.parametrize("body", [{"query": "", "documents": ["x"]}, {"query": " ", "documents": ["x"]},
                                  {"query": "x", "documents": [""]}, {"query": "x", "documents": ["\n"]}])  # fmt: skip
async def test_texts_without_a_word_in_them(ranker: EngineProcess, body: dict[str, Any]):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(ranker, session)
        assert (await client.post("/v1/rerank", body)).status == client.words.differences.blank_texts


# --- labels -----------------------------------------------------------------------------------------------------------

LABELS = ("bad", "fair", "good")


@pytest.fixture(scope="module", params=ALL_KINDS)
def labeller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of a model with three labels."""
    kind: Kind = request.param
    folder: Path = tmp_path_factory.mktemp(f"any-labeller-{kind}")
    model = make_classifier(folder / "model", LABELS)
    queue = () if WORDS[kind].name == "vLLM" else ("--max-queued-requests", "64")
    with running_engine(kind, folder / "run", *WORDS[kind].pooling, *queue, model=model) as process:
        yield process


async def test_texts_get_labels(labeller: EngineProcess):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(labeller, session)
        path, counter = client.words.wire.paths[CLASSIFY], client.words.counter("prompt_tokens")
        before = await client.metric(counter)
        answer = (await client.post(path, {"model": SERVED, "input": ["hello world", "the fox"]})).json
        assert (answer["object"], answer["model"]) == ("list", SERVED)
        for index, found in enumerate(answer["data"]):
            assert (found["index"], found["num_classes"], len(found["probs"])) == (index, 3, 3)
            assert sum(found["probs"]) == pytest.approx(1, abs=1e-3)
            assert found["label"] == LABELS[found["probs"].index(max(found["probs"]))]
        one = await client.post(path, {"model": SERVED, "input": "hello world"})
        assert one.json["usage"]["prompt_tokens"] == 3
        # In a batch of another size the last digits differ.
        assert one.json["data"][0]["probs"] == pytest.approx(answer["data"][0]["probs"], abs=1e-3)
        counted = answer["usage"]["prompt_tokens"] + 3
        async with asyncio.timeout(10):
            while await client.metric(counter) - before != counted:
                await asyncio.sleep(0.05)


async def test_tokens_get_labels_too(labeller: EngineProcess):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(labeller, session)
        path = client.words.wire.paths[CLASSIFY]
        one = await client.post(path, {"model": SERVED, "input": [300, 301]})
        assert (len(one.json["data"]), one.json["usage"]["prompt_tokens"]) == (1, 2)
        several = await client.post(path, {"model": SERVED, "input": [[300], [301]]})
        assert several.status == client.words.differences.token_lists


async def test_a_model_that_nobody_serves_labels_nothing_for_its_name(labeller: EngineProcess):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(labeller, session)
        answer = await client.post(client.words.wire.paths[CLASSIFY], {"model": "nobody", "input": "hello world"})
        assert answer.status == client.words.differences.unknown_model


@pytest.mark.parametrize("wrong", [{"input": []}, {"input": ""}, {},
                                   {"input": "hello world " * 8000}], ids=lambda wrong: str(wrong)[:30])  # fmt: skip
async def test_what_cannot_be_labelled_is_refused_and_the_engine_lives(labeller: EngineProcess, wrong: dict[str, Any]):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Client(labeller, session)
        path = client.words.wire.paths[CLASSIFY]
        assert (await client.post(path, wrong)).status == 400
        assert (await client.post(path, {"input": "x"})).status == 200


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "lengths", "refused"),
    [
        ({"is_matryoshka": True}, (1, 8, 64), {65}),
        ({"matryoshka_dimensions": [8, 16]}, (8, 16), {9, 64}),
    ],
)
async def test_embeddings_are_as_long_as_the_config_allows(
    any_kind: Kind, tmp_path: Path, config: dict[str, Any], lengths: tuple[int, ...], refused: set[int]
):
    words = WORDS[any_kind]
    with running_engine(any_kind, tmp_path, *words.pooling, words.overrides, json.dumps(config)) as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            client = Client(engine, session)
            for length in lengths:
                answer = await client.post("/v1/embeddings", {"input": "hello", "dimensions": length})
                vector = answer.json["data"][0]["embedding"]
                assert len(vector) == length
                assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-3)
                assert answer.json["usage"]["prompt_tokens"] == 2
            for length in refused:
                answer = await client.post("/v1/embeddings", {"input": "hello", "dimensions": length})
                assert (answer.status, words.code(answer.json)) == (400, 400)


async def test_embeddings_and_what_a_chat_does_to_such_an_engine(any_kind: Kind, tmp_path: Path):
    words = WORDS[any_kind]
    with running_engine(any_kind, tmp_path, *words.pooling) as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            client = Client(engine, session)
            answer = await client.post("/v1/embeddings", {"model": SERVED, "input": ["hello", "hello world"]})
            assert answer.status == 200
            assert [item["index"] for item in answer.json["data"]] == [0, 1]
            assert {len(item["embedding"]) for item in answer.json["data"]} == {64}
            assert (answer.json["usage"]["prompt_tokens"], answer.json["usage"]["total_tokens"]) == (5, 5)
            again = await client.post("/v1/embeddings", {"model": SERVED, "input": "hello"})
            first, same = answer.json["data"][0]["embedding"], again.json["data"][0]["embedding"]
            assert same == pytest.approx(first, abs=1e-4)
            coded = await client.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"})
            assert isinstance(coded.json["data"][0]["embedding"], str)
            for wrong in ({"input": ""}, {"input": []}, {}, {"input": "x", "dimensions": 8}):
                refused = await client.post("/v1/embeddings", wrong)
                assert (refused.status, words.code(refused.json)) == (400, 400)
            chat = {"messages": [{"role": "user", "content": "x"}]}
            if words.differences.pooling_chat == "kills it":
                with contextlib.suppress(aiohttp.ClientError):
                    await client.post("/v1/chat/completions", chat)
                await asyncio.to_thread(engine.process.wait, 200)
            else:
                answer = await client.post("/v1/chat/completions", chat)
                assert str(answer.status) == words.differences.pooling_chat
                assert (await client.post("/v1/embeddings", {"input": "hello"})).status == 200
