"""The gateway in front of every engine: what a client gets and what is recorded, whichever engine answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response

from shoal.core.routing.resolve import ServedModel
from shoal.metering.record import UsageData
from shoal.net.installkey import KeyRing
from tests.contract.conftest import Client
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.engines import SERVED
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, replica, tenant

MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None)
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 8,
    "ignore_eos": True,
}


class OneKey(KeyRing):
    """The engine of these tests has a key of its own, which no install key leads to."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


@pytest.fixture
async def front(any_client: Client, tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    async with gateway(tmp_path) as it:
        it.models[SERVED] = MODEL
        it.tenants["acme"] = tenant(models=[SERVED])
        it.pods[f"{SERVED}-1"] = replace(replica(1, MODEL), engine=any_client.words.name)
        it.ports["pod-1"] = any_client.engine.port
        it.app.key_ring = OneKey(tmp_path)
        it.changed()
        it.hear(1)
        yield it


async def test_an_answer_and_its_record(front: GatewayUnderTest):
    answer = await (await front.post(CHAT)).json()
    assert answer["model"] == "tiny"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    (record,) = await front.records()
    assert (record.data.outcome, record.data.count_source) == ("answered", "final")
    assert (record.data.input_tokens, record.data.output_tokens) == (usage["prompt_tokens"], 8)
    assert answer["id"] == record.data.request_id


async def test_a_stream_through_the_openai_sdk(front: GatewayUnderTest):
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=API_KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Count."}],
            max_tokens=8,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {"tiny"}
        assert all(chunk.choices for chunk in chunks)  # the closing usage was not asked for
        assert all(chunk.usage is None for chunk in chunks)
        (record,) = await front.records()
        assert chunks[0].id == record.data.request_id
        assert (record.data.output_tokens, record.data.count_source) == (8, "final")
        assert record.data.cached_tokens is not None
        models = [model.id async for model in client.models.list()]
        assert models == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="does not exist or you do not have access"):
            await client.chat.completions.create(model="nobody", messages=[])
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            await client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_judges_the_fields_and_records_nothing(front: GatewayUnderTest, stream: bool):
    response = await front.post({"model": "tiny", "stream": stream})
    error = (await response.json())["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == ("messages", "missing_value")
    await (await front.post(CHAT)).read()
    (record,) = await front.records()
    assert record.data.outcome == "answered"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_judges_the_rest_of_the_body(front: GatewayUnderTest, any_client: Client, stream: bool):
    """Such as whether prompt and answer fit its context together: only it has the prompt's tokens."""
    response = await front.post({**CHAT, "max_tokens": 9000, "stream": stream})
    assert response.status == 400
    error = (await response.json())["error"]
    assert any_client.words.too_long in error["message"]
    assert error["type"] == "invalid_request_error"
    (record,) = await front.records()
    assert (record.data.outcome, record.data.status) == ("rejected", 400)


async def test_several_prompts_in_one_request(front: GatewayUnderTest):
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 4, "ignore_eos": True}
    response = await front.post(body, "/v1/completions")
    answer = await response.json()
    assert response.status == 200, answer
    assert len(answer["choices"]) == 2
    assert (await front.records())[0].data.output_tokens == 8


async def test_leaving_a_stream_frees_the_engine(front: GatewayUnderTest, any_client: Client):
    response = await front.post({**CHAT, "stream": True, "max_tokens": 3000})
    # The first chunk names the role and has no usage: who leaves there leaves no counts. Some content chunks then.
    events = [await response.content.readline() for _ in range(8)]
    assert any(json.loads(e[6:])["choices"][0]["delta"].get("content") for e in events if e.startswith(b"data: {"))
    response.close()
    (record,) = await front.records()
    assert record.data.outcome == "cancelled"
    assert record.data.count_source == "continuous"
    assert 1 <= (record.data.output_tokens or 0) < 3000
    await any_client.settle(0)


# --- the APIs that the gateway translates -----------------------------------------------------------------------------

