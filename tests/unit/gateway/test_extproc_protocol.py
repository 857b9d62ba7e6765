"""What the protocol of endpoint pickers (Gateway API Inference Extension, proposal 004, v1.0.0) asks of a picker, case
by case, against the gateway's port; and what a caller that is no Envoy may do to it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict

from shoal.gateway.app import GatewayApp
from shoal.gateway.extproc.protocol import external_processor_pb2 as pb
from shoal.gateway.extproc.protocol.external_processor_pb2_grpc import ExternalProcessorStub
from shoal.gateway.extproc.server import ExtProcServer, PortCertificate
from shoal.net.pki import CertificatePair
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, tenant
from tests.support.mutual import InstallationPKI, process
from tests.support.provider import Provider, beside
from tests.support.recordings import TYPE, asked, read_form, wav
from tests.support.routes import target, two_models
from tests.support.scripted_engine import ScriptedEngine

CHAT = json.dumps({"model": "chat/llama", "messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = json.dumps({**json.loads(CHAT), "stream": True}).encode()
DESTINATION = "x-gateway-destination-endpoint"
HEALTH = "/grpc.health.v1.Health/Check"
OUTSIDE = {"external": {"name": "outside"}}
_END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it


class Caller:
    """One conversation, said by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = ExternalProcessorStub(channel)
        self.call: Any = stub.Process()

    async def ask(
        self,
        body: bytes = CHAT,
        *,
        subset: list[str] | None = None,
        key: str = API_KEY,
        path: str = "/v1/chat/completions",
        **headers: str,
    ) -> None:
        await self.say_head(path, subset=subset, key=key, **headers)
        await self.call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)))

    async def say_head(self, path: str, *, subset: list[str] | None = None, key: str = API_KEY, **headers: str) -> None:
        said = pb.ProcessingRequest()
        values = {":method": "POST", ":path": path, "authorization": f"Bearer {key}"}
        values |= {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in values.items():
            said.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        if subset is not None:
            hint: Any = said.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": subset})
        await self.call.write(said)

    async def hear(self) -> pb.ProcessingResponse:
        async with asyncio.timeout(20):
            return await self.call.read()

    async def refused(self) -> tuple[int, str]:
        told = (await self.hear()).immediate_response
        return told.status.code, json.loads(told.body)["error"]["code"]

    async def picked(self) -> tuple[str, str]:
        """The endpoint in the header, and the one in the metadata."""
        told = await self.hear()
        wanted = told.request_headers.response.header_mutation.set_headers
        (header,) = [each.header.raw_value.decode() for each in wanted if each.header.key == DESTINATION]
        return header, MessageToDict(told.dynamic_metadata)["envoy.lb"][DESTINATION]

    async def stream(self, body: bytes = STREAM, headers: str = "text/event-stream") -> str:
        """Asks for a stream, which the replica then begins. Returns the endpoint that was picked."""
        await self.ask(body)
        picked, _ = await self.picked()
        await self.hear()  # the body for the replica
        head = pb.ProcessingRequest()
        head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        head.response_headers.headers.headers.add(key="content-type", raw_value=headers.encode())
        await self.call.write(head)
        return picked

    async def part(self, tokens: int) -> None:
        """The replica's stream goes on: it has so many tokens now."""
        usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
        event = {"object": "chat.completion.chunk", "model": "chat/llama", "choices": [choice], "usage": usage}
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        await self.call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=data)))

    async def told_body(self) -> tuple[bytes, bool]:
        """The next part of the answer to the client, and whether it is the last."""
        while (heard := await self.hear()).WhichOneof("response") != "response_body":
            assert heard.WhichOneof("response") == "response_headers", heard
        part = heard.response_body.response.body_mutation.streamed_response
        return part.body, part.end_of_stream


class Picker:
    def __init__(self, it: GatewayUnderTest, server: ExtProcServer, channel: grpc.aio.Channel) -> None:
        self.it, self.server, self.channel = it, server, channel

    def endpoint(self, number: int) -> str:
        return f"127.0.0.1:{self.it.ports[f'pod-{number}']}"

    async def health(self, service: str = "") -> int:
        asked = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
        channel: Any = self.channel
        answer: bytes = await channel.unary_unary(HEALTH)(asked, timeout=10)
        return answer[1]


@asynccontextmanager
async def picker(tmp_path: Path, engines: int = 2, most: int = 100, **settings: Any) -> AsyncGenerator[Picker]:
    async with (
        gateway(tmp_path, *(ScriptedEngine() for _ in range(engines)), **settings) as it,
        asked_by_proxies(it, most) as found,
    ):
        yield found


