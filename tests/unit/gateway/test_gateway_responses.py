"""OpenAI's Responses API at the gateway, with the unmodified SDK."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from shoal.core.hold.limits import Limits
from shoal.gateway import accepted
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

PATH: Final = "/v1/responses"


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


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (PATH, {"max_output_tokens": 0}, "max_output_tokens"),
        (PATH, {"reasoning": {"effort": "much"}}, "reasoning.effort"),
        (PATH, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]}, "input"),
        (PATH, {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        # Tools that the model does without count too: they are in the client's list.
        (PATH, {"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        (
            PATH,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"pattern": "(a+)+"}}}},
            "text.format.schema...pattern",
        ),
        ("/v1/messages", {"output_config": {"effort": "much"}}, "output_config.effort"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        (
            "/v1/messages",
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": []}]},
            "tools[1].input_schema",
        ),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_errors_name_the_fields_of_the_clients_api(
    tmp_path: Path, path: str, more: dict[str, Any], param: str
) -> None:
    body = {"input": "hi"} if path == PATH else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    async with gateway(tmp_path, ScriptedEngine()) as it:
        response = await it.post({"model": "llama", **body, **more}, path)
        error = (await response.json())["error"]
        assert response.status == 400
        assert f"`{param}`" in error["message"]
        assert path != PATH or error["param"] == param


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
        seen = events(text)
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        failed = seen[-1]["response"]
        assert (seen[-1]["type"], failed["status"]) == ("response.failed", "failed")
        assert failed["error"]["code"] == "server_error"
        assert "The gateway holds too many" in failed["error"]["message"]
        assert failed["error"]["retry_after"] >= 1
        told = [event["delta"] for event in seen if event["type"] == "response.output_text.delta"]
        assert failed["output"][0]["content"][0]["text"] == "".join(told)
        assert len(text) < 1_200_000
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


def events(text: str) -> list[dict[str, Any]]:
    """Of raw bytes; each has its type twice, as OpenAI sends it."""
    blocks = [block.split("\n") for block in text.split("\n\n") if block and not block.startswith(":")]
    found = [json.loads(block[1].removeprefix("data: ")) for block in blocks]
    assert [block[0] for block in blocks] == [f"event: {event['type']}" for event in found]
    return found


async def test_an_engine_that_is_lost_in_the_middle_is_a_failed_response(tmp_path: Path) -> None:
    async def breaks(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        request.writer.transport.abort()

    async with asked(tmp_path, ScriptedEngine(breaks)) as (it, client):
        stream = await client.responses.create(model="llama", input="hi", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert (last.response.status, last.response.output_text) == ("failed", "a")
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        assert "the answer is incomplete" in last.response.error.message
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", 1)
        seen = events(await (await it.post({"model": "llama", "input": "hi", "stream": True}, PATH)).text())
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert [event["type"] for event in seen][-2:] == ["response.output_text.delta", "response.failed"]
        assert seen[-1]["response"]["id"] == seen[0]["response"]["id"]


async def test_an_error_of_the_engine_comes_after_what_it_sent_with_it(tmp_path: Path) -> None:
    async def fails(request: EngineRequest) -> None:
        await request.begin_stream()
        error = b'data: {"error":{"object":"error","message":"no memory","code":500}}\n\n'
        await request.chunk(request.delta("a", 1) + request.delta("b", 2) + error + b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(fails)) as it:
        seen = events(await (await it.post({"model": "llama", "input": "hi", "stream": True}, PATH)).text())
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert [event["type"] for event in seen if "response" in event] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert seen[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
        assert seen[-1]["response"]["error"]["message"] == "The engine failed on this request."
        assert (await it.records())[0].data.outcome == "failed"


async def test_a_refusal_in_a_held_stream_is_an_error_that_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    async with asked(tmp_path, ScriptedEngine()) as (it, client):
        it.pods.clear()
        it.model(limits=Limits(timeout_seconds=1.0), cold_start_seconds=20.0)
        stream = await client.responses.create(model="llama", input="hi", stream=True)
        (error,) = [event async for event in stream]
        assert error.type == "error"
        assert (error.code, error.param, error.sequence_number) == ("hold_expired", None, 0)
        assert 1 <= error.to_dict()["retry_after"] <= 60  # pyright: ignore[reportOperatorIssue]
        (again,) = events(await (await it.post({"model": "llama", "input": "hi", "stream": True}, PATH)).text())
        assert again.keys() == {"type", "code", "message", "param", "sequence_number", "retry_after"}
