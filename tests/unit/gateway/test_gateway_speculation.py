"""What became of an engine's drafts: it is in the usage record, and no client meets the engine's way of saying it."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from shoal.gateway.directory import project_model
from tests.support.gateway import API_KEY, MODEL, GatewayUnderTest, gateway, replica
from tests.support.scripted_engine import Behaviour, EngineRequest, ScriptedEngine

USAGE = {"prompt_tokens": 7, "total_tokens": 17, "completion_tokens": 10}
FIELD = "return_spec_tokens_details"
CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "llama", "prompt": "hi"}


def answers(*correct: int | None, cached: bool = False, again: bool = False, model: str | None = None) -> Behaviour:
    """As SGLang 0.5.23 answers, with so many correct drafts in each answer; None: nothing is known of this one.
    `again`: both events at the end arrive in one piece."""

    async def serve(request: EngineRequest) -> None:
        many = request.body.get("n", 1) > 1
        found = [
            {"spec_accept_rate": 0.5, "spec_num_correct_drafts": n, "spec_num_proposed_drafts": 40, "spec_verify_ct": 4}
            for n in correct
            if n is not None
        ]
        extension: dict[str, Any] = {}
        if request.body.get(FIELD) and found:
            extension["spec_tokens_details"] = found if many else found[0]
        if cached:
            extension["cached_tokens_details"] = {"device": 1, "host": 0}
        told = {"sglext": extension} if extension else {}
        chat = request.path.endswith("/chat/completions")
        head = {"id": request.body.get("rid"), "object": "x", "created": 1, "model": model or request.model}
        indexes = range(len(correct))
        if not request.body.get("stream"):
            text = {"message": {"role": "assistant", "content": "a fox"}} if chat else {"text": "a fox"}
            choices = [{"index": at, **text, "finish_reason": "stop"} for at in indexes]
            await request.answer(200, _packed({**head, "choices": choices, "usage": USAGE, **told}))
            return
        await request.begin_stream()
        part = {"delta": {"role": "assistant", "content": "a fox"}} if chat else {"text": "a fox"}
        for at in indexes:
            choice = {"index": at, **part, "finish_reason": None}
            await request.chunk(_event({**head, "choices": [choice], "usage": USAGE}))
        for at in indexes:
            choice = {"index": at, **({"delta": {}} if chat else {"text": ""}), "finish_reason": "stop"}
            await request.chunk(_event({**head, "choices": [choice], "usage": None}))
        last = [_event({**head, "choices": [], "usage": None, **told})] if told else []
        last.append(_event({**head, "choices": [], "usage": USAGE}))
        for data in [b"".join(last)] if again else last:
            await request.chunk(data)
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    return serve


def _packed(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _packed(body) + b"\n\n"


@asynccontextmanager
async def speculating(tmp_path: Path, *engines: ScriptedEngine, **settings: Any) -> AsyncGenerator[GatewayUnderTest]:
    async with gateway(tmp_path, *engines, **settings) as it:
        it.models[MODEL.key] = replace(MODEL, speculates=True)
        it.changed()
        yield it


async def accepted(it: GatewayUnderTest) -> tuple[int | None, int | None]:
    (record,) = [found.data for found in await it.records()]
    assert record.outcome == "answered"
    return record.output_tokens, record.accepted_tokens


@pytest.mark.parametrize(
    ("engine", "speculates"),
    [
        ({}, False),
        ({"speculation": {"method": "NGram", "isolation": "Shared"}}, True),
        ({"type": "vLLM", "speculation": {"method": "MTP"}}, True),
    ],
)
def test_the_gateway_knows_it_of_the_model(engine: dict[str, Any], speculates: bool) -> None:
    metadata = {"name": "llama", "namespace": "chat", "uid": "u"}
    model = project_model(
        {"metadata": metadata, "spec": {"source": {"uri": "file:///m"}, "engine": engine}}, pytest.fail
    )
    assert model is not None
    assert model.speculates == speculates


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
@pytest.mark.parametrize(
    ("correct", "tokens"),
    [
        ((6,), 6),
        ((0,), 0),
        ((11,), 10),  # a part of what was written, never more
        ((None,), None),
        ((2, 0, 3), 5),
        ((2, None, 3), None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_recorded_and_taken_out(
    tmp_path: Path, path: str, body: dict[str, Any], correct: tuple[int | None, ...], tokens: int | None, stream: bool
) -> None:
    engine = ScriptedEngine(answers(*correct))
    async with speculating(tmp_path, engine) as it:
        asked = {**body, "n": len(correct), "stream": stream}
        got = await it.post(asked, path)
        assert got.status == 200
        text = await got.text()
        assert await accepted(it) == (10, tokens)
    assert engine.requests[0].body[FIELD] is True
    assert "sglext" not in text
    assert "spec_" not in text
    if stream:
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line and not line.endswith("[DONE]")]
        assert len(events) == 2 * len(correct)
        assert all(event["choices"] and event["model"] == "llama" for event in events)
        assert text.endswith("data: [DONE]\n\n")
    else:
        assert len(json.loads(text)["choices"]) == len(correct)


@pytest.mark.parametrize("again", [False, True])
async def test_a_client_that_asks_for_usage_gets_its_one_event_without_choices(tmp_path: Path, again: bool) -> None:
    async with speculating(tmp_path, ScriptedEngine(answers(6, again=again))) as it:
        got = await it.post({**CHAT, "stream": True, "stream_options": {"include_usage": True}})
        events = [json.loads(part[6:]) for part in (await got.text()).split("\n\n")[:-2]]
        assert [len(event["choices"]) for event in events] == [1, 1, 0]
        assert events[-1]["usage"] == USAGE
        assert await accepted(it) == (10, 6)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_client_asked_sglang_for_stays(tmp_path: Path, stream: bool) -> None:
    async with speculating(tmp_path, ScriptedEngine(answers(6, cached=True))) as it:
        text = await (await it.post({**CHAT, "return_cached_tokens_details": True, "stream": stream})).text()
        assert '"sglext":{"cached_tokens_details":{"device":1,"host":0}}' in text
        assert "spec_" not in text
        assert await accepted(it) == (10, 6)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_without_speculation_is_asked_nothing(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine(answers(6))
    async with gateway(tmp_path, engine) as it:
        assert (await (await it.post({**CHAT, "stream": stream})).read()).find(b"a fox") > 0
        assert await accepted(it) == (10, None)
    assert FIELD not in engine.requests[0].body


async def test_vllm_is_asked_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine(answers(6))
    async with speculating(tmp_path, engine) as it:
        it.pods["chat/llama-1"] = replica(1, engine="vLLM")
        it.changed()
        assert (await it.post(CHAT)).status == 200
        assert await accepted(it) == (10, None)
    assert FIELD not in engine.requests[0].body


async def test_of_several_prompts_with_one_answer_each_it_stays_unknown(tmp_path: Path) -> None:
    """SGLang would tell of the first alone."""
    engine = ScriptedEngine(answers(6, 6))
    async with speculating(tmp_path, engine) as it:
        assert (await it.post({**COMPLETION, "prompt": ["hi", "ho"]}, "/v1/completions")).status == 200
        assert await accepted(it) == (10, None)
    assert FIELD not in engine.requests[0].body


async def test_a_client_cannot_ask_for_it(tmp_path: Path) -> None:
    engine = ScriptedEngine(answers(6))
    async with gateway(tmp_path, engine) as it:
        got = await it.post({**CHAT, FIELD: True})
        assert got.status == 400 or FIELD not in engine.requests[0].body


async def test_messages_and_responses_are_counted_too(tmp_path: Path) -> None:
    engine = ScriptedEngine(answers(6))
    async with speculating(tmp_path, engine) as it:
        hi: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
        async with anthropic.AsyncAnthropic(base_url=it.url, api_key=API_KEY, max_retries=0) as client:
            message = await client.messages.create(model="llama", max_tokens=32, messages=hi)
            async with client.messages.stream(model="llama", max_tokens=32, messages=hi) as stream:
                streamed = await stream.get_final_message()
        assert [found.content[0].text for found in (message, streamed)] == ["a fox"] * 2  # type: ignore[union-attr]
        async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key=API_KEY, max_retries=0) as other:
            response = await other.responses.create(model="llama", input="hi", store=False)
            texts = [response.output_text]
            async for event in await other.responses.create(model="llama", input="hi", store=False, stream=True):
                assert "spec_" not in event.to_json()
                if event.type == "response.completed":
                    texts.append(event.response.output_text)
        assert texts == ["a fox"] * 2
        records = await it.records(count=4)
        assert [found.data.accepted_tokens for found in records] == [6] * 4
    assert all(request.body[FIELD] is True for request in engine.requests)


async def test_a_lost_attempt_leaves_no_count_behind(tmp_path: Path) -> None:
    """The first replica dies after it has told, and before anything that the client gets; the second tells nothing."""
    asked: list[EngineRequest] = []

    async def serve(request: EngineRequest) -> None:
        asked.append(request)
        if len(asked) > 1:
            await answers(None)(request)
            return
        await request.begin_stream()
        details = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 9}
        head = {"id": "x", "model": request.model, "choices": [], "usage": None}
        await request.chunk(_event({**head, "sglext": {"spec_tokens_details": details}}))
        request.writer.close()

    async with speculating(tmp_path, ScriptedEngine(serve), ScriptedEngine(serve)) as it:
        got = await it.post({**CHAT, "stream": True})
        assert "a fox" in await got.text()
        assert await accepted(it) == (10, None)
    assert len(asked) == 2