@asynccontextmanager
async def asked_by_proxies(it: GatewayUnderTest, most: int = 100) -> AsyncGenerator[Picker]:
    server = ExtProcServer(
        GatewayApp(it.app, lambda: it.ready),
        lambda: it.ready,
        host="127.0.0.1",
        port=0,
        body_seconds=it.settings.body_seconds,
        most_streams=most,
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Picker(it, server, channel)
    finally:
        await server.stop(0)


async def test_header_and_metadata_name_the_same_endpoint(tmp_path: Path) -> None:
    async with picker(tmp_path) as it:
        caller = Caller(it.channel)
        await caller.ask()
        header, metadata = await caller.picked()
        assert header == metadata
        assert header in {it.endpoint(1), it.endpoint(2)}
        body = (await caller.hear()).request_body.response.body_mutation.streamed_response
        assert body.end_of_stream
        assert json.loads(body.body)["model"] == "chat/llama"


async def test_a_form_is_sent_on_in_parts(tmp_path: Path) -> None:
    audio = wav(20)
    async with picker(tmp_path) as it:
        it.it.model(capabilities=frozenset({"transcribe"}))
        caller = Caller(it.channel)
        await caller.ask(asked(audio), path="/v1/audio/transcriptions", content_type=TYPE.decode())
        wanted = (await caller.hear()).request_headers.response.header_mutation.set_headers
        headers = {each.header.key: each.header.raw_value.decode() for each in wanted}
        parts: list[bytes] = []
        ended = False
        while not ended:
            part = (await caller.hear()).request_body.response.body_mutation.streamed_response
            assert len(part.body) <= 60 * 1024
            parts.append(part.body)
            ended = part.end_of_stream
        assert len(parts) > 10
        found = read_form(headers["content-type"], b"".join(parts))
        assert found == {"model": "chat/llama", "file": ("audio.wav", "audio/wav", audio)}


@pytest.mark.parametrize("number", [1, 2])
async def test_only_endpoints_of_the_subset_are_picked(tmp_path: Path, number: int) -> None:
    async with picker(tmp_path) as it:
        for _ in range(4):
            caller = Caller(it.channel)
            await caller.ask(subset=["127.0.0.1:9", it.endpoint(number)])
            assert (await caller.picked())[0] == it.endpoint(number)


@pytest.mark.parametrize("subset", [[], ["127.0.0.1:9", "10.1.1.1:30000"]], ids=["empty", "others"])
async def test_a_subset_without_a_replica_is_503(tmp_path: Path, subset: list[str]) -> None:
    async with picker(tmp_path) as it:
        caller = Caller(it.channel)
        await caller.ask(subset=subset)
        assert await caller.refused() == (503, "no_replica")


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_canary_whose_replicas_a_proxy_does_not_reach_has_not_failed(tmp_path: Path, fallback: bool) -> None:
    limits = {"errorPercent": 20, "minRequests": 10}
    canary = {"target": target("other"), "percent": 100, "haltOn": limits}
    rule: dict[str, Any] = {"targets": [target("llama")], "canary": canary}
    if fallback:
        rule["fallback"] = {"targets": [target("llama")]}
    front = json.dumps({"model": "front", "messages": [{"role": "user", "content": "hi"}]}).encode()
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it, asked_by_proxies(it) as picking:
        for _ in range(4):
            caller = Caller(picking.channel)
            await caller.ask(front, subset=[picking.endpoint(1)])
            if fallback:
                assert (await caller.picked())[0] == picking.endpoint(1)
            else:
                assert await caller.refused() == (503, "no_replica")
        assert not it.app.canaries.halts
        caller = Caller(picking.channel)
        await caller.ask(front, subset=[picking.endpoint(1), picking.endpoint(2)])
        assert (await caller.picked())[0] == picking.endpoint(2)


@pytest.mark.parametrize(("status", "most"), [(502, 9), (503, 9), (504, 9), (500, 2)])
async def test_errors_that_may_be_a_proxys_own_halt_a_canary_only_where_nothing_is_answered(
    tmp_path: Path, status: int, most: int
) -> None:
    """A proxy whose route is too short, or that does not reach the replica's port. `most`: as many halt nothing."""
    canary = {"target": target("other"), "percent": 100, "haltOn": {"errorPercent": 20, "minRequests": 10}}
    front = json.dumps({"model": "front", "messages": [{"role": "user", "content": "hi"}]}).encode()
    rule = {"targets": [target("llama")], "canary": canary}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it, asked_by_proxies(it) as picking:
        for number in range(most + 1):
            assert not it.app.canaries.halts, number
            caller = Caller(picking.channel)
            await caller.ask(front)
            assert (await caller.picked())[0] == picking.endpoint(2)
            await caller.hear()
            head = pb.ProcessingRequest()
            head.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
            head.response_headers.end_of_stream = True  # the gateway may end the conversation with the head
            await caller.call.write(head)
            assert (await caller.refused())[0] == status
            while it.app.in_flight:
                await asyncio.sleep(0.01)
        assert len(it.app.canaries.halts) == 1


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"targets": [OUTSIDE]}, "no_route_target"),
        ({"targets": [target("llama")], "fallback": {"targets": [OUTSIDE]}}, "hold_expired"),
    ],
    ids=["target", "fallback"],
)
async def test_a_proxy_takes_no_request_to_an_external_target(tmp_path: Path, rule: Any, code: str) -> None:
    provider = Provider()
    async with (
        beside(tmp_path, provider, ScriptedEngine(), rule, hold_seconds=0.1) as it,
        asked_by_proxies(it) as picking,
    ):
        it.pods.clear()
        it.changed()
        caller = Caller(picking.channel)
        await caller.ask(json.dumps({"model": "front", "messages": [{"role": "user", "content": "hi"}]}).encode())
        assert await caller.refused() == (503, code)
        assert not provider.heads


