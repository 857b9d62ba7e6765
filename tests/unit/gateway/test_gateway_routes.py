"""A served name over several Models, as a client of the gateway sees it."""

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from shoal.api.adapters import Ensure
from shoal.core.hold.capacity import Allowance
from shoal.core.hold.limits import Limits
from shoal.core.routing.canary import CanaryCounts, CanaryHalt
from shoal.core.routing.resolve import DeadEnd
from shoal.gateway.bigbodies import BIG
from shoal.gateway.request import GatewayRequest
from shoal.gateway.waiter import Waiter
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.gateway import GatewayUnderTest, replica, tenant
from tests.support.routes import OTHER, declared, put, served, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

CHAT = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}
BOTH = {"targets": [target("llama"), target("other")]}


async def ask(it: GatewayUnderTest, status: int = 200, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    response = await it.post({**CHAT, **more}, headers=headers)
    answer = await response.json()
    assert response.status == status, answer
    return answer


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


async def test_the_answer_has_the_routes_name_and_the_record_the_model_and_the_route(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, {"targets": [target("llama", 0), target("other")]}) as it:
        assert (await ask(it))["model"] == "front"
        assert (await ask(it, model="chat/front"))["model"] == "chat/front"
        assert [sent.body["model"] for sent in other.requests] == ["chat/other"] * 2
        assert not llama.requests
        first, second = (record.data for record in await it.records(count=2))
        assert {first.model_requested, second.model_requested} == {"front", "chat/front"}
        for data in (first, second):
            assert (data.model, data.route, data.outcome) == ("chat/other", "chat/front", "answered")
        (opened, _) = await it.records("open", count=2)
        assert opened.data.route == "chat/front"


async def test_a_request_that_names_its_model_has_no_route_in_its_record(tmp_path: Path):
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), BOTH) as it:
        await ask(it, model="llama")
        (record,) = await it.records()
        assert record.data.route is None


async def test_requests_are_shared_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, {"targets": [target("llama", 3), target("other", 1)]}) as it:
        draws = iter([draw for share in (0.1, 0.3, 0.5, 0.74, 0.76, 0.99) for draw in (share, 0.0)])  # and for a mirror
        monkeypatch.setattr("shoal.gateway.routechoice.random.random", lambda: next(draws))
        for _ in range(6):
            await ask(it)
        assert (len(llama.requests), len(other.requests)) == (4, 2)


async def test_rules_by_header_endpoint_and_length(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    rules = [
        {"name": "beta", "matches": [{"headers": [{"name": "x-beta", "value": "1"}]}], "targets": [target("other")]},
        {"name": "long", "matches": [{"promptTokens": {"atLeast": 1000}}], "targets": [target("other")]},
        {"matches": [{"endpoints": ["/v1/chat/completions"]}], "targets": [target("llama")]},
    ]
    async with two_models(tmp_path, llama, other, *rules) as it:
        await ask(it)
        assert (len(llama.requests), len(other.requests)) == (1, 0)
        await ask(it, headers={"X-Beta": "1"})
        await ask(it, messages=[{"role": "user", "content": "x" * 4000}])
        assert (len(llama.requests), len(other.requests)) == (1, 2)
        response = await it.post({"model": "front", "input": "x"}, "/v1/embeddings")
        assert (response.status, (await response.json())["error"]["code"]) == (404, "no_route_rule")


async def test_a_header_beyond_ascii_in_utf_8_is_matched(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    match = {"headers": [{"name": "x-team", "value": "Zürich"}]}
    rules = [{"name": "team", "matches": [match], "targets": [target("other")]}, {"targets": [target("llama")]}]
    async with two_models(tmp_path, llama, other, *rules) as it:
        await ask(it, headers={"X-Team": "Zürich"})
        assert (len(llama.requests), len(other.requests)) == (0, 1)


async def test_a_session_keeps_its_target(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    rule = {**BOTH, "sessionAffinity": {"type": "Conversation"}}
    async with two_models(tmp_path, llama, other, rule) as it:
        for at in range(16):
            begin = {"role": "user", "content": f"question {at}"}
            for turns in range(3):
                more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}] * turns
                await ask(it, messages=[begin, *more])
        for engine in (llama, other):
            counts: dict[str, int] = {}
            for sent in engine.requests:
                first = sent.body["messages"][0]["content"]
                counts[first] = counts.get(first, 0) + 1
            assert counts, "each has some of sixteen conversations"
            assert set(counts.values()) == {3}


async def test_a_target_that_the_tenant_may_not_use_does_not_exist_for_it(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, BOTH) as it:
        it.tenants["acme"] = tenant(models=["chat/other"])
        it.changed()
        for _ in range(8):
            await ask(it)
        assert (len(llama.requests), len(other.requests)) == (0, 8)
        put(it, {"targets": [target("llama"), target("other", 0)]})
        response = await it.post(CHAT)
        answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (503, "no_route_target")
        assert "llama" not in answer["error"]["message"]
        (known,) = it.app.choices.refusals(response.headers["x-shoal-request-id"], "gateway-1")
        assert known.subject == "route/chat/front", "`shoal why request/ID` goes on there"
        it.tenants["acme"] = tenant(models=[])
        it.changed()
        assert (await ask(it, 404))["error"]["code"] == "model_not_found"
        assert not llama.requests


async def test_a_route_of_another_namespace_is_nothing_without_consent(tmp_path: Path):
    """Somebody writes a route that takes a name which the tenant uses, and leads it to a Model of another namespace."""
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, BOTH) as it:
        evil = declared({"targets": [target("other", namespace="chat")]}, name="evil", namespace="evil")
        it.routes[evil.key] = dataclasses.replace(evil, claims=("evil", "front", "llama"), created=None)
        it.changed()
        assert (await ask(it, 404, model="evil"))["error"]["code"] == "model_not_found"
        await ask(it, model="llama")
        assert len(llama.requests) == 1
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], routes=[{"namespace": "evil"}])
        it.changed()
        assert (await ask(it, 503, model="evil"))["error"]["code"] == "no_route_target", "the target has to agree"
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], route_namespaces=frozenset({"evil"}))
        it.changed()
        await ask(it, model="evil")
        assert len(other.requests) == 1


