"""APIs that an external target serves itself: Anthropic's Messages and OpenAI's Responses, passed on and metered."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.api.config import ExternalHost
from shoal.api.ledger import Rate
from shoal.core.fields.mediasize import PAGE_TOKENS
from shoal.core.hold.limits import Limits
from shoal.core.routing.external import FAILURES
from shoal.gateway import accepted
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, tenant
from tests.support.pictures import data_url, made, wav
from tests.support.pricelist import PriceList
from tests.support.provider import HOST, TOKEN, Provider, beside, stream, whole
from tests.support.routes import put, target
from tests.support.scripted_engine import EngineRequest, ScriptedEngine
from tests.support.traces import collecting, traced

ONLY = {"targets": [{"external": {"name": "outside"}}]}
WITH_FALLBACK: dict[str, Any] = {**ONLY, "fallback": {"targets": [target("llama")]}}
BOTH: dict[str, Any] = {"endpoints": ["/v1/messages", "/v1/responses"]}
CHATS = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
MESSAGE = {"model": "front", "max_tokens": 50, "messages": HI}
RESPONSE = {"model": "front", "input": "hi"}
COUNTS = {"input_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 3, "output_tokens": 9}
OPENAI_COUNTS = {
    "input_tokens": 28,
    "input_tokens_details": {"cached_tokens": 20},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 4},
    "total_tokens": 37,
}
A_MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x-2026",
    "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Hello there"}],
    "stop_reason": "end_turn",
    "usage": COUNTS,
}
A_RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "model": "gpt-x-2026",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello there"}]}],
    "usage": OPENAI_COUNTS,
}


def named(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **members}).encode())


START = named("message_start", message={**A_MESSAGE, "content": [], "usage": {**COUNTS, "output_tokens": 1}})
DELTA = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello there"})
ENDING = named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9})
STOP = named("message_stop")
CREATED = named("response.created", response={**A_RESPONSE, "status": "in_progress", "usage": None})
TEXT = named("response.output_text.delta", delta="Hello there")
COMPLETED = named("response.completed", response=A_RESPONSE)


async def ask(it: GatewayUnderTest, body: dict[str, Any], path: str, status: int = 200) -> Any:
    response = await it.post(body, path)
    answer = await response.json()
    assert response.status == status, answer
    return answer


def parsed(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]


async def test_a_message_is_passed_on_as_it_is_and_its_own_counts_are_billed(tmp_path: Path) -> None:
    provider = Provider(whole(A_MESSAGE))
    key = {"credentials": {"name": "provider", "auth": "XApiKey"}}
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH | key) as it:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        more = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": thinking, "system": cached}
        answer = await ask(it, {**MESSAGE, **more}, "/v1/messages")
        assert answer == {**A_MESSAGE, "model": "front"}
        (head,), (body,) = provider.heads, provider.bodies
        assert head.startswith("POST /v1/messages HTTP/1.1\r\n")
        assert "x-api-key: sk-outside" in head
        assert "authorization" not in head
        assert "anthropic-version: 2023-06-01\r\n" in head
        assert body == {"model": "gpt-x", "max_tokens": 50, "messages": HI, "thinking": thinking, "system": cached}
        (record,) = await it.records()
        data = record.data
        assert (data.model, data.endpoint, data.count_source) == ("chat/front/outside", "/v1/messages", "final")
        assert (data.input_tokens, data.cached_tokens, data.output_tokens) == (28, 20, 9)


async def test_a_response_is_passed_on_and_nothing_of_it_is_stored(tmp_path: Path) -> None:
    provider = Provider(whole(A_RESPONSE))
    key = {"credentials": {"name": "provider", "auth": "ApiKey"}}
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH | key) as it:
        group = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
        tools = [{"type": "custom", "name": "patch"}, group, {"type": "web_search"}]
        more = {"store": True, "tools": tools, "include": ["reasoning.encrypted_content", "file_search_call.results"]}
        assert await ask(it, {**RESPONSE, **more}, "/v1/responses") == {**A_RESPONSE, "model": "front"}
        (head,), (body,) = provider.heads, provider.bodies
        assert head.startswith("POST /v1/responses HTTP/1.1\r\n")
        assert "\r\napi-key: sk-outside" in head
        assert body == {
            "model": "gpt-x",
            "input": "hi",
            "store": False,
            "tools": tools[:2],
            "include": ["reasoning.encrypted_content"],
        }
        data = (await it.records())[0].data
        assert (data.input_tokens, data.cached_tokens, data.output_tokens) == (28, 20, 9)
        assert (data.reasoning_tokens, data.count_source) == (4, "final")


@pytest.mark.parametrize(
    ("path", "body", "events"),
    [
        ("/v1/messages", MESSAGE, (START, named("ping"), DELTA, ENDING, STOP)),
        ("/v1/responses", RESPONSE, (CREATED, TEXT, COMPLETED, b"data: [DONE]\n\n")),
    ],
    ids=["messages", "responses"],
)
async def test_a_stream_is_passed_on_event_by_event(
    tmp_path: Path, path: str, body: dict[str, Any], events: tuple[bytes, ...]
) -> None:
    provider = Provider(stream(*events, ends=True))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        response = await it.post({**body, "stream": True}, path)
        raw = await response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        got, sent = parsed(raw), parsed(b"".join(events))
        assert [one["type"] for one in got] == [one["type"] for one in sent]
        assert {
            each["model"] for one in got for each in one.values() if isinstance(each, dict) and "model" in each
        } == {"front"}
        assert DELTA in raw or TEXT in raw, "what names no model is not touched"
        assert provider.bodies[0]["stream"] is True
        data = (await it.records())[0].data
        assert (data.input_tokens, data.cached_tokens, data.output_tokens) == (28, 20, 9)
        assert (data.count_source, data.outcome, data.stream) == ("final", "answered", True)


@pytest.mark.parametrize(("path", "body"), [("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)])
async def test_a_field_that_is_null_counts_as_absent(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with beside(tmp_path, Provider(whole(A_MESSAGE)), ScriptedEngine(), ONLY, changed=BOTH) as it:
        await ask(it, {**body, "new_field": None}, path)
        answer = await ask(it, {**body, "new_field": 1}, path, 400)
        assert "`new_field` is not forwarded" in answer["error"]["message"]


async def test_what_a_target_lacks_has_the_name_that_the_client_uses(tmp_path: Path) -> None:
    only = {"endpoints": ["/v1/embeddings"]}
    async with beside(tmp_path, Provider(), ScriptedEngine(), ONLY, changed=only) as it:
        for path, body in (
            ("/v1/messages", MESSAGE),
            ("/v1/responses", RESPONSE),
            ("/v1/messages/count_tokens", {"model": "front", "messages": HI}),
        ):
            answer = await ask(it, body, path, 400)
            expected = f"The model `front` does not serve {path} where this request goes: use /v1/embeddings."
            assert answer["error"]["message"] == expected


@pytest.mark.parametrize("bound", [-1_000_000, 0, 10.5, "50", True])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [("/v1/messages", MESSAGE, "max_tokens"), ("/v1/responses", RESPONSE, "max_output_tokens")],
)
async def test_a_bound_that_is_none_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], name: str, bound: Any
) -> None:
    """Limits reserve for it: a negative one would make room for other requests while this one runs."""
    provider = Provider(whole(A_MESSAGE))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        answer = await ask(it, {**body, name: bound}, path, 400)
        assert answer["error"]["message"] == f"`{name}` must be a whole number of at least 1."
        assert not provider.heads


async def test_an_event_without_data_is_none(tmp_path: Path) -> None:
    events = (b"retry: 3000\n\n", START, b"event: ping\n\n", DELTA, ENDING, STOP)
    async with beside(tmp_path, Provider(stream(*events, ends=True)), ScriptedEngine(), ONLY, changed=BOTH) as it:
        response = await it.post({**MESSAGE, "stream": True}, "/v1/messages")
        assert parsed(await response.read())[-1]["type"] == "message_stop"
        assert (await it.records())[0].data.outcome == "answered"


async def test_a_stream_that_breaks_off_is_billed_nothing_it_cannot_have(tmp_path: Path) -> None:
    async with beside(tmp_path, Provider(stream(START, DELTA)), ScriptedEngine(), ONLY, changed=BOTH) as it:
        response = await it.post({**MESSAGE, "stream": True}, "/v1/messages")
        last = parsed(await response.read())[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        data = (await it.records())[0].data
        # What was read is the provider's count, what was written the length of the text.
        assert (data.outcome, data.count_source) == ("failed", "estimated")
        assert (data.input_tokens, data.output_tokens) == (28, 3)


async def test_an_error_within_a_stream_is_told_without_the_providers_words(tmp_path: Path) -> None:
    error = named("error", error={"type": "overloaded_error", "message": "org-secret is over its limit"})
    provider = Provider(stream(START, DELTA, error, ends=True))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        response = await it.post({**MESSAGE, "stream": True}, "/v1/messages")
        raw = await response.read()
        assert b"org-secret" not in raw
        assert parsed(raw)[-1]["type"] == "error"
        assert (await it.records())[0].data.outcome == "failed"
        assert it.metric("shoal_gateway_external_requests_total", outcome="broken") == 1


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [("overloaded_error", "broken"), ("permission_error", "declined"), ("invalid_request_error", "rejected")],
)
@pytest.mark.parametrize("path", BOTH["endpoints"])
async def test_an_error_within_a_stream_lets_the_target_rest_for_whom_it_concerns(
    tmp_path: Path, path: str, kind: str, outcome: str
) -> None:
    body = MESSAGE if path == "/v1/messages" else RESPONSE
    begin = (START, DELTA) if path == "/v1/messages" else (CREATED, TEXT)
    error = named("error", error={"type": kind, "message": "no"})
    async with beside(tmp_path, Provider(stream(*begin, error, ends=True)), ScriptedEngine(), ONLY, changed=BOTH) as it:
        for _ in range(FAILURES):
            assert parsed(await (await it.post({**body, "stream": True}, path)).read())[-1]["type"] == "error"
        assert it.metric("shoal_gateway_external_requests_total", outcome=outcome) == FAILURES
        (state,) = it.app.externals.observe()
        assert state.rests == (outcome == "broken")


async def test_a_message_that_is_translated_has_nothing_that_only_engines_know(tmp_path: Path) -> None:
    """OpenAI's API refuses a field that it does not know. Coding agents always send `thinking`."""
    provider = Provider()
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "b"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [*HI, {"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        await ask(it, {**MESSAGE, "messages": turns, "thinking": {"type": "adaptive"}}, "/v1/messages")
    (body,) = provider.bodies
    assert "chat_template_kwargs" not in body
    assert body["messages"][1].keys() == {"role", "content", "tool_calls"}
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"path":"a"}'}


BEGUN = {**MESSAGE, "messages": [*HI, {"role": "assistant", "content": "{"}]}


async def test_a_begun_answer_is_not_sent_to_who_would_begin_anew(tmp_path: Path) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        answer = await ask(it, BEGUN, "/v1/messages", 400)
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert "must not be the assistant's" in answer["error"]["message"]
        assert not provider.heads
        # A client that asks for it in the words of chats knows where its request goes.
        await ask(it, {"model": "front", "messages": BEGUN["messages"], "continue_final_message": True}, CHATS)
        assert provider.bodies[0]["continue_final_message"] is True
        provider.answer = whole(A_MESSAGE)
        put(it, ONLY, externalTargets=[provider.target(**BOTH)])
        await ask(it, BEGUN, "/v1/messages")
        assert provider.bodies[1]["messages"] == BEGUN["messages"]


async def test_a_begun_answer_goes_to_no_fallback_that_would_begin_anew(tmp_path: Path) -> None:
    provider, engine = Provider(), ScriptedEngine()
    rule = {"targets": [target("llama")], "fallback": ONLY}
    async with beside(tmp_path, provider, engine, rule) as it:
        it.model(limits=Limits(max_requests=0))
        it.pods.clear()
        it.changed()
        assert (await it.post(BEGUN, "/v1/messages")).status == 503
        assert not provider.heads
        await ask(it, MESSAGE, "/v1/messages")
        assert len(provider.heads) == 1


async def test_an_error_before_the_first_event_goes_to_a_fallback_that_translates(tmp_path: Path) -> None:
    error = named("error", error={"type": "overloaded_error", "message": "Overloaded"})
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(stream(error)), engine, WITH_FALLBACK, changed=BOTH) as it:
        response = await it.post({**MESSAGE, "stream": True}, "/v1/messages")
        assert parsed(await response.read())[-1]["type"] == "message_stop"
        (sent,) = engine.requests
        assert sent.path == "/v1/chat/completions"
        data = (await it.records())[0].data
        assert (data.model, data.count_source) == ("chat/llama", "final")


