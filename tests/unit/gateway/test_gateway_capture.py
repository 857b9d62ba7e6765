"""What usage records say, from the engine's own counts, wherever a request ends."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.metering.meter import parse_usage, sum_choices
from shoal.metering.record import UsageData
from tests.support.gateway import GatewayUnderTest, gateway, lines
from tests.support.scripted_engine import USAGE, EngineRequest, ScriptedEngine, serve_normally

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "x" * 400}]}
STREAM = {**CHAT, "stream": True}


def counts(data: UsageData) -> tuple[int | None, int | None, int | None, str]:
    return data.input_tokens, data.cached_tokens, data.output_tokens, data.count_source


def about_400_characters(tokens: int | None) -> bool:
    return tokens is not None and 100 <= tokens < 250


async def leave(it: GatewayUnderTest, body: dict[str, Any], after: Callable[[], Awaitable[Any]]) -> UsageData:
    """A client that sends a request and closes its connection; returns the final record."""
    asked = asyncio.create_task(it.post(body))
    await after()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    (record,) = await it.records()
    return record.data


async def test_a_body_that_cannot_be_passed_on_is_refused_before_anything_is_opened(tmp_path: Path):
    nested: Any = 1
    for _ in range(400):
        nested = [nested]
    async with gateway(tmp_path, ScriptedEngine()) as it:
        answer = await it.post({**CHAT, "tools": nested})
        assert answer.status == 413
        assert b"more than 128 levels" in await answer.read()
        assert await it.records("open", 0) == []


# --- the client closes ----------------------------------------------------------------------------------------------


async def test_while_it_is_held_nobody_computed_anything(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.hear(1, phase="stalled")

        async def held() -> None:
            while not it.app.holds.waiting:
                await asyncio.sleep(0.005)

        data = await leave(it, STREAM, held)
        assert (data.outcome, data.attempts) == ("cancelled", 0)
        assert counts(data) == (None, None, None, "none")


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_before_the_first_chunk_the_prompt_is_estimated(tmp_path: Path, body: dict[str, Any]):
    reached = asyncio.Event()

    async def prefill(request: EngineRequest) -> None:
        reached.set()
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(prefill)) as it:
        data = await leave(it, body, reached.wait)
        assert data.outcome == "cancelled"
        assert about_400_characters(data.input_tokens)
        assert counts(data)[1:] == (None, None, "estimated")
        assert (data.replica, data.engine_boot) == ("chat/llama-1", "boot-1")


@pytest.mark.parametrize("tokens", [1, 3], ids=["after the first chunk", "before the usage chunk"])
async def test_in_mid_stream_the_running_counts_stand(tmp_path: Path, tokens: int):
    async def answer(request: EngineRequest) -> None:
        await request.begin_stream()
        for n in range(1, tokens + 1):
            await request.chunk(request.delta("x", n))
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        response = await it.post(STREAM)
        seen = lines(response)
        for _ in range(tokens):
            await anext(seen)
        response.close()
        (record,) = await it.records()
        assert record.data.outcome == "cancelled"
        assert counts(record.data) == (7, None, tokens, "continuous")  # how much was cached nobody said: not zero


async def test_a_role_chunk_without_usage_says_nothing_yet(tmp_path: Path):
    async def answer(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request._event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        response = await it.post(STREAM)
        await anext(lines(response))
        response.close()
        (record,) = await it.records()
        assert about_400_characters(record.data.input_tokens)
        assert counts(record.data)[1:] == (None, None, "estimated")


# --- the engine fails -----------------------------------------------------------------------------------------------


async def test_an_engine_that_dies_in_mid_stream(tmp_path: Path):
    async def die(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("x", 1))
        await request.chunk(request.delta("x", 2))
        request.writer.transport.abort()

    async with gateway(tmp_path, ScriptedEngine(die), ScriptedEngine(die)) as it:
        response = await it.post(STREAM)
        assert b"replica_lost" in await response.read()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.attempts) == ("failed", 1)
        assert counts(record.data) in ((7, None, 1, "continuous"), (7, None, 2, "continuous"))
        assert not await attempts(it)


async def attempts(it: GatewayUnderTest) -> list[UsageData]:
    return [record.data for record in await it.records("attempt", 0)]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_try_that_was_lost_is_a_row_of_its_own(tmp_path: Path, body: dict[str, Any]):
    first: list[str] = []

    async def die_once(request: EngineRequest) -> None:
        if not first:
            first.append(request.headers["host"])
            request.writer.transport.abort()
        else:
            await serve_normally(request)

    async with gateway(tmp_path, ScriptedEngine(die_once), ScriptedEngine(die_once)) as it:
        response = await it.post(body)
        assert response.status == 200
        await response.read()
        (final,) = await it.records()
        (lost,) = await it.records("attempt")
        assert lost.id == f"{final.data.request_id}:attempt:1"
        assert (lost.data.attempt, lost.data.outcome) == (1, None)
        assert about_400_characters(lost.data.input_tokens)
        assert counts(lost.data)[1:] == (None, None, "estimated")
        assert {lost.data.replica, final.data.replica} == {"chat/llama-1", "chat/llama-2"}
        assert {lost.data.engine_boot, final.data.engine_boot} == {"boot-1", "boot-2"}
        assert counts(final.data) == (7, 4, 3, "final")
        assert final.data.attempts == 2


async def test_an_engine_that_dies_in_a_prefill_on_a_connection_that_was_used_before(tmp_path: Path):
    """It looks like an idle connection that the engine closed, only later."""
    seen: list[str] = []

    async def die_once(request: EngineRequest) -> None:
        seen.append(request.headers["host"])
        if len(seen) == 2:
            await asyncio.sleep(0.7)
            request.writer.transport.abort()
        else:
            await serve_normally(request)

    async with gateway(tmp_path, ScriptedEngine(die_once)) as it:
        for _ in range(2):
            assert (await it.post(CHAT)).status == 200
        (lost,) = await it.records("attempt")
        assert about_400_characters(lost.data.input_tokens)
        assert (lost.data.attempt, lost.data.count_source) == (1, "estimated")


@pytest.mark.parametrize("status", [503, 401])
async def test_a_try_that_was_refused_is_none(tmp_path: Path, status: int):
    refused: list[str] = []

    async def refuse_once(request: EngineRequest) -> None:
        if not refused:
            refused.append("")
            await request.answer(status, b'{"object":"error","message":"no","code":%d}' % status)
        else:
            await serve_normally(request)

    async with gateway(tmp_path, ScriptedEngine(refuse_once), ScriptedEngine(refuse_once)) as it:
        assert (await it.post(CHAT)).status == 200
        (final,) = await it.records()
        assert final.data.attempts == 2
        assert not await attempts(it)


async def test_an_engine_that_is_not_reached_counts_nothing(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.ports["pod-1"] = 1
        it.model(limits=type(it.models["chat/llama"].limits)(max_requests=0))
        assert (await it.post(CHAT)).status == 503
        (final,) = await it.records()
        assert counts(final.data) == (None, None, None, "none")
        assert not await attempts(it)


@pytest.mark.parametrize(("status", "source"), [(400, "none"), (500, "estimated")])
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_what_an_engine_refuses_it_did_not_compute(
    tmp_path: Path, body: dict[str, Any], status: int, source: str
):
    async def refuse(request: EngineRequest) -> None:
        text = b'{"object":"error","message":"no","code":%d}' % status
        if request.body.get("stream"):
            await request.begin_stream()
            await request.chunk(b'data: {"error":%b}\n\n' % text)
            await request.end_stream()
        else:
            await request.answer(status, text)

    async with gateway(tmp_path, ScriptedEngine(refuse)) as it:
        assert (await it.post(body)).status == status
        (final,) = await it.records()
        assert final.data.count_source == source
        assert (final.data.input_tokens is None) == (source == "none")


# --- what the engine says -------------------------------------------------------------------------------------------


async def test_a_client_that_asks_for_no_usage_is_counted_all_the_same(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        response = await it.post({**STREAM, "stream_options": {"include_usage": False}})
        assert b"usage" not in await response.read()
        assert engine.requests[0].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        (record,) = await it.records()
        assert counts(record.data) == (7, 4, 3, "final")


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_an_answer_without_usage(tmp_path: Path, body: dict[str, Any]):
    async def answer(request: EngineRequest) -> None:
        if request.body.get("stream"):
            await request.begin_stream()
            await request.chunk(request._event(choices=[{"index": 0, "delta": {"content": "hi"}}]))
            await request.chunk(b"data: [DONE]\n\n")
            await request.end_stream()
        else:
            await request.answer(200, b'{"choices":[{"message":{"content":"hi"}}]}')

    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        assert (await it.post(body)).status == 200
        (record,) = await it.records()
        assert record.data.outcome == "answered"
        assert about_400_characters(record.data.input_tokens)
        assert counts(record.data)[1:] == (None, None, "estimated")


async def test_an_explicit_zero_is_not_missing(tmp_path: Path):
    zero = {**USAGE, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}, "reasoning_tokens": 0}

    async def answer(request: EngineRequest) -> None:
        await request.answer(200, json.dumps({"choices": [], "usage": zero}).encode())

    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        await it.post(CHAT)
        (record,) = await it.records()
        assert counts(record.data) == (7, 0, 0, "final")
        assert record.data.reasoning_tokens == 0


async def test_tool_calls_that_look_like_usage(tmp_path: Path):
    arguments = json.dumps({"usage": {"prompt_tokens": 10**6}})

    async def answer(request: EngineRequest) -> None:
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "bill", "arguments": arguments}}
        if request.body.get("stream"):
            await request.begin_stream()
            delta = {"index": 0, "delta": {"tool_calls": [call]}}
            usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
            await request.chunk(request._event(choices=[delta], usage=usage))
            await request.chunk(request._event(choices=[delta]))
            await request.gone.wait()
        else:
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            body = {"usage": USAGE, "choices": [{"index": 0, "message": message}]}
            await request.answer(200, json.dumps(body, separators=(",", ":")).encode())

    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        assert (await it.post(CHAT)).status == 200
        response = await it.post(STREAM)
        seen = lines(response)
        for _ in range(2):
            await anext(seen)
        response.close()
        records = await it.records(count=2)
        assert [counts(record.data) for record in records] == [(7, 4, 3, "final"), (7, None, 2, "continuous")]


@pytest.mark.parametrize(
    ("body", "answers", "expected"),
    [
        ({**STREAM, "n": 3}, [(0, 5), (1, 4), (2, 6), (1, 7)], (7, None, 18)),
        ({"model": "llama", "prompt": ["a", "b"], "n": 2, "stream": True}, [(0, 5), (1, 4), (2, 6)], (14, None, 15)),
        ({"model": "llama", "prompt": [1, 2, 3], "stream": True}, [(0, 5), (0, 6)], (7, None, 6)),
        ({**STREAM, "n": 2}, [(0, 5), (1, 4), (2, 900), (-1, 900), (10**6, 900)], (7, None, 9)),
    ],
    ids=["n=3", "two prompts, n=2", "one prompt of tokens", "answers that nobody asked for"],
)
async def test_several_answers_at_a_time(tmp_path: Path, body: dict, answers: list[tuple[int, int]], expected: tuple):
    """Engines count each answer for itself until the closing block, which is the sum of all."""

    async def answer(request: EngineRequest) -> None:
        await request.begin_stream()
        for index, tokens in answers:
            usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}
            await request.chunk(request._event(choices=[{"index": index, "delta": {"content": "x"}}], usage=usage))
        if not request.body.get("seed"):
            await request.gone.wait()
        closing = {"prompt_tokens": 7, "total_tokens": 37, "completion_tokens": 30}
        await request.chunk(request.closing(closing))
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        response = await it.post(body, path)
        seen = lines(response)
        for _ in answers:
            await anext(seen)
        response.close()
        (cut,) = await it.records()
        assert counts(cut.data) == (*expected, "continuous")
        response = await it.post({**body, "seed": 1}, path)
        await response.read()
        whole = (await it.records(count=2))[-1]
        assert counts(whole.data) == (7, None, 30, "final")


async def test_what_an_engine_leaves_unfinished_counts_towards_the_memory_for_answers(tmp_path: Path):
    """Some streams of a broken engine would end the gateway of all tenants."""

    async def swell(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("x", 1))
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                await request.chunk(b"data: " + b"x" * 100_000)
            await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(swell), max_held_answer_bytes=1 << 20) as it:
        async with asyncio.timeout(20):
            text = await (await it.post(STREAM)).text()
        assert '"code":"overloaded"' in text
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("refused", 1)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 9, "reasoning_tokens": 4}, 4),
        ({"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}, 4),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 9,
                "reasoning_tokens": 0,
                "completion_tokens_details": {"reasoning_tokens": 4},
            },
            0,
        ),
        ({"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": None}, None),
    ],
)
def test_reasoning_tokens(usage: dict[str, Any], expected: int | None):
    assert parse_usage(json.dumps(usage).encode())["reasoningTokens"] == expected


def test_cached_tokens_are_never_more_than_the_input():
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    assert parse_usage(json.dumps(usage).encode())["cachedTokens"] == 5


def test_a_sum_with_an_unknown_part_is_unknown():
    known, unknown = b'{"prompt_tokens":3,"completion_tokens":2}', b'{"prompt_tokens":3}'
    assert sum_choices({0: known, 1: unknown}, 1)["outputTokens"] is None
    assert sum_choices({0: known, 1: known}, 2)["inputTokens"] == 3


# --- checkpoints ----------------------------------------------------------------------------------------------------


async def test_a_stream_that_falls_silent_is_checkpointed(tmp_path: Path):
    """No event comes in the second after the count: a gateway killed then must not have lost it."""

    async def silent(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("x", 2))
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(silent)) as it:
        response = await it.post(STREAM)
        await anext(lines(response))
        (checkpoint,) = await it.records("checkpoint")
        assert counts(checkpoint.data) == (7, None, 2, "continuous")
        await asyncio.sleep(1.3)
        assert len(await it.records("checkpoint")) == 1  # nothing new, nothing written
        response.close()
        await it.records()
        assert it.app.checkpoints._timer is None or not any(it.app.checkpoints._slots)


async def test_a_long_prefill_is_checkpointed_once(tmp_path: Path):
    async def prefill(request: EngineRequest) -> None:
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(prefill)) as it:
        asked = asyncio.create_task(it.post(CHAT))
        (checkpoint,) = await it.records("checkpoint")
        assert checkpoint.data.count_source == "estimated"
        assert checkpoint.data.replica == "chat/llama-1"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await it.records()


async def test_short_requests_have_no_checkpoint(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        for _ in range(20):
            await (await it.post(STREAM)).read()
        await it.records(count=20)
        assert not await it.records("checkpoint", 0)


async def test_a_request_that_waits_for_long_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.metering.meter.KEEP_ALIVE_SECONDS", 0.5)
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.hear(1, phase="stalled")
        asked = asyncio.create_task(it.post(CHAT))
        (checkpoint,) = await it.records("checkpoint")
        assert counts(checkpoint.data) == (None, None, None, "none")
        it.hear(1)
        assert (await asked).status == 200


# --- who and when ---------------------------------------------------------------------------------------------------


async def test_a_record_says_plan_gateway_and_admission(tmp_path: Path):
    from tests.support.gateway import tenant

    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.tenants["acme"] = tenant(plan="gold")
        it.changed()
        assert (await it.post(CHAT)).status == 200
        (final,), (opened,) = await it.records(), await it.records("open")
        for record in (opened, final):
            assert (record.data.plan, record.data.gateway) == ("gold", "boot-of-the-gateway")
        assert final.data.admitted_at == opened.data.admitted_at
        assert final.data.admitted_at is not None
        assert final.data.admitted_at <= final.time
