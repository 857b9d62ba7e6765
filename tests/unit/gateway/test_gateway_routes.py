"""A served name over several Models, as a client of the gateway sees it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shoal.core.hold.limits import Limits
from shoal.core.routing.canary import CanaryHalt
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.gateway import GatewayUnderTest, tenant
from tests.support.routes import declared, put, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

CHAT = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}
BOTH = {"targets": [target("llama"), target("other")]}


async def ask(it: GatewayUnderTest, status: int = 200, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    response = await it.post({**CHAT, **more}, headers=headers)
    answer = await response.json()
    assert response.status == status, answer
    return answer


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
        draws = iter([0.1, 0.3, 0.5, 0.74, 0.76, 0.99])
        monkeypatch.setattr("shoal.gateway.request.random.random", lambda: next(draws))
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
        answer = await ask(it, 503)
        assert answer["error"]["code"] == "no_route_target"
        assert "llama" not in answer["error"]["message"]
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
        async with asyncio.timeout(30):
            while not it.app.holds.waiting:
                await asyncio.sleep(0.01)
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


async def test_clients_that_send_nonsense_do_not_halt_a_canary(tmp_path: Path):
    async def rejects(request: EngineRequest) -> None:
        await request.answer(400, b'{"message": "no", "code": 400}')

    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(rejects), CANARY) as it:
        for _ in range(12):
            await ask(it, 400)
        assert not it.app.canaries.halts
