"""What holds for every endpoint, the translated APIs too: keys, limits, holding at zero, retries before the first byte,
adapters, cache salts, the request log and its redaction, and clients that leave."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from shoal.core.fields.table import FORMS, TABLE, TOKENIZING
from shoal.core.hold.limits import Limits
from shoal.gateway import accepted
from shoal.gateway.dialects import COUNT_TOKENS, DIALECTS, MESSAGES, RESPONSES
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.gateway import API_KEY, MODEL, GatewayUnderTest, gateway, replica, tenant
from tests.support.recordings import TYPE, asked, wav
from tests.support.requestlog import CANARY, echo, logged, raw_bytes
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.vllm_engine import NOT_FOUND, says
from tests.support.waiting import until_async
from tests.unit.gateway.test_gateway_cancellations import Agent, ends_when_told, serving

CHAT: Final = "/v1/chat/completions"
HI: Final = [{"role": "user", "content": "hi"}]
BODIES: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["x"]},
    "/v1/score": {"query": "hi", "items": ["x"]},
    "/v1/classify": {"input": "hi"},
    "/v1/tokenize": {"prompt": "hi"},
    "/v1/detokenize": {"tokens": [5]},
    "/v1/audio/transcriptions": {},
    MESSAGES: {"messages": HI, "max_tokens": 50},
    COUNT_TOKENS: {"messages": HI},
    RESPONSES: {"input": "hi"},
}
STREAMED: Final = {CHAT: "[DONE]", MESSAGES: "message_stop", RESPONSES: "response.completed"}
"""What of a stream's last event says that it is complete."""
GENERATING: Final = [CHAT, "/v1/completions", MESSAGES, RESPONSES]
FREE: Final = [*TOKENIZING, COUNT_TOKENS]
endpoints = pytest.mark.parametrize("path", BODIES)
generating = pytest.mark.parametrize("path", GENERATING)
streamed = pytest.mark.parametrize("path", STREAMED)


def test_each_endpoint_is_here() -> None:
    assert BODIES.keys() == TABLE.keys() | DIALECTS.keys()


async def post(
    it: GatewayUnderTest, path: str, key: str | None = API_KEY, model: str = "llama", **more: Any
) -> aiohttp.ClientResponse:
    if path in FORMS:
        return await it.post(asked(wav(0.1)), path, key, headers={"content-type": TYPE.decode()})
    return await it.post({"model": model, **BODIES[path], **more}, path, key)


async def answer(request: EngineRequest) -> None:
    """An answer of each endpoint of an engine; chats and completions as `serve_normally`."""
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    if request.path in (CHAT, "/v1/completions"):
        await serve_normally(request)
        return
    found: Any = {"model": request.body.get("model"), "usage": usage}
    if request.path == "/v1/rerank":
        found = [{"score": 0.5, "index": 0, "meta_info": usage}]
    elif request.path == "/v1/score":
        found |= {"scores": [[0.5]]}
    elif request.path in ("/v1/embeddings", "/v1/classify"):
        found |= {"data": [{"index": 0}]}
    elif request.path == "/v1/tokenize":
        found = {"tokens": [5, 6], "count": 2, "max_model_len": 8192}
    elif request.path in FORMS:
        found = {"text": "hi", "usage": {"type": "duration", "seconds": 1}}
    await request.answer(200, json.dumps(found, separators=(",", ":")).encode())


def error_of(path: str, body: Any) -> Any:
    """The error of an answer, after a look at the shape of its API."""
    if path in (MESSAGES, COUNT_TOKENS):
        assert body.keys() == {"type", "error", "request_id"}
        assert body["error"].keys() >= {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


# --- keys and limits --------------------------------------------------------------------------------------------------


@endpoints
async def test_nobody_is_served_without_a_key(tmp_path: Path, path: str) -> None:
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        for key in (None, "sk-wrong"):
            refused = await post(it, path, key)
            assert refused.status == 401
            error_of(path, await refused.json())
        async with it.session.get(it.url + path) as wrong:
            assert wrong.status == 405
        assert engine.requests == []
        assert await it.records("open", 0) == []


@endpoints
async def test_over_its_limit_a_tenant_is_told_so_and_when_to_come_again(tmp_path: Path, path: str) -> None:
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        it.tenants["acme"] = tenant(limits={"requestsPerMinute": 1, "tokensPerMinute": 100_000})
        it.changed()
        served = await post(it, path)
        assert served.status == 200, await served.text()
        assert served.headers["x-ratelimit-limit-requests"] == "1"
        assert served.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await post(it, path)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 50
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "limit on requests per minute" in error_of(path, await refused.json())["message"]
        assert len(engine.requests) == 1


@generating
async def test_tokens_that_the_engine_counted_are_used_up(tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 100_000})
        it.changed()
        assert (await post(it, path)).status == 200
        await until_async(lambda: not it.app.demand.tenants.of("acme").own_use().in_flight)
        assert it.app.demand.tenants.of("acme").own_use().tokens == 10