PHOTO = made("JPEG", 800, 700, quality=95)
PHOTO_TOKENS = 800 * 700 // (28 * 28)
SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": b64encode(PHOTO).decode()}}
PICTURE = {"type": "input_image", "image_url": data_url("image/jpeg", PHOTO)}
CUSTOM = {"type": "custom", "name": "patch"}
"""A tool that has no translation."""


HEARD = {"type": "input_audio", "input_audio": {"data": b64encode(wav(1.5)).decode(), "format": "wav"}}
UNREAD = {"type": "input_audio", "input_audio": {"data": b64encode(b"fLaC").decode(), "format": "flac"}}


@pytest.mark.parametrize(("parts", "milliseconds"), [([HEARD], 1_500), ([HEARD, UNREAD], None)])
async def test_sounds_of_a_response_have_seconds_where_all_of_them_can_be_read(
    tmp_path: Path, parts: list[Any], milliseconds: int | None
) -> None:
    """Nobody checks here what a sound is: the provider may know what the gateway does not. Unknown is not 0."""
    async with beside(tmp_path, Provider(whole(A_RESPONSE)), ScriptedEngine(), ONLY, changed=BOTH) as it:
        await ask(it, {**RESPONSE, "input": [{"role": "user", "content": parts}]}, "/v1/responses")
        data = (await it.records())[0].data
        assert (data.audio_ms, data.audio_source) == (milliseconds, "measured" if milliseconds else None)
        assert (data.input_tokens, data.count_source) == (28, "final")


