"""No name leads a request for an adapter to the base model: every way that could, against an engine that would."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_agents import AdapterAgent, adapter, name_of, tuned
from tests.support.adapter_names import BODIES, MEANS_IT, MEANS_NOTHING, NOT_A_WORD
from tests.support.gateway import tenant

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/embeddings": {"input": "x"},
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("word", MEANS_IT)
async def test_a_word_that_means_it_reaches_it_on_every_path(tmp_path: Path, path: str, word: str):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        response = await it.it.post({"model": word, **ENDPOINTS[path]}, path)
        assert response.status == 200
        assert (await response.json())["model"] == word
        assert it.asked() == [name_of()]


@pytest.mark.parametrize("granted", [True, False], ids=["base granted", "base not granted"])
async def test_a_word_that_means_nothing_reaches_nothing(tmp_path: Path, granted: bool):
    async with tuned(tmp_path, AdapterAgent(1, adapters={name_of(): {"state": "loaded"}})) as it:
        if not granted:
            it.it.tenants["acme"] = tenant(models=[])
            it.changed()
        for why, word in MEANS_NOTHING.items():
            for path, body in ENDPOINTS.items():
                response = await it.it.post({"model": word, **body}, path)
                assert response.status == 404, why
                assert (await response.json())["error"]["code"] == "model_not_found"
        assert it.asked() == []


@pytest.mark.parametrize("value", NOT_A_WORD, ids=repr)
async def test_what_is_no_word_reaches_nothing(tmp_path: Path, value: object):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        response = await it.it.post({"model": value, "messages": [{"role": "user", "content": "hi"}]})
        assert response.status == 400
        assert it.asked() == []


@pytest.mark.parametrize("beside", BODIES)
@pytest.mark.parametrize(("word", "reached"), [("support", name_of()), ("llama", None)])
async def test_nothing_beside_the_word_says_which_weights_answer(tmp_path: Path, beside: str, word: str, reached):
    async with tuned(tmp_path, AdapterAgent(1, adapters={name_of(): {"state": "loaded"}})) as it:
        response = await it.it.post({"model": word, "messages": [{"role": "user", "content": "hi"}], **BODIES[beside]})
        if beside not in ("nothing", "nested"):
            assert response.status == 400
            assert it.asked() == []
            return
        assert response.status == 200
        (sent,) = it.engines[0].requests
        assert sent.body["model"] == "chat/llama"
        assert ("lora_path" in sent.body) == (reached is not None)
        assert it.asked() == [reached]


async def test_of_a_field_that_is_there_twice_the_last_counts_for_us_and_ours_for_the_engine(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        body = (
            b'{"lora_path":"rival.x@0123456789ab","model":"llama","messages":[{"role":"user","content":"hi"}],'
            b'"model":"support","lora_path":null}'
        )
        response = await it.it.post(body, headers={"content-type": "application/json"})
        assert response.status == 200
        assert it.asked() == [name_of()]


async def test_a_query_and_headers_say_nothing(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        response = await it.it.post(
            {"model": "support", "messages": [{"role": "user", "content": "hi"}]},
            "/v1/chat/completions?model=llama&lora_path=",
            headers={"x-lora-path": "", "x-model": "llama"},
        )
        assert response.status == 200
        assert it.asked() == [name_of()]


@pytest.mark.parametrize(
    "state", ["gone", "retiring", "failed", "staging", "loading"], ids=lambda state: f"the agent says {state}"
)
async def test_one_that_is_not_loaded_is_loaded_first(tmp_path: Path, state: str):
    agent = AdapterAgent(1, adapters={} if state == "gone" else {name_of(): {"state": state}})
    async with tuned(tmp_path, agent) as it:
        response = await it.ask()
        assert response.status == 200
        assert [wanted.name for wanted in agent.ensured] == [name_of()]
        assert it.asked() == [name_of()]


async def test_one_that_the_engine_evicted_unseen_is_answered_by_nobody_else(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        assert (await it.ask()).status == 200
        agent.adapters = {}  # the agent does not know yet
        response = await it.ask()
        assert response.status == 200  # refused by the engine, ensured again, answered
        assert it.asked() == [name_of()] * 3
        assert len(agent.ensured) == 2


async def test_one_that_is_not_ready_does_not_make_room_for_a_younger_one_of_its_name(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        younger = adapter("younger", served=("support",), created="2026-03-01T00:00:00Z")
        it.declare(adapter(revision=None, reason="Corrupt"), younger)
        response = await it.ask()
        assert response.status == 503
        assert it.asked() == []


async def test_a_model_that_is_granted_has_its_name_before_every_adapter(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.it.model(claims=("llama", "support"), created=None)  # younger than everything
        assert (await it.ask()).status == 200
        assert (await it.ask("chat/support")).status == 200
        assert it.asked() == [None, name_of()]


async def test_whoever_answers_the_answer_names_what_was_asked_for(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        for word in (*MEANS_IT, "llama", "chat/llama"):
            response = await it.ask(word)
            text = await response.text()
            assert json.loads(text)["model"] == word
            assert name_of() not in text