async def test_no_replica_is_503_and_over_the_limit_is_429(tmp_path: Path) -> None:
    async with picker(tmp_path, hold_seconds=0.1) as it:
        it.it.tenants["acme"] = tenant(limits={"requestsPerMinute": 1})
        it.it.pods.clear()
        it.it.changed()
        caller = Caller(it.channel)
        await caller.ask()
        assert await caller.refused() == (503, "hold_expired")
        caller = Caller(it.channel)
        await caller.ask()
        assert await caller.refused() == (429, "rate_limit_exceeded")


async def test_health_says_whether_requests_are_taken(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1) as it:
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        assert [await it.health(name) for name in ("", "liveness", "readiness", service, "x")] == [1, 1, 1, 1, 3]
        it.it.ready = False
        assert [await it.health(name) for name in ("", "liveness", "readiness", service)] == [2, 1, 2, 2]
        caller = Caller(it.channel)
        assert await caller.call.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_port_opens_with_its_certificate_and_a_renewed_one_counts_from_the_next_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.extproc.server._RETRY_SECONDS", 0.01)
    pki, folder = InstallationPKI(), tmp_path / "certificate"
    async with gateway(tmp_path, ScriptedEngine()) as it:
        server = ExtProcServer(
            GatewayApp(it.app, lambda: True),
            lambda: True,
            host="127.0.0.1",
            port=0,
            body_seconds=5,
            most_streams=10,
            certificate=PortCertificate(folder, asks_clients=True),
        )
        starting = asyncio.create_task(server.run())
        await asyncio.sleep(0.05)
        assert not starting.done()  # there is none yet
        pki.write(folder, process("gateway"))
        async with asyncio.timeout(20):
            await starting
        mine, others = pki.pair(process("gateway")), InstallationPKI()
        theirs = others.pair(process("gateway"))
        try:
            assert await _health(server.port, pki.trust, mine) == grpc.StatusCode.OK
            assert await _health(server.port, pki.trust, theirs) == grpc.StatusCode.UNAVAILABLE
            assert await _health(server.port, pki.trust, None) == grpc.StatusCode.UNAVAILABLE
            others.write(folder, process("gateway"))
            assert await _health(server.port, others.trust, theirs) == grpc.StatusCode.OK
            assert await _health(server.port, pki.trust, mine) == grpc.StatusCode.UNAVAILABLE
        finally:
            await server.stop(0)


