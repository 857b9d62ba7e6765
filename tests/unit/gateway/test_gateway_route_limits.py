"""Limits of a single request by a route, as clients see them under the route's name and under its target's."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.core.hold.limits import Limits
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.gateway import GatewayUnderTest, tenant
from tests.support.provider import Provider, beside, whole
from tests.support.routes import declared, put, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

CHAT = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}
ONE: dict[str, Any] = {"targets": [target("llama")]}
FALLBACK: dict[str, Any] = {**ONE, "fallback": {"targets": [target("other")]}}
MIRRORED: dict[str, Any] = {**ONE, "mirror": {**target("other"), "percent": 100}}
OUTSIDE: dict[str, Any] = {"targets": [{"external": {"name": "outside"}}]}


@asynccontextmanager
async def front(
    tmp_path: Path, llama: ScriptedEngine, other: ScriptedEngine, rule: dict[str, Any], limits: dict[str, int]
) -> AsyncGenerator[GatewayUnderTest]:
    """A gateway whose route `front` has these limits."""
    async with two_models(tmp_path, llama, other, rule) as it:
        put(it, rule, limits=limits)
        yield it


def cap(it: GatewayUnderTest, key: str, **limits: Any) -> None:
    """The Model has these limits from now on."""
    it.models[key] = dataclasses.replace(it.models[key], **limits)
    it.changed()


async def ask(it: GatewayUnderTest, status: int = 200, **more: Any) -> dict[str, Any]:
    response = await it.post({**CHAT, **more})
    answer = await response.json()
    assert response.status == status, answer
    return answer


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


async def never(request: EngineRequest) -> None:
    await request.gone.wait()


# --- the longest answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_route", "by_model", "asked", "sent"),
    [
        (7, None, None, 7),
        (7, None, 100, 7),
        (7, None, 5, 5),
        (7, 9, 100, 7),
        (9, 7, 100, 7),
        (None, 7, 100, 7),
        (None, None, 100, 100),
    ],
)
async def test_the_smaller_limit_of_route_and_target_bounds_the_answer(
    tmp_path: Path, by_route: int | None, by_model: int | None, asked: int | None, sent: int
) -> None:
    llama = ScriptedEngine()
    limits = {} if by_route is None else {"maxOutputTokens": by_route}
    async with front(tmp_path, llama, ScriptedEngine(), ONE, limits) as it:
        cap(it, "chat/llama", max_output_tokens=by_model)
        await ask(it, **({} if asked is None else {"max_tokens": asked}))
        assert llama.requests[0].body["max_tokens"] == sent


async def test_the_targets_own_name_has_the_targets_limits_only(tmp_path: Path) -> None:
    llama = ScriptedEngine()
    async with front(tmp_path, llama, ScriptedEngine(), ONE, {"maxOutputTokens": 7}) as it:
        for name in ("front", "chat/front", "llama"):
            await ask(it, model=name, max_tokens=100)
        assert [sent.body["max_tokens"] for sent in llama.requests] == [7, 7, 100]


async def test_a_limit_holds_from_the_next_request_on(tmp_path: Path) -> None:
    llama = ScriptedEngine()
    async with front(tmp_path, llama, ScriptedEngine(), ONE, {"maxOutputTokens": 7}) as it:
        await ask(it, max_tokens=100)
        put(it, ONE, limits={"maxOutputTokens": 8})
        await ask(it, max_tokens=100)
        cap(it, "chat/llama", max_output_tokens=6)
        await ask(it, max_tokens=100)
        put(it, ONE)
        await ask(it, max_tokens=100)
        cap(it, "chat/llama", max_output_tokens=None)
        await ask(it, max_tokens=100)
        assert [sent.body["max_tokens"] for sent in llama.requests] == [7, 8, 6, 6, 100]


async def test_a_fallback_gets_the_clients_bound_under_the_routes_limit_and_its_own(tmp_path: Path) -> None:
    """The body is made anew from what the client sent: the first target's limit does not stick to it."""
    other = ScriptedEngine()
    async with front(tmp_path, ScriptedEngine(), other, FALLBACK, {"maxOutputTokens": 50}) as it:
        cap(it, "chat/llama", max_output_tokens=5)
        del it.pods["chat/llama-1"]
        cap(it, "chat/llama", limits=Limits(max_requests=0))
        await ask(it, max_tokens=100)
        cap(it, "chat/other", max_output_tokens=20)
        await ask(it, max_tokens=100)
        await ask(it)
        assert [sent.body["max_tokens"] for sent in other.requests] == [50, 20, 20]


