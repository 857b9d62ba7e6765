"""External targets of routes, as clients, providers and attackers see them."""

import asyncio
import contextlib
import functools
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal.api.config import ExternalHost
from shoal.core.hold.limits import Limits
from shoal.core.hold.retries import RetryBudget
from shoal.core.layers.externals import OUTCOMES
from shoal.core.routing.external import FAILURES, Credential, connectable
from shoal.gateway import externals
from shoal.gateway.externals import Externals
from tests.support.gateway import API_KEY, GatewayUnderTest, lines, tenant
from tests.support.mediahost import Dns
from tests.support.provider import (
    CHUNK,
    CLOSING,
    DONE,
    HOST,
    TOKEN,
    USAGE,
    Provider,
    address,
    beside,
    event,
    hanging,
    local,
    stream,
    whole,
)
from tests.support.routes import put, target
from tests.support.scripted_engine import ScriptedEngine

CHAT = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}
ONLY = {"targets": [{"external": {"name": "outside"}}]}
WITH_FALLBACK = {**ONLY, "fallback": {"targets": [target("llama")]}}


async def ask(it: GatewayUnderTest, status: int = 200, path: str = "/v1/chat/completions", **more: Any) -> Any:
    headers = more.pop("headers", {})
    response = await it.post({**CHAT, **more}, path, headers=headers)
    answer = await response.json()
    assert response.status == status, answer
    return answer


async def refused(it: GatewayUnderTest, outcome: str) -> Any:
    answer = (await ask(it, 503))["error"]
    assert answer["code"] == "external_unavailable"
    assert HOST not in answer["message"]
    assert it.metric("shoal_gateway_external_requests_total", outcome=outcome) == 1
    return answer


# --- what is sent, and what comes back --------------------------------------------------------------------------------


async def test_a_chat_goes_out_with_the_routes_key_and_nothing_of_the_clients(tmp_path: Path) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        answer = await ask(it, temperature=0.5, headers={"cookie": "a=b", "x-private": "1", "traceparent": "00-1"})
        assert answer["model"] == "front"
        assert answer["choices"][0]["message"]["content"] == "Hello there"
        (head,), (body,) = provider.heads, provider.bodies
        assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
        said = {line.partition(":")[0]: line.partition(":")[2].strip() for line in head.split("\r\n")[1:] if line}
        assert said == {
            "host": f"{HOST}:{provider.port}",
            "authorization": f"Bearer {TOKEN}",
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",
            "user-agent": "shoal",
            "x-shoal-hops": "1",
            "content-length": said["content-length"],
        }
        assert API_KEY not in head
        assert body == {"model": "gpt-x", "messages": CHAT["messages"], "temperature": 0.5}
        (record,) = await it.records()
        data = record.data
        assert (data.model, data.route, data.outcome) == ("chat/front/outside", "chat/front", "answered")
        assert (data.input_tokens, data.output_tokens, data.count_source) == (7, 3, "final")
        assert data.replica is None


async def test_a_stream_needs_no_spaces_after_its_colons(tmp_path: Path) -> None:
    """Some frameworks write none."""
    parts = (part.replace(b"data: ", b"data:") for part in (event("Hel"), event("lo"), CLOSING))
    async with beside(tmp_path, Provider(stream(*parts, b"data:[DONE]\n\n", ends=True)), ScriptedEngine(), ONLY) as it:
        response = await it.post({**CHAT, "stream": True})
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source) == ("answered", "final")


async def test_a_stream_has_the_clients_name_of_the_model_and_its_usage_is_counted(tmp_path: Path) -> None:
    provider = Provider(stream(event("Hel"), event("lo"), CLOSING, DONE))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        response = await it.post({**CHAT, "stream": True})
        found = [line async for line in lines(response)]
        assert found[-1] == b"[DONE]"
        chunks = [json.loads(line) for line in found[:-1]]
        assert [chunk["model"] for chunk in chunks] == ["front"] * 2, "the usage was not asked for"
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello"
        assert provider.bodies[0]["stream_options"] == {"include_usage": True}
        (record,) = await it.records()
        assert (record.data.output_tokens, record.data.count_source) == (3, "final")