async def _health(port: int, trust: str, client: CertificatePair | None) -> grpc.StatusCode:
    pair = (
        {} if client is None else {"private_key": client.key.encode(), "certificate_chain": client.certificate.encode()}
    )
    credentials = grpc.ssl_channel_credentials(trust.encode(), **pair)
    options = (("grpc.ssl_target_name_override", "gateway.shoal.internal"), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as secure:
        channel: Any = secure
        try:
            await channel.unary_unary(HEALTH)(b"", timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


# --- callers that are no Envoy ----------------------------------------------------------------------------------------


async def test_an_answer_that_nobody_asked_for_meters_nothing(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        said = pb.ProcessingRequest()
        said.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        await caller.call.write(said)
        assert await caller.refused() == (500, "proxy_misconfigured")
        assert await it.it.records(kind="", count=0) == []


async def test_a_message_out_of_order_ends_the_request_and_leaves_one_record(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        await caller.ask()
        await caller.picked()
        await caller.call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x")))
        async with asyncio.timeout(20):
            await caller.hear()  # the body for the replica
            assert await caller.call.code() == grpc.StatusCode.INTERNAL
        assert len(await it.it.records()) == 1


@pytest.mark.parametrize("shown", ["nothing", "the head", "the body"])
async def test_a_proxy_that_does_not_say_its_modes_passes_on_no_answer_that_it_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: str
) -> None:
    """Envoy says in its first message how it sends bodies (`protocol_config`). Others do not have to."""
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        await caller.ask()
        await caller.picked()
        said = pb.ProcessingRequest()
        if shown == "the head":
            said.response_headers.headers.headers.add(key=":status", raw_value=b"200")
            said.response_headers.headers.headers.add(key="content-type", raw_value=b"application/json")
        elif shown == "the body":
            said.response_body.CopyFrom(pb.HttpBody(body=b'{"choices":[]}', end_of_stream=True))
        if shown != "nothing":
            await caller.call.write(said)
        await caller.call.done_writing()
        async with asyncio.timeout(20):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while (heard := await caller.call.read()) is not _END:
                    assert heard.WhichOneof("response") not in ("response_headers", "response_body")
            code = await caller.call.code()
        (record,) = await it.it.records()
        assert (record.data.outcome, code) == (
            ("failed", grpc.StatusCode.INTERNAL) if shown == "the body" else ("cancelled", grpc.StatusCode.OK)
        )
    assert ("response_header_mode has to be SEND" in capsys.readouterr().out) is (shown == "the body")


async def test_a_body_that_does_not_come_is_refused_in_time(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1, body_seconds=1) as it:
        caller = Caller(it.channel)
        await caller.say_head("/v1/completions")
        assert await caller.refused() == (408, "request_timeout")


async def test_a_conversation_that_the_gateway_gives_up_fails_at_the_proxy(tmp_path: Path) -> None:
    """It must not end well: then Envoy goes on without the gateway, and passes on what comes."""
    async with picker(tmp_path, engines=1, body_seconds=0.2) as it:
        assert await Caller(it.channel).call.code() is grpc.StatusCode.INTERNAL  # it says nothing

    async def gives_up(_scope: Any, _receive: Any, _send: Any) -> None: ...

    app: Any = gives_up
    server = ExtProcServer(app, lambda: True, host="127.0.0.1", port=0, body_seconds=5, most_streams=10)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            caller = Caller(channel)
            await caller.say_head("/v1/chat/completions")  # no more: the gateway may have ended the conversation
            assert await caller.call.code() is grpc.StatusCode.INTERNAL
    finally:
        await server.stop(0)


@pytest.mark.parametrize("parts", [1, 3])
async def test_an_error_in_the_midst_of_a_stream_ends_it_whatever_the_replica_does(tmp_path: Path, parts: int) -> None:
    async with picker(tmp_path, engines=1, request_seconds=3) as it:
        caller = Caller(it.channel)
        await caller.stream()
        for number in range(1, parts + 1):
            await caller.part(number)
        told = [await caller.told_body() for _ in range(parts + 1)]
        assert [end for _, end in told] == [False] * parts + [True]
        assert b'"code":"timeout"' in told[-1][0]
        (record,) = await it.it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("failed", parts)


class Broken(NamedTuple):
    """Streams of a canary's replica that Envoy breaks off."""

    engine: str
    agent: dict[str, Any] | None
    """What the agent of the replica says afterwards; None: its stream ends too."""
    outcome: str


READY: dict[str, Any] = {"phase": "ready", "engine_boot": "boot-2"}
LOADING: dict[str, Any] = {"phase": "loading", "engine_boot": "boot-2"}


@pytest.mark.parametrize(
    "case",
    [
        Broken("has ended", LOADING, "failed"),
        Broken("has ended", {"phase": "loading", "engine_boot": "boot-3"}, "failed"),
        Broken("has ended", None, "failed"),
        Broken("is not reached", READY, "cancelled"),
        Broken("goes on", READY, "cancelled"),
        Broken("goes on", {"phase": "draining", "engine_boot": "boot-2"}, "cancelled"),
        Broken("goes on", None, "cancelled"),
    ],
    ids=str,
)
async def test_a_canary_is_halted_by_streams_that_break_off_as_its_replica_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Broken
) -> None:
    monkeypatch.setattr("shoal.gateway.dispatch._AGENT_SECONDS", 0.2)
    canary = {"target": target("other"), "percent": 100, "haltOn": {"errorPercent": 20, "minRequests": 10}}
    front = json.dumps({**json.loads(STREAM), "model": "front"}).encode()
    engine, rule = ScriptedEngine(), {"targets": [target("llama")], "canary": canary}
    async with two_models(tmp_path, ScriptedEngine(), engine, rule) as it, asked_by_proxies(it) as picking:
        callers = [Caller(picking.channel) for _ in range(3)]
        for caller in callers:
            assert await caller.stream(front) == picking.endpoint(2)
            await caller.part(1)
            await caller.told_body()
        if case.engine != "goes on":
            engine.die()
        if case.agent is None:
            it.fleet.update("pod-2", None)
        else:
            it.hear(2, **case.agent)
        for caller in callers:
            caller.call.cancel()
        records = await it.records(count=3)
        assert {(each.data.outcome, each.data.output_tokens) for each in records} == {(case.outcome, 1)}
        while it.app.in_flight:
            await asyncio.sleep(0.01)
        assert len(it.app.canaries.halts) == (case.outcome == "failed")
        assert it.metric("shoal_gateway_requests_total", outcome=case.outcome) == 3


@pytest.mark.parametrize("ended", [True, False])
async def test_a_whole_answer_that_breaks_off_as_its_replica_ends_has_failed_and_costs_nothing(
    tmp_path: Path, ended: bool
) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, asked_by_proxies(it) as picking:
        caller = Caller(picking.channel)
        await caller.stream(CHAT, "application/json")
        await caller.call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=b'{"choices":')))
        while not it.app.fleet.attempts["pod-1"]:
            await asyncio.sleep(0.01)
        if ended:
            engine.die()
            it.hear(1, phase="loading")
        await caller.call.done_writing()
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == (
            ("failed", "none") if ended else ("cancelled", "estimated")
        )
        assert it.metric("shoal_gateway_requests_total", outcome=record.data.outcome or "") == 1


