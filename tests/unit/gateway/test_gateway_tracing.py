"""What a collector gets of a gateway's requests, over OTLP, and what their engines are told."""

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.hold.limits import Limits
from shoal.gateway.choices import ChoiceMemory
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, lines, replica
from tests.support.gateway_process import ask as process_ask
from tests.support.gateway_process import serving
from tests.support.routes import put, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.traces import Collector, collecting, environment_of, traced
from tests.support.vllm_engine import vllm_engine
from tests.unit.gateway.test_gateway_garbage import KINDS, OF_CONNECTIONS, TIMES, of_requests

SECRET = "the-canary-that-nobody-may-see"
CHAT = {"model": "llama", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 50}
STREAM = {**CHAT, "stream": True}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


async def ask(it: GatewayUnderTest, body: object = CHAT, **kw: Any) -> int:
    response = await it.post(body, **kw)
    await response.read()
    return response.status


def of_server(collector: Collector) -> dict[str, object]:
    return collector.named("POST /v1/chat/completions").attributes


def sampled(request: EngineRequest) -> bool:
    return bool(int(request.headers["traceparent"][-2:], 16) & 1)


async def test_an_answer_is_a_trace_of_the_server_and_of_the_call_of_the_model(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch, POD_NAME="shoal-gateway-0"):
            assert await ask(it) == 200
        server = collector.named("POST /v1/chat/completions")
        [call] = collector.below(server)
        (record,) = await it.records()
    assert (server.kind, server.parent, server.error) == ("SERVER", "", None)
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "llama",
        "shoal.request.id": record.data.request_id,
        "shoal.tenant": "acme",
        "shoal.model": "chat/llama",
        "shoal.outcome": "answered",
        "shoal.attempts": 1,
        "shoal.replica": "chat/llama-1",
        "shoal.gpu_class": "l4-24gb",
    }
    assert (call.name, call.kind, call.error) == ("chat llama", "CLIENT", None)
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.model": "llama",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": record.data.request_id,
        "gen_ai.response.model": "chat/llama",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "server.address": "127.0.0.1",
        "server.port": engine.port,
        "shoal.model": "chat/llama",
        "shoal.attempt": 1,
        "shoal.replica": "chat/llama-1",
        "shoal.gpu_class": "l4-24gb",
        "k8s.node.name": "node-1",
    }
    assert server.service == "shoal-gateway"
    assert server.resource["k8s.pod.name"] == "shoal-gateway-0"
    assert server.began <= call.began <= call.ended <= server.ended


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_the_trace_of_the_chat_that_it_becomes(tmp_path, monkeypatch, stream: bool):
    body = {"model": "llama", "max_tokens": 50, "messages": CHAT["messages"], "stream": stream}
    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch):
            response = await it.post(body, "/v1/messages", headers={"traceparent": SAMPLED})
            text = await response.text()
            assert response.status == 200
        server = collector.named("POST /v1/chat/completions")
        [call] = collector.below(server)
        (record,) = await it.records()
    assert (server.trace, server.parent, server.error) == (TRACE, SPAN, None)
    assert server.attributes["shoal.outcome"] == "answered"
    assert call.attributes["gen_ai.request.stream"] is stream
    assert call.attributes["gen_ai.response.id"] == record.data.request_id
    assert call.attributes["gen_ai.usage.input_tokens"] == 7
    assert call.attributes["gen_ai.usage.output_tokens"] == 3
    assert engine.requests[0].headers["traceparent"] == f"00-{TRACE}-{call.id}-01"
    # The client's answer is the same as without traces, and the trace has no text of either.
    assert ('"type":"message_stop"' if stream else '"type":"message"') in text
    assert SECRET not in str([server.attributes, call.attributes])


async def test_replicas_of_vllm_are_named_as_that(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path, vllm_engine()) as it:
        it.pods["chat/llama-1"] = replica(1, engine="vLLM")
        it.changed()
        async with traced(it, collector, monkeypatch):
            assert await ask(it) == 200
    call = collector.named("chat llama")
    assert call.attributes["gen_ai.provider.name"] == "vllm"
    assert call.attributes["gen_ai.response.finish_reasons"] == ["stop"]


