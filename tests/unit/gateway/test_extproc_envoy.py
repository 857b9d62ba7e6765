"""The real Envoy in front of a gateway that decides on its requests by external processing."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError

from shoal.gateway.extproc.server import PortCertificate
from shoal.gateway.shared import Gateway
from tests.support.adapter_agents import AdapterAgent, name_of, tuned
from tests.support.extproc import EnvoyInFront, Processors, asking, envoy, in_front_of, listening
from tests.support.gateway import MODEL, gateway, lines, replica, tenant
from tests.support.gateway_process import serving
from tests.support.mutual import InstallationPKI, process
from tests.support.scripted_engine import USAGE, EngineRequest, ScriptedEngine
from tests.support.waiting import until_async

CHAT = {"model": "chat/llama", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}


async def error_of(envoy: EnvoyInFront, status: int, body: object = CHAT, **asked: Any) -> dict[str, str]:
    async with await envoy.post(body, **asked) as answer:
        assert answer.status == status, await answer.text()
        assert answer.headers["content-type"] == "application/json"
        return (await answer.json())["error"]


async def test_a_chat_completion_is_answered_and_metered_once(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        spoofed = {"x-secret": "1", "x-gateway-destination-endpoint": "127.0.0.1:1", "cookie": "a=b"}
        async with await envoy.post(CHAT, headers=spoofed) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.json()
        assert body["model"] == "chat/llama"
        (record,) = await it.records()
        data = record.data
        assert (data.outcome, data.input_tokens, data.output_tokens, data.status) == ("answered", 7, 3, 200)
        assert (data.replica, data.attempts) == ("chat/llama-1", 1)
        assert answer.headers["x-shoal-request-id"] == data.request_id
        (request,) = engine.requests
        assert not {"x-secret", "cookie"} & set(request.headers)
        assert request.headers["authorization"].startswith("Bearer ")
        assert "sk-test-acme" not in request.headers["authorization"]


async def test_a_stream_arrives_chunk_by_chunk_without_the_usage_that_nobody_asked_for(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slowly(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await go_on.wait()
        await request.chunk(request.delta("b", 2))
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(slowly)) as it, in_front_of(it) as envoy:
        async with await envoy.post(STREAM) as answer:
            assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
            events = lines(answer)
            assert json.loads(await anext(events))["choices"][0]["delta"]["content"] == "a"
            go_on.set()
            rest = [event async for event in events]
        assert b"usage" not in b"".join(rest)
        assert rest[-1] == b"[DONE]"
        (record,) = await it.records()
        assert (record.data.outcome, record.data.input_tokens, record.data.output_tokens) == ("answered", 7, 3)


async def test_other_apis_are_translated_and_take_the_engines_path(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        body = {**CHAT, "max_tokens": 16}
        async with await envoy.post(body, path="/v1/messages?beta=1") as answer:
            assert (answer.status, (await answer.json())["type"]) == (200, "message")
        assert engine.requests[0].path == "/v1/chat/completions"
        async with envoy.session.get(envoy.url + "/v1/models", headers={"authorization": "Bearer sk-test-acme"}) as got:
            assert [model["id"] for model in (await got.json())["data"]] == ["llama"]


async def test_a_large_body_goes_on_whole(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        words = "word " * 60_000
        async with await envoy.post({**CHAT, "messages": [{"role": "user", "content": words}]}) as answer:
            assert answer.status == 200, await answer.text()
        assert engine.requests[0].body["messages"][0]["content"] == words


async def test_refusals_have_the_shape_of_openai_and_reach_no_replica(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine, max_body_bytes=100_000) as it, in_front_of(it) as envoy:
        assert (await error_of(envoy, 401, key=None))["code"] == "missing_api_key"
        assert (await error_of(envoy, 401, key="sk-wrong"))["code"] == "invalid_api_key"
        assert (await error_of(envoy, 404, {**CHAT, "model": "other"}))["code"] == "model_not_found"
        assert (await error_of(envoy, 400, {**CHAT, "lora_path": "x"}))["param"] == "lora_path"
        assert (await error_of(envoy, 404, path="/server_info"))["code"] == "unknown_path"
        too_large = {**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}]}
        assert (await error_of(envoy, 413, too_large))["code"] == "request_too_large"
        it.tenants["acme"] = tenant(limits={"requestsPerMinute": 1})
        it.changed()
        async with await envoy.post(CHAT) as answer:
            assert answer.status == 200
        async with await envoy.post(CHAT) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(answer.headers["retry-after"]) > 0
        assert len(engine.requests) == 1
        assert len(await it.records()) == 1


async def test_an_adapter_is_leased_and_named_to_the_engine(tmp_path: Path) -> None:
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it, in_front_of(it.it) as envoy:
        async with await envoy.post({**CHAT, "model": "support"}) as answer:
            assert (answer.status, (await answer.json())["model"]) == (200, "support")
        assert it.engines[0].requests[0].body["lora_path"] == name_of()
        (record,) = await it.it.records()
        assert (record.data.outcome, record.data.adapter) == ("answered", "chat/support")
        assert len(agent.ensured) == 1


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_request_is_held_until_a_replica_comes(tmp_path: Path, body: dict[str, object]) -> None:
    """Far beyond Envoy's default of 200 ms for one message: while bodies are streamed both ways, it sets no limit."""
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        it.pods.clear()
        it.fleet.update("pod-1", None)
        it.changed()
        asked = asyncio.create_task(envoy.post(body))
        await until_held(it.app, 1)
        await asyncio.sleep(1.0)  # Envoy's limit passes
        assert not asked.done()
        it.pods["chat/llama-1"] = replica(1)
        it.changed()
        it.hear(1)
        async with await asked as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.attempts) == ("answered", 1)
        assert record.data.hold_ms is not None
        assert record.data.hold_ms >= 1000