@pytest.mark.parametrize(
    ("grants", "status", "code"),
    [
        ({"models": ["chat/llama"], "routes": [{"namespace": "edge", "names": ["front"]}]}, 200, None),
        ({"models": ["chat/llama"], "routes": [{"namespace": "edge", "names": ["back"]}]}, 404, "model_not_found"),
        ({"models": ["chat/llama"]}, 404, "model_not_found"),
        ({"models": ["chat/other"], "routes": [{"namespace": "edge"}]}, 503, "no_route_target"),
        ({"models": [], "routes": [{"namespace": "edge"}]}, 503, "no_route_target"),
    ],
)
async def test_a_tenant_has_to_grant_the_route_and_its_target(
    tmp_path: Path, grants: dict[str, Any], status: int, code: str | None
):
    llama = ScriptedEngine()
    async with two_models(tmp_path, llama, ScriptedEngine(), BOTH) as it:
        it.models["chat/llama"] = dataclasses.replace(it.models["chat/llama"], route_namespaces=frozenset({"edge"}))
        it.routes.clear()
        put(it, {"targets": [target("llama", namespace="chat")]}, namespace="edge")
        it.tenants["acme"] = tenant(**grants)
        it.changed()
        for name in ("front", "edge/front"):
            answer = await ask(it, status, model=name)
            assert code is None or answer["error"]["code"] == code
        assert len(llama.requests) == (2 if status == 200 else 0)


async def test_a_routes_name_among_the_granted_models_grants_nothing(tmp_path: Path):
    llama = ScriptedEngine()
    async with two_models(tmp_path, llama, ScriptedEngine(), BOTH) as it:
        it.tenants["acme"] = tenant(models=["chat/front"])
        it.changed()
        for name in ("front", "chat/front", "llama"):
            assert (await ask(it, 404, model=name))["error"]["code"] == "model_not_found"
        assert not llama.requests


async def test_the_caps_of_each_target_hold_for_the_requests_that_it_gets(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other")) as it:
        for key, most in (("chat/llama", 7), ("chat/other", 5)):
            it.models[key] = dataclasses.replace(it.models[key], max_output_tokens=most)
        it.changed()
        await ask(it, max_tokens=100)
        await gone(it, limits=Limits(max_requests=0))
        await ask(it, max_tokens=100)
        await ask(it, max_tokens=100, model="other")
        assert [sent.body["max_tokens"] for sent in llama.requests] == [7]
        assert [sent.body["max_tokens"] for sent in other.requests] == [5, 5], "under either name"


async def test_the_list_of_models_has_the_names_of_a_route(tmp_path: Path):
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), BOTH) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], capabilities=frozenset({"generate"}))
        it.changed()
        headers = {"authorization": "Bearer sk-test-acme"}
        async with it.session.get(f"{it.url}/v1/models", headers=headers) as response:
            cards = {card["id"]: card for card in (await response.json())["data"]}
        assert set(cards) == {"front", "llama", "other"}
        assert cards["front"] | {"created": 0} == {
            "id": "front",
            "object": "model",
            "created": 0,
            "owned_by": "shoal",
            "root": "chat/front",
            "parent": None,
            "capabilities": ["generate"],
        }
        async with it.session.get(f"{it.url}/v1/models/chat/front", headers=headers) as response:
            assert (await response.json())["root"] == "chat/front"


@pytest.mark.parametrize(
    ("rule", "listed"),
    [
        ({"targets": [target("llama")], "mirror": {**target("other"), "percent": 100}}, False),
        ({"targets": [target("llama"), target("other", 0)]}, False),
        ({"targets": [target("llama")], "canary": {"target": target("other"), "percent": 0}}, False),
        ({"targets": [target("llama")], "canary": {"target": target("other"), "percent": 5}}, True),
        ({"targets": [target("llama"), target("other", 0)], "fallback": {"targets": [target("other")]}}, True),
    ],
    ids=["mirror", "weight 0", "canary of 0 %", "canary", "fallback"],
)
async def test_a_route_is_listed_where_a_request_can_be_answered(tmp_path: Path, rule: dict[str, Any], listed: bool):
    """The tenant may use `other` only."""
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it:
        it.models["chat/llama"] = dataclasses.replace(it.models["chat/llama"], capabilities=frozenset({"embed"}))
        it.tenants["acme"] = tenant(models=["chat/other"])
        it.changed()
        headers = {"authorization": "Bearer sk-test-acme"}
        async with it.session.get(f"{it.url}/v1/models", headers=headers) as response:
            assert ("front" in {card["id"] for card in (await response.json())["data"]}) is listed
        async with it.session.get(f"{it.url}/v1/models/front", headers=headers) as response:
            assert response.status == (200 if listed else 404)
        await ask(it, 200 if listed else 503)


async def test_a_mirror_takes_no_capability_from_its_route(tmp_path: Path):
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), MIRRORED) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], capabilities=frozenset({"embed"}))
        it.changed()
        async with it.session.get(f"{it.url}/v1/models", headers={"authorization": "Bearer sk-test-acme"}) as response:
            cards = {card["id"]: card for card in (await response.json())["data"]}
        assert "generate" in cards["front"]["capabilities"]


async def test_limits_and_price_are_those_of_the_target(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, {"targets": [target("other")]}) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], max_output_tokens=5)
        it.changed()
        await ask(it, max_tokens=100)
        (sent,) = other.requests
        assert sent.body["max_tokens"] == 5


async def test_a_waiting_request_stays_with_its_target_and_ends_when_the_grant_does(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, {"targets": [target("other")]}) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], limits=Limits(max_requests=9))
        del it.pods["chat/llama-2"]
        it.changed()
        waiting = asyncio.create_task(ask(it, 404))
        await until(lambda: it.app.holds.waiting == 1)
        put(it, {"targets": [target("llama")]})
        assert it.app.holds.waiting == 1, "the route's new rules are for new requests"
        it.tenants["acme"] = tenant(models=["chat/llama"])
        it.changed()
        assert (await waiting)["error"]["code"] == "model_not_found"
        assert not llama.requests
        assert not other.requests


async def test_an_adapter_is_a_target(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1, adapters={name_of(): {"state": "loaded"}})) as it:
        one = declared({"targets": [target("support", kind="adapter")]})
        it.it.routes[one.key] = one
        it.it.changed()
        response = await it.it.post(CHAT)
        assert (response.status, (await response.json())["model"]) == (200, "front")
        assert it.asked() == [name_of()]
        (record,) = await it.it.records()
        data = record.data
        assert (data.model, data.adapter, data.route) == ("chat/llama", "chat/support", "chat/front")


# --- canaries ---------------------------------------------------------------------------------------------------------


async def breaks(request: EngineRequest) -> None:
    await request.answer(500, b"{}")