def with_usage(text: str, tokens: int) -> bytes:
    """A chunk that has choices and the usage so far."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    usage = {**USAGE, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}}
    return b"data: %b\n\n" % json.dumps({**CHUNK, "choices": choices, "usage": usage}, separators=(",", ":")).encode()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        (event("Hel"), event("lo"), CLOSING),
        (event("Hel"), with_usage("lo", 3)),
        (with_usage("Hel", 1), with_usage("lo", 3)),
        (with_usage("Hel", 1), with_usage("lo", 3), CLOSING),
    ],
    ids=["closing chunk", "last chunk", "every chunk", "every and a closing chunk"],
)
async def test_who_asks_for_usage_gets_it_once_wherever_the_provider_says_it(
    tmp_path: Path, parts: tuple[bytes, ...], asked: bool
) -> None:
    async with beside(tmp_path, Provider(stream(*parts, DONE)), ScriptedEngine(), ONLY) as it:
        options = {"stream_options": {"include_usage": True}} if asked else {}
        response = await it.post({**CHAT, "stream": True, **options})
        found = [line async for line in lines(response)]
        assert found[-1] == b"[DONE]"
        chunks = [json.loads(line) for line in found[:-1]]
        told = [chunk for chunk in chunks if chunk.get("usage")]
        assert [(chunk["choices"], chunk["usage"]["completion_tokens"]) for chunk in told] == [([], 3)] * asked
        assert {chunk["model"] for chunk in chunks} == {"front"}
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"]) == "Hello"
        (record,) = await it.records()
        assert (record.data.input_tokens, record.data.output_tokens, record.data.count_source) == (7, 3, "final")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_without_usage_is_estimated(tmp_path: Path, streamed: bool) -> None:
    body = {"model": "m", "choices": [{"index": 0, "message": {"content": "eight by"}}]}
    answer = stream(event("a"), event("b"), DONE) if streamed else whole(body)
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        response = await it.post({**CHAT, "stream": streamed})
        await response.read()
        (record,) = await it.records()
        assert (record.data.count_source, record.data.output_tokens) == ("estimated", 2)
        assert record.data.input_tokens


async def test_a_usage_that_nobody_can_have_is_not_believed(tmp_path: Path) -> None:
    body = {"model": "m", "choices": [], "usage": {"prompt_tokens": 10**12, "completion_tokens": 1}}
    async with beside(tmp_path, Provider(whole(body)), ScriptedEngine(), ONLY) as it:
        await ask(it)
        (record,) = await it.records()
        assert record.data.count_source == "estimated"
        assert (record.data.input_tokens or 0) < 100


async def test_responses_and_messages_are_translated_to_chats(tmp_path: Path) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        response = await it.post({"model": "front", "input": "hi"}, "/v1/responses")
        assert response.status == 200
        assert (await response.json())["output"][0]["content"][0]["text"] == "Hello there"
        body = {"model": "front", "max_tokens": 9, "messages": CHAT["messages"]}
        response = await it.post(body, "/v1/messages")
        assert (await response.json())["content"][0]["text"] == "Hello there"
        assert all(head.startswith("POST /v1/chat/completions ") for head in provider.heads)


async def test_an_endpoint_that_it_does_not_declare_is_refused_in_that_apis_shape(tmp_path: Path) -> None:
    provider = Provider()
    only = {"endpoints": ["/v1/embeddings"]}
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=only) as it:
        error = (await ask(it, 400))["error"]
        assert (error["code"], error["param"]) == ("wrong_endpoint", "model")
        response = await it.post({**CHAT, "max_tokens": 9}, "/v1/messages")
        assert (response.status, (await response.json())["type"]) == (400, "error")
        provider.answer = whole({"data": [], "model": "e", "usage": {"prompt_tokens": 2, "total_tokens": 2}})
        response = await it.post({"model": "front", "input": "x"}, "/v1/embeddings")
        assert (await response.json())["model"] == "front"
        assert provider.heads[0].startswith("POST /v1/embeddings ")


async def test_what_the_provider_refuses_of_the_request_is_the_clients(tmp_path: Path) -> None:
    message = "temperature is too high for gpt-x"
    error = {"error": {"message": message, "type": "invalid_request_error", "param": "temperature"}}
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(whole(error, "400 Bad Request")), engine, WITH_FALLBACK) as it:
        answer = (await ask(it, 400))["error"]
        assert (answer["message"], answer["param"]) == ("temperature is too high for front", "temperature")
        assert not engine.requests
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("rejected", "none")


DECLINES = b'data: {"error":{"message":"flagged","code":403}}\n\n'

# --- failures ---------------------------------------------------------------------------------------------------------

FAILING: list[tuple[str, Any, str]] = [
    ("500", whole(b"boom", "500 Internal Server Error"), "failed"),
    ("429", whole(b"{}", "429 Too Many Requests", retry_after="30"), "busy"),
    ("401", whole({"error": {"message": f"Incorrect API key {TOKEN}"}}, "401 Unauthorized"), "unauthorized"),
    ("402", whole(b"{}", "402 Payment Required"), "declined"),
    ("403", whole(b"{}", "403 Forbidden"), "declined"),
    ("404", whole(b"{}", "404 Not Found"), "declined"),
    ("408", whole(b"{}", "408 Request Timeout"), "declined"),
    ("409", whole(b"{}", "409 Conflict"), "declined"),
    ("a stream whose first event declines", stream(DECLINES, DONE), "declined"),
    ("redirect", whole(b"", "302 Found", location="http://169.254.169.254/latest/meta-data"), "redirect"),
    ("compressed", whole(b"\x1f\x8b", content_encoding="gzip"), "failed"),
    ("no HTTP", whole(b"", "nonsense"), "lost"),
    ("no first byte", hanging, "too_slow"),
    ("a stream that never begins", stream(hang=True), "too_slow"),
    ("a cut before the first event", stream(), "lost"),
]


@pytest.mark.parametrize(("answer", "outcome"), [row[1:] for row in FAILING], ids=[row[0] for row in FAILING])
async def test_what_fails_before_the_first_byte_goes_to_the_fallback(tmp_path: Path, answer: Any, outcome: str) -> None:
    engine, provider = ScriptedEngine(), Provider(answer)
    slow = {"timeouts": {"firstByteSeconds": 1}} if outcome == "too_slow" else {}
    async with beside(tmp_path, provider, engine, WITH_FALLBACK, changed=slow) as it:
        response = await it.post({**CHAT, "stream": True})
        assert response.status == 200
        assert b"[DONE]" in await response.read()
        (record,) = await it.records()
        assert (record.data.model, record.data.outcome) == ("chat/llama", "answered")
        assert it.metric("shoal_gateway_external_requests_total", outcome=outcome) == 1
        assert len(engine.requests) == 1
        assert len(provider.heads) == 1, "a redirect is not followed, and nothing is sent twice"


async def test_retry_after_makes_it_rest_and_reaches_the_client(tmp_path: Path) -> None:
    provider = Provider(whole(b"{}", "429 Too Many Requests", retry_after="30"))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        response = await it.post(CHAT)
        assert (response.status, response.headers["retry-after"]) == (503, "30")
        (remembered,) = it.app.choices.refusals(response.headers["x-shoal-request-id"], "gateway-1")
        assert (remembered.outcome, remembered.model) == ("busy", None), "no Model explains it"
        await refused_at_rest(it)
        assert len(provider.heads) == 1


async def refused_at_rest(it: GatewayUnderTest) -> None:
    assert (await ask(it, 503))["error"]["code"] == "external_unavailable"
    assert it.metric("shoal_gateway_external_requests_total", outcome="resting") == 1


async def test_a_target_that_fails_repeatedly_is_not_asked_for_a_while(tmp_path: Path) -> None:
    provider = Provider(whole(b"boom", "500 Internal Server Error"))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for _ in range(3):
            await ask(it, 503)
        await refused_at_rest(it)
        assert len(provider.heads) == 3


async def flags(provider: Provider, writer: asyncio.StreamWriter) -> None:
    """A provider that answers 403 to some prompts, and else as usual."""
    flagged = "bad" in json.dumps(provider.bodies[-1])
    await (whole(b"{}", "403 Forbidden") if flagged else whole())(writer)


async def test_a_target_that_declines_one_tenants_prompts_rests_for_that_tenant_only(tmp_path: Path) -> None:
    """A provider objects to what the tenant acme asks for."""
    provider, engine = Provider(), ScriptedEngine()
    provider.answer = functools.partial(flags, provider)
    bad = {**CHAT, "messages": [{"role": "user", "content": "bad"}]}
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        it.tenants["globex"] = tenant("globex", "sk-test-globex", routes=[{"namespace": "chat"}])
        it.changed()
        for _ in range(5):
            assert (await it.post(bad)).status == 200
        assert (len(provider.heads), len(engine.requests)) == (3, 5), "after three it is not asked, and the fallback is"
        assert it.metric("shoal_gateway_external_requests_total", outcome="declined") == 3
        assert it.metric("shoal_gateway_external_requests_total", outcome="resting_for_tenant") == 2
        for _ in range(2):
            assert (await it.post(CHAT, key="sk-test-globex")).status == 200
        assert (len(provider.heads), len(engine.requests)) == (5, 5)
        (state,) = it.app.externals._states.values()  # pyright: ignore[reportPrivateUsage]
        state.declined["acme"]._until = 0.0  # pyright: ignore[reportPrivateUsage] - its rest is over
        assert (await it.post(CHAT)).status == 200
        assert not state.declined, "an answer ends it"


async def test_a_target_that_rests_for_all_keeps_a_tenants_turn_to_try_it(tmp_path: Path) -> None:
    """The tenant's own rest is over while the target rests for all. The tenant's next request after that is sent."""
    provider = Provider(whole(b"{}", "403 Forbidden"))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for _ in range(FAILURES):
            await ask(it, 503)
        (state,) = it.app.externals._states.values()  # pyright: ignore[reportPrivateUsage]
        provider.answer = whole()
        now = asyncio.get_running_loop().time()
        state.declined["acme"]._until = 0.0  # pyright: ignore[reportPrivateUsage] - its rest is over
        state.health.failed(now, 30.0)
        await refused_at_rest(it)
        state.health._until = 0.0  # pyright: ignore[reportPrivateUsage] - that one is over too
        await ask(it)
        assert len(provider.heads) == FAILURES + 1


def failing(**error: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"error": {"message": "org-secret", **error}}).encode()


@pytest.mark.parametrize(
    ("error", "outcome", "rests", "rests_for_tenant"),
    [
        ({"type": "server_error"}, "broken", True, False),
        ({"code": "rate_limit_exceeded"}, "broken", True, False),
        ({"code": 502}, "broken", True, False),
        ({"type": "invalid_request_error", "code": "content_filter"}, "rejected", False, False),
        ({"code": 403}, "declined", False, True),
        ({"type": "who_knows"}, "declined", False, True),
    ],
)
async def test_an_error_within_a_stream_lets_the_target_rest_for_whom_it_concerns(
    tmp_path: Path, error: dict[str, Any], outcome: str, rests: bool, rests_for_tenant: bool
) -> None:
    provider = Provider(stream(event("Hel"), failing(**error), ends=True))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for _ in range(FAILURES):
            last = [line async for line in lines(await it.post({**CHAT, "stream": True}))][-1]
            # What is wrong with the request is told to its client, as before the first byte.
            code = error["code"] if outcome == "rejected" else "external_broken"
            assert json.loads(last)["error"]["code"] == code
            assert (b"org-secret" in last) == (outcome == "rejected")
        assert it.metric("shoal_gateway_external_requests_total", outcome=outcome) == FAILURES
        (state,) = it.app.externals._states.values()  # pyright: ignore[reportPrivateUsage]
        assert state.health.rests(asyncio.get_running_loop().time()) == rests
        assert ("acme" in state.declined) == rests_for_tenant


async def test_a_stream_that_begins_with_an_error_about_the_request_is_the_clients(tmp_path: Path) -> None:
    error = failing(type="invalid_request_error", code="context_length_exceeded")
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(stream(error, ends=True)), engine, WITH_FALLBACK) as it:
        assert (await ask(it, 400, stream=True))["error"]["code"] == "context_length_exceeded"
        assert it.metric("shoal_gateway_external_requests_total", outcome="rejected") == 1
        assert not engine.requests


async def test_an_error_within_a_stream_that_repeats_the_key_is_not_passed_on(tmp_path: Path) -> None:
    error = failing(type="invalid_request_error", param=TOKEN)
    async with beside(tmp_path, Provider(stream(event("Hel"), error, ends=True)), ScriptedEngine(), ONLY) as it:
        raw = await (await it.post({**CHAT, "stream": True})).read()
        assert b"the engine answered with status 400" in raw
        assert TOKEN.encode() not in raw


@pytest.mark.parametrize(("error", "halted"), [({"code": "content_filter"}, False), ({"type": "server_error"}, True)])
async def test_an_error_within_a_stream_that_the_request_may_cause_is_doubtful_for_a_canary(
    tmp_path: Path, error: dict[str, Any], halted: bool
) -> None:
    provider = Provider(stream(event("Hel"), failing(**error), ends=True))
    canary = {"target": {"external": {"name": "outside"}}, "percent": 100, "haltOn": {"minRequests": 10}}
    async with beside(tmp_path, provider, ScriptedEngine(), {"targets": [target("llama")], "canary": canary}) as it:
        for _ in range(2):
            await (await it.post({**CHAT, "stream": True})).read()
        assert len(it.app.canaries.halts) == int(halted)


async def test_the_log_says_once_that_a_target_fails_and_that_it_answers_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = Provider(whole(b"boom", "500 Internal Server Error"))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for _ in range(4):
            await ask(it, 503)
        provider.answer = whole()
        for state in it.app.externals._states.values():  # pyright: ignore[reportPrivateUsage]
            state.health._until = 0.0  # pyright: ignore[reportPrivateUsage] - its rest is over
        for _ in range(2):
            await ask(it)
    said = capsys.readouterr().out
    assert said.count("an external target fails repeatedly") == 1
    assert said.count("an external target answers again") == 1


async def test_requests_of_a_failing_target_are_no_retries_of_its_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryBudget, "take", lambda _budget, _now: False)
    engine, provider = ScriptedEngine(), Provider(whole({}, "500 Internal Server Error"))
    async with beside(tmp_path, provider, engine, WITH_FALLBACK) as it:
        await ask(it)
        assert (len(provider.heads), len(engine.requests)) == (1, 1)
        assert it.metric("shoal_gateway_retry_budget_exhausted_total") == 0


async def test_a_stream_that_breaks_off_ends_with_an_error_and_no_second_answer(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(stream(event("Hel"))), engine, WITH_FALLBACK) as it:
        response = await it.post({**CHAT, "stream": True})
        found = [line async for line in lines(response)]
        assert json.loads(found[-1])["error"]["code"] == "external_broken"
        assert not engine.requests
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("failed", "estimated")


async def test_a_pause_within_an_answer_cuts_it(tmp_path: Path) -> None:
    provider = Provider(stream(event("Hel"), hang=True))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed={"timeouts": {"idleSeconds": 1}}) as it:
        response = await it.post({**CHAT, "stream": True})
        found = [line async for line in lines(response)]
        assert json.loads(found[-1])["error"]["code"] == "external_broken"


async def test_an_answer_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    huge = whole({"choices": [{"message": {"content": "x" * 300_000}}]})
    async with beside(tmp_path, Provider(huge), ScriptedEngine(), ONLY, max_answer_bytes=100_000) as it:
        assert (await ask(it, 502))["error"]["code"] == "answer_too_large"


async def test_more_requests_than_it_may_get_go_to_the_fallback(tmp_path: Path) -> None:
    engine, provider = ScriptedEngine(), Provider(hanging)
    async with beside(tmp_path, provider, engine, WITH_FALLBACK, changed={"maxConcurrentRequests": 1}) as it:
        first = asyncio.create_task(it.post(CHAT))
        async with asyncio.timeout(30):
            while not provider.heads:
                await asyncio.sleep(0.01)
        await ask(it)
        assert len(engine.requests) == 1
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first


async def test_a_canary_outside_halts_itself(tmp_path: Path) -> None:
    provider = Provider(whole(b"boom", "500 Internal Server Error"))
    canary = {"target": {"external": {"name": "outside"}}, "percent": 100, "haltOn": {"minRequests": 10}}
    engine = ScriptedEngine()
    rule = {"targets": [target("llama")], "canary": canary, "fallback": {"targets": [target("llama")]}}
    async with beside(tmp_path, provider, engine, rule) as it:
        for _ in range(4):
            await ask(it)
        assert len(it.app.canaries.halts) == 1
        assert len(provider.heads) == 2, "more than a tenth of ten failed"
        assert len(engine.requests) == 4


async def test_a_canary_that_rests_is_not_judged_by_what_it_was_not_sent(tmp_path: Path) -> None:
    """One 429 that asks for a pause is one failure, however many requests are drawn meanwhile."""
    provider, engine = Provider(whole(b"{}", "429 Too Many Requests", retry_after="20")), ScriptedEngine()
    canary = {"target": {"external": {"name": "outside"}}, "percent": 100}
    rule = {"targets": [target("llama")], "canary": canary, "fallback": {"targets": [target("llama")]}}
    async with beside(tmp_path, provider, engine, rule) as it:
        for _ in range(6):
            await ask(it)
        assert (len(provider.heads), len(engine.requests)) == (1, 6)
        assert not it.app.canaries.halts
        for _ in range(2):
            (state,) = it.app.externals._states.values()  # pyright: ignore[reportPrivateUsage]
            state.health._until = 0.0  # pyright: ignore[reportPrivateUsage] - its rest is over
            await ask(it)
        assert len(it.app.canaries.halts) == 1, "the third failure"


async def test_while_a_canary_rests_its_share_is_answered_by_the_targets(tmp_path: Path) -> None:
    """No fallback is needed for that. The first request after the rest goes to the canary again."""
    provider, engine = Provider(whole(b"{}", "429 Too Many Requests", retry_after="20")), ScriptedEngine()
    canary = {"target": {"external": {"name": "outside"}}, "percent": 100}
    async with beside(tmp_path, provider, engine, {"targets": [target("llama")], "canary": canary}) as it:
        assert (await it.post(CHAT)).status == 503
        for _ in range(5):
            await ask(it)
        assert (len(provider.heads), len(engine.requests)) == (1, 5)
        (state,) = it.app.externals._states.values()  # pyright: ignore[reportPrivateUsage]
        state.health._until = 0.0  # pyright: ignore[reportPrivateUsage] - its rest is over
        provider.answer = whole()
        await ask(it)
        assert (len(provider.heads), len(engine.requests)) == (2, 5)


async def test_a_canary_with_as_many_requests_as_it_may_get_has_not_failed(tmp_path: Path) -> None:
    provider, engine = Provider(hanging), ScriptedEngine()
    canary = {"target": {"external": {"name": "outside"}}, "percent": 100}
    rule = {"targets": [target("llama")], "canary": canary, "fallback": {"targets": [target("llama")]}}
    async with beside(tmp_path, provider, engine, rule, changed={"maxConcurrentRequests": 1}) as it:
        first = asyncio.create_task(it.post(CHAT))
        async with asyncio.timeout(30):
            while not provider.heads:
                await asyncio.sleep(0.01)
        for _ in range(4):
            await ask(it)
        assert not it.app.canaries.halts
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first


@pytest.mark.parametrize("others", [True, False])
async def test_prompts_that_a_provider_declines_halt_its_canary_only_where_nobody_is_answered(
    tmp_path: Path, others: bool
) -> None:
    provider, engine = Provider(), ScriptedEngine()
    provider.answer = functools.partial(flags, provider)
    canary = {"target": {"external": {"name": "outside"}}, "percent": 100, "haltOn": {"minRequests": 10}}
    rule = {"targets": [target("llama")], "canary": canary, "fallback": {"targets": [target("llama")]}}
    bad = {**CHAT, "messages": [{"role": "user", "content": "bad"}]}
    async with beside(tmp_path, provider, engine, rule) as it:
        it.tenants["globex"] = tenant("globex", "sk-test-globex", routes=[{"namespace": "chat"}])
        it.changed()
        for number in range(30):
            if others and number % 9 == 8:
                assert (await it.post(CHAT, key="sk-test-globex")).status == 200
            assert len(it.app.canaries.halts) == (0 if others or number < 10 else 1)
            assert (await it.post(bad)).status == 200
        assert len(it.app.canaries.halts) == (0 if others else 1)


# --- sent once --------------------------------------------------------------------------------------------------------


async def test_a_request_whose_reused_connection_ends_is_not_sent_again_and_is_recorded(tmp_path: Path) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        await ask(it)

        async def reads_and_closes(_: asyncio.StreamWriter) -> None:
            raise ConnectionError("it has computed, perhaps")

        provider.answer = reads_and_closes
        answer = await ask(it, 503)
        assert answer["error"]["code"] == "external_unavailable"
        assert (len(provider.heads), provider.connections) == (2, 1), "asked once each, on one connection"
        assert it.metric("shoal_gateway_external_requests_total", outcome="lost") == 1
        (attempt,), (*_, final) = await it.records("attempt"), await it.records(count=2)
        attempt, final = attempt.data, final.data
        assert (attempt.kind, attempt.model, attempt.count_source) == ("attempt", "chat/front/outside", "estimated")
        assert attempt.input_tokens
        assert (final.outcome, final.count_source) == ("refused", "none")


async def test_an_idle_connection_that_the_provider_has_ended_is_not_used(tmp_path: Path) -> None:
    provider = Provider(ends_after=1)
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for _ in range(3):
            await ask(it)
        assert (len(provider.heads), provider.connections) == (3, 3)


async def test_the_end_of_a_connection_is_seen_before_the_loop_has_read_it(tmp_path: Path) -> None:
    """The provider's end arrives while the gateway is busy: nothing has told it yet."""
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        await ask(it)
        ((idle,),) = (each for pool in it.app.externals._pools.values() for each in pool._idle.values())  # pyright: ignore[reportPrivateUsage]
        assert idle.quiet
        assert idle.socket is not None
        (writer,) = provider.writers
        ours = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        ours.shutdown(socket.SHUT_WR)  # no step of the loop in between
        ours.close()
        assert idle.usable
        assert not idle.quiet