async def test_a_copy_for_the_mirror_is_bounded_as_its_request_is(tmp_path: Path) -> None:
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with front(tmp_path, llama, other, MIRRORED, {"maxOutputTokens": 7}) as it:
        await ask(it, max_tokens=100)
        await until(lambda: bool(other.requests) and not it.app.copies.in_progress)
        assert [sent.body["max_tokens"] for sent in (*llama.requests, *other.requests)] == [7, 7]


async def test_an_adapter_is_bounded_by_its_model_and_the_route(tmp_path: Path) -> None:
    async with tuned(tmp_path, AdapterAgent(1, adapters={name_of(): {"state": "loaded"}})) as it:
        one = declared({"targets": [target("support", kind="adapter")]}, limits={"maxOutputTokens": 7})
        it.it.routes[one.key] = one
        for by_model in (None, 5):
            cap(it.it, "chat/llama", max_output_tokens=by_model)
            assert (await it.it.post({**CHAT, "max_tokens": 100})).status == 200
        assert [sent.body["max_tokens"] for sent in it.engines[0].requests] == [7, 5]


async def test_tokens_are_reserved_for_the_answer_that_the_route_allows(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), ScriptedEngine(), ONE, {"maxOutputTokens": 7}) as it:
        it.tenants["acme"] = tenant(models=["chat/llama"], limits={"tokensPerMinute": 1000})
        it.changed()
        assert (await ask(it, 429, model="llama", max_tokens=2000))["error"]["code"] == "rate_limit_exceeded"
        await ask(it, model="front", max_tokens=2000)


async def test_a_tenants_limit_counts_a_request_once_under_either_name(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), ScriptedEngine(), ONE, {"maxOutputTokens": 7}) as it:
        it.tenants["acme"] = tenant(models=["chat/llama"], limits={"requestsPerMinute": 3})
        it.changed()
        for name in ("front", "llama", "chat/front"):
            await ask(it, model=name)
        for name in ("front", "llama"):
            assert (await ask(it, 429, model=name))["error"]["code"] == "rate_limit_exceeded"


async def test_an_external_target_has_the_routes_limit_alone(tmp_path: Path) -> None:
    provider = Provider()
    async with beside(tmp_path, provider, ScriptedEngine(), OUTSIDE) as it:
        put(it, OUTSIDE, externalTargets=[provider.target()], limits={"maxOutputTokens": 7})
        for bounds in ({"max_completion_tokens": 100}, {"max_tokens": 5}, {}):
            await ask(it, **bounds)
        named = ("max_tokens", "max_completion_tokens")
        sent = [{name: body[name] for name in named if name in body} for body in provider.bodies]
        assert sent == [{"max_completion_tokens": 7}, {"max_tokens": 5}, {"max_tokens": 7}]


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", "max_output_tokens", {"input": "hi"}),
    ],
)
async def test_an_api_that_the_provider_serves_itself_is_bounded_in_its_own_field(
    tmp_path: Path, path: str, field: str, body: dict[str, Any]
) -> None:
    provider = Provider(whole({"model": "gpt-x", "usage": {"input_tokens": 1, "output_tokens": 1}}))
    changed: dict[str, Any] = {"endpoints": ["/v1/messages", "/v1/responses"]}
    async with beside(tmp_path, provider, ScriptedEngine(), OUTSIDE, changed=changed) as it:
        put(it, OUTSIDE, externalTargets=[provider.target(**changed)], limits={"maxOutputTokens": 7})
        for bound in ({field: 100}, {field: 5}, {}):
            response = await it.post({"model": "front", **body, **bound}, path)
            assert response.status == 200, await response.text()
        assert [sent[field] for sent in provider.bodies] == [7, 5, 7]
        response = await it.post({"model": "front", **body, field: "100"}, path)
        assert response.status == 400, "what a provider may read as no bound is refused"
        assert field in (await response.json())["error"]["message"]
        assert len(provider.bodies) == 3