async def test_the_engine_is_told_of_the_call_so_that_its_spans_join(tmp_path, monkeypatch):
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
    async with (
        collecting() as collector,
        gateway(tmp_path, engine := ScriptedEngine()) as it,
        traced(it, collector, monkeypatch),
    ):
        assert await ask(it, headers=headers) == 200
    server, call = collector.named("POST /v1/chat/completions"), collector.named("chat llama")
    assert (server.trace, server.parent) == (TRACE, SPAN)
    (request,) = engine.requests
    assert request.headers["traceparent"] == f"00-{TRACE}-{call.id}-01"
    assert request.headers["tracestate"] == "vendor=1"


async def test_a_stream_shows_when_its_answer_began(tmp_path, monkeypatch):
    async def answer(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        ended = b'{"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}'
        await request.chunk(b"data: " + ended + b"\n\n")
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with (
        collecting() as collector,
        gateway(tmp_path, ScriptedEngine(answer)) as it,
        traced(it, collector, monkeypatch),
    ):
        response = await it.post(STREAM)
        assert [line async for line in lines(response)][-1] == b"[DONE]"
    call = collector.named("chat llama")
    [stream] = collector.below(call)
    assert stream.name == "stream"
    assert call.attributes["gen_ai.request.stream"] is True
    assert call.attributes["gen_ai.response.finish_reasons"] == ["length"]
    first = call.attributes["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first, float)
    assert first > 0
    assert call.began <= stream.began <= stream.ended <= call.ended


async def test_a_wait_for_a_replica_is_a_span_with_its_reason(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path, ScriptedEngine()) as it:
        it.pods.clear()
        it.fleet.update("pod-1", None)
        it.changed()
        async with traced(it, collector, monkeypatch):
            asked = asyncio.create_task(ask(it))
            while not it.app.holds.waiting:
                await asyncio.sleep(0.005)
            it.pods["chat/llama-1"] = replica(1)
            it.changed()
            it.hear(1)
            assert await asked == 200
    hold, call = collector.below(collector.named("POST /v1/chat/completions"))
    assert (hold.name, hold.kind) == ("hold", "INTERNAL")
    assert hold.attributes == {"shoal.hold.reason": "none", "shoal.hold.ended": "released"}
    assert hold.ended <= call.began
    held = of_server(collector)["shoal.hold.seconds"]
    assert isinstance(held, float)
    assert held == pytest.approx((hold.ended - hold.began) / 1e9, abs=1.0)


async def test_each_try_is_a_call_and_a_lost_one_says_why(tmp_path, monkeypatch):
    async def busy(request: EngineRequest) -> None:
        await request.answer(503, b'{"object":"error","message":"busy","type":"Busy","code":503}')

    both = [ScriptedEngine(busy), ScriptedEngine(serve_normally)]
    # Idle replicas take turns, so that the busy one is tried too.
    front = gateway(tmp_path, *both, routing="PrefixHeads")
    async with collecting() as collector, front as it, traced(it, collector, monkeypatch):
        for _ in range(4):
            assert await ask(it) == 200
    calls = [span for span in collector.spans if span.name == "chat llama"]
    lost = [call for call in calls if call.error is not None]
    assert len(calls) - len(lost) == 4
    assert lost
    assert {(c.error, c.attributes["error.type"], c.attributes["shoal.replica"]) for c in lost} == {
        ("unavailable", "unavailable", "chat/llama-1")
    }
    assert all("gen_ai.usage.input_tokens" not in call.attributes for call in lost)
    told = {tuple(r.headers["traceparent"].split("-")[1:3]) for engine in both for r in engine.requests}
    assert told == {(call.trace, call.id) for call in calls}


async def test_a_refusal_is_an_error_by_its_code_and_not_by_its_words(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path) as it:
        it.model(limits=Limits(max_requests=0))
        async with traced(it, collector, monkeypatch):
            assert await ask(it) == 503
            assert await ask(it, {**CHAT, "model": SECRET}) == 404
    refused, unknown = sorted(collector.spans, key=lambda span: span.began)
    assert (refused.error, refused.attributes["http.response.status_code"]) == ("no_replica", 503)
    assert (refused.attributes["error.type"], refused.attributes["shoal.outcome"]) == ("no_replica", "refused")
    assert (unknown.error, unknown.attributes["http.response.status_code"]) == (None, 404)
    assert unknown.attributes["error.type"] == "model_not_found"
    assert "gen_ai.request.model" not in unknown.attributes


async def test_a_client_that_leaves_ends_its_spans(tmp_path, monkeypatch):
    async def never(request: EngineRequest) -> None:
        await request.gone.wait()

    async with (
        collecting() as collector,
        gateway(tmp_path, engine := ScriptedEngine(never)) as it,
        traced(it, collector, monkeypatch),
    ):
        asked = asyncio.create_task(ask(it))
        while not engine.requests:
            await asyncio.sleep(0.005)
        asked.cancel()
        await it.records()
        while it.app.in_flight:
            await asyncio.sleep(0.005)
    assert of_server(collector)["shoal.outcome"] == "cancelled"
    assert collector.named("chat llama").parent == collector.named("POST /v1/chat/completions").id


async def test_an_adapter_is_named_on_its_spans(tmp_path, monkeypatch):
    async with collecting() as collector, tuned(tmp_path, AdapterAgent(1)) as it:
        it.it.app.leases.drop("pod-1", name_of())
        async with traced(it.it, collector, monkeypatch):
            response = await it.ask()
            assert response.status == 200
            await response.read()
    server = collector.named("POST /v1/chat/completions")
    assert server.attributes["shoal.adapter"] == "chat/support"
    hold = collector.named("hold")
    assert hold.attributes["shoal.hold.reason"] == "no-lease"
    [call] = [span for span in collector.below(server) if span.kind == "CLIENT"]
    assert call.attributes["gen_ai.response.model"] == "chat/support"


# --- whose trace, and how many ----------------------------------------------------------------------------------------


async def test_a_client_that_does_not_sample_is_not_traced_and_neither_is_its_engine(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch):
            assert await ask(it, headers={"traceparent": NOT_SAMPLED}) == 200
        assert not collector.spans
    (request,) = engine.requests
    assert request.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert request.headers["traceparent"].endswith("-00")


async def test_clients_cannot_have_more_traced_than_the_bound(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch, SHOAL_TRACES_PER_SECOND="0.001"):
            for _ in range(5):
                assert await ask(it, headers={"traceparent": SAMPLED}) == 200
            assert it.metric("shoal_traces_limited_total") == 4
        assert len([span for span in collector.spans if span.kind == "SERVER"]) == 1
    # Engines sample by their parent: what the gateway does not trace, they do not either.
    assert [sampled(request) for request in engine.requests] == [True, False, False, False, False]


async def test_a_share_of_the_requests_is_traced_where_that_is_asked_for(tmp_path, monkeypatch):
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch, **sampler):
            assert await ask(it) == 200
            assert await ask(it, headers={"traceparent": SAMPLED}) == 200
        assert {span.trace for span in collector.spans} == {TRACE}
    assert [sampled(request) for request in engine.requests] == [False, True]


@pytest.mark.parametrize("key", [None, "sk-wrong"])
async def test_nobody_without_a_key_is_traced(tmp_path, monkeypatch, key):
    async with collecting() as collector, gateway(tmp_path, ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch):
            assert await ask(it, key=key, headers={"traceparent": SAMPLED}) == 401
        assert not collector.spans


@pytest.mark.parametrize(
    "sent",
    [
        {"traceparent": "00-00000000000000000000000000000000-00f067aa0ba902b7-01"},
        {"traceparent": f"00-{TRACE}-0000000000000000-01"},
        {"traceparent": "nonsense"},
        {"tracestate": "vendor=1"},
    ],
)
async def test_what_is_no_trace_is_not_joined(tmp_path, monkeypatch, sent):
    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine()) as it:
        async with traced(it, collector, monkeypatch):
            assert await ask(it, headers=sent) == 200
        server = collector.named("POST /v1/chat/completions")
        assert server.parent == ""
    (request,) = engine.requests
    assert request.headers["traceparent"].split("-")[1] == server.trace
    assert "tracestate" not in request.headers