async def test_a_provider_that_says_it_is_our_sidecar_is_not_asked_again(tmp_path: Path) -> None:
    provider = Provider(whole(x_shoal_sidecar="UF"))
    dns = Dns({HOST: address("127.0.0.1", "127.0.0.2", "127.0.0.3")})
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, dns=dns, connectable=lambda *_: True) as it:
        await ask(it)
        assert len(provider.heads) == 1
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("answered", "final")


# --- routes of several clusters in a circle ---------------------------------------------------------------------------


async def refused_as_loop(it: GatewayUnderTest, hops: str) -> None:
    error = (await ask(it, 400, headers={"x-shoal-hops": hops}))["error"]
    assert (error["code"], error["type"]) == ("route_loop", "invalid_request_error")


async def test_a_route_that_leads_back_to_its_own_gateway_ends_after_two_rounds(tmp_path: Path) -> None:
    own_key = Credential(HOST, API_KEY)
    async with beside(tmp_path, Provider(), engine := ScriptedEngine(), ONLY, credential=own_key) as it:
        port = it.server.port
        it.app.externals.close()
        hosts = [ExternalHost(host=HOST, port=port, plain_http=True)]
        dns, keys = Dns({HOST: address()}), it.app.externals.keys
        it.app.externals = Externals(hosts, keys, resolve=dns, connectable=local)
        back = {"name": "outside", "url": f"http://{HOST}:{port}/v1", "model": "front"}
        put(it, WITH_FALLBACK, externalTargets=[{**back, "credentials": {"name": "provider"}}])
        await refused_as_loop(it, "0")
        # The third refused it, and the two before it passed that on: a fallback would have hidden the circle.
        assert it.metric("shoal_gateway_external_requests_total", outcome="rejected") == 2
        assert it.metric("shoal_gateway_rejected_total", reason="route_loop") == 1
        assert not engine.requests
        for record in await it.records(count=2):
            assert (record.data.outcome, record.data.output_tokens or 0) == ("rejected", 0)
        (state,) = it.app.externals.observe()
        assert not state.rests