CANARY: dict[str, Any] = {
    "targets": [target("llama")],
    "canary": {"target": target("other"), "percent": 100, "haltOn": {"errorPercent": 20, "minRequests": 10}},
}


async def test_a_canary_that_fails_is_halted_at_this_gateway_at_once(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine(breaks)
    async with two_models(tmp_path, llama, other, CANARY) as it:
        for _ in range(3):
            await ask(it, 500)
        assert [halt.reason for halt in it.app.canaries.halts.values()] == ["Errors"]
        for _ in range(3):
            await ask(it)
        assert (len(llama.requests), len(other.requests)) == (3, 3)
        put(it, {**CANARY, "targets": [target("llama", 7)]})
        await ask(it)
        assert len(other.requests) == 3, "what was changed is not the canary"
        put(it, {**CANARY, "canary": {**CANARY["canary"], "haltOn": {"minRequests": 11}}})
        assert not it.app.canaries.halts
        await ask(it, 500)


async def test_a_canary_that_another_gateway_halted_is_halted_here_too(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, CANARY) as it:
        await ask(it)
        (rule,) = it.routes["chat/front"].rules
        assert rule.canary is not None
        it.app.canaries.heard(
            {rule.canary.revision: CanaryHalt("Slow", 6, 7), "of no route here": CanaryHalt("Slow", 1, 1)}
        )
        assert set(it.app.canaries.halts) == {rule.canary.revision}
        await ask(it)
        assert (len(llama.requests), len(other.requests)) == (1, 1)


async def test_a_clock_that_jumps_halts_no_canary_and_ends_no_halt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = {"haltOn": {"ttftSeconds": 60, "minRequests": 1}}
    days = itertools.count()

    class JumpingClock(datetime):
        """A day later each time that it is looked at, and then years back."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days=next(days) - (10_000 if broken else 0))

    broken = False

    async def answers(request: EngineRequest) -> None:
        await (breaks if broken else serve_normally)(request)

    llama, other = ScriptedEngine(), ScriptedEngine(answers)
    rule = {**CANARY, "canary": {**CANARY["canary"], **limits}}
    async with two_models(tmp_path, llama, other, rule) as it:
        monkeypatch.setattr("shoal.metering.meter.datetime", JumpingClock)
        monkeypatch.setattr("shoal.gateway.hold.datetime", JumpingClock)
        monkeypatch.setattr("time.time", lambda: JumpingClock.now(UTC).timestamp())
        for _ in range(6):
            response = await it.post({**CHAT, "stream": True})
            assert b"[DONE]" in await response.read()
        assert next(days) >= 12, "the clock jumped between a request and its first byte"
        assert not it.app.canaries.halts
        assert len(other.requests) == 6
        broken = True
        await ask(it, 500)
        for _ in range(6):
            await ask(it)
        assert [halt.reason for halt in it.app.canaries.halts.values()] == ["Errors"]
        assert (len(llama.requests), len(other.requests)) == (6, 7)


async def test_routes_in_a_circle_end_at_once(tmp_path: Path):
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), {"targets": [target("back")]}) as it:
        put(it, {"targets": [target("front")], "fallback": {"targets": [target("back")]}}, name="back")
        # Neither name is a Model's, so neither route has a target, and nobody may use one.
        for name in ("front", "back", "chat/front", "chat/back"):
            assert (await ask(it, 404, model=name))["error"]["code"] == "model_not_found"
        put(it, {"targets": [target("back"), target("llama")]})
        assert (await ask(it))["model"] == "front", "what can be served of it is served"


async def test_weights_that_sum_to_zero_leave_the_fallback(tmp_path: Path):
    off = {"targets": [target("llama", 0), target("other", 0)]}
    async with two_models(tmp_path, llama := ScriptedEngine(), other := ScriptedEngine(), off) as it:
        assert (await ask(it, 503))["error"]["code"] == "no_route_target"
        put(it, {**off, "fallback": {"targets": [target("other")]}})
        await ask(it)
        assert (len(llama.requests), len(other.requests)) == (0, 1)


async def test_clients_that_send_nonsense_do_not_halt_a_canary(tmp_path: Path):
    async def rejects(request: EngineRequest) -> None:
        await request.answer(400, b'{"message": "no", "code": 400}')

    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(rejects), CANARY) as it:
        for _ in range(12):
            await ask(it, 400)
        assert not it.app.canaries.halts


async def test_answers_that_take_longer_than_the_limit_halt_a_canary_only_where_none_is_in_time(tmp_path: Path):
    """A tenant asks for very long answers. The limit of the route ends them."""

    async def slow(request: EngineRequest) -> None:
        if "long" in json.dumps(request.body):
            await request.gone.wait()
            return
        await serve_normally(request)

    long = [{"role": "user", "content": "long"}]
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(slow), CANARY) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], request_seconds=0.05)
        it.changed()
        for number in range(14):
            if number % 7 == 6:
                it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], request_seconds=60.0)
                it.changed()
                await ask(it)
                it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], request_seconds=0.05)
                it.changed()
            await ask(it, 504, messages=long)
        for _ in range(8):
            await ask(it, 504, messages=long)
        assert not it.app.canaries.halts
        await ask(it, 504, messages=long)
        assert len(it.app.canaries.halts) == 1, "ten in a row: it answers nobody"


async def test_answers_that_the_gateway_has_no_memory_for_halt_no_canary(tmp_path: Path):
    """Its engine answered. A tenant whose clients do not read holds its share of the memory for answers."""

    async def much(request: EngineRequest) -> None:
        await request.answer(200, b'{"model":"chat/other","x":"%b"}' % (b"x" * 100_000))

    async with two_models(tmp_path, ScriptedEngine(), other := ScriptedEngine(much), CANARY) as it:
        it.app.answer_budget.take("acme", it.app.memory.answer)
        for _ in range(4):
            assert (await ask(it, 503))["error"]["code"] == "overloaded"
        assert (len(other.requests), len(it.app.canaries.halts)) == (4, 0)


async def test_streams_that_do_not_begin_halt_a_canary_at_once(tmp_path: Path):
    async def hangs(request: EngineRequest) -> None:
        await request.gone.wait()

    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(hangs), CANARY) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], request_seconds=0.05)
        it.changed()
        for _ in range(2):
            await ask(it, 504, stream=True)
        assert not it.app.canaries.halts
        await ask(it, 504, stream=True)
        assert len(it.app.canaries.halts) == 1


# --- fallbacks --------------------------------------------------------------------------------------------------------


def with_fallback(*fallbacks: str, **more: Any) -> dict[str, Any]:
    return {"targets": [target("llama")], "fallback": {"targets": [target(name) for name in fallbacks], **more}}


async def gone(it: GatewayUnderTest, **model: Any) -> None:
    """The Model chat/llama has no replica."""
    del it.pods["chat/llama-1"]
    it.model(**model)


async def test_a_request_that_its_target_refuses_goes_to_the_fallback(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other")) as it:
        await ask(it)
        await gone(it, limits=Limits(max_requests=0))
        assert (await ask(it))["model"] == "front"
        assert (len(llama.requests), len(other.requests)) == (1, 1)
        assert other.requests[0].body["model"] == "chat/other"
        _, record = await it.records(count=2)
        data = record.data
        assert (data.model, data.route, data.outcome, data.status) == ("chat/other", "chat/front", "answered", 200)
        assert (data.input_tokens, data.count_source) == (7, "final")
        assert it.metric("shoal_gateway_route_fallbacks_total", reason="refused") == 1
        it.tenants["acme"] = tenant(models=["chat/llama"])
        it.changed()
        assert (await ask(it, 503))["error"]["code"] == "no_replica", "a fallback that it may not use is none"
        *_, record = await it.records(count=3)
        assert (record.data.model, record.data.outcome) == ("chat/llama", "refused")


@pytest.mark.parametrize(("first", "second", "limit"), [(0.5, None, "0.5"), (None, 0.5, "0.5"), (0.5, 600.0, "0.5")])
async def test_all_targets_together_have_the_time_of_the_first_one_and_no_more_than_the_last_one_allows(
    tmp_path: Path, first: float | None, second: float | None, limit: str
):
    async def never(request: EngineRequest) -> None:
        await request.gone.wait()

    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(never), with_fallback("other")) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], request_seconds=second)
        await gone(it, limits=Limits(max_requests=0), request_seconds=first)
        async with asyncio.timeout(60):
            error = (await ask(it, 504))["error"]
        assert (error["code"], error["message"]) == ("timeout", f"The request took longer than {limit} s.")
        assert not it.fleet.in_flight("pod-2")


async def test_a_request_that_waited_as_long_as_it_may_does_not_wait_again_for_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    waited = list[Waiter]()
    wait = Waiter.wait

    async def noted(waiter: Waiter, seconds: float) -> bool:
        waited.append(waiter)
        return await wait(waiter, seconds)

    monkeypatch.setattr(Waiter, "wait", noted)
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, with_fallback("other")) as it:
        limits = Limits(timeout_seconds=0.2)
        del it.pods["chat/llama-2"]
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], limits=limits)
        await gone(it, limits=limits)
        assert (await ask(it, 503))["error"]["code"] == "hold_expired"
        assert len(set(map(id, waited))) == 1
        (record,) = await it.records()
        assert (record.data.model, record.data.outcome) == ("chat/other", "expired")
        # A fallback with a replica serves it all the same.
        it.pods["chat/llama-2"] = replica(2, model=it.models["chat/other"])
        it.changed()
        assert (await ask(it))["model"] == "front"
        assert len(other.requests) == 1


async def test_a_request_that_has_waited_goes_to_a_fallback_with_a_replica(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other", whenWaitSeconds=1)) as it:
        await gone(it, limits=Limits(max_requests=9, timeout_seconds=60.0))
        assert (await ask(it))["model"] == "front"
        assert (len(llama.requests), len(other.requests)) == (0, 1)
        (record,) = await it.records()
        assert record.data.model == "chat/other"
        assert (record.data.hold_ms or 0) >= 1000
        assert not it.app.holds.waiting


COLD = {"limits": Limits(max_requests=9, timeout_seconds=120.0), "cold_start_seconds": 200.0}


def whys(it: GatewayUnderTest, request: str) -> list[str]:
    """Why the request went on to fallbacks."""
    return [each.message for each in it.app.choices.fallbacks(request, "gateway-1")]


async def test_a_request_whose_target_needs_longer_to_start_than_it_would_wait_leaves_at_once(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other", whenWaitSeconds=30)) as it:
        await gone(it, **COLD)
        response = await it.post(CHAT)
        assert response.status == 200
        (why,) = whys(it, response.headers["x-shoal-request-id"])
        assert why == (
            "went on to chat/other: 200 s of its measured cold start are left, more than the 30 s of whenWaitSeconds"
        )
        demand = it.app.demand.demand("uid-llama")
        assert (demand.arrivals, demand.held) == (1, 0), "its target is woken all the same"
        # A pod that has just started changes little; one that is nearly ready is worth the wait.
        it.pods["chat/llama-1"] = replica(1, ready=False, created=datetime.now(UTC) - timedelta(seconds=20))
        it.changed()
        await ask(it)
        it.pods["chat/llama-1"] = replica(1, ready=False, created=datetime.now(UTC) - timedelta(seconds=185))
        it.changed()
        asking = asyncio.create_task(it.post(CHAT))
        await until(lambda: it.app.holds.waiting == 1)
        it.pods["chat/llama-1"] = replica(1)
        it.changed()
        it.hear(1)
        response = await asking
        assert not whys(it, response.headers["x-shoal-request-id"])
        assert (len(llama.requests), len(other.requests)) == (1, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"cold_start_seconds": None},  # never measured
        {"created": timedelta(seconds=900)},  # it takes longer than measured
        {"created": None},
    ],
)
async def test_where_the_wait_is_not_known_the_request_waits_first(tmp_path: Path, changes: dict[str, Any]):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, with_fallback("other", whenWaitSeconds=1)) as it:
        await gone(it, **COLD)
        if "created" in changes:
            age = changes["created"]
            created = None if age is None else datetime.now(UTC) - age
            it.pods["chat/llama-1"] = replica(1, ready=False, created=created)
            it.changed()
        else:
            it.model(**changes)
        response = await it.post(CHAT)
        (why,) = whys(it, response.headers["x-shoal-request-id"])
        assert "went on to chat/other: the request waited" in why
        (record,) = await it.records()
        assert (record.data.hold_ms or 0) >= 1000


async def test_a_busy_replica_is_no_cold_start(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other", whenWaitSeconds=30)) as it:
        it.model(**COLD)
        ticket = it.app.holds.enter(it.models["chat/llama"], "acme", "llama", 1, 1, (), 1, is_retry=False)
        assert ticket.expected_seconds is None
        it.hear(1, phase="draining")
        assert ticket.expected_seconds is None, "a replica that drains says nothing of the next one"
        del it.pods["chat/llama-1"]
        it.changed()
        assert ticket.expected_seconds == 200.0
        ticket.close()


async def test_a_refusal_and_the_next_fallback_are_told_in_order(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other")) as it:
        await gone(it, limits=Limits(max_requests=0))
        response = await it.post(CHAT)
        assert whys(it, response.headers["x-shoal-request-id"]) == [
            "went on to chat/other: it refused the request (no_replica)"
        ]


async def test_a_request_counts_once_towards_its_tenants_limits_however_many_targets_it_went_to(tmp_path: Path):
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), with_fallback("other")) as it:
        limits = {"requestsPerMinute": 100, "tokensPerMinute": 100_000}
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], limits=limits)
        await gone(it, limits=Limits(max_requests=0))
        for left in (99, 98):
            response = await it.post(CHAT)
            assert response.status == 200
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        response = await it.post({**CHAT, "model": "other"})
        assert response.headers["x-ratelimit-remaining-requests"] == "97", "under its own name it is the same limit"
        # What the engine counted is all that is left of three reservations.
        response = await it.post({**CHAT, "n": "wrong"})
        assert response.headers["x-ratelimit-remaining-tokens"] == str(100_000 - 3 * 10)


async def test_large_requests_that_leave_at_once_are_decoded_one_at_a_time(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    long = {**CHAT, "messages": [{"role": "user", "content": "x" * BIG}]}
    async with two_models(tmp_path, llama, other, with_fallback("other", whenWaitSeconds=1)) as it:
        await gone(it, limits=Limits(max_requests=9, timeout_seconds=60.0))
        asking = [asyncio.create_task(it.post(long)) for _ in range(2)]
        await until(lambda: it.app.holds.waiting == 2)
        async with it.app.big_bodies.slot("acme", BIG):
            await until(lambda: it.app.big_bodies.waiting == 2)
            assert not other.requests
        assert [(await answer).status for answer in asking] == [200, 200]
        assert (len(llama.requests), len(other.requests)) == (0, 2)


async def test_a_waiting_request_stays_where_no_fallback_has_a_replica(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other", whenWaitSeconds=1)) as it:
        del it.pods["chat/llama-2"]
        await gone(it, limits=Limits(max_requests=9, timeout_seconds=60.0))
        looked = 0
        fall_back = GatewayRequest._fall_back

        def counted(request: GatewayRequest, **how: Any) -> Any:
            nonlocal looked
            looked += 1
            return fall_back(request, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GatewayRequest, "_fall_back", counted)
            asking = asyncio.create_task(ask(it))
            await until(lambda: looked > 0)
            assert it.app.holds.waiting == 1
            it.pods["chat/llama-1"] = replica(1)
            it.changed()
            it.hear(1)
            assert (await asking)["model"] == "front"
        assert (len(llama.requests), len(other.requests)) == (1, 0)


async def test_a_stream_that_got_comments_goes_on_at_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.gateway.accepted.COMMENT_SECONDS", 0.2)
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, with_fallback("other", whenWaitSeconds=1)) as it:
        await gone(it, limits=Limits(max_requests=9, timeout_seconds=60.0))
        response = await it.post({**CHAT, "stream": True})
        text = await response.text()
        assert text.startswith(": waiting for a replica")
        assert '"model":"front"' in text
        assert text.rstrip().endswith("[DONE]")
        assert len(other.requests) == 1


async def test_what_ends_the_replicas_of_one_model_does_not_go_on_to_another(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(breaks), other, with_fallback("other")) as it:
        assert (await ask(it, 500))["error"]["code"] == "engine_error"
        assert not other.requests


@pytest.mark.parametrize("more", [{}, {"whenWaitSeconds": 1}])
async def test_a_request_under_which_a_replica_died_goes_to_no_fallback(tmp_path: Path, more: dict[str, Any]):
    async def dies(_request: EngineRequest) -> None:
        llama.die()

    llama, other = ScriptedEngine(dies), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other", **more)) as it:
        it.model(limits=Limits(max_requests=9, timeout_seconds=2.5))
        assert (await ask(it, 503))["error"]["code"] in ("hold_expired", "no_replica")
        assert not other.requests


async def test_a_fallback_that_has_no_room_now_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.gateway.accepted._LOOK_AGAIN_SECONDS", 0.1)
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, with_fallback("other", whenWaitSeconds=1)) as it:
        del it.pods["chat/llama-2"]
        full = it.models["chat/other"]
        it.models["chat/other"] = dataclasses.replace(full, dead_end=DeadEnd("NoCapacity", unless_pods=True))
        await gone(it, limits=Limits(max_requests=9, timeout_seconds=60.0))
        asking = asyncio.create_task(ask(it))
        await until(lambda: it.app.holds.waiting == 1)
        await asyncio.sleep(1.3)
        it.models["chat/other"] = full
        it.pods["chat/llama-2"] = replica(2, model=full)
        it.changed()
        it.hear(2)
        assert (await asking)["model"] == "front"
        assert (len(llama.requests), len(other.requests)) == (0, 1)


async def test_nothing_falls_back_after_the_first_byte(tmp_path: Path):
    async def cut(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        request.writer.close()

    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(cut), other, with_fallback("other")) as it:
        response = await it.post({**CHAT, "stream": True})
        assert "replica_lost" in await response.text()
        assert not other.requests


async def test_a_fallback_that_cannot_do_the_request_is_passed_over(tmp_path: Path):
    other, third = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, other, third, with_fallback("other", "third")) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], capabilities=frozenset({"embed"}))
        it.models["chat/third"] = served("chat/third", uid="uid-third")
        it.pods["chat/third-2"] = replica(2, model=it.models["chat/third"])
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other", "chat/third"])
        await gone(it, limits=Limits(max_requests=0))
        await ask(it)
        assert third.requests[0].body["model"] == "chat/third"


async def test_the_whole_body_counts_twice_while_a_fallback_may_need_it(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, with_fallback("other")) as it:
        await gone(it, limits=Limits(max_requests=0))
        await ask(it, messages=[{"role": "user", "content": "x" * 50_000}])
        assert len(other.requests[0].body["messages"][0]["content"]) == 50_000
        await until(lambda: it.app.body_budget.held == 0)


async def test_a_canary_that_no_replica_serves_counts_as_failed_and_its_requests_fall_back(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    rule = {**CANARY, "fallback": {"targets": [target("llama")]}}
    async with two_models(tmp_path, llama, other, rule) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], limits=Limits(max_requests=0))
        del it.pods["chat/llama-2"]
        it.changed()
        for _ in range(4):
            await ask(it)
        assert len(llama.requests) == 4
        assert [halt.reason for halt in it.app.canaries.halts.values()] == ["Errors"]


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_canary_that_is_an_adapter_that_no_replica_can_load_has_failed(tmp_path: Path, fallback: bool):
    async def refuse(_: Ensure) -> tuple[int, dict[str, Any]]:
        return 422, {"reason": "SourceChanged", "message": "secret s3://other/path"}

    rule = {**CANARY, "canary": {**CANARY["canary"], "target": target("support", kind="adapter")}}
    if fallback:
        rule["fallback"] = {"targets": [target("llama")]}
    async with tuned(tmp_path, AdapterAgent(1, answer=refuse)) as it:
        put(it.it, rule)
        for _ in range(3):
            await ask(it.it, 200 if fallback else 422)
        assert [(halt.reason, halt.bad) for halt in it.it.app.canaries.halts.values()] == [("Errors", 3)]
        assert it.it.metric("shoal_gateway_route_fallbacks_total", reason="refused") == (3 if fallback else 0)
        assert (await ask(it.it))["model"] == "front"
        assert it.asked() == [None] * (4 if fallback else 1)
        records = [(r.data.outcome, r.data.status) for r in await it.it.records(count=4)]
        assert records == [("answered", 200) if fallback else ("refused", 422)] * 3 + [("answered", 200)]
        answer = await (await it.ask()).json()
        assert answer["error"]["code"] == "adapter_unusable", "who names the adapter has no fallback"
        *_, record = await it.it.records(count=5)
        assert record.data.outcome == "rejected"


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_first_load_of_an_adapter_halts_no_canary(tmp_path: Path, leaves: bool):
    """Its requests leave for the fallback, or wait, and their streams begin late."""
    gate = asyncio.Event()

    async def slowly(_: Ensure) -> tuple[int, dict[str, Any]]:
        await gate.wait()
        return 200, {}

    limits = {"errorPercent": 20, "minRequests": 2, "ttftSeconds": 1}
    rule = {**CANARY, "canary": {"target": target("support", kind="adapter"), "percent": 100, "haltOn": limits}}
    if leaves:
        rule["fallback"] = {"targets": [target("llama")], "whenWaitSeconds": 1}
    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        put(it.it, rule)
        (revision,) = (rule.canary.revision for rule in it.it.routes["chat/front"].rules if rule.canary)

        async def streamed() -> None:
            assert b"[DONE]" in await (await it.it.post({**CHAT, "stream": True})).read()

        asked = [asyncio.create_task(streamed()) for _ in range(3)]
        await until(lambda: it.it.app.holds.waiting == 3)
        await asyncio.sleep(1.1)
        if not leaves:
            gate.set()
        await asyncio.gather(*asked)
        await until(lambda: it.it.app.in_flight == 0)
        assert it.asked() == [None if leaves else name_of()] * 3
        assert not it.it.app.canaries.halts
        window = it.it.app.canaries._windows.get(revision)  # pyright: ignore[reportPrivateUsage]
        assert (None if window is None else window.counts) == (None if leaves else CanaryCounts(requests=3))


@pytest.mark.parametrize("answers", [True, False])
async def test_an_adapter_that_is_never_loaded_halts_its_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
):
    """Its load ends the engine each time, or its agent never answers: no refusal says that the load failed."""
    monkeypatch.setattr("shoal.gateway.adaptertarget.FIRST_LOAD_SECONDS", 0.5)

    async def never(_: Ensure) -> tuple[int, dict[str, Any]]:
        if not answers:
            await asyncio.Event().wait()
        return 503, {"reason": "LoadingAdapter", "message": "it is staged still", "retryAfter": 1}

    canary = {**CANARY["canary"], "target": target("support", kind="adapter"), "percent": 100}
    rule = {**CANARY, "canary": canary, "fallback": {"targets": [target("llama")], "whenWaitSeconds": 1}}
    async with tuned(tmp_path, AdapterAgent(1, answer=never, cancels=True)) as it:
        put(it.it, rule)
        await asyncio.gather(*(ask(it.it) for _ in range(3)))
        assert not it.it.app.canaries.halts, "they came at the beginning of what may be a load"
        await asyncio.gather(*(ask(it.it) for _ in range(3)))
        assert [(halt.reason, halt.bad) for halt in it.it.app.canaries.halts.values()] == [("Errors", 3)]
        assert it.asked() == [None] * 6


@pytest.mark.parametrize("cold_start", [200.0, None])
async def test_a_canary_that_only_starts_is_not_halted(tmp_path: Path, cold_start: float | None):
    """By the expected wait, or, where no start was measured yet, after the wait."""
    llama, other = ScriptedEngine(), ScriptedEngine(breaks)
    rule = {**CANARY, "fallback": {"targets": [target("llama")], "whenWaitSeconds": 1}}
    async with two_models(tmp_path, llama, other, rule) as it:
        limits = Limits(max_requests=9, timeout_seconds=60.0, max_tenant_percent=100)
        it.models["chat/other"] = dataclasses.replace(OTHER, limits=limits, cold_start_seconds=cold_start)
        del it.pods["chat/llama-2"]
        it.changed()
        await asyncio.gather(*(ask(it) for _ in range(4)))
        (revision,) = (rule.canary.revision for rule in it.routes["chat/front"].rules if rule.canary)
        assert len(llama.requests) == 4
        assert it.metric("shoal_gateway_route_fallbacks_total", reason="wait") == 4
        assert not it.app.canaries.halts
        assert revision not in it.app.canaries._windows, "neither good nor bad"  # pyright: ignore[reportPrivateUsage]
        # Its replica comes, and fails: that counts from the first request on.
        it.pods["chat/llama-2"] = replica(2, model=OTHER)
        it.changed()
        it.hear(2)
        for _ in range(3):
            await ask(it, 500)
        assert [(halt.bad, halt.of) for halt in it.app.canaries.halts.values()] == [(3, 3)]


def starting(it: GatewayUnderTest, seconds_ago: float = 0.0, **limits: Any) -> str:
    """The canary's first pod starts, whose start takes 20 s as measured. Returns the canary's revision. `seconds_ago`:
    when it was created, and seen by the gateway."""
    held = dataclasses.replace(Limits(9, max_tenant_percent=100, timeout_seconds=0.2), **limits)
    it.models["chat/other"] = dataclasses.replace(OTHER, limits=held, cold_start_seconds=20.0)
    created = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    it.pods["chat/llama-2"] = replica(2, model=OTHER, ready=False, created=created)
    it.changed()
    it.app.holds.first_seen["pod-2"] = time.monotonic() - seconds_ago
    (revision,) = (rule.canary.revision for rule in it.routes["chat/front"].rules if rule.canary)
    return revision


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("full", [True, False])
async def test_what_a_canary_that_starts_cannot_hold_is_no_failure_of_it(tmp_path: Path, full: bool, fallback: bool):
    """Its queue is full, or its requests wait for as long as they may."""
    llama = ScriptedEngine()
    rule = {**CANARY, **({"fallback": {"targets": [target("llama")]}} if fallback else {})}
    async with two_models(tmp_path, llama, ScriptedEngine(), rule) as it:
        revision = starting(it, **({"max_requests": 1, "timeout_seconds": 60.0} if full else {}))
        first = it.app.holds.enter(it.models["chat/other"], "acme", "other", 1, 1, (), 1, is_retry=False)
        for _ in range(4):
            answer = await ask(it, 200 if fallback else 503)
            assert fallback or answer["error"]["code"] == ("hold_full" if full else "hold_expired")
        first.close()
        assert len(llama.requests) == 4 * fallback
        assert revision not in it.app.canaries._windows, "neither good nor bad"  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("full", [True, False])
async def test_what_a_canary_cannot_hold_that_should_have_started_is_a_failure(tmp_path: Path, full: bool):
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), CANARY) as it:
        starting(it, 71, **({"max_requests": 1, "timeout_seconds": 60.0} if full else {}))
        first = it.app.holds.enter(it.models["chat/other"], "acme", "other", 1, 1, (), 1, is_retry=False)
        for _ in range(3):
            await ask(it, 503)
        first.close()
        assert [(halt.bad, halt.of) for halt in it.app.canaries.halts.values()] == [(3, 3)]


async def test_a_gateways_clock_that_is_ahead_halts_no_canary_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By this gateway's clock the pod is older than a start may take. But the gateway saw it only now."""

    class FastClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=80)

    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), CANARY) as it:
        monkeypatch.setattr("shoal.gateway.hold.datetime", FastClock)
        revision = starting(it)
        for _ in range(4):
            await ask(it, 503)
        assert revision not in it.app.canaries._windows, "neither good nor bad"  # pyright: ignore[reportPrivateUsage]