# --- what it must not do ----------------------------------------------------------------------------------------------


async def test_no_prompt_answer_or_key_is_in_a_trace(tmp_path, monkeypatch):
    async def answer(request: EngineRequest) -> None:
        if request.body.get("seed") == 400:
            error = f'{{"object":"error","message":"no {SECRET}","type":"BadRequestError","code":400}}'
            await request.answer(400, error.encode())
        elif request.body.get("stream"):
            await request.begin_stream()
            await request.chunk(request.delta(f'{SECRET} "finish_reason":"canary"', 1))
            await request.chunk(request.closing())
            await request.chunk(b"data: [DONE]\n\n")
            await request.end_stream()
        else:
            await serve_normally(request)

    async with collecting() as collector, gateway(tmp_path, engine := ScriptedEngine(answer)) as it:
        async with traced(it, collector, monkeypatch):
            for body in (
                CHAT,
                STREAM,
                {**CHAT, "seed": 400},
                {**CHAT, "model": SECRET},
                {**CHAT, "stream": SECRET},
                {**CHAT, "user": SECRET, "tools": [{"type": "function", "function": {"name": SECRET}}]},
            ):
                await ask(it, body)
        assert len([span for span in collector.spans if span.kind == "SERVER"]) == 6
        keys = {r.headers["authorization"].removeprefix("Bearer ") for r in engine.requests}
    everything = b"".join(collector.raw)
    for secret in (SECRET, "canary", API_KEY, *keys):
        assert secret.encode() not in everything