async def test_a_gateway_counts_itself_and_those_before_it(tmp_path: Path) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for hops in ("", "nonsense", "1"):
            await ask(it, headers={"x-shoal-hops": hops})
        told = [line for head in provider.heads for line in head.split("\r\n") if line.startswith("x-shoal-hops")]
        assert told == ["x-shoal-hops: 1", "x-shoal-hops: 1", "x-shoal-hops: 2"]


async def test_a_client_that_writes_hops_ends_only_its_own_requests(tmp_path: Path) -> None:
    provider, engine = Provider(), ScriptedEngine()
    canary = {"target": ONLY["targets"][0], "percent": 100, "haltOn": {"minRequests": 1, "errorPercent": 0}}
    async with beside(tmp_path, provider, engine, {"targets": [target("llama")], "canary": canary}) as it:
        for _ in range(FAILURES + 1):
            await refused_as_loop(it, "99")
        assert not provider.heads
        assert not it.app.canaries.halts
        await ask(it)
        assert len(provider.heads) == 1, "the target does not rest"
        # Where nothing leaves the cluster, the header means nothing.
        await ask(it, model="llama", headers={"x-shoal-hops": "99"})
        assert len(engine.requests) == 1


async def test_a_request_that_came_through_gateways_gets_no_fallback_outside(tmp_path: Path) -> None:
    provider = Provider()
    rule = {"targets": [target("llama")], "fallback": {"targets": ONLY["targets"]}}
    async with beside(tmp_path, provider, ScriptedEngine(), rule) as it:
        del it.pods["chat/llama-1"]
        it.model(limits=Limits(max_requests=0))
        await refused_as_loop(it, "2")
        assert not provider.heads
        await ask(it, headers={"x-shoal-hops": "1"})
        assert len(provider.heads) == 1