async def test_the_wait_for_a_canarys_first_replica_is_not_its_time_to_the_first_byte(tmp_path: Path):
    """The answers count, but are neither early nor late."""
    limits = {"haltOn": {"ttftSeconds": 1, "minRequests": 2}}
    rule = {**CANARY, "canary": {**CANARY["canary"], **limits}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it:
        revision = starting(it, timeout_seconds=60.0)

        async def streamed() -> bytes:
            return await (await it.post({**CHAT, "stream": True})).read()

        asked = [asyncio.create_task(streamed()) for _ in range(3)]
        await until(lambda: it.app.holds.waiting == 3)
        await asyncio.sleep(1.1)
        it.pods["chat/llama-2"] = replica(2, model=OTHER)
        it.changed()
        it.hear(2)
        assert all(b"[DONE]" in answer for answer in await asyncio.gather(*asked))
        await until(lambda: it.app.in_flight == 0)
        assert not it.app.canaries.halts
        counts = it.app.canaries._windows[revision].counts  # pyright: ignore[reportPrivateUsage]
        assert counts == CanaryCounts(requests=3)
        await streamed()
        await until(lambda: it.app.in_flight == 0)
        counts = it.app.canaries._windows[revision].counts  # pyright: ignore[reportPrivateUsage]
        assert counts == CanaryCounts(requests=4, streams=1), "its next one did not wait"


@pytest.mark.parametrize("starts", [False, True])
async def test_streams_whose_clients_give_up_halt_a_canary_that_does_not_only_start(tmp_path: Path, starts: bool):
    async def hangs(request: EngineRequest) -> None:
        await request.gone.wait()

    limits = {"haltOn": {"ttftSeconds": 1, "minRequests": 2}}
    rule = {**CANARY, "canary": {**CANARY["canary"], **limits}}
    async with two_models(tmp_path, ScriptedEngine(), other := ScriptedEngine(hangs), rule) as it:
        if starts:
            starting(it, timeout_seconds=60.0)

        async def give_up(clients: int, seconds: float) -> None:
            asked = [asyncio.create_task(it.post({**CHAT, "stream": True})) for _ in range(clients)]
            await until(lambda: it.app.in_flight == clients)
            await asyncio.sleep(seconds)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await until(lambda: it.app.in_flight == 0)

        for _ in range(3):
            await give_up(1, 0.0)
        assert not it.app.canaries.halts, "clients that leave at once halt nothing for the others"
        await give_up(2, 1.1)
        expected = [] if starts else [CanaryHalt("Slow", 2, 2)]
        assert list(it.app.canaries.halts.values()) == expected
        assert bool(other.requests) is not starts


async def test_a_canary_whose_pod_never_becomes_ready_has_failed(tmp_path: Path):
    """Its image is broken, say: the pod is there, and starts again and again."""
    rule = {**CANARY, "fallback": {"targets": [target("llama")], "whenWaitSeconds": 1}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it:
        limits = Limits(max_requests=9, timeout_seconds=60.0, max_tenant_percent=100)
        it.models["chat/other"] = dataclasses.replace(OTHER, limits=limits, cold_start_seconds=20.0)
        long_ago = datetime.now(UTC) - timedelta(seconds=71)
        it.pods["chat/llama-2"] = replica(2, model=OTHER, ready=False, created=long_ago)
        it.changed()
        it.app.holds.first_seen["pod-2"] = time.monotonic() - 71
        await asyncio.gather(*(ask(it) for _ in range(3)))
        assert [(halt.bad, halt.of) for halt in it.app.canaries.halts.values()] == [(3, 3)]


async def test_a_canary_whose_replicas_are_too_busy_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rule = {**CANARY, "fallback": {"targets": [target("llama")], "whenWaitSeconds": 1}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it:
        it.models["chat/other"] = dataclasses.replace(OTHER, limits=Limits(max_requests=9, max_tenant_percent=100))
        it.changed()

        def full(*_: object, **_more: object) -> Allowance:
            return Allowance(0, None)

        monkeypatch.setattr(it.fleet, "allowance", full)
        waiting = it.app.holds.enter(it.models["chat/other"], "acme", "other", 1, 1, (), 1, is_retry=False)
        await asyncio.gather(*(ask(it) for _ in range(3)))
        assert [(halt.bad, halt.of) for halt in it.app.canaries.halts.values()] == [(3, 3)]
        waiting.close()


@pytest.mark.parametrize("own", [True, False])
async def test_a_tenant_that_fills_its_own_share_of_the_queue_halts_no_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
):
    """What no tenant may add to the queue any more is a failure."""
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), CANARY) as it:
        limits = Limits(max_requests=4, max_tenant_percent=50)
        it.models["chat/other"] = dataclasses.replace(OTHER, limits=limits)
        it.changed()
        monkeypatch.setattr(it.fleet, "allowance", lambda *_, **_more: Allowance(0, None))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        waiting = [
            it.app.holds.enter(it.models["chat/other"], name, "other", 1, 1, (), 1, is_retry=False)
            for name in ("acme", "acme", *(() if own else ("zeta", "zeta")))
        ]
        for _ in range(3):
            assert (await ask(it, 503))["error"]["code"] == "hold_full"
        assert len(it.app.canaries.halts) == (0 if own else 1)
        for one in waiting:
            one.close()