async def test_a_client_that_leaves_frees_its_place_in_the_queue(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it, in_front_of(it) as envoy:
        it.pods.clear()
        it.fleet.update("pod-1", None)
        it.changed()
        asked = asyncio.create_task(envoy.post(STREAM))
        await until_held(it.app, 1)
        asked.cancel()
        await until_held(it.app, 0)
        (record,) = await it.records()
        assert (record.data.outcome, record.data.attempts) == ("cancelled", 0)


async def test_a_client_that_leaves_its_stream_pays_for_what_it_got(tmp_path: Path) -> None:
    async def endless(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.gone.wait()

    engine = ScriptedEngine(endless)
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        answer = await envoy.post(STREAM)
        await anext(lines(answer))
        answer.close()
        async with asyncio.timeout(20):
            await engine.requests[0].gone.wait()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.input_tokens, record.data.output_tokens) == ("cancelled", 7, 1)
        assert not it.app.demand.demand(MODEL.uid).in_flight


async def test_an_engines_error_has_openais_shape_and_no_tokens(tmp_path: Path) -> None:
    async def refuse(request: EngineRequest) -> None:
        await request.answer(400, b'{"object":"error","message":"too long","type":"BadRequestError","code":400}')

    async with gateway(tmp_path, ScriptedEngine(refuse)) as it, in_front_of(it) as envoy:
        assert (await error_of(envoy, 400))["message"] == "too long"
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("rejected", "none")


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_replica_that_is_gone_is_an_error_that_sdks_retry(tmp_path: Path, body: dict[str, object]) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        engine.die()
        assert (await error_of(envoy, 503, body))["code"] == "replica_unavailable"
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", None)


@pytest.mark.parametrize("way", ["its process ends", "its connection is lost", "the client leaves"])
async def test_a_stream_that_breaks_off_is_the_replicas_failure_only_if_that_has_ended(
    tmp_path: Path, way: str
) -> None:
    """Envoy ends its conversation with the gateway alike in all of these."""

    async def begin(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.gone.wait()

    engine = ScriptedEngine(begin)
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        async with await envoy.post(STREAM) as answer:
            events = lines(answer)
            await anext(events)
            if way == "its process ends":
                engine.die()
            elif way == "its connection is lost":
                engine.requests[0].writer.transport.abort()
            if way != "the client leaves":
                with pytest.raises(ClientPayloadError):
                    await anext(events)
            if way == "its process ends":
                it.hear(1, phase="loading")  # as its agent sees it then
        (record,) = await it.records()
        assert (record.data.input_tokens, record.data.output_tokens) == (7, 1)
        failed = way == "its process ends"
        assert record.data.outcome == ("failed" if failed else "cancelled")
        cause = "replica_ended" if failed else "unknown"
        assert it.metric("shoal_gateway_broken_off_total") == 1
        assert it.metric("shoal_gateway_broken_off_total", cause=cause) == 1
        assert it.metric("shoal_gateway_requests_total", outcome="failed") == failed
        assert it.metric("shoal_gateway_errors_total", reason="replica_lost") == failed


async def test_a_stream_whose_replica_stalls_ends_when_its_agent_says_so(tmp_path: Path) -> None:
    """Not when Envoy speaks next, which is when the engine is killed or the client leaves."""

    async def begin(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.gone.wait()

    engine = ScriptedEngine(begin)
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        asked = asyncio.create_task(envoy.post(STREAM))
        await until_async(lambda: bool(engine.requests))
        await asyncio.sleep(0.5)  # the head of the answer has come by then, and nothing of its body
        it.hear(1, phase="stalled")
        async with asyncio.timeout(20):
            async with await asked as answer:
                assert answer.status == 503
            (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", None)


async def test_an_answer_that_takes_too_long_ends_for_the_client_and_at_the_engine(tmp_path: Path) -> None:
    """With an error event at once, as on the gateway's own port. An Envoy whose processor only goes away passes on the
    rest as it comes from the engine: not metered, and without a limit."""
    sent = 0

    async def endless(request: EngineRequest) -> None:
        nonlocal sent
        await request.begin_stream()
        while not request.gone.is_set():
            sent += 1
            await request.chunk(request.delta("a", sent))
            await asyncio.sleep(0.02)

    engine = ScriptedEngine(endless)
    async with gateway(tmp_path, engine, request_seconds=0.5) as it, in_front_of(it) as envoy:
        async with asyncio.timeout(20), await envoy.post(STREAM) as answer:
            *events, last = [json.loads(event) async for event in lines(answer)]
        assert last["error"]["code"] == "timeout"
        async with asyncio.timeout(20):
            await engine.requests[0].gone.wait()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", len(events))
        assert it.metric("shoal_gateway_errors_total", reason="timeout") == 1


async def test_a_whole_answer_that_is_left_is_recorded(tmp_path: Path) -> None:
    async def never(request: EngineRequest) -> None:
        await request.gone.wait()

    engine = ScriptedEngine(never)
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        asked = asyncio.create_task(envoy.post(CHAT))
        async with asyncio.timeout(20):
            while not engine.requests:
                await asyncio.sleep(0.005)
        asked.cancel()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("cancelled", "estimated")


async def test_without_a_gateway_nothing_is_served(tmp_path: Path) -> None:
    """FailClose: no request passes an Envoy that gets no answer."""
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        it.ready = False
        async with await envoy.post(CHAT) as answer:
            assert answer.status >= 500
        it.ready = True
        await envoy.processor.stop(0)
        async with await envoy.post(CHAT) as answer:
            assert answer.status >= 500
        assert engine.requests == []
        assert await it.records(count=0) == []


async def test_a_stopping_gateway_finishes_what_it_began(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slowly(request: EngineRequest) -> None:
        await go_on.wait()
        body = {"id": request.body["rid"], "model": request.model, "choices": [], "usage": USAGE}
        await request.answer(200, json.dumps(body).encode())

    engine = ScriptedEngine(slowly)
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        asked = asyncio.create_task(envoy.post(CHAT))
        async with asyncio.timeout(20):
            while not engine.requests:
                await asyncio.sleep(0.005)
        stopping = asyncio.create_task(envoy.processor.stop(30))
        go_on.set()
        async with await asked as answer:
            assert answer.status == 200
        await stopping
        (record,) = await it.records()
        assert record.data.outcome == "answered"


async def test_the_whole_process_finishes_its_streams_and_then_envoy_refuses(tmp_path: Path) -> None:
    going = asyncio.Event()

    async def slow(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await going.wait()
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    engine = ScriptedEngine(slow)
    async with serving(tmp_path, engine, ext_proc=True, ext_proc_port=0) as whole:
        assert whole.ext_proc is not None
        async with asyncio.timeout(20):
            while not whole.ext_proc.port:
                await asyncio.sleep(0.01)
        async with asking(whole.ext_proc) as envoy:
            answer = await envoy.post({**STREAM, "model": "llama"})
            events = lines(answer)
            await anext(events)
            whole.stop()
            async with asyncio.timeout(30):
                while not whole.server.should_exit:
                    await asyncio.sleep(0.01)
            async with await envoy.post({**CHAT, "model": "llama"}) as refused:
                assert refused.status == 500  # Envoy's own: the port takes nothing more
            going.set()
            assert [event async for event in events][-1] == b"[DONE]"
    assert len(engine.requests) == 1


async def test_a_gateway_that_dies_under_load_leaves_no_answer_without_a_record(tmp_path: Path) -> None:
    """Two gateways with TLS, and an Envoy that asks those whose health check is good, as data planes do."""

    async def slowly(request: EngineRequest) -> None:
        await request.begin_stream()
        for count in range(1, 6):
            await asyncio.sleep(0.02)
            await request.chunk(request.delta("a", count))
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    pki, engine = InstallationPKI(), ScriptedEngine(slowly)
    for name in ("a", "b", "tls"):
        (tmp_path / name).mkdir()
    pki.write(tmp_path / "tls", process("gateway"))
    certificate = PortCertificate(tmp_path / "tls")
    got: list[tuple[int, str | None, bool]] = []
    async with (
        gateway(tmp_path / "a", engine) as first,
        gateway(tmp_path / "b", engine) as second,
        listening(first, certificate) as dying,
        listening(second, certificate) as living,
    ):
        ports = [("127.0.0.1", each.port) for each in (dying, living)]
        async with envoy(Processors(ports, trust=pki.trust, watched=True)) as it:

            async def client(requests: int) -> None:
                for _ in range(requests):
                    answer = await it.post(STREAM)
                    whole = False
                    with contextlib.suppress(ClientPayloadError):
                        whole = b"[DONE]" in [event async for event in lines(answer)]
                    answer.close()
                    got.append((answer.status, answer.headers.get("x-shoal-request-id"), whole))

            async def death() -> None:
                while len(got) < 20:
                    await asyncio.sleep(0.005)
                await dying.stop(0)

            await asyncio.gather(death(), *(client(10) for _ in range(8)))
            # Envoy asks the dead one until its health check has failed.
            async with asyncio.timeout(30):
                await client(4)
                while not all(whole for _, _, whole in got[-4:]):
                    await client(1)
        ids = [request for status, request, _ in got if status == 200 and request is not None]
        complete = {request for _, request, came in got if came and request is not None}
        known = [record.data for each in (first, second) for record in await each.records(count=1)]
        # The dead one's requests end when it notices; all have reached the engine or none of it.
        async with asyncio.timeout(20):
            while not set(ids) <= {data.request_id for data in known} or len(known) < len(engine.requests):
                await asyncio.sleep(0.02)
                known = [record.data for each in (first, second) for record in await each.records(count=1)]
    by_id = {data.request_id: data for data in known}
    assert len(by_id) == len(known) >= len(engine.requests)
    assert {(by_id[id].outcome, by_id[id].output_tokens) for id in complete} == {("answered", 3)}
    # The gateway had passed some of these on to their end.
    assert {by_id[id].outcome for id in set(ids) - complete} <= {"cancelled", "answered"}
    refused = [request for status, request, _ in got if status != 200]
    assert set(refused) <= {None}, "Envoy's own errors: no gateway has decided on these"
    assert len(got) >= 84
    assert len(complete) < len(got), "somebody was at the gateway that died"
    assert got[-4:] == [(200, request, True) for _, request, _ in got[-4:]], "the other one goes on"


async def test_an_envoy_that_is_set_up_in_another_way_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    mode = {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"}
    async with gateway(tmp_path, engine) as it, in_front_of(it, serves=500, processing_mode=mode) as envoy:
        assert (await error_of(envoy, 500))["code"] == "proxy_misconfigured"
        assert engine.requests == []


async def until_held(app: Gateway, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(room.held.requests for room in app.holds.queues.values()) != count:
            await asyncio.sleep(0.005)