async def test_counting_tokens_has_no_answer_to_bound(tmp_path: Path) -> None:
    provider = Provider(whole({"input_tokens": 3}))
    changed: dict[str, Any] = {"endpoints": ["/v1/messages"]}
    async with beside(tmp_path, provider, ScriptedEngine(), OUTSIDE, changed=changed) as it:
        put(it, OUTSIDE, externalTargets=[provider.target(**changed)], limits={"maxOutputTokens": 7})
        body = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}
        assert (await it.post(body, "/v1/messages/count_tokens")).status == 200
        assert "max_tokens" not in provider.bodies[0]


# --- the longest time -------------------------------------------------------------------------------------------------

BY_ROUTE = "The request took longer than 1 s, which is `requestSeconds` of the route chat/front."


async def timed_out(it: GatewayUnderTest, model: str = "front") -> tuple[str, str | None]:
    """The message of the error, and whose limit the gateway remembers."""
    async with asyncio.timeout(60):
        response = await it.post({**CHAT, "model": model})
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (504, "timeout")
    (known,) = it.app.choices.refusals(response.headers["x-shoal-request-id"], "gateway-1")
    return error["message"], known.limit


async def test_a_request_ends_at_the_routes_limit_which_the_error_names(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(never), ScriptedEngine(), ONE, {"requestSeconds": 1}) as it:
        assert await timed_out(it) == (BY_ROUTE, "requestSeconds of ModelRoute chat/front, 1 s")
        # The client is not told which target it was.
        cap(it, "chat/llama", request_seconds=0.5)
        for name in ("front", "llama"):
            message, limit = await timed_out(it, name)
            assert message == "The request took longer than 0.5 s."
            assert limit == "requestSeconds of Model chat/llama, 0.5 s"


async def test_a_limit_of_the_gateways_is_told_as_theirs(tmp_path: Path) -> None:
    async with two_models(tmp_path, ScriptedEngine(never), ScriptedEngine(), ONE, request_seconds=0.5) as it:
        put(it, ONE, limits={"requestSeconds": 60})
        for name in ("front", "llama"):
            message, limit = await timed_out(it, name)
            assert message == "The request took longer than 0.5 s."
            assert limit == "the gateways' own requestSeconds, 0.5 s"


async def test_a_stream_that_has_begun_ends_with_the_error(tmp_path: Path) -> None:
    async def hangs(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.gone.wait()

    async with front(tmp_path, ScriptedEngine(hangs), ScriptedEngine(), ONE, {"requestSeconds": 1}) as it:
        async with asyncio.timeout(60):
            response = await it.post({**CHAT, "stream": True})
            lines = (await response.text()).strip().split("\n\n")
        assert response.status == 200
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("timeout", BY_ROUTE)


async def test_all_targets_together_have_the_routes_time(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), ScriptedEngine(never), FALLBACK, {"requestSeconds": 1}) as it:
        del it.pods["chat/llama-1"]
        cap(it, "chat/llama", limits=Limits(max_requests=0))
        assert await timed_out(it) == (BY_ROUTE, "requestSeconds of ModelRoute chat/front, 1 s")
        put(it, FALLBACK, limits={"requestSeconds": 60})
        cap(it, "chat/other", request_seconds=0.3)
        message, limit = await timed_out(it)
        assert message == "The request took longer than 0.3 s."
        assert limit == "requestSeconds of Model chat/other, 0.3 s"


async def test_a_copy_for_the_mirror_ends_at_the_routes_limit_too(tmp_path: Path) -> None:
    llama, other = ScriptedEngine(), ScriptedEngine(never)
    async with front(tmp_path, llama, other, MIRRORED, {"requestSeconds": 1}) as it:
        await ask(it)
        await until(lambda: bool(other.requests))
        await until(lambda: other.requests[0].gone.is_set() and not it.app.copies.in_progress)


async def test_an_external_target_ends_at_the_routes_limit(tmp_path: Path) -> None:
    async def hangs(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    provider = Provider(hangs)
    async with beside(tmp_path, provider, ScriptedEngine(), OUTSIDE) as it:
        put(it, OUTSIDE, externalTargets=[provider.target()], limits={"requestSeconds": 1})
        assert await timed_out(it) == (BY_ROUTE, "requestSeconds of ModelRoute chat/front, 1 s")
