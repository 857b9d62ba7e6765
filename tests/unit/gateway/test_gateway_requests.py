"""What a client of the gateway sees, request by request."""

import asyncio
import dataclasses
import json
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.api import keys
from shoal.core.hold.limits import Limits
from shoal.core.routing.resolve import ServedModel
from shoal.gateway import preparation, sse
from shoal.gateway.app import GatewayApp
from shoal.gateway.upstream import UpstreamAddress
from tests.support.gateway import API_KEY, INSTALL_KEY, MODEL, gateway, lines, replica, tenant
from tests.support.scripted_engine import USAGE, EngineRequest, ScriptedEngine, serve_normally

NOBODY_WAITS = Limits(max_requests=0)
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_load_balancer_sees_whether_the_gateway_takes_requests_without_a_key(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        for method, body in (("GET", "ok\n"), ("HEAD", "")):
            async with it.session.request(method, f"{it.url}/healthz") as answer:
                assert (answer.status, await answer.text()) == (200, body)
        it.ready = False
        async with it.session.get(f"{it.url}/healthz") as answer:
            assert (answer.status, await answer.text()) == (503, "not ready\n")
        async with it.session.post(f"{it.url}/healthz") as answer:
            assert answer.status == 404
        assert it.app.in_flight == 0


async def test_answers_and_records(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        response = await it.post(CHAT, headers={"x-request-id": "mine-1", "x-override-priority": "9"})
        answer = await response.json()
        assert response.status == 200
        assert answer["model"] == "llama"
        # what looks like JSON inside the text stays the text
        assert answer["choices"][0]["message"]["content"] == 'abc "model":"chat/llama" "usage":{'
        assert response.headers["x-request-id"] == "mine-1"
        assert "x-shoal-replica" not in response.headers
        (record,) = await it.records()
        data = record.data
        assert response.headers["x-shoal-request-id"] == data.request_id == answer["id"]
        assert (data.tenant, data.external_id, data.key_name) == ("acme", "cus_1", "prod")
        assert (data.model, data.model_requested, data.client_request_id) == ("chat/llama", "llama", "mine-1")
        assert (data.input_tokens, data.cached_tokens, data.output_tokens) == (7, 4, 3)
        assert (data.outcome, data.status, data.count_source, data.attempts) == ("answered", 200, "final", 1)
        assert (data.replica, data.node, data.gpu_class) == ("chat/llama-1", "node-1", "l4-24gb")
        assert data.engine_boot == "boot-1"
        assert record.source == "shoal"
        assert record.id == f"{data.request_id}:final"
        (opened,) = await it.records("open")
        assert opened.data.outcome is None
        sent = engine.requests[0]
        assert sent.headers["authorization"] == f"Bearer {keys.derive(INSTALL_KEY, 'gateway', 'uid-llama')}"
        assert "x-override-priority" not in sent.headers
        assert sent.body["rid"] == data.request_id


async def test_streams_and_strips_what_was_not_asked_for(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        response = await it.post({**CHAT, "stream": True, "stream_options": {"include_usage": False}})
        got = [line async for line in lines(response)]
        assert got[-1] == b"[DONE]"
        chunks = [json.loads(line) for line in got[:-1]]
        assert [c["choices"][0]["delta"]["content"] for c in chunks] == ["a", "b", "c"]
        assert all(c["model"] == "llama" and "usage" not in c for c in chunks)
        assert engine.requests[0].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        (record,) = await it.records()
        assert (record.data.input_tokens, record.data.cached_tokens, record.data.output_tokens) == (7, 4, 3)
        assert record.data.count_source == "final"
        assert record.data.ttft_ms is not None


@pytest.mark.parametrize(
    ("options", "in_chunks", "closing"),
    [({"include_usage": True}, False, True), ({"include_usage": True, "continuous_usage_stats": True}, True, True)],
)
async def test_usage_that_was_asked_for_stays(tmp_path: Path, options: dict, in_chunks: bool, closing: bool):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        response = await it.post({**CHAT, "stream": True, "stream_options": options})
        chunks = [json.loads(line) async for line in lines(response) if line != b"[DONE]"]
        assert all(("usage" in c) == in_chunks for c in chunks if c["choices"])
        assert any(not c["choices"] for c in chunks) == closing
        assert chunks[-1]["usage"]["prompt_tokens"] == 7


async def test_what_means_nothing_to_an_engine_does_not_reach_it(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        beside = {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "x", "n": None}
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        response = await it.post({**CHAT, "temperature": 0.5, **kwargs, **beside})
        assert response.status == 200
        sent = engine.requests[0].body
        assert set(sent) == {"messages", "temperature", "chat_template_kwargs", "model", "rid", "cache_salt"}
        assert sent["model"] == "chat/llama"


@pytest.mark.parametrize(
    ("given", "sent"), [({"path": "a"}, '{"path":"a"}'), ({}, "{}"), ("", "{}"), ('{"path": 1}', '{"path": 1}')]
)
async def test_arguments_of_earlier_calls_reach_each_engine_as_text(tmp_path: Path, given: object, sent: str):
    engine = ScriptedEngine()
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": given}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    async with gateway(tmp_path, engine) as it:
        assert (await it.post({**CHAT, "messages": [*CHAT["messages"], *turns]})).status == 200
        assert engine.requests[0].body["messages"][1]["tool_calls"][0]["function"]["arguments"] == sent


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_what_a_model_thought_has_the_name_that_each_engine_reads(tmp_path: Path, name: str):
    engine = ScriptedEngine()
    turns = [*CHAT["messages"], {"role": "assistant", "content": "x", name: "Hm."}, *CHAT["messages"]]
    async with gateway(tmp_path, engine) as it:
        assert (await it.post({**CHAT, "messages": turns})).status == 200
        sent = engine.requests[0].body["messages"][1]
        assert (sent["reasoning_content"], sent["reasoning"]) == ("Hm.", "Hm.")


async def test_completions_and_embeddings(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "chat/llama", "input": ["x", "y"]}, "/v1/embeddings")
        assert (await response.json())["model"] == "chat/llama"
        assert "rid" not in engine.requests[0].body
        response = await it.post({"model": "llama", "prompt": "x"}, "/v1/completions")
        assert response.status == 200
        first, second = await it.records(count=2)
        assert (first.data.endpoint, first.data.input_tokens, first.data.cached_tokens) == ("/v1/embeddings", 5, None)
        assert second.data.endpoint == "/v1/completions"


@pytest.mark.parametrize(
    ("said", "code", "shown"),
    [
        (
            "Model '/shoal/models/model' does not support matryoshka representation, changing output dimensions will",
            "unsupported_dimensions",
            "leave it out",
        ),
        (
            "Model '/shoal/models/model' only supports [256, 512] matryoshka dimensions, using other output",
            "unsupported_dimensions",
            "it has [256, 512] only",
        ),
        ("Provided dimensions are greater than max embedding dimension: 64", None, "dimension: 64"),
    ],
)
async def test_dimensions_that_a_model_does_not_have(tmp_path: Path, said: str, code: str | None, shown: str):
    async def refuse(request: EngineRequest) -> None:
        error = {"object": "error", "message": said, "type": "BadRequestError", "param": None, "code": 400}
        await request.answer(400, json.dumps(error).encode())

    engine = ScriptedEngine(refuse)
    async with gateway(tmp_path, engine) as it:
        response = await it.post({"model": "llama", "input": "x", "dimensions": 9, "user": "me"}, "/v1/embeddings")
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, code)
        assert shown in error["message"]
        assert "/shoal" not in error["message"]
        assert engine.requests[0].body == {"model": "chat/llama", "input": "x", "dimensions": 9}
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source) == ("rejected", "none")


async def test_an_engine_for_embeddings_gets_nothing_else(tmp_path: Path):
    """SGLang dies of a chat request when it was started with --is-embedding."""
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.models["chat/llama"] = dataclasses.replace(MODEL, capabilities=frozenset({"embed"}))
        it.changed()
        refused = await it.post(CHAT)
        assert refused.status == 400
        assert "/v1/embeddings" in (await refused.json())["error"]["message"]
        assert engine.requests == []
        assert (await it.post({"model": "llama", "input": "x"}, "/v1/embeddings")).status == 200


async def test_models(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.models["chat/other"] = ServedModel("chat/other", "u2", "chat/other", ("other",), None)
        it.changed()
        headers = {"authorization": f"Bearer {API_KEY}"}
        listed = await (await it.session.get(f"{it.url}/v1/models", headers=headers)).json()
        assert [m["id"] for m in listed["data"]] == ["llama"]
        assert listed["object"] == "list"
        for name in ("llama", "chat/llama"):
            one = await it.session.get(f"{it.url}/v1/models/{name}", headers=headers)
            assert (await one.json())["id"] == name
        unknown = await it.session.get(f"{it.url}/v1/models/other", headers=headers)
        assert unknown.status == 404
        assert (await it.session.get(f"{it.url}/v1/models")).status == 401


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"{", 400, "invalid_json", "not valid JSON"),
        (b"", 400, "invalid_json", "not valid JSON"),
        (b"\xff\xfe", 400, "invalid_json", "not valid JSON"),
        (b"[1]", 400, "invalid_json", "must be a JSON object"),
        (b'"x"', 400, "invalid_json", "must be a JSON object"),
        (b"[" * 480 + b"]" * 480, 413, "request_too_complex", "more than 128 levels"),
        ({"messages": []}, 400, "missing_model", "You must provide `model`"),
        ({"model": ""}, 400, "missing_model", "You must provide `model`"),
        ({"model": 3}, 400, "invalid_type", "`model` must be a string"),
        ({"model": "llama", "stream": "yes"}, 400, "invalid_type", "`stream` must be true or false"),
        ({"model": "llama", "stream_options": 1}, 400, "invalid_type", "`stream_options` must be an object"),
        (
            {"model": "gpt-9"},
            404,
            "model_not_found",
            "The model `gpt-9` does not exist or you do not have access to it.",
        ),
        ({"model": "chat/secret"}, 404, "model_not_found", "The model `chat/secret` does not exist"),
        (b" " * 2000, 413, "request_too_large", "larger than 1000 bytes"),
    ],
)
async def test_bad_bodies(tmp_path: Path, body: object, status: int, code: str, message: str):
    async with gateway(tmp_path, ScriptedEngine(), max_body_bytes=1000 if status == 413 else 100_000) as it:
        response = await it.post(body)
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (status, code)
        assert message in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert await it.records("", count=0) == []