# --- attacks ----------------------------------------------------------------------------------------------------------


async def test_without_the_tenants_grant_of_the_route_no_prompt_leaves(tmp_path: Path) -> None:
    provider, engine = Provider(), ScriptedEngine()
    both = {"targets": [target("llama"), {"external": {"name": "outside"}, "weight": 1000}]}
    async with beside(tmp_path, provider, engine, both, grant=False) as it:
        for _ in range(5):
            await ask(it)
        assert not provider.heads
        assert len(engine.requests) == 5


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [ExternalHost(host="other.example.com")],
        [ExternalHost(host=HOST, port=444)],
    ],
    ids=["none", "another", "another port"],
)
async def test_a_host_that_the_installation_does_not_allow_is_not_called(
    tmp_path: Path, hosts: list[ExternalHost]
) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, allowed=hosts) as it:
        await refused(it, "not_allowed")
        assert not provider.heads


async def test_plain_http_needs_leave(tmp_path: Path) -> None:
    provider = Provider(tls=False)
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        await refused(it, "not_allowed")
        hosts = [ExternalHost(host=HOST, port=provider.port, plain_http=True)]
        it.app.externals._allowed = tuple(hosts)  # pyright: ignore[reportPrivateUsage]
        await ask(it)


@pytest.mark.parametrize("inside", ["169.254.169.254", "10.0.0.1", "127.0.0.1", "fd00::1", "100.100.100.200"])
async def test_a_name_that_leads_inside_is_not_called(tmp_path: Path, inside: str) -> None:
    provider = Provider()
    dns = Dns({HOST: address("93.184.216.34", inside)})
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, dns=dns, connectable=connectable) as it:
        await refused(it, "address_not_allowed")
        assert not provider.heads


