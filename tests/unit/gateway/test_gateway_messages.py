"""Anthropic's Messages API at the gateway, with the unmodified SDK."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import pytest

from shoal.core.hold.limits import Limits
from shoal.gateway import accepted
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def asked(
    tmp_path: Path, *engines: ScriptedEngine
) -> AsyncGenerator[tuple[GatewayUnderTest, anthropic.AsyncAnthropic]]:
    async with (
        gateway(tmp_path, *engines) as it,
        anthropic.AsyncAnthropic(base_url=it.url, api_key=API_KEY, max_retries=0, timeout=20) as client,
        asyncio.timeout(30),
    ):
        yield it, client


async def test_a_message_is_answered_and_metered(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with asked(tmp_path, engine) as (it, client):
        got = await client.messages.create(model="llama", max_tokens=32, system="Be brief.", messages=HI)
        [block] = got.content
        assert block.type == "text"
        assert block.text.startswith("abc")
        assert (got.model, got.role, got.stop_reason) == ("llama", "assistant", "end_turn")
        assert (got.usage.input_tokens, got.usage.cache_read_input_tokens, got.usage.output_tokens) == (3, 4, 3)
        [sent] = engine.requests
        assert sent.path == "/v1/chat/completions"
        assert [m["role"] for m in sent.body["messages"]] == ["system", "user"]
        (record,) = await it.records()
        assert got.id == got._request_id == record.data.request_id
        # The series are those of a chat.
        [counted] = [
            sample
            for family in it.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "gen_ai_server_request_duration_seconds_count"
        ]
        assert (counted.value, counted.labels["gen_ai_operation_name"]) == (1, "chat")
        assert record.data.endpoint == "/v1/messages"
        assert (record.data.input_tokens, record.data.cached_tokens, record.data.output_tokens) == (7, 4, 3)
        assert record.data.count_source == "final"


async def test_a_message_is_streamed_and_metered(tmp_path: Path) -> None:
    async with asked(tmp_path, ScriptedEngine()) as (it, client):
        async with client.messages.stream(model="llama", max_tokens=32, messages=HI) as stream:
            text = [piece async for piece in stream.text_stream]
            whole = await stream.get_final_message()
            assert stream.request_id == whole.id
        assert text == ["a", "b", "c"]
        assert (whole.stop_reason, whole.usage.input_tokens, whole.usage.output_tokens) == ("end_turn", 3, 3)
        assert whole.usage.cache_read_input_tokens == 4
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("answered", "final")
        assert (record.data.input_tokens, record.data.output_tokens) == (7, 3)


async def test_tokens_of_a_prompt_are_counted_and_cost_nothing(tmp_path: Path) -> None:
    async def counts(request: EngineRequest) -> None:
        assert request.path == "/v1/tokenize"
        await request.answer(200, b'{"tokens":[1,2,3],"count":3,"max_model_len":8192}')

    engine = ScriptedEngine(counts)
    async with asked(tmp_path, engine) as (it, client):
        tool: anthropic.types.ToolParam = {"name": "read", "input_schema": {"type": "object"}}
        got = await client.messages.count_tokens(model="llama", system="Be brief.", messages=HI, tools=[tool])
        assert got.input_tokens == 3
        assert got._request_id
        [sent] = engine.requests
        assert [m["role"] for m in sent.body["messages"]] == ["system", "user"]
        assert sent.body["tools"][0]["function"]["name"] == "read"
        assert sent.body["add_generation_prompt"] is True
        (record,) = await it.records()
        assert (record.data.endpoint, record.data.outcome) == ("/v1/messages/count_tokens", "answered")
        assert (record.data.input_tokens, record.data.output_tokens) == (0, 0)


async def test_errors_reach_the_sdk_as_its_own(tmp_path: Path) -> None:
    async with asked(tmp_path, ScriptedEngine()) as (it, client):
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="nobody", max_tokens=3, messages=HI)
        assert isinstance(missing.value.body, dict)
        assert missing.value.body["error"]["type"] == "not_found_error"
        assert missing.value.request_id == missing.value.body["request_id"]
        document: anthropic.types.MessageParam = {
            "role": "user",
            "content": [{"type": "document", "source": {"type": "url", "url": "https://example.com/x.pdf"}}],
        }
        with pytest.raises(anthropic.BadRequestError, match=r"`messages\[0\]\.content\[0\]\.type`"):
            await client.messages.create(model="llama", max_tokens=3, messages=[document])
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(model="llama", max_tokens=3, messages=HI, extra_body={"temperature": 9})
        stranger = anthropic.AsyncAnthropic(base_url=it.url, api_key="sk-wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="llama", max_tokens=3, messages=HI)
        await stranger.close()


async def test_an_engine_that_is_lost_in_the_middle_is_an_error_of_the_stream(tmp_path: Path) -> None:
    async def breaks(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        request.writer.transport.abort()

    async with asked(tmp_path, ScriptedEngine(breaks)) as (it, client):
        stream = await client.messages.create(model="llama", max_tokens=32, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the answer is incomplete"):
            await anext(event async for event in stream if event.type == "message_stop")
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", 1)


async def test_a_refusal_in_a_held_stream_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    async with asked(tmp_path, ScriptedEngine()) as (it, client):
        it.pods.clear()
        it.model(limits=Limits(timeout_seconds=1.0), cold_start_seconds=20.0)
        stream = await client.messages.create(model="llama", max_tokens=32, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError) as refused:
            await anext(stream)
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["error"]["type"] == "overloaded_error"
        assert 1 <= refused.value.body["error"]["retry_after"] <= 60


async def test_an_engine_that_is_lost_before_the_answer_is_not_seen(tmp_path: Path) -> None:
    async def dies(request: EngineRequest) -> None:
        request.writer.transport.abort()

    async with asked(tmp_path, ScriptedEngine(dies), ScriptedEngine(serve_normally)) as (_, client):
        for _ in range(4):
            got = await client.messages.create(model="llama", max_tokens=32, messages=HI)
            assert got.stop_reason == "end_turn"


async def test_the_key_of_anthropics_sdk_opens_every_endpoint(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        async with it.session.get(f"{it.url}/v1/models", headers={"x-api-key": API_KEY}) as answer:
            assert answer.status == 200
        both = {"authorization": "Basic eHg6eXk=", "x-api-key": API_KEY}
        async with it.session.get(f"{it.url}/v1/models", headers=both) as answer:
            assert answer.status == 401


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_stream_without_text_and_counts_is_an_empty_answer(tmp_path: Path, path: str) -> None:
    async def says_nothing(request: EngineRequest) -> None:
        await request.begin_stream()
        for choice in ({"delta": {"role": "assistant"}}, {"delta": {}, "finish_reason": "stop"}):
            await request.chunk(b"data: %b\n\n" % json.dumps({"model": request.model, "choices": [choice]}).encode())
            await asyncio.sleep(0.05)
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(says_nothing)) as it:
        body = {"messages": HI, "max_tokens": 9} if path == "/v1/messages" else {"input": "hi"}
        response = await it.post({"model": "llama", "stream": True, **body}, path)
        raw = await response.read()
        events = [json.loads(line[6:])["type"] for line in raw.split(b"\n") if line.startswith(b"data: ")]
        assert events[0] in ("message_start", "response.created")
        assert events[-1] in ("message_stop", "response.completed")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "message"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error", "POST"),
        ("PUT", "/v1/messages/count_tokens", 405, "invalid_request_error", "POST"),
        ("POST", "/v1/messages/nothing", 404, "not_found_error", "Unknown path: /v1/messages/nothing"),
        ("GET", "/v1/messages/batches/1", 404, "not_found_error", "Unknown path: /v1/messages/batches/1"),
    ],
)
async def test_a_path_or_method_that_is_not_served_is_an_error_of_this_api(
    tmp_path: Path, method: str, path: str, status: int, kind: str, message: str
) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        response = await it.session.request(method, f"{it.url}{path}", headers={"authorization": f"Bearer {API_KEY}"})
        answer = await response.json()
        assert (response.status, answer["type"], answer["error"]["type"]) == (status, "error", kind)
        assert message in answer["error"]["message"]
        other = await it.session.request(method, f"{it.url}/v1/messagesother")
        assert (await other.json())["error"]["code"] == "unknown_path"