async def test_a_body_without_length_is_bounded_too(tmp_path: Path):
    async def endless():
        for _ in range(100):
            yield b"x" * 1000

    async with gateway(tmp_path, ScriptedEngine(), max_body_bytes=5000) as it:
        response = await it.session.post(
            f"{it.url}/v1/chat/completions", data=endless(), headers={"authorization": f"Bearer {API_KEY}"}
        )
        assert response.status == 413
        assert it.app.body_budget.held == 0


@pytest.mark.parametrize(
    ("key", "spec", "status", "code", "message"),
    [
        (None, {}, 401, "missing_api_key", "No API key"),
        ("wrong", {}, 401, "invalid_api_key", "Incorrect API key"),
        ("käse-ключ", {}, 401, "invalid_api_key", "Incorrect API key"),
        (API_KEY, {"expires": datetime(2020, 1, 1, tzinfo=UTC)}, 401, "expired_api_key", "has expired"),
        (API_KEY, {"disabled": True}, 401, "disabled_api_key", "is disabled"),
        (API_KEY, {"suspended": True}, 403, "tenant_suspended", "is suspended"),
    ],
)
async def test_bad_keys(tmp_path: Path, key: str | None, spec: dict, status: int, code: str, message: str):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.tenants["acme"] = tenant(**spec)
        it.changed()
        response = await it.post(CHAT, key=key)
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (status, code)
        assert message in error["message"]
        assert await it.records("", count=0) == []