# --- waiting, and trying again ----------------------------------------------------------------------------------------


def wake(it: GatewayUnderTest) -> None:
    it.pods["chat/llama-1"] = replica(1)
    it.changed()
    it.hear(1)


@endpoints
async def test_at_zero_a_request_is_held_and_is_demand(tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.pods.clear()
        it.fleet.update("pod-1", None)
        it.changed()
        asking = asyncio.create_task(post(it, path))
        await until_async(lambda: it.app.holds.waiting == 1)
        assert it.app.demand.demand(MODEL.uid).held == 1
        wake(it)
        response = await asking
        assert response.status == 200, await response.text()
        (record,) = await it.records()
        assert (record.data.endpoint, record.data.outcome) == (path, "answered")
        assert record.data.hold_ms is not None


def read(path: str) -> int | None:
    """Tokens of the prompt that the engine has counted."""
    return None if path in FORMS else 0 if path in FREE else 7 if path in GENERATING else 3


@endpoints
async def test_a_request_waits_for_a_replica_that_does_not_answer(tmp_path: Path, path: str) -> None:
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        it.hear(1, phase="stalled")
        asking = asyncio.create_task(post(it, path))
        await until_async(lambda: it.app.holds.waiting == 1)
        assert engine.requests == []
        it.hear(1)
        assert (await asking).status == 200
        data = (await it.records())[0].data
        assert data.hold_ms is not None
        assert data.input_tokens == read(path)


@endpoints
async def test_a_replica_that_is_lost_before_it_answers_costs_the_client_nothing(tmp_path: Path, path: str) -> None:
    async def hang_up(request: EngineRequest) -> None:
        request.writer.close()

    broken, sound = ScriptedEngine(hang_up), ScriptedEngine(answer)
    async with gateway(tmp_path, broken, sound) as it:
        for _ in range(3):
            assert (await post(it, path)).status == 200
        assert broken.requests
        records = await it.records(count=3)
        assert {record.data.input_tokens for record in records} == {read(path)}
        assert max(record.data.attempts for record in records) == 2


@streamed
async def test_a_held_stream_has_comments_before_its_first_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.pods.clear()
        it.changed()
        response = await post(it, path, stream=True)
        assert await response.content.readline() == b": waiting for a replica\n"
        wake(it)
        blocks = [block for block in (await response.text()).strip().split("\n\n") if block]
        first = next(number for number, block in enumerate(blocks) if not block.startswith(":"))
        assert not any(block.startswith(":") for block in blocks[first:])
        assert STREAMED[path] in blocks[-1]


@streamed
async def test_a_held_stream_that_is_refused_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.pods.clear()
        it.model(limits=Limits(timeout_seconds=0.5), cold_start_seconds=20.0)
        response = await post(it, path, stream=True)
        assert response.status == 200
        (line,) = [line for line in (await response.text()).splitlines() if line.startswith("data: ")]
        event = json.loads(line[6:])
        error = event.get("error", event)
        assert error["message"]
        assert 1 <= error["retry_after"] <= 60
        assert (await it.records())[0].data.outcome == "expired"


# --- adapters and prefixes --------------------------------------------------------------------------------------------


@generating
async def test_an_adapter_answers_under_a_lease_and_by_the_clients_name(tmp_path: Path, path: str) -> None:
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        response = await post(it.it, path, model="support")
        assert response.status == 200, await response.text()
        assert (await response.json())["model"] == "support"
        (wanted,) = agent.ensured
        assert wanted.name == name_of()
        (sent,) = it.engines[0].requests
        assert (sent.body["model"], sent.body["lora_path"]) == ("chat/llama", name_of())
        (record,) = await it.it.records()
        assert (record.data.model, record.data.adapter, record.data.endpoint) == ("chat/llama", "chat/support", path)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/v1/classify"])
async def test_what_no_adapter_can_do_is_refused_by_its_name(tmp_path: Path, path: str) -> None:
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        response = await post(it.it, path, model="support")
        assert (response.status, error_of(path, await response.json())["code"]) == (400, "wrong_endpoint")
        assert it.engines[0].requests == []


@endpoints
async def test_an_engine_that_lacks_the_endpoint_in_its_version_is_told_as_that(tmp_path: Path, path: str) -> None:
    """Another replica of the Model lacks it too, and is not tried."""
    engines = [ScriptedEngine(says(404, NOT_FOUND)) for _ in range(2)]
    async with gateway(tmp_path, *engines) as it:
        response = await post(it, path)
        wrong = error_of(path, await response.json())
        assert (response.status, wrong["type"]) == (400, "invalid_request_error")
        inside = DIALECTS[path].engine_path if path in DIALECTS else path
        assert wrong["message"] == f"The engine of the model `llama` does not serve {inside}."
        assert path not in TABLE or wrong["code"] == "wrong_endpoint"
        assert len([*engines[0].requests, *engines[1].requests]) == 1
        assert [record.data.count_source for record in await it.records()] in ([], ["none"])


@generating
async def test_an_engine_that_lacks_the_endpoint_is_told_as_that_of_an_adapter_too(tmp_path: Path, path: str) -> None:
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.engines[0].behave = says(404, NOT_FOUND)
        response = await post(it.it, path, model="support")
        assert response.status == 400
        assert "does not serve" in error_of(path, await response.json())["message"]
        assert len(it.engines[0].requests) == 1


def versions(it: GatewayUnderTest, *given: str | None) -> None:
    """The versions of the engines, of replica 1 and on."""
    for number, version in enumerate(given, 1):
        it.pods[f"chat/llama-{number}"] = replica(number, engine_version=version)
    it.changed()


def first_asked_lacks_it() -> list[ScriptedEngine]:
    """Two engines, of which the one that is asked first lacks the endpoint."""
    lacking: list[int] = []

    def engine(number: int) -> ScriptedEngine:
        async def behave(request: EngineRequest) -> None:
            lacking.append(number)
            await (says(404, NOT_FOUND) if number == lacking[0] else answer)(request)

        return ScriptedEngine(behave)

    return [engine(1), engine(2)]


@endpoints
async def test_during_an_upgrade_a_replica_of_the_other_version_is_tried(tmp_path: Path, path: str) -> None:
    """Those that run the same version as one that lacks the endpoint are not."""
    old, new = [ScriptedEngine(says(404, NOT_FOUND)) for _ in range(4)], ScriptedEngine(answer)
    async with gateway(tmp_path, *old, new) as it:
        versions(it, "0.5.22", "0.5.22", "0.5.22", "0.5.22", "0.5.23")
        for sent in range(1, 7):
            response = await post(it, path)
            assert response.status == 200, await response.text()
            assert sum(len(engine.requests) for engine in old) <= sent
        failed = sum(len(engine.requests) for engine in old)
        assert failed
        assert len(new.requests) == 6
        assert it.metric("shoal_gateway_retries_total") == failed
        assert it.metric("shoal_gateway_retries_total", reason="endpoint") == failed
        records = await it.records(count=6)
        assert {record.data.input_tokens for record in records} == {read(path)}
        assert sorted({record.data.attempts for record in records})[-1] == 2
        assert len(await it.records("", count=12)) == 12  # an attempt that was refused has no row


@endpoints
async def test_an_endpoint_that_both_versions_lack_is_told_as_that(tmp_path: Path, path: str) -> None:
    engines = [ScriptedEngine(says(404, NOT_FOUND)) for _ in range(4)]
    async with gateway(tmp_path, *engines) as it:
        versions(it, "0.5.22", "0.5.22", "0.5.23", None)
        response = await post(it, path)
        wrong = error_of(path, await response.json())
        assert (response.status, wrong["type"]) == (400, "invalid_request_error")
        assert "does not serve" in wrong["message"]
        assert [len(engine.requests) for engine in engines[2:]] == [1, 1]
        assert len([*engines[0].requests, *engines[1].requests]) == 1
        assert [record.data.count_source for record in await it.records()] == ["none"]


async def test_where_the_other_version_fails_the_client_is_told_to_come_again(tmp_path: Path) -> None:
    async def hang_up(request: EngineRequest) -> None:
        request.writer.close()

    old, new = ScriptedEngine(says(404, NOT_FOUND)), ScriptedEngine(hang_up)
    async with gateway(tmp_path, old, new) as it:
        versions(it, "0.5.22", "0.5.23")
        it.model(limits=Limits(max_requests=0))
        for _ in range(3):
            response = await post(it, CHAT)
            assert (response.status, error_of(CHAT, await response.json())["code"]) == (503, "no_replica")
        assert old.requests


async def test_a_request_that_waits_after_that_is_not_sent_to_the_same_version_again(tmp_path: Path) -> None:
    """The hold queue gives it any replica with capacity."""
    engines = first_asked_lacks_it()
    async with gateway(tmp_path, *engines) as it:
        versions(it, "0.5.22", "0.5.23")
        budget = it.app.holds.budget(MODEL.uid)
        while budget.take(time.monotonic()):
            pass
        asking = asyncio.create_task(post(it, CHAT))
        await until_async(lambda: it.app.holds.waiting == 1)
        (other,) = [number for number, engine in enumerate(engines, 1) if not engine.requests]
        it.hear(other, phase="draining")
        response = await asking
        assert (response.status, error_of(CHAT, await response.json())["code"]) == (503, "no_replica")
        assert [len(engine.requests) for engine in engines].count(1) == 1
        it.hear(other)
        assert (await post(it, CHAT)).status == 200


async def test_a_replica_that_takes_no_requests_now_is_none_that_may_serve_the_endpoint(tmp_path: Path) -> None:
    old, new = ScriptedEngine(says(404, NOT_FOUND)), ScriptedEngine(answer)
    async with gateway(tmp_path, old, new) as it:
        versions(it, "0.5.22", "0.5.23")
        it.hear(2, phase="draining")
        response = await post(it, CHAT)
        assert (response.status, error_of(CHAT, await response.json())["code"]) == (400, "wrong_endpoint")
        assert not new.requests


@generating
async def test_an_adapters_request_goes_to_the_other_version_too(tmp_path: Path, path: str) -> None:
    async with tuned(tmp_path, AdapterAgent(1), AdapterAgent(2)) as it:
        versions(it.it, "0.5.22", "0.5.23")
        for engine, lacking in zip(it.engines, first_asked_lacks_it(), strict=True):
            engine.behave = lacking.behave
        response = await post(it.it, path, model="support")
        assert response.status == 200, await response.text()
        assert (await response.json())["model"] == "support"
        assert [len(engine.requests) for engine in it.engines] == [1, 1]


@pytest.mark.parametrize(
    "body",
    [
        # What SGLang 0.5.23 says of a model that it does not know, at its own /v1/responses and /v1/models.
        {"object": "error", "message": "The model 'x' does not exist", "type": "invalid_request_error", "code": 404},
        {"error": {"message": "The model 'x' does not exist", "type": "invalid_request_error", "code": 404}},
        {"object": "error", "message": "Not Found", "type": "404", "code": 404},
        {"detail": "Not Found", "message": "The model 'x' does not exist"},
    ],
)
async def test_an_engine_that_does_not_know_a_model_is_not_taken_for_one_that_lacks_the_endpoint(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    async with gateway(tmp_path, ScriptedEngine(says(404, json.dumps(body).encode()))) as it:
        response = await post(it, CHAT)
        wrong = error_of(CHAT, await response.json())
        assert (response.status, wrong["code"]) == (404, None)
        assert "does not serve" not in wrong["message"]


@endpoints
async def test_prompts_that_an_engine_keeps_have_a_salt_per_tenant(tmp_path: Path, path: str) -> None:
    engine = ScriptedEngine(answer)
    async with gateway(tmp_path, engine) as it:
        it.tenants["globex"] = tenant("globex", "sk-globex")
        it.changed()
        for key in (API_KEY, API_KEY, "sk-globex"):
            assert (await post(it, path, key)).status == 200
    if path in FORMS:
        assert all(b"cache_salt" not in request.raw for request in engine.requests)
        return
    acme, again, globex = [request.body.get("cache_salt") for request in engine.requests]
    if path in GENERATING:
        assert acme == again != globex
        assert None not in (acme, globex)
        assert not any(name in f"{acme}{globex}" for name in ("acme", "globex"))
    else:
        assert (acme, again, globex) == (None, None, None)


# --- the request log --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@streamed
async def test_the_request_log_has_prompt_and_answer_redacted(tmp_path: Path, path: str, *, stream: bool) -> None:
    text = f"I am alice@example.org, {CANARY}"
    body: dict[str, Any] = {"input": text} if path == RESPONSES else {"messages": [{"role": "user", "content": text}]}
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        it.tenant(mode="Full", redact=[{"name": "mail", "builtin": "Email"}])
        response = await post(it.it, path, key="sk-test-acme", stream=stream, **body)
        told = await response.text()
        assert response.status == 200, told
        assert stream or CANARY in told, "the client's own answer is untouched"
        (entry,) = await it.written()
        raw = raw_bytes(tmp_path)
    # What a translated API asks for is logged as the chat that it becomes.
    assert entry["request"]["messages"][-1]["content"] == "I am [mail], [Secret]"
    assert entry["answer"][0]["content"] == "I am [mail], [Secret]"
    assert entry["endpoint"] == path
    for secret in (b"alice@example.org", CANARY.encode()):
        assert secret not in raw


async def test_the_request_log_has_a_counted_prompt_redacted(tmp_path: Path) -> None:
    async with logged(tmp_path, ScriptedEngine(answer)) as it:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": f"this is {CANARY}"}]}
        assert (await post(it.it, COUNT_TOKENS, key="sk-test-acme", **body)).status == 200
        (entry,) = await it.written()
        raw = raw_bytes(tmp_path)
    assert entry["request"]["messages"][-1]["content"] == "this is [Secret]"
    assert "answer" not in entry
    assert CANARY.encode() not in raw


# --- clients that leave -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def leaving(it: GatewayUnderTest, engine: ScriptedEngine, path: str) -> AsyncGenerator[EngineRequest]:
    """A client that leaves when the engine has its request."""
    asking = asyncio.create_task(post(it, path))
    await until_async(lambda: bool(engine.requests))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    yield engine.requests[0]
    await until_async(lambda: it.app.in_flight == 0)


@generating
async def test_a_client_that_leaves_pays_what_the_engine_had_computed(tmp_path: Path, path: str) -> None:
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it, leaving(it, engine, path) as request:
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source, record.data.endpoint) == ("cancelled", "final", path)
        assert (record.data.input_tokens, record.data.cached_tokens, record.data.output_tokens) == (7, 4, 3)
        assert [asked["rid"] for asked in agent.asked] == [record.data.request_id]
        assert not request.gone.is_set()


@pytest.mark.parametrize("path", [path for path in BODIES if path not in GENERATING])
async def test_what_an_engine_cannot_be_asked_to_end_is_cut_off(tmp_path: Path, path: str) -> None:
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it, leaving(it, engine, path) as request:
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens or 0) == ("cancelled", 0)
        assert agent.asked == []
        async with asyncio.timeout(20):
            await request.gone.wait()


@streamed
async def test_a_client_that_leaves_a_stream_ends_it_at_the_engine(tmp_path: Path, path: str) -> None:
    async def endless(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.chunk(request.delta("b", 2))
        await request.gone.wait()

    engine = ScriptedEngine(endless)
    async with gateway(tmp_path, engine) as it:
        response = await post(it, path, stream=True)
        async with asyncio.timeout(20):
            while b'"b"' not in await response.content.readline():
                pass
        response.close()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source, record.data.output_tokens) == (
            "cancelled",
            "continuous",
            2,
        )
        async with asyncio.timeout(20):
            await engine.requests[0].gone.wait()
        await until_async(lambda: it.app.in_flight == 0)
