"""What Prometheus sees of requests: the pace of answers, what each tenant used, how full a hold is."""

import asyncio
import json
from pathlib import Path

import pytest

from shoal.core.hold.limits import Limits
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.tenantmetrics import TenantMetrics
from tests.support.gateway import API_KEY, MODEL, GatewayUnderTest, gateway, lines, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine
from tests.unit.gateway.test_gateway_hold import asleep

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
OF = {"gen_ai_request_model": MODEL.key, "gen_ai_operation_name": "chat"}
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"


async def slowly(request: EngineRequest) -> None:
    """Three tokens, 0.4 s apart at least."""
    await request.begin_stream()
    for count in (1, 2, 3):
        await request.chunk(request.delta("x", count))
        await asyncio.sleep(0.4)
    await request.chunk(request.closing())
    await request.chunk(b"data: [DONE]\n\n")
    await request.end_stream()


async def ask(it: GatewayUnderTest, body: object = CHAT) -> int:
    response = await it.post(body)
    if body is STREAM:
        assert [line async for line in lines(response)][-1] == b"[DONE]"
    else:
        await response.read()
    return response.status


async def test_time_per_token_is_that_of_the_tokens_after_the_first(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(slowly)) as it:
        await ask(it, STREAM)
        await it.records(count=1)
        assert it.metric(f"{PER_TOKEN}_count", **OF) == 1
        # 1.2 s after the first byte for two further tokens: half of that each. The first may have been read late.
        assert it.metric(f"{PER_TOKEN}_sum", **OF) >= 0.6 - 0.1


async def test_an_answer_that_came_whole_has_no_time_per_token(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        assert await ask(it) == 200
        await it.records(count=1)
        assert it.metric("shoal_gateway_requests_total", **OF, outcome="answered") == 1
        assert it.metric(f"{PER_TOKEN}_count", **OF) == 0


async def test_a_refusal_counts_on_the_layer_of_its_cause(tmp_path: Path) -> None:
    """Before acceptance and after it; a code that an engine made up is no label."""
    rejected, errors = "shoal_gateway_rejected_total", "shoal_gateway_errors_total"
    answers = iter([(400, "made_up_by_an_engine"), (400, None), (500, None)])

    async def refuse(request: EngineRequest) -> None:
        status, code = next(answers)
        await request.answer(status, json.dumps({"message": "no", "code": code}).encode())

    async with gateway(tmp_path, ScriptedEngine(refuse)) as it:
        assert await ask(it, {**CHAT, "model": "nobodys"}) == 404
        assert it.metric(rejected, reason="model_not_found", layer="L6") == it.metric(rejected) == 1
        assert it.metric(errors) == 0, "it was not accepted"
        assert [await ask(it) for _ in range(3)] == [400, 400, 500]
        assert it.metric(rejected) == 1
        assert it.metric(errors, reason="400", layer="L4") == 2
        assert it.metric(errors, reason="engine_error", layer="L4") == 1
        assert it.metric(errors) == 3
        asleep(it)
        it.model(limits=Limits(max_requests=0))
        assert await ask(it) == 503
        assert it.metric(errors, reason="no_replica", layer="control") == 1


async def test_what_a_tenant_used_and_what_its_limits_kept_out(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.tenants["acme"] = tenant(limits={"requestsPerMinute": 2})
        it.changed()
        assert [await ask(it) for _ in range(3)] == [200, 200, 429]
        await it.records(count=2)
        assert it.metric("shoal_tenant_requests_total", tenant="acme", outcome="answered") == 2
        used = [
            it.metric("shoal_tenant_tokens_total", tenant="acme", gen_ai_token_type=kind)
            for kind in ("input", "cached", "output")
        ]
        assert used == [14, 8, 6]
        assert it.metric("shoal_tenant_refused_total", tenant="acme", reason="rate_limit_exceeded") == 1


async def test_no_label_has_a_key_or_a_word_of_a_client(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        await it.post({**CHAT, "model": "canary-model"})
        await it.post({**CHAT, "user": "canary-user"}, headers={"x-request-id": "canary-id"})
        await it.post(CHAT, key="sk-canary")
        await it.records(count=1)
        text = str([sample for family in it.metrics.registry.collect() for sample in family.samples])
        assert "canary" not in text
        assert API_KEY not in text


async def test_a_hold_is_shown_with_its_limits(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.model(limits=Limits(max_requests=7, max_bytes=1000))
        it.hear(1, phase="stalled")
        waiting = asyncio.create_task(ask(it))
        async with asyncio.timeout(20):
            while not it.app.holds.waiting:
                await asyncio.sleep(0.005)
        of = {"gen_ai_request_model": MODEL.key}
        assert it.metric("shoal_gateway_held_requests", **of) == 1
        assert it.metric("shoal_gateway_hold_limit_requests", **of) == 7
        assert it.metric("shoal_gateway_hold_limit_bytes", **of) == 1000
        assert it.metric("shoal_gateway_hold_seconds_count", **of, gen_ai_operation_name="chat") == 0
        it.hear(1)
        assert await waiting == 200
        assert it.metrics.registry.get_sample_value("shoal_gateway_hold_limit_requests", of) is None


@pytest.mark.parametrize("many", [3, 10])
def test_tenants_beyond_the_bound_share_one_label(many: int) -> None:
    metrics = TenantMetrics(most=3)
    for number in range(many):
        metrics.refused(f"t{number}", "rate_limit_exceeded")
    (refused,) = [family for family in metrics.collect() if family.name == "shoal_tenant_refused"]
    limited = [sample for sample in refused.samples if sample.labels["reason"] == "rate_limit_exceeded"]
    shown = {sample.labels["tenant"]: sample.value for sample in limited}
    assert shown == {"t0": 1, "t1": 1, "t2": 1} | ({"other": many - 3} if many > 3 else {})


def test_a_tenant_is_shown_before_its_first_refusal() -> None:
    """An increase over a time does not see what a series begins with."""
    metrics = TenantMetrics(most=3)
    metrics.known({"acme"})
    before = {family.name: [sample.value for sample in family.samples] for family in metrics.collect()}
    names = ("requests", "tokens", "units", "refused")
    assert set(before) == {f"shoal_tenant_{name}" for name in names}
    for values in before.values():
        assert values
        assert set(values) == {0}


def test_requests_for_adapters_by_whether_one_was_there() -> None:
    metrics = GatewayMetrics()
    for missed in (True, False, False):
        metrics.adapter_requested("chat/llama", "/v1/chat/completions", missed=missed)
    metrics.adapter_requested("chat/llama", "/v1/completions", missed=False)
    read = metrics.registry.get_sample_value
    of = {"gen_ai_request_model": "chat/llama"}
    assert read("shoal_gateway_adapter_requests_total", {**of, "loaded": "yes"}) == 3
    assert read("shoal_gateway_adapter_requests_total", {**of, "loaded": "no"}) == 1