async def test_a_name_that_changes_its_meaning_is_checked_where_it_is_connected_to(tmp_path: Path) -> None:
    provider = Provider()
    dns = Dns({HOST: [address("127.0.0.1"), address("127.0.0.2")]})
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, dns=dns) as it:
        await ask(it)
        await ask(it)
        assert dns.asked == [HOST], "the address that was checked is the one in use"
        it.app.externals._names.clear()  # pyright: ignore[reportPrivateUsage] - half a minute later
        await refused(it, "address_not_allowed")
        assert len(provider.heads) == 2


async def test_a_server_that_does_not_prove_its_name_gets_nothing(tmp_path: Path) -> None:
    provider = Provider(names=("impostor.example.com",))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        await refused(it, "certificate")
        assert not provider.heads


@pytest.mark.parametrize("credential", [None, Credential("other.example.com", TOKEN)], ids=["none", "another host's"])
async def test_without_a_key_for_this_host_nothing_is_sent(tmp_path: Path, credential: Credential | None) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, credential=credential) as it:
        await refused(it, "no_credentials")
        assert not provider.heads


async def test_without_a_key_the_other_targets_get_its_share(tmp_path: Path) -> None:
    """As the route's status says."""
    provider, engine = Provider(), ScriptedEngine()
    both = {"targets": [target("llama"), {"external": {"name": "outside"}, "weight": 1000}]}
    async with beside(tmp_path, provider, engine, both, credential=None) as it:
        for _ in range(5):
            await ask(it)
        assert len(engine.requests) == 5
        assert it.metric("shoal_gateway_external_requests_total", outcome="no_credentials") == 0


async def test_the_key_is_in_no_log_and_in_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": f"Incorrect API key provided: {TOKEN}"}}
    async with beside(tmp_path, Provider(whole(error, "401 Unauthorized")), ScriptedEngine(), ONLY) as it:
        assert TOKEN not in json.dumps(await refused(it, "unauthorized"))
        assert TOKEN not in repr(it.app.externals.keys.get("x")) + repr(Credential(HOST, TOKEN))
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err


async def test_usage_of_a_client_that_left_is_estimated(tmp_path: Path) -> None:
    provider = Provider(stream(event("Hel"), hang=True))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        response = await it.post({**CHAT, "stream": True})
        await response.content.readline()
        response.close()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source, record.data.output_tokens) == (
            "cancelled",
            "estimated",
            1,
        )


def test_every_outcome_of_an_external_target_has_a_reason_and_words() -> None:
    sources = Path(externals.__file__).parent
    written = "".join((sources / name).read_text() for name in ("externals.py", "externaldispatch.py"))
    found = set(re.findall(r'ExternalUnusable\(\s*"(\w+)"', written)) | set(re.findall(r'"(broken)"', written))
    assert {"connect", "certificate", "busy"} <= found
    assert found == OUTCOMES.keys()