async def test_a_target_that_is_gone_leaves_its_requests_to_the_fallback(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, with_fallback("other")) as it:
        del it.models["chat/llama"]
        it.changed()
        await ask(it)
        assert len(other.requests) == 1


@pytest.mark.parametrize("gone_for", ["no place", "deleted"])
async def test_errors_have_the_name_that_the_client_asked_for(tmp_path: Path, gone_for: str):
    """A client of a route is not told which Models the route leads to, nor one client the name that another used."""
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), {"targets": [target("llama")]}) as it:
        await gone(it)
        names = ("front", "llama")
        waiting = [asyncio.create_task(it.post({**CHAT, "model": name})) for name in names]
        await until(lambda: it.app.holds.waiting == 2)
        if gone_for == "deleted":
            del it.models["chat/llama"]
            it.changed()
        else:
            it.model(dead_end=DeadEnd("NoFit", unless_pods=True))
            waiting += [asyncio.create_task(it.post({**CHAT, "model": name})) for name in names]
        for name, post in zip(names * 2, waiting, strict=False):
            response = await post
            message = (await response.json())["error"]["message"]
            assert response.status == (404 if gone_for == "deleted" else 503)
            assert f"`{name}`" in message
            assert "chat/llama" not in message
            assert name == "llama" or "llama" not in message
            (known,) = it.app.choices.refusals(response.headers["x-shoal-request-id"], "gateway-1")
            assert known.model == "chat/llama", "`shoal why request/ID` goes on there"