@pytest.mark.parametrize("envoy", ["leaves before", "is cut off"])
async def test_a_gateway_that_stops_records_the_answers_that_broke_off_behind_envoy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, envoy: str
) -> None:
    monkeypatch.setattr("shoal.gateway.dispatch._AGENT_SECONDS", 0.5)
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, asked_by_proxies(it) as picking:
        caller = Caller(picking.channel)
        await caller.stream()
        await caller.part(1)
        await caller.told_body()
        it.hear(1, phase="ready", engine_boot="boot-1")
        engine.die()  # its agent does not know yet: the gateway waits for its word
        if envoy == "leaves before":
            caller.call.cancel()
        await picking.server.stop(0.1)
        assert not it.app.in_flight
        (record,) = await it.records()
        assert (record.data.outcome, record.data.output_tokens) == ("cancelled", 1)


async def test_a_conversation_that_the_gateway_cannot_read_fails_instead_of_going_on_without_it(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        said = pb.ProcessingRequest()
        for name, value in {":method": "POST", ":path": "/v1/chat/completions"}.items():
            said.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        hint: Any = said.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": float("inf")})
        await caller.call.write(said)
        assert await caller.call.code() == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("wrong", ["the head comes twice", "a number that cannot be read"])
@pytest.mark.parametrize("when", ["before the answer", "in the midst of the answer"])
async def test_a_conversation_that_breaks_the_protocol_fails_instead_of_ending_well(
    tmp_path: Path, wrong: str, when: str
) -> None:
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        if when == "before the answer":
            await caller.ask(STREAM)
            await caller.picked()
            await caller.hear()  # the body for the replica
        else:
            await caller.stream()
            await caller.part(1)
            await caller.told_body()
        said = pb.ProcessingRequest()
        if wrong == "the head comes twice":
            said.request_headers.headers.headers.add(key=":method", raw_value=b"POST")
        else:
            said.response_headers.headers.headers.add(key=":status", raw_value=b"200")
            hint: Any = said.metadata_context.filter_metadata["envoy.lb"]
            hint.update({"x-gateway-destination-endpoint-served": float("inf")})
        await caller.call.write(said)
        async with asyncio.timeout(20):
            assert await caller.call.code() == grpc.StatusCode.INTERNAL
        (record,) = await it.it.records()
        assert record.data.outcome == "failed"


async def test_streams_are_bounded(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1, most=1) as it:
        first = Caller(it.channel)
        await first.ask()
        await first.picked()
        second = Caller(it.channel)
        assert await second.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_that_breaks_off_leaves_one_record_and_frees_its_place(tmp_path: Path) -> None:
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        await caller.ask()
        await caller.picked()
        caller.call.cancel()
        (record,) = await it.it.records()
        assert record.data.outcome == "cancelled"
        assert it.it.app.body_budget.held == 0