async def test_a_change_of_the_tenant_holds_for_the_next_request(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        assert (await it.post(CHAT)).status == 200
        it.tenants["acme"] = tenant(suspended=True)
        it.directory.mark("tenants")
        await asyncio.sleep(0)
        assert (await it.post(CHAT)).status == 403


async def test_unknown_paths_and_methods(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        response = await it.session.get(f"{it.url}/generate")
        assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_path")
        response = await it.session.get(f"{it.url}/v1/chat/completions")
        assert (response.status, response.headers["allow"]) == (405, "POST")
        response = await it.session.post(f"{it.url}/v1/models")
        assert (response.status, response.headers["allow"]) == (405, "GET")


async def test_the_engines_flat_errors_get_the_right_shape(tmp_path: Path):
    async def refuse(request: EngineRequest) -> None:
        body = {"object": "error", "message": "messages: Field required", "type": "BadRequestError", "code": 400}
        await request.answer(400, json.dumps(body).encode())

    async with gateway(tmp_path, ScriptedEngine(refuse)) as it:
        response = await it.post({**CHAT, "stream": True})
        assert response.status == 400
        assert await response.json() == {
            "error": {
                "message": "messages: Field required",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        }
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status, record.data.input_tokens) == ("rejected", 400, None)


async def test_an_engines_crash_answer(tmp_path: Path):
    async def crash(request: EngineRequest) -> None:
        await request.answer(500, b"Internal Server Error", "text/plain")

    async with gateway(tmp_path, ScriptedEngine(crash)) as it:
        response = await it.post(CHAT)
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "The engine failed on this request."
        assert (await it.records())[0].data.outcome == "failed"


async def test_heads_that_are_too_large_or_no_http(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine(), max_head_bytes=4096) as it:
        for raw, status in (
            (b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 9000 + b"\r\n\r\n", 431),
            (b"nonsense\r\n\r\n", 400),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
            writer.write(raw)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d" % status)
            assert b'"error":{"message"' in answer
            writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (
            b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 100\r\nauthorization: Bearer %s\r\n\r\n{",
            b"HTTP/1.1 408",
        ),
        (b"POST /v1/chat/completions HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
)
async def test_clients_that_do_not_finish_are_dropped(tmp_path: Path, sent: bytes, answer: bytes):
    async with gateway(tmp_path, ScriptedEngine(), body_seconds=0.2) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        writer.write(sent.replace(b"%s", API_KEY.encode()))
        await asyncio.sleep(0.4)
        it.server.sweep()
        async with asyncio.timeout(10):
            try:
                got = await reader.read()
            except ConnectionResetError:
                got = b""
        assert got.startswith(answer)
        assert bool(got) == bool(answer)
        writer.close()
        assert it.app.body_budget.held == 0


async def test_tls(tmp_path: Path):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "tls.crt").write_bytes(certificate.public_bytes(pem))
    (tmp_path / "tls.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    async with gateway(tmp_path, ScriptedEngine(), tls_cert=tmp_path / "tls.crt", tls_key=tmp_path / "tls.key") as it:
        trusting = ssl.create_default_context(cafile=tmp_path / "tls.crt")
        url = f"https://localhost:{it.server.port}/v1/models"
        headers = {"authorization": f"Bearer {API_KEY}"}
        async with it.session.get(url, headers=headers, ssl=trusting) as response:
            assert response.status == 200


async def test_too_many_requests_at_once(tmp_path: Path):
    release = asyncio.Event()

    async def wait(request: EngineRequest) -> None:
        await release.wait()
        await request.answer(200, b'{"model":"chat/llama"}')

    async with gateway(tmp_path, ScriptedEngine(wait), max_requests=1) as it:
        first = asyncio.create_task(it.post(CHAT))
        await it.records("open")
        second = await it.post(CHAT)
        assert (second.status, second.headers["retry-after"]) == (503, "2")
        release.set()
        assert (await first).status == 200


# --- replicas -------------------------------------------------------------------------------------------------------


async def test_no_replica_where_nobody_may_wait(tmp_path: Path):
    async with gateway(tmp_path) as it:
        it.model(limits=NOBODY_WAITS)
        response = await it.post(CHAT)
        error = (await response.json())["error"]
        assert response.status == 503
        assert int(response.headers["retry-after"]) <= 60
        assert error["message"] == "The model `llama` cannot serve right now: it has no replica. Try again."
        it.pods["p"] = replica(1, ready=False)
        it.changed()
        response = await it.post(CHAT)
        assert "no replica is ready yet" in (await response.json())["error"]["message"]
        first, second = await it.records(count=2)
        assert {first.data.outcome, second.data.outcome} == {"refused"}
        assert first.data.replica is None


async def test_pods_of_an_older_model_of_the_same_name_are_not_used(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.model(uid="uid-new", limits=NOBODY_WAITS)
        assert (await it.post(CHAT)).status == 503


async def test_all_streams_down_falls_back_to_ready_pods(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine(), live=False) as it:
        assert (await it.post(CHAT)).status == 200
        assert it.metric("shoal_gateway_fallback_choices_total") == 1


async def test_spreads_over_replicas_by_what_is_in_flight(tmp_path: Path):
    release = asyncio.Event()

    async def wait(request: EngineRequest) -> None:
        await release.wait()
        await request.answer(200, b'{"model":"chat/llama"}')

    engines = [ScriptedEngine(wait), ScriptedEngine(wait), ScriptedEngine(wait)]
    async with gateway(tmp_path, *engines) as it:
        posts = [asyncio.create_task(it.post(CHAT)) for _ in range(9)]
        async with asyncio.timeout(20):
            while sum(len(e.requests) for e in engines) < 9:
                await asyncio.sleep(0.01)
        release.set()
        assert [len(e.requests) for e in engines] == [3, 3, 3]
        assert {(await p).status for p in posts} == {200}


async def refuse_connections(tmp_path: Path) -> int:
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


def failing(how: str):
    async def behave(request: EngineRequest) -> None:
        match how:
            case "reset":
                request.writer.transport.abort()
            case "unavailable":
                await request.answer(503, b'{"object":"error","message":"The request queue is full.","code":503}')
            case "unauthorized":
                await request.answer(401, b'{"error":"Unauthorized"}')
            case "error-event":
                await request.begin_stream()
                await request.chunk(b'data: {"error":{"object":"error","message":"full","code":503}}\n\n')
                await request.chunk(b"data: [DONE]\n\n")
                await request.end_stream()
            case "stream-without-event":
                await request.begin_stream()
                await request.chunk(b": ping\n\n")
                request.writer.transport.abort()
            case _:
                raise AssertionError(how)

    return behave


@pytest.mark.parametrize(
    ("how", "stream", "reason"),
    [
        ("reset", False, "lost"),
        ("unavailable", False, "unavailable"),
        ("unavailable", True, "unavailable"),
        ("unauthorized", False, "unauthorized"),
        ("error-event", True, "unavailable"),
        ("stream-without-event", True, "lost"),
    ],
)
async def test_retries_on_another_replica_before_the_first_byte(tmp_path: Path, how: str, stream: bool, reason: str):
    bad, good = ScriptedEngine(failing(how)), ScriptedEngine()
    async with gateway(tmp_path, bad, good, routing="PrefixHeads") as it:
        for _ in range(2):
            response = await it.post({**CHAT, "stream": stream})
            assert response.status == 200
            assert b'"c' in await response.read() or not stream
        records = await it.records(count=2)
        assert sorted(r.data.attempts for r in records) == [1, 2]
        assert {(r.data.replica, r.data.outcome) for r in records} == {("chat/llama-2", "answered")}
        assert it.metric("shoal_gateway_retries_total", reason=reason) == 1
        assert not it.fleet.in_flight("pod-1")


async def test_a_port_that_is_closed_is_retried_elsewhere(tmp_path: Path):
    bad = ScriptedEngine(port=await refuse_connections(tmp_path))
    async with gateway(tmp_path, bad, ScriptedEngine()) as it:
        assert [(await it.post(CHAT)).status for _ in range(2)] == [200, 200]
        assert it.metric("shoal_gateway_retries_total", reason="connect") == 1


async def test_when_all_replicas_refuse(tmp_path: Path):
    engines = [ScriptedEngine(failing("unavailable")) for _ in range(5)]
    async with gateway(tmp_path, *engines) as it:
        it.model(limits=NOBODY_WAITS)
        response = await it.post(CHAT)
        assert response.status == 503
        assert "no replica could take the request" in (await response.json())["error"]["message"]
        assert sum(len(e.requests) for e in engines) == 3  # attempts are bounded
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status, record.data.attempts) == ("refused", 503, 3)


async def test_an_engine_lost_after_the_first_byte_is_told_and_never_retried(tmp_path: Path):
    async def die(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await asyncio.sleep(0.05)
        request.writer.transport.abort()

    engines = [ScriptedEngine(die), ScriptedEngine(die)]
    async with gateway(tmp_path, *engines) as it:
        response = await it.post({**CHAT, "stream": True})
        got = [json.loads(line) async for line in lines(response)]
        assert got[0]["choices"][0]["delta"]["content"] == "a"
        assert got[-1]["error"]["code"] == "replica_lost"
        assert sum(len(e.requests) for e in engines) == 1
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens, record.data.count_source) == ("failed", 1, "continuous")
        assert record.data.cached_tokens is None  # known only at the end


async def test_a_stream_that_ends_without_done_is_incomplete(tmp_path: Path):
    async def stop_early(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(stop_early)) as it:
        response = await it.post({**CHAT, "stream": True})
        assert b"replica_lost" in await response.read()
        assert (await it.records())[0].data.outcome == "failed"


async def gives_up(request: EngineRequest) -> None:
    """As an engine that is paused: what it ended looks like an answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": 'a "abort"'}, "finish_reason": "abort"}
    if request.body.get("stream"):
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "abort", "matched_stop": None}
        await request.begin_stream()
        if request.body.get("seed", 1):
            await request.chunk(request.delta("a", 1))
            await asyncio.sleep(0.02)
    body = json.dumps(
        {"id": request.body["rid"], "model": request.model, "choices": [choice], "usage": USAGE}, separators=(",", ":")
    )
    if not request.body.get("stream"):
        await request.answer(200, body.encode())
        return
    await request.chunk(b"data: %b\n\n" % body.encode())
    await request.chunk(request.closing())
    await request.chunk(b"data: [DONE]\n\n")
    await request.end_stream()


def test_a_short_chunk_that_says_so_is_looked_at_whole():
    chunk = b'data: {"id":"1","choices":[{"index":0,"finish_reason":"abort"}],"usage":{"prompt_tokens":1}}\n\n'
    assert sse.plain_chunks(chunk.replace(b'"abort"', b"null")) is not None
    assert sse.plain_chunks(chunk) is None
    assert sse.plain_chunks(2 * chunk) is None


@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_engine_gives_up_is_answered_by_another_replica(tmp_path: Path, stream: bool):
    behaviours = [serve_normally, gives_up]

    async def once(request: EngineRequest) -> None:
        await behaviours.pop()(request)

    async with gateway(tmp_path, ScriptedEngine(once), ScriptedEngine(once)) as it:
        response = await it.post({**CHAT, "stream": stream, "seed": 0})
        assert response.status == 200
        assert b'"finish_reason":"abort"' not in await response.read()
        assert it.metric("shoal_gateway_retries_total", reason="aborted") == 1
        (record,) = await it.records()
        assert (record.data.outcome, record.data.attempts) == ("answered", 2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_that_the_engine_gives_up_ends_with_an_error(tmp_path: Path, path: str):
    async with gateway(tmp_path, ScriptedEngine(gives_up)) as it:
        body = {**CHAT, "stream": True}
        raw = await (await it.post(body | ({"max_tokens": 9} if "messages" in path else {"seed": 1}), path)).read()
        assert b"The engine gave the request up; the answer is incomplete." in raw
        assert b"abort" not in raw
        assert (await it.records())[0].data.outcome == "failed"


async def test_an_error_event_in_mid_stream(tmp_path: Path):
    async def fail(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await asyncio.sleep(0.02)
        await request.chunk(b'data: {"error":{"object":"error","message":"out of memory","code":500}}\n\n')
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(fail)) as it:
        response = await it.post({**CHAT, "stream": True})
        got = [line async for line in lines(response)]
        assert json.loads(got[1])["error"]["message"] == "The engine failed on this request."
        assert got[-1] == b"[DONE]"
        assert (await it.records())[0].data.outcome == "failed"


async def test_a_first_error_event_becomes_a_status(tmp_path: Path):
    async def fail(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(b'data: {"error":{"object":"error","message":"too long","code":400}}\n\n')
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(fail)) as it:
        response = await it.post({**CHAT, "stream": True})
        assert (response.status, (await response.json())["error"]["message"]) == (400, "too long")
        assert (await it.records())[0].data.outcome == "rejected"


async def test_a_reset_on_a_reused_connection_is_not_seen(tmp_path: Path):
    engine = ScriptedEngine(keep_alive=0.1)
    async with gateway(tmp_path, engine) as it:
        assert (await it.post(CHAT)).status == 200
        await asyncio.sleep(0.3)
        assert (await it.post(CHAT)).status == 200
        assert engine.connections == 2
        assert {r.data.attempts for r in await it.records(count=2)} == {1}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_sent_again_has_another_id_for_the_engine_and_none_for_the_client(tmp_path: Path, stream: bool):
    async def takes_it_and_breaks_off(request: EngineRequest) -> None:
        if request.body["rid"] in seen:
            await request.answer(400, b'{"object":"error","message":"Duplicate request ID detected","code":400}')
            return
        seen.append(request.body["rid"])
        if len(seen) in (2, 3):  # on a connection that was used before, then on a new one
            request.writer.transport.abort()
        else:
            await serve_normally(request)

    seen: list[str] = []
    async with gateway(tmp_path, ScriptedEngine(takes_it_and_breaks_off)) as it:
        assert (await it.post(CHAT)).status == 200
        response = await it.post({**CHAT, "stream": stream})
        own = response.headers["x-shoal-request-id"]
        text = await response.text()
        assert response.status == 200
        assert seen[1:] == [own, f"{own}.2", f"{own}.3"]
        assert own in text
        assert f"{own}." not in text


async def test_a_stalled_replica_keeps_no_request_that_has_seen_nothing_of_its_answer(tmp_path: Path):
    async def hang(request: EngineRequest) -> None:
        if request.body.get("stream"):
            await request.begin_stream()
            await request.chunk(request.delta("a", 1))
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(hang), ScriptedEngine()) as it:
        it.fleet.update("pod-2", None)
        stream = await it.post({**CHAT, "stream": True})
        whole = asyncio.create_task(it.post(CHAT))
        async with asyncio.timeout(20):
            while it.fleet.in_flight("pod-1") < 2:
                await asyncio.sleep(0.01)
        it.hear(2)
        it.hear(1, phase="stalled")
        assert (await whole).status == 200
        assert it.metric("shoal_gateway_retries_total", reason="stalled") == 1
        assert it.fleet.in_flight("pod-1") == 1  # what was begun is never begun again
        stream.close()


async def test_a_replica_that_stalls_while_it_is_dialled_gets_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = ScriptedEngine()
    async with gateway(tmp_path, first, ScriptedEngine()) as it:
        it.fleet.update("pod-2", None)
        dial = it.pool._connect  # pyright: ignore[reportPrivateUsage]

        async def dialled(target: UpstreamAddress):
            connection = await dial(target)
            if target.port == it.ports["pod-1"]:
                it.hear(2)
                it.hear(1, phase="stalled")
            return connection

        monkeypatch.setattr(it.pool, "_connect", dialled)
        assert (await it.post(CHAT)).status == 200
        assert first.requests == []


async def test_the_kernel_is_asked_to_notice_an_engine_whose_machine_is_gone(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        assert (await it.post(CHAT)).status == 200
        (connection,) = it.pool._idle[UpstreamAddress("127.0.0.1", it.ports["pod-1"])]  # pyright: ignore[reportPrivateUsage]
        assert connection.socket is not None
        option = connection.socket.getsockopt
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        seconds = option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + option(
            socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
        ) * option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert seconds <= 20
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000


async def test_connections_are_reused(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        for stream in (False, True, False):
            await (await it.post({**CHAT, "stream": stream})).read()
        assert engine.connections == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_engines_work(tmp_path: Path, stream: bool):
    aborted = asyncio.Event()

    async def endless(request: EngineRequest) -> None:
        if stream:
            await request.begin_stream()
            for n in range(1, 4):
                await request.chunk(request.delta("x", n))
        await request.gone.wait()
        aborted.set()

    engine = ScriptedEngine(endless)
    async with gateway(tmp_path, engine) as it:
        if stream:
            response = await it.post({**CHAT, "stream": True})
            await response.content.readline()
            response.close()
        else:
            asked = asyncio.create_task(it.post(CHAT))
            async with asyncio.timeout(20):
                while not engine.requests:
                    await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        async with asyncio.timeout(20):
            await aborted.wait()
        (record,) = await it.records()
        assert record.data.outcome == "cancelled"
        assert (record.data.output_tokens, record.data.count_source) == (
            (3, "continuous") if stream else (None, "estimated")
        )
        assert it.app.in_flight == 0


async def test_a_client_that_leaves_once_it_has_all_of_its_answer_was_answered(tmp_path: Path):
    """The SDK closes at `[DONE]`, perhaps before the engine has ended its own answer."""

    async def lingers(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1) + request.closing() + b"data: [DONE]\n\n")
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(lingers)) as it:
        response = await it.post({**CHAT, "stream": True})
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                break
        response.close()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source, record.data.output_tokens) == ("answered", "final", 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_has_a_deadline(tmp_path: Path, stream: bool):
    async def slow(request: EngineRequest) -> None:
        if stream:
            await request.begin_stream()
            await request.chunk(request.delta("x", 1))
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(slow), request_seconds=1.5) as it:
        response = await it.post({**CHAT, "stream": stream})
        text = await response.read()
        assert b"took longer than 1.5 s" in text
        assert response.status == (200 if stream else 504)
        assert (await it.records())[0].data.outcome == "failed"


async def test_checkpoints_while_it_streams(tmp_path: Path):
    async def slow(request: EngineRequest) -> None:
        await request.begin_stream()
        for n in range(1, 14):
            await request.chunk(request.delta("x", n))
            await asyncio.sleep(0.1)
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(slow)) as it:
        response = await it.post({**CHAT, "stream": True})
        await response.read()
        found = {record.id.rpartition(":")[2]: record for record in await it.records("checkpoint")}
        record = found["1"]  # where chunks come slowly there may be another
        assert record.id.endswith(":checkpoint:1")
        assert 1 <= (record.data.output_tokens or 0) <= 13
        assert record.data.outcome is None


async def test_a_slow_reader_slows_the_engine_and_fills_no_memory(tmp_path: Path):
    sent = 0
    finished = asyncio.Event()

    async def flood(request: EngineRequest) -> None:
        nonlocal sent
        await request.begin_stream()
        for n in range(2000):
            await request.chunk(request.delta("y" * 50_000, n))
            sent += 50_000
        finished.set()

    async with gateway(tmp_path, ScriptedEngine(flood)) as it:
        response = await it.post({**CHAT, "stream": True})
        before = -1
        async with asyncio.timeout(20):
            while before != sent:
                before = sent
                await asyncio.sleep(0.5)
        assert not finished.is_set()
        assert sent < 40_000_000
        response.close()
        assert (await it.records())[0].data.outcome == "cancelled"


@pytest.mark.parametrize("where", ["parse", "prompt_of", "choose"])
async def test_a_mistake_of_our_own_is_logged_without_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    """Python's errors repeat the value at fault, which may be a prompt."""

    def fail(*_: object, **__: object) -> None:
        raise KeyError("canary-prompt")

    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.pods["chat/llama-2"] = replica(2)
        it.changed()
        monkeypatch.setattr(type(it.fleet) if where == "choose" else preparation, where, fail)
        with structlog.testing.capture_logs() as logs:
            response = await it.post({**CHAT, "messages": [{"role": "user", "content": "canary-prompt"}]})
        assert response.status == 500
        error = (await response.json())["error"]
        assert (error["message"], error["code"]) == ("The gateway failed.", "internal_error")
        # What has a beginning has an end.
        rows = await it.records("final", 1 if where == "choose" else 0)
        assert len(await it.records("open", 0)) == len(rows)
    (said,) = [entry for entry in logs if entry["event"] == "request failed"]
    assert said["error"] == "KeyError"
    assert said["at"][-1].endswith(" fail")
    assert "canary" not in str(logs)


async def test_nothing_is_served_that_cannot_be_recorded(tmp_path: Path):
    (tmp_path / "spool").write_text("a file where the folder should be")
    engine = ScriptedEngine()
    async with engine.running():
        from tests.support.gateway import GatewayUnderTest

        it = GatewayUnderTest(tmp_path, [engine])
        it.changed()
        it.spool.start()
        sent: list[dict] = []

        async def receive():
            return {"type": "http.request", "body": json.dumps(CHAT).encode(), "more_body": False}

        async def send(message: dict):
            sent.append(message)

        headers = [(b"authorization", f"Bearer {API_KEY}".encode())]
        scope = {"type": "http", "path": "/v1/chat/completions", "method": "POST", "headers": headers}
        await GatewayApp(it.app)(scope, receive, send)
        await it.spool.stop()
        assert sent[0]["status"] == 503
        assert b"cannot record usage" in sent[1]["body"]
        assert engine.requests == []