async def test_an_engines_words_about_a_request_have_the_name_that_the_client_asked_for(tmp_path: Path):
    refusal = {"message": "chat/llama does not do that; see chat/llama-2.", "type": "BadRequestError", "code": 400}

    async def refuse(request: EngineRequest) -> None:
        await request.answer(400, json.dumps(refusal).encode())

    async with two_models(tmp_path, ScriptedEngine(refuse), ScriptedEngine(), {"targets": [target("llama")]}) as it:
        assert (await ask(it, 400))["error"]["message"] == "front does not do that; see chat/llama-2."


# --- mirrors ----------------------------------------------------------------------------------------------------------

MIRRORED = {"targets": [target("llama")], "mirror": {**target("other"), "percent": 100}}


async def test_a_mirror_gets_a_copy_whose_answer_nobody_sees_and_nobody_pays(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, MIRRORED) as it:
        it.tenants["acme"] = tenant(
            models=["chat/llama", "chat/other"], limits={"requestsPerMinute": 1, "tokensPerMinute": 10_000}
        )
        it.changed()
        assert (await ask(it))["model"] == "front"
        await until(lambda: bool(other.requests) and not it.app.copies.in_progress)
        (sent,), (copied,) = llama.requests, other.requests
        assert (sent.body["model"], copied.body["model"]) == ("chat/llama", "chat/other")
        assert sent.body["messages"] == copied.body["messages"]
        assert sent.body["rid"] != copied.body["rid"]
        (final,) = await it.records()
        (attempt,) = await it.records("attempt")
        assert (final.data.model, final.data.attempts, final.data.mirror_of) == ("chat/llama", 1, None)
        data = attempt.data
        assert (data.model, data.route, data.mirror_of) == ("chat/other", "chat/front", final.data.request_id)
        assert (data.kind, data.attempt, data.tenant, data.input_tokens) == ("attempt", 1, "acme", 7)
        assert len(await it.records("open")) == 1, "a copy is no request"
        assert it.metric("shoal_gateway_mirrored_total", result="sent") == 1
        await until(lambda: it.app.body_budget.held == 0)