@pytest.mark.parametrize("trouble", ["away", "refuses", "hangs"])
async def test_a_collector_in_trouble_costs_spans_and_no_request(tmp_path, monkeypatch, trouble):
    async with collecting() as collector, gateway(tmp_path, ScriptedEngine()) as it:
        environment = {"OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        if trouble == "away":
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
        elif trouble == "refuses":
            collector.status = 400
        else:
            collector.gate.clear()
        async with traced(it, collector, monkeypatch, **environment) as tracing:
            for _ in range(20):
                assert await ask(it) == 200
            counts = tracing.counts
            async with asyncio.timeout(20):
                while counts.failed + counts.dropped < 1:
                    await asyncio.sleep(0.02)
            if trouble == "hangs":
                assert it.metric("shoal_trace_spans_total", result="dropped") > 0
            assert it.metric("shoal_trace_spans_total", result="exported") == 0
            collector.gate.set()
        assert len(await it.records(count=20)) == 20


async def test_a_request_with_many_waits_keeps_its_trace_small(tmp_path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path) as it, traced(it, collector, monkeypatch) as tracing:
        from shoal.gateway.tracing import RequestSpans

        span = tracing.tracer.start_span("POST /v1/chat/completions")
        spans = RequestSpans(tracing.tracer, span, "/v1/chat/completions", "")
        for _ in range(100):
            spans.held(0.0, "refused", "released")
        spans.end()
    assert len(collector.spans) == 33
    assert of_server(collector)["shoal.spans_left_out"] == 68


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_what_is_traced_leaves_nothing_to_collect_either(tmp_path, monkeypatch, kind):
    refused: set[str] = set()

    async def answer(request: EngineRequest) -> None:
        seed, rid = request.body.get("seed"), request.body["rid"].partition(".")[0]
        if seed == 400:
            await request.answer(400, b'{"object":"error","message":"no","type":"BadRequestError","code":400}')
        elif seed == 503 and rid not in refused:
            refused.add(rid)
            await request.answer(503, b'{"object":"error","message":"busy","type":"Busy","code":503}')
        else:
            await serve_normally(request)

    engines = [ScriptedEngine(answer), ScriptedEngine(answer)]
    async with (
        collecting() as collector,
        gateway(tmp_path, *engines) as it,
        traced(it, collector, monkeypatch, OTEL_BSP_SCHEDULE_DELAY="10"),
    ):
        it.app.choices = ChoiceMemory(1)

        async def several() -> Counter[str]:
            for _ in range(TIMES):
                await kind(it)
            ended = len(await it.records(count=TIMES))
            await collector.until(lambda spans: len([s for s in spans if s.kind == "SERVER"]) >= ended)
            return of_requests()

        await several()
        gc.collect()
        gc.disable()
        try:
            before = await several()
            after = await several()
        finally:
            gc.enable()
    grown = {name: n - before[name] for name, n in after.items() if n - before[name] >= TIMES}
    assert not {name for name in grown if name not in OF_CONNECTIONS}


async def test_the_process_traces_by_its_environment_and_sends_the_last_ones_at_its_end(tmp_path, monkeypatch):
    async with collecting() as collector:
        for name, value in {**environment_of(collector), "OTEL_BSP_SCHEDULE_DELAY": "600000"}.items():
            monkeypatch.setenv(name, value)
        async with serving(tmp_path, ScriptedEngine()) as process, aiohttp.ClientSession() as session:
            async with process_ask(session, process) as answer:
                assert answer.status == 200
            assert not collector.spans
            async with session.get(f"http://127.0.0.1:{process.ops.port}/metrics") as metrics:
                assert 'shoal_trace_spans_total{result="exported"} 0.0' in await metrics.text()
        assert of_server(collector)["shoal.outcome"] == "answered"


def test_a_gateway_that_traces_nothing_loads_nothing_of_opentelemetry():
    program = (
        "import sys, shoal.gateway.process, shoal.runtime.gateway;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_without_tracing_a_clients_trace_still_reaches_the_engine(tmp_path: Path):
    async with gateway(tmp_path, engine := ScriptedEngine()) as it:
        await ask(it, headers={"traceparent": SAMPLED, "tracestate": "vendor=1"})
        await ask(it, headers={"traceparent": "nonsense", "tracestate": "vendor=1"})
    with_trace, without = engine.requests
    assert (with_trace.headers["traceparent"], with_trace.headers["tracestate"]) == (SAMPLED, "vendor=1")
    assert not {"traceparent", "tracestate"} & without.headers.keys()


async def test_a_request_to_a_route_names_the_route_and_what_the_model_is_in_it(tmp_path, monkeypatch):
    llama, other = ScriptedEngine(), ScriptedEngine()
    canary = {"target": target("other"), "percent": 100}
    body = {**CHAT, "model": "front"}
    async with (
        collecting() as collector,
        two_models(tmp_path, llama, other, {"targets": [target("llama")]}) as it,
        traced(it, collector, monkeypatch),
    ):
        assert await ask(it, body) == 200
        put(it, {"targets": [target("llama")], "canary": canary})
        assert await ask(it, body) == 200
        assert await ask(it) == 200
    told = {
        (str(span.attributes["gen_ai.request.model"]), str(span.attributes["shoal.model"])): (
            span.attributes.get("shoal.route"),
            span.attributes.get("shoal.route.role"),
        )
        for span in collector.spans
    }
    assert told == {
        ("front", "chat/llama"): ("chat/front", "target"),
        ("front", "chat/other"): ("chat/front", "canary"),
        ("llama", "chat/llama"): (None, None),
    }


async def test_after_a_fallback_the_spans_name_the_model_that_answered(tmp_path, monkeypatch):
    llama, other = ScriptedEngine(), ScriptedEngine()
    rule = {"targets": [target("llama")], "fallback": {"targets": [target("other")]}}
    async with (
        collecting() as collector,
        two_models(tmp_path, llama, other, rule) as it,
        traced(it, collector, monkeypatch),
    ):
        del it.pods["chat/llama-1"]
        it.model(limits=Limits(max_requests=0))
        assert await ask(it, {**CHAT, "model": "front"}) == 200
    server = collector.named("POST /v1/chat/completions")
    [call] = collector.below(server)
    for span in (server, call):
        assert span.attributes["shoal.model"] == "chat/other"
        assert (span.attributes["shoal.route"], span.attributes["shoal.route.role"]) == ("chat/front", "fallback")
    assert call.attributes["gen_ai.response.model"] == "chat/other"