async def test_a_sound_of_unknown_length_is_not_cheap_to_a_route_with_a_bound_on_costs(tmp_path: Path) -> None:
    costs = {**WITH_FALLBACK["fallback"], "whenCostAbove": {"amount": "900", "currency": "USD"}}
    body = {**RESPONSE, "max_output_tokens": 10}
    async with beside(
        tmp_path, Provider(whole(A_RESPONSE)), ScriptedEngine(), {**ONLY, "fallback": costs}, changed=BOTH
    ) as it:
        it.app.quotas.ledger = PriceList(Rate(model="*", input=1, cached=1, output=1, audio_ms=1))
        whys: list[list[str]] = []
        for parts in ([HEARD], [HEARD, UNREAD]):
            response = await it.post({**body, "input": [{"role": "user", "content": parts}]}, "/v1/responses")
            assert response.status == 200, await response.text()
            stays = it.app.choices.stays(response.headers["x-shoal-request-id"], "gateway-1")
            whys.append([each.message for each in stays])
        assert whys[0] == []
        assert len(whys[1]) == 1
        assert "whenCostAbove has no effect: the length of a sound for chat/front/" in whys[1][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages",
            {
                **MESSAGE,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "document", "source": {"type": "content", "content": [SHOWN]}}],
                    }
                ],
            },
        ),
        (
            "/v1/messages",
            {
                **MESSAGE,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [SHOWN]}]}
                ],
                "tools": [{"type": "bash_20250124", "name": "bash"}],
            },
        ),
        ("/v1/responses", {**RESPONSE, "input": [{"role": "user", "content": [PICTURE]}], "tools": [CUSTOM]}),
        (
            "/v1/responses",
            {**RESPONSE, "input": [{"type": "custom_tool_call_output", "call_id": "c", "output": [PICTURE]}]},
        ),
    ],
)
async def test_images_of_what_no_chat_can_say_count_by_what_they_show(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """As in chats: in the record, in limits and in routes."""
    rule = {
        "targets": [{"external": {"name": "outside"}}],
        "matches": [{"promptTokens": {"lessThan": PHOTO_TOKENS + 200}}],
    }
    uncounted = whole({**A_MESSAGE, "usage": None})
    async with beside(tmp_path, Provider(uncounted), ScriptedEngine(), rule, changed=BOTH) as it:
        await ask(it, body, path)
        data = (await it.records())[0].data
        assert (data.images, data.count_source) == (1, "estimated")
        assert data.input_tokens is not None
        assert PHOTO_TOKENS <= data.input_tokens < PHOTO_TOKENS + 200


PDF = b"%PDF-1.4\n" + b"1 0 obj\n<</Type /Page>>\nendobj\n" * 2 + bytes(600_000)
PDF_URL = data_url("application/pdf", PDF)
WITH_PDF: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/messages",
        {
            **MESSAGE,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {
                                "type": "base64",
                                "media_type": "application/pdf",
                                "data": b64encode(PDF).decode(),
                            },
                        }
                    ],
                }
            ],
        },
    ),
    (
        "/v1/responses",
        {**RESPONSE, "input": [{"role": "user", "content": [{"type": "input_file", "file_data": PDF_URL}]}]},
    ),
]
AS_CHAT = {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": PDF_URL}}]}]}


@pytest.mark.parametrize(("path", "body"), WITH_PDF, ids=["messages", "responses"])
async def test_a_pdf_fits_limits_by_its_pages_and_not_by_its_base64(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """It was 429 for good: a quarter of its base64 is some 200,000 tokens."""
    uncounted = whole({**A_MESSAGE, "usage": None})
    async with beside(tmp_path, Provider(uncounted), ScriptedEngine(), ONLY, changed=BOTH) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 10_000}, routes=[{"namespace": "chat"}])
        it.changed()
        await ask(it, body, path)
        data = (await it.records())[0].data
        assert data.count_source == "estimated"
        assert data.input_tokens is not None
        assert 2 * PAGE_TOKENS <= data.input_tokens < 2 * PAGE_TOKENS + 200


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (*WITH_PDF[0], 'messages[0].content[0].type`: blocks of type "document" are not supported'),
        (*WITH_PDF[1], 'input[0].content[0].type`: parts of type "input_file" are not supported'),
        (CHATS, AS_CHAT, "messages[0].content[0].type` must be one of"),
    ],
    ids=["messages", "responses", "chat"],
)
async def test_a_pdf_for_an_engine_is_refused_before_anything_is_counted(
    tmp_path: Path, path: str, body: dict[str, Any], named: str
) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 3_000})
        it.changed()
        answer = await ask(it, {**body, "model": "llama"}, path, 400)
        assert answer["error"]["type"] == "invalid_request_error"
        assert named in answer["error"]["message"]
        assert answer.get("type") == ("error" if path == "/v1/messages" else None)
        reply = await it.post({"model": "llama", "messages": HI, "max_tokens": 10})
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) > 3_000 - 100
        assert (reply.status, len(engine.requests)) == (200, 1)
        assert len(await it.records()) == 1