async def test_a_stream_is_mirrored_to_its_end(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, MIRRORED) as it:
        response = await it.post({**CHAT, "stream": True})
        assert (await response.text()).rstrip().endswith("[DONE]")
        (attempt,) = await it.records("attempt")
        assert (attempt.data.count_source, attempt.data.output_tokens) == ("final", 3)


async def test_a_mirror_that_fails_or_has_no_replica_hurts_nobody(tmp_path: Path):
    other = ScriptedEngine(breaks)
    async with two_models(tmp_path, ScriptedEngine(), other, MIRRORED) as it:
        await ask(it)
        await until(lambda: bool(other.requests) and not it.app.copies.in_progress)
        del it.pods["chat/llama-2"]
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], limits=Limits(max_requests=9))
        it.changed()
        await ask(it)
        await until(lambda: it.metric("shoal_gateway_mirrored_total", result="dropped") == 1)
        assert not it.app.holds.waiting, "a copy wakes nothing and waits for nothing"
        it.tenants["acme"] = tenant(models=["chat/llama"])
        it.changed()
        await ask(it)
        assert len(other.requests) == 1
        assert it.metric("shoal_gateway_mirrored_total", result="dropped") == 1, "what it may not use gets no copy"


async def test_a_mirror_that_cannot_do_the_request_gets_no_copy(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, MIRRORED) as it:
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], capabilities=frozenset({"embed"}))
        it.changed()
        await ask(it)
        assert not other.requests
        assert not it.app.copies.in_progress
        assert it.metric("shoal_gateway_mirrored_total", result="dropped") == 1


async def test_a_body_that_is_too_large_to_copy_counts_as_dropped(tmp_path: Path):
    other = ScriptedEngine()
    async with two_models(tmp_path, ScriptedEngine(), other, MIRRORED) as it:
        await ask(it, messages=[{"role": "user", "content": "x" * BIG}])
        assert not other.requests
        assert it.metric("shoal_gateway_mirrored_total", result="dropped") == 1