SYSTEM, QUESTION = "Be brief.", "Count."
ASKED: list[anthropic.types.MessageParam] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
MOST = 8


async def counters(client: Client) -> list[float]:
    return [await client.metric(client.words.counter(name)) for name in ("prompt_tokens", "generation_tokens")]


async def metered(front: GatewayUnderTest, client: Client, before: list[float], endpoint: str) -> UsageData:
    """The record of the only request, once the engine's own counters say the same."""
    (record,) = await front.records()
    data = record.data
    assert (data.endpoint, data.outcome, data.count_source) == (endpoint, "answered", "final")
    # A counter may be written a moment after the answer.
    async with asyncio.timeout(10):
        while [now - was for now, was in zip(await counters(client), before, strict=True)] != [
            data.input_tokens,
            data.output_tokens,
        ]:
            await asyncio.sleep(0.05)
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    chat = await client.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1})
    assert chat.json["usage"]["prompt_tokens"] == data.input_tokens
    return data


def is_the_message(message: anthropic.types.Message, data: UsageData) -> None:
    """The weights are random: the model may end its answer before it is cut."""
    assert (message.id, message.type, message.role) == (data.request_id, "message", "assistant")
    assert message.model == "tiny"
    assert {block.type for block in message.content} <= {"text"}
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == data.input_tokens
    assert usage.cache_read_input_tokens == (data.cached_tokens or 0)
    assert usage.output_tokens == data.output_tokens
    assert message.stop_reason == "end_turn" or (message.stop_reason, usage.output_tokens) == ("max_tokens", MOST)


def is_the_response(response: Response, data: UsageData) -> None:
    assert (response.id, response.object, response.model) == (data.request_id, "response", "tiny")
    assert {(item.type, getattr(item, "role", None)) for item in response.output} <= {("message", "assistant")}
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (data.input_tokens, data.output_tokens)
    assert usage.input_tokens_details.cached_tokens == (data.cached_tokens or 0)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    cut = response.incomplete_details
    assert response.status == ("completed" if cut is None else "incomplete")
    assert cut is None or (cut.reason, usage.output_tokens) == ("max_output_tokens", MOST)


@pytest.fixture
async def claude(front: GatewayUnderTest) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def gpt(front: GatewayUnderTest) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


async def test_a_message_and_its_record(front: GatewayUnderTest, any_client: Client, claude: anthropic.AsyncAnthropic):
    before = await counters(any_client)
    message = await claude.messages.create(
        model="tiny", max_tokens=MOST, system=SYSTEM, messages=ASKED, extra_body=GREEDY
    )
    is_the_message(message, await metered(front, any_client, before, "/v1/messages"))


async def test_a_message_is_streamed_in_the_events_of_its_api(
    front: GatewayUnderTest, any_client: Client, claude: anthropic.AsyncAnthropic
):
    before = await counters(any_client)
    async with claude.messages.stream(
        model="tiny", max_tokens=MOST, system=SYSTEM, messages=ASKED, extra_body=GREEDY
    ) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)
    is_the_message(message, await metered(front, any_client, before, "/v1/messages"))


async def test_a_response_and_its_record(front: GatewayUnderTest, any_client: Client, gpt: openai.AsyncOpenAI):
    before = await counters(any_client)
    response = await gpt.responses.create(
        model="tiny", max_output_tokens=MOST, temperature=0, instructions=SYSTEM, input=QUESTION
    )
    is_the_response(response, await metered(front, any_client, before, "/v1/responses"))


async def test_a_response_is_streamed_in_the_events_of_its_api(
    front: GatewayUnderTest, any_client: Client, gpt: openai.AsyncOpenAI
):
    before = await counters(any_client)
    stream = await gpt.responses.create(
        model="tiny", max_output_tokens=MOST, temperature=0, instructions=SYSTEM, input=QUESTION, stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed" or last.type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    is_the_response(last.response, await metered(front, any_client, before, "/v1/responses"))
