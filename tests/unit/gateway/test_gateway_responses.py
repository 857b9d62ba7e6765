"""OpenAI's Responses API at the gateway, with the unmodified SDK."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.support.gateway import API_KEY, GatewayUnderTest, gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine


@asynccontextmanager
async def asked(
    tmp_path: Path, *engines: ScriptedEngine
) -> AsyncGenerator[tuple[GatewayUnderTest, openai.AsyncOpenAI]]:
    async with (
        gateway(tmp_path, *engines) as it,
        openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key=API_KEY, max_retries=0, timeout=20) as client,
        asyncio.timeout(30),
    ):
        yield it, client


async def test_a_response_is_answered_and_metered(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with asked(tmp_path, engine) as (it, client):
        got = await client.responses.create(model="llama", instructions="Be brief.", input="hi", max_output_tokens=32)
        assert got.output_text.startswith("abc")
        assert (got.model, got.status) == ("llama", "completed")
        assert got.usage is not None
        assert (got.usage.input_tokens, got.usage.output_tokens) == (7, 3)
        assert got.usage.input_tokens_details.cached_tokens == 4
        [sent] = engine.requests
        assert sent.path == "/v1/chat/completions"
        assert [m["role"] for m in sent.body["messages"]] == ["system", "user"]
        (record,) = await it.records()
        assert got.id == record.data.request_id
        # The series are those of a chat.
        [counted] = [
            sample
            for family in it.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "gen_ai_server_request_duration_seconds_count"
        ]
        assert (counted.value, counted.labels["gen_ai_operation_name"]) == (1, "chat")
        assert (record.data.endpoint, record.data.count_source) == ("/v1/responses", "final")
        assert (record.data.input_tokens, record.data.cached_tokens, record.data.output_tokens) == (7, 4, 3)


async def test_a_response_is_streamed_and_metered(tmp_path: Path) -> None:
    async with asked(tmp_path, ScriptedEngine()) as (it, client):
        async with client.responses.stream(model="llama", input="hi") as stream:
            text = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            whole = await stream.get_final_response()
        assert text == ["a", "b", "c"]
        assert (whole.output_text, whole.status) == ("abc", "completed")
        assert whole.usage is not None
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (7, 3)
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("answered", "final")


async def test_what_a_stream_keeps_is_within_the_budget_of_answers(tmp_path: Path) -> None:
    """Its last event repeats the whole answer."""
    kept: list[int] = []

    async def long(request: EngineRequest) -> None:
        await request.begin_stream()
        for number in range(200):
            await request.chunk(request.delta("x" * 4096, number + 1))
            await asyncio.sleep(0.001)
            kept.append(it.app.answer_budget.held)
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    body = {"model": "llama", "input": "hi", "stream": True}
    async with gateway(tmp_path, ScriptedEngine(long), max_held_answer_bytes=3_000_000) as it:
        text = await (await it.post(body, "/v1/responses")).text()
        assert "response.completed" in text
        assert 500_000 < max(kept) < 1_000_000
        assert it.app.answer_budget.held == 0
        # The same as messages, whose events repeat nothing.
        kept.clear()
        message = {"model": "llama", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        assert "message_stop" in await (await it.post(message, "/v1/messages")).text()
        assert max(kept) == 0


async def test_a_stream_beyond_the_budget_of_answers_ends_with_an_error(tmp_path: Path) -> None:
    async def endless(request: EngineRequest) -> None:
        await request.begin_stream()
        while not request.gone.is_set():
            await request.chunk(request.delta("x" * 4096, 1))

    body = {"model": "llama", "input": "hi", "stream": True}
    async with gateway(tmp_path, ScriptedEngine(endless), max_held_answer_bytes=400_000) as it:
        async with asyncio.timeout(20):
            text = await (await it.post(body, "/v1/responses")).text()
        last = json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["code"] == "overloaded"
        assert len(text) < 1_000_000
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("refused", "continuous")
        assert it.app.answer_budget.held == 0


async def test_errors_name_the_field_of_the_response(tmp_path: Path) -> None:
    async with asked(tmp_path, ScriptedEngine()) as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="llama", input="hi", previous_response_id="r")
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_field")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="nobody", input="hi")


async def test_an_engine_that_is_lost_in_the_middle_is_an_error_of_the_stream(tmp_path: Path) -> None:
    async def breaks(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        request.writer.transport.abort()

    async with asked(tmp_path, ScriptedEngine(breaks)) as (it, client):
        stream = await client.responses.create(model="llama", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="the answer is incomplete"):
            await anext(event async for event in stream if event.type == "response.completed")
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", 1)