SECRET = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages",
            {
                "max_tokens": 50,
                "system": f"Be brief. {SECRET}",
                "messages": [{"role": "user", "content": [{"type": "search_result", "content": [SHOWN]}]}],
            },
        ),
        (
            "/v1/responses",
            {
                "max_output_tokens": 50,
                "instructions": f"Be brief. {SECRET}",
                "input": [{"role": "user", "content": [PICTURE]}],
                "tools": [CUSTOM],
            },
        ),
    ],
)  # fmt: skip
async def test_the_request_log_has_what_goes_out_untranslated_and_no_image(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with beside(
        tmp_path, Provider(whole(A_MESSAGE)), ScriptedEngine(), ONLY, changed=BOTH, log_dir=tmp_path / "logs"
    ) as it:
        full = {"mode": "Full", "retentionDays": 1}
        it.tenants["acme"] = tenant(logging=full, routes=[{"namespace": "chat"}])
        it.changed()
        await ask(it, {"model": "front", **body}, path)

        entries: list[dict[str, Any]] = []
        async with asyncio.timeout(20):
            while not entries:
                page = await it.session.get(it.url + "/v1/logs", headers={"authorization": f"Bearer {API_KEY}"})
                entries = (await page.json())["data"]
                await asyncio.sleep(0.05)
        (entry,) = entries
        assert entry["request"].keys() == body.keys()
        told = json.dumps(entry)
        assert "Be brief." in told
        assert "abcdefghijklmnop" not in told
        assert "bytes, not logged" in told
        assert b64encode(PHOTO[:300]).decode() not in told


# --- a Shoal behind a Shoal -------------------------------------------------------------------------------------------


@dataclass
class Shoal(Provider):
    """Another gateway in the place of a provider."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Shoal"]:
        yield self


@asynccontextmanager
async def two_shoals(
    tmp_path: Path, inner: ScriptedEngine, engine: ScriptedEngine, *rules: dict[str, Any]
) -> AsyncGenerator[tuple[GatewayUnderTest, GatewayUnderTest]]:
    """The outer gateway, whose external target is the inner one, and the inner."""
    (tmp_path / "inner").mkdir()
    async with gateway(tmp_path / "inner", inner) as behind:
        behind.tenants["acme"] = tenant(key=TOKEN)
        behind.changed()
        shoal = Shoal(tls=False, port=behind.server.port)
        allowed = [ExternalHost(host=HOST, port=shoal.port, plain_http=True)]
        (tmp_path / "outer").mkdir()
        changed = BOTH | {"model": "llama"}
        async with beside(tmp_path / "outer", shoal, engine, *rules, changed=changed, allowed=allowed) as it:
            yield it, behind


STREAMS = pytest.mark.parametrize(
    ("path", "body", "last"),
    [("/v1/messages", MESSAGE, "message_stop"), ("/v1/responses", RESPONSE, "response.completed")],
    ids=["messages", "responses"],
)


@STREAMS
async def test_a_refusal_of_a_shoal_behind_goes_to_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], last: str
) -> None:
    """It has sent comments and the status 200 by then."""
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    engine = ScriptedEngine()
    async with two_shoals(tmp_path, ScriptedEngine(), engine, WITH_FALLBACK) as (it, behind):
        behind.pods.clear()
        behind.model(limits=Limits(timeout_seconds=0.5))
        response = await it.post({**body, "stream": True}, path)
        assert parsed(await response.read())[-1]["type"] == last
        assert len(engine.requests) == 1
        data = (await it.records())[0].data
        assert (data.model, data.outcome) == ("chat/llama", "answered")
        assert (await behind.records())[0].data.outcome == "expired"


@STREAMS
async def test_a_shoal_behind_that_fails_in_the_middle_is_an_error_of_that_api(
    tmp_path: Path, path: str, body: dict[str, Any], last: str
) -> None:
    async def breaks(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        request.writer.transport.abort()

    async with two_shoals(tmp_path, ScriptedEngine(breaks), ScriptedEngine(), WITH_FALLBACK) as (it, _):
        response = await it.post({**body, "stream": True}, path)
        raw = await response.read()
        seen = parsed(raw)
        assert seen[-1]["type"] == "error"
        assert last not in {event["type"] for event in seen}
        assert b"replica" not in raw, "the words of the target"
        assert b"The external target broke off its answer" in raw
        if path == "/v1/responses":
            assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
            assert (seen[-1]["code"], seen[-1]["param"]) == ("external_broken", None)
        data = (await it.records())[0].data
        assert (data.model, data.outcome) == ("chat/front/outside", "failed")


@pytest.mark.parametrize("path", BOTH["endpoints"])
async def test_an_error_in_the_shape_of_a_chat_goes_to_the_fallback_too(tmp_path: Path, path: str) -> None:
    body = MESSAGE if path == "/v1/messages" else RESPONSE
    error = b'event: error\ndata: {"error": {"message": "org-secret is full", "code": "overloaded"}}\n\n'
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(stream(error)), engine, WITH_FALLBACK, changed=BOTH) as it:
        raw = await (await it.post({**body, "stream": True}, path)).read()
        assert b"org-secret" not in raw
        assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {**COUNTS, "input_tokens": -5},
        {**COUNTS, "output_tokens": 9.5},
        {**COUNTS, "cache_read_input_tokens": True},
        {**COUNTS, "input_tokens": 10**30},
        {**COUNTS, "output_tokens": 10**8},
        {**COUNTS, "output_tokens": "9"},
    ],
    ids=["none", "empty", "negative", "fraction", "no number", "beyond 64 bits", "huge", "text"],
)
async def test_counts_that_cannot_be_are_estimated(tmp_path: Path, usage: Any) -> None:
    provider = Provider(whole({**A_MESSAGE, "usage": usage}))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        await ask(it, MESSAGE, "/v1/messages")
        data = (await it.records())[0].data
        assert (data.count_source, data.output_tokens) == ("estimated", 4)
        assert 0 < (data.input_tokens or 0) < 100


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ("/v1/messages", {"mcp_servers": [{"type": "url", "url": "https://evil.example"}]}, "mcp_servers"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]},
        "messages[0].content[0].source",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0].source",
    ),
    ("/v1/responses", {"previous_response_id": "resp_of_another_tenant"}, "previous_response_id"),
    ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
    ("/v1/responses", {"background": True}, "background"),
    ("/v1/responses", {"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ("/v1/responses", {"tools": [{"type": "mcp", "server_url": "https://x"}]}, "tools[0].type"),
    ("/v1/responses", {"tools": [{"type": "namespace", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]},
        "input[0].content[0].file_id",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]},
        "input[0].content[0].image_url",
    ),
]


@pytest.mark.parametrize(("path", "changed", "param"), REFUSED, ids=[row[2] for row in REFUSED])
async def test_what_is_stored_or_runs_under_the_shared_key_is_not_forwarded(
    tmp_path: Path, path: str, changed: dict[str, Any], param: str
) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        answer = await ask(it, {**(MESSAGE if path == "/v1/messages" else RESPONSE), **changed}, path, 400)
        assert f"`{param}`" in answer["error"]["message"]
        assert not provider.heads


async def test_tools_of_a_client_reach_the_provider_though_no_chat_has_words_for_them(tmp_path: Path) -> None:
    provider, engine = Provider(whole(A_MESSAGE)), ScriptedEngine()
    bash = {"tools": [{"type": "bash_20250124", "name": "bash"}]}
    async with beside(tmp_path, provider, engine, ONLY, {**ONLY, "targets": [target("llama")]}, changed=BOTH) as it:
        await ask(it, {**MESSAGE, **bash}, "/v1/messages")
        assert provider.bodies[0]["tools"] == bash["tools"]
        answer = await ask(it, {**MESSAGE, **bash, "model": "llama"}, "/v1/messages", 400)
        assert "run at Anthropic" in answer["error"]["message"]


async def test_tokens_are_counted_by_the_provider_and_billed_to_nobody(tmp_path: Path) -> None:
    provider = Provider(whole({"input_tokens": 14}))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        body = {"model": "front", "messages": HI}
        assert await ask(it, body, "/v1/messages/count_tokens") == {"input_tokens": 14}
        assert provider.heads[0].startswith("POST /v1/messages/count_tokens ")
        data = (await it.records())[0].data
        assert (data.input_tokens, data.output_tokens) == (0, 0)


async def test_a_target_that_serves_only_messages_gets_no_chats(tmp_path: Path) -> None:
    provider = Provider()
    only = {"endpoints": ["/v1/messages"]}
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=only) as it:
        answer = await ask(it, {"model": "front", "messages": HI}, "/v1/chat/completions", 400)
        assert "use /v1/messages" in answer["error"]["message"]
        assert (await ask(it, RESPONSE, "/v1/responses", 400))["error"]["code"] == "wrong_endpoint"
        assert not provider.heads


@pytest.mark.parametrize(
    "answer",
    [
        whole(b"<html>hello</html>", kind="text/html"),
        whole(b"[]"),
        stream(b"data: \xff\xfe\n\n", ends=True),
        stream(b"data: not json\n\n", ends=True),
    ],
    ids=["html", "no object", "not UTF-8", "no JSON"],
)
async def test_what_is_no_answer_of_that_api_goes_to_the_fallback(tmp_path: Path, answer: Any) -> None:
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(answer), engine, WITH_FALLBACK, changed=BOTH) as it:
        await ask(it, MESSAGE, "/v1/messages")
        assert len(engine.requests) == 1


# --- traces -----------------------------------------------------------------------------------------------------------


async def test_a_trace_shows_the_call_of_the_provider_without_key_or_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Provider(whole(A_MESSAGE))
    secret = "a-prompt-that-nobody-may-see"
    body = {**MESSAGE, "messages": [{"role": "user", "content": secret}]}
    async with collecting() as collector, beside(tmp_path, provider, ScriptedEngine(), ONLY, changed=BOTH) as it:
        async with traced(it, collector, monkeypatch):
            await ask(it, body, "/v1/messages")
        (call,) = collector.below(collector.named("POST /v1/chat/completions"))
        (record,) = await it.records()
    assert (call.name, call.kind, call.error) == ("chat front", "CLIENT", None)
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "front",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": record.data.request_id,
        "gen_ai.response.model": "chat/front/outside",
        "gen_ai.response.finish_reasons": ["end_turn"],
        "gen_ai.usage.input_tokens": 28,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "server.address": "api.example.com",
        "server.port": provider.port,
        "shoal.attempt": 1,
        "shoal.model": "chat/front/outside",
        "shoal.route": "chat/front",
        "shoal.route.role": "target",
    }
    told = repr([(span.name, span.attributes) for span in collector.spans])
    assert secret not in told
    assert TOKEN not in told
    assert "traceparent" not in provider.heads[0], "a provider learns nothing of others' requests"


async def test_a_trace_tells_the_providers_failure_and_then_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Provider(whole(b"boom", "500 Internal Server Error"))
    async with collecting() as collector, beside(tmp_path, provider, ScriptedEngine(), WITH_FALLBACK) as it:
        async with traced(it, collector, monkeypatch):
            await ask(it, {"model": "front", "messages": HI}, "/v1/chat/completions")
        outside, inside = collector.below(collector.named("POST /v1/chat/completions"))
    assert (outside.error, outside.attributes["error.type"]) == ("failed", "failed")
    assert "gen_ai.usage.input_tokens" not in outside.attributes, "an estimate is no count"
    assert (inside.error, inside.attributes["shoal.route.role"]) == (None, "fallback")
