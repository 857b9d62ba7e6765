"""Clients that leave before an answer that is no stream: the engine is asked to end the request, and what it then says
that it computed is billed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.api import keys, names
from shoal.core.quota.abandoned import is_exact
from shoal.gateway import cancellations
from shoal.metering.record import UsageRecord
from shoal.net.stream import StreamPeer
from tests.support.gateway import INSTALL_KEY, GatewayUnderTest, gateway, replica, tenant
from tests.support.scripted_engine import USAGE, EngineRequest, ScriptedEngine, serve_normally
from tests.support.waiting import until_async

KEY = keys.derive(INSTALL_KEY, "gateway", "uid-llama")
CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
PROMPT: dict[str, Any] = {"model": "llama", "prompt": "Hi", "max_tokens": 100}


@dataclass
class Agent:
    """Has what is aborted end, as an engine would."""

    status: int = 204
    unread: int = 0
    """So many times the engine does not have the request yet."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        said = {"boot": "agent-1", "seq": 0, "full": True, "keys": {"phase": "ready", "engineBoot": "boot-1"}}
        await response.write(b"data: " + json.dumps(said).encode() + b"\n\n")
        await asyncio.sleep(60)
        return response

    async def abort(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        self.asked.append(await request.json())
        if self.status == 204 and len(self.asked) > self.unread:
            self.aborted.set()
        return web.Response(status=self.status)

    def peer(self, number: int = 1) -> StreamPeer:
        return StreamPeer(f"pod-{number}", f"chat/llama-{number}", "127.0.0.1", KEY, self.port)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        app = web.Application()
        app.router.add_get(names.REPLICA_PATH, self.stream)
        app.router.add_post(names.ABORT_PATH, self.abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        try:
            yield
        finally:
            await runner.cleanup()


def ends_when_told(agent: Agent, usage: dict[str, Any] = USAGE) -> Callable[[EngineRequest], Awaitable[None]]:
    async def behave(request: EngineRequest) -> None:
        waiting = [asyncio.create_task(event.wait()) for event in (agent.aborted, request.gone)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if not request.gone.is_set():
            await aborted(request, usage)

    return behave


async def aborted(request: EngineRequest, usage: dict[str, Any]) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "abort"}
    body = {"id": request.body["rid"], "model": request.model, "choices": [choice], "usage": usage}
    await request.answer(200, json.dumps(body, separators=(",", ":")).encode())


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, agent: Agent, *engines: ScriptedEngine, listening: bool = True, **settings: Any
) -> AsyncGenerator[GatewayUnderTest]:
    async with agent.running(), gateway(tmp_path, *engines, **settings) as it:
        it.fleet.streams.start()
        if listening:
            it.fleet.streams.set_peers([agent.peer(number) for number in range(1, len(engines) + 1)])
        try:
            yield it
        finally:
            await it.fleet.streams.close()


async def leave(it: GatewayUnderTest, engine: ScriptedEngine, body: dict[str, Any], path: str) -> EngineRequest:
    """Asks, and leaves when the engine has the request."""
    had = len(engine.requests)
    post = asyncio.create_task(it.post(body, path))
    await until_async(lambda: len(engine.requests) > had or post.done())
    post.cancel()
    await asyncio.gather(post, return_exceptions=True)
    return engine.requests[had]


async def left(
    it: GatewayUnderTest, engine: ScriptedEngine, body: dict[str, Any] = CHAT, path: str = "/v1/chat/completions"
) -> UsageRecord:
    await leave(it, engine, body, path)
    (record,) = await it.records()
    await until_async(lambda: it.app.in_flight == 0)
    return record


def counts(record: UsageRecord) -> tuple[object, ...]:
    data = record.data
    return data.outcome, data.count_source, data.input_tokens, data.cached_tokens, data.output_tokens


EXACT = ("cancelled", "final", 7, 4, 3)


async def test_what_the_engine_had_computed_is_billed(tmp_path: Path):
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        record = await left(it, engine)
        assert counts(record) == EXACT
        assert record.data.status is None
        assert agent.asked == [{"rid": record.data.request_id, "prompts": 0}]
        assert not engine.requests[0].gone.is_set()
        assert it.metric("shoal_gateway_cancellations_total", counts="exact") == 1
        # Its connection is whole: the next request goes over it.
        engine.behave = serve_normally
        assert (await it.post(CHAT)).status == 200
        assert engine.connections == 1


async def test_without_the_agent_nobody_knows_what_it_was(tmp_path: Path):
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine, listening=False) as it:
        record = await left(it, engine)
        assert counts(record)[:2] == ("cancelled", "estimated")
        assert record.data.output_tokens is None
        assert agent.asked == []
        await engine.requests[0].gone.wait()


@pytest.mark.parametrize("status", [404, 401, 503])
async def test_an_agent_that_cannot_leaves_the_estimate(tmp_path: Path, status: int):
    agent = Agent(status)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        assert counts(await left(it, engine))[:2] == ("cancelled", "estimated")
        assert len(agent.asked) == 1
        await engine.requests[0].gone.wait()
        assert it.metric("shoal_gateway_cancellations_total", counts="estimated") == 1


async def test_an_agent_that_is_gone_leaves_the_estimate(tmp_path: Path):
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        it.fleet.streams.set_peers([StreamPeer("pod-1", "chat/llama-1", "127.0.0.1", KEY, 1)])
        it.hear(1)
        assert counts(await left(it, engine))[:2] == ("cancelled", "estimated")
        await engine.requests[0].gone.wait()


async def test_an_engine_that_does_not_end_it_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancellations, "SECONDS", 0.3)
    agent = Agent(unread=1000)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        assert counts(await left(it, engine))[:2] == ("cancelled", "estimated")
        await engine.requests[0].gone.wait()


async def test_an_engine_that_had_not_read_it_yet_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancellations, "SECONDS", 30.0)
    monkeypatch.setattr(cancellations, "_AGAIN_SECONDS", 0.01)
    agent = Agent(unread=2)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        record = await left(it, engine)
        assert counts(record) == EXACT
        assert len(agent.asked) >= 3
        assert {asked["rid"] for asked in agent.asked} == {record.data.request_id}


async def test_one_that_still_waited_in_the_engine_is_not_billed(tmp_path: Path):
    """SGLang says no prompt of it, and of one whose prompt is computed in pieces."""
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}))
    async with serving(tmp_path, agent, engine) as it:
        record = await left(it, engine)
        assert counts(record)[:2] == ("cancelled", "estimated")
        assert (record.data.input_tokens or 0) > 0
        assert is_exact(1)
        assert not is_exact(0)
        assert not is_exact(None)


@pytest.mark.parametrize("answer", [b"{}", b"no JSON", b'{"usage":{"prompt_tokens":"7"}}'])
async def test_an_answer_without_counts_leaves_the_estimate(tmp_path: Path, answer: bytes):
    agent = Agent()

    async def behave(request: EngineRequest) -> None:
        await agent.aborted.wait()
        await request.answer(200, answer)

    engine = ScriptedEngine(behave)
    async with serving(tmp_path, agent, engine) as it:
        assert counts(await left(it, engine))[:2] == ("cancelled", "estimated")


@pytest.mark.parametrize("status", [400, 401, 500, 503, 0])
async def test_what_fails_then_is_neither_told_nor_sent_again(tmp_path: Path, status: int):
    agent = Agent()

    async def behave(request: EngineRequest) -> None:
        await agent.aborted.wait()
        if status:
            await request.answer(status, b'{"object":"error","message":"x","type":"x","code":400}')
        else:
            request.writer.transport.abort()

    engines = [ScriptedEngine(behave), ScriptedEngine(behave)]
    async with serving(tmp_path, agent, *engines) as it:
        it.pods.pop("chat/llama-2")
        it.changed()
        await leave(it, engines[0], CHAT, "/v1/chat/completions")
        it.pods["chat/llama-2"] = replica(2)
        it.changed()
        (record,) = await it.records()
        assert counts(record)[:2] == ("cancelled", "estimated")
        assert record.data.attempts == 1
        assert [len(engine.requests) for engine in engines] == [1, 0]


async def test_the_second_try_is_ended_by_its_own_id(tmp_path: Path):
    agent = Agent()

    async def busy(request: EngineRequest) -> None:
        await request.answer(503, b"{}")

    engines = [ScriptedEngine(busy), ScriptedEngine(busy)]
    async with serving(tmp_path, agent, *engines) as it:

        async def first(request: EngineRequest) -> None:
            for engine in engines:
                engine.behave = ends_when_told(agent)
            await busy(request)

        for engine in engines:
            engine.behave = first
        post = asyncio.create_task(it.post(CHAT))
        await until_async(lambda: sum(len(engine.requests) for engine in engines) == 2)
        post.cancel()
        (record,) = await it.records()
        assert counts(record) == EXACT
        rid = f"{record.data.request_id}.2"
        assert agent.asked == [{"rid": rid, "prompts": 0}]
        assert {r.body["rid"] for engine in engines for r in engine.requests} == {record.data.request_id, rid}


async def test_of_a_list_of_prompts_each_is_ended(tmp_path: Path):
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        record = await left(it, engine, {**PROMPT, "prompt": ["a", "b"]}, "/v1/completions")
        assert counts(record) == EXACT
        assert agent.asked == [{"rid": record.data.request_id, "prompts": 2}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**PROMPT, "n": 2}),
        ("/v1/embeddings", {"model": "llama", "input": "Hi"}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
async def test_what_has_no_id_there_that_we_know_is_cut_off(tmp_path: Path, path: str, body: dict[str, Any]):
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        assert counts(await left(it, engine, body, path))[:2] == ("cancelled", "estimated")
        assert agent.asked == []
        await engine.requests[0].gone.wait()


async def test_its_places_are_kept_until_the_engine_has_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancellations, "SECONDS", 30.0)
    agent = Agent(unread=1000)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        it.tenants["acme"] = tenant(limits={"concurrentRequests": 1, "tokensPerMinute": 100_000})
        it.changed()
        await leave(it, engine, CHAT, "/v1/chat/completions")
        await until_async(lambda: len(agent.asked) > 0)
        assert it.fleet.in_flight("pod-1") == 1
        response = await it.post(CHAT)
        assert (response.status, response.headers["retry-after"] != "") == (429, True)
        agent.aborted.set()
        (record,) = await it.records()
        assert counts(record) == EXACT
        await until_async(lambda: it.app.in_flight == 0)
        assert it.fleet.in_flight("pod-1") == 0
        assert it.app.demand.tenants.of("acme").own_use().in_flight == 0


@pytest.mark.parametrize("listening", [True, False])
async def test_a_budget_is_used_up_by_what_was_computed(tmp_path: Path, listening: bool):
    agent = Agent()
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine, listening=listening) as it:
        it.tenants["acme"] = tenant(budget={"tokens": 100_000})
        it.changed()
        await left(it, engine)
        booked = it.app.demand.tenants.of("acme").own_use().booked
        assert (booked == USAGE["total_tokens"]) == listening
        assert booked > 0


async def test_only_so_many_are_kept_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancellations, "MAX_CANCELLATIONS", 1)
    monkeypatch.setattr(cancellations, "SECONDS", 30.0)
    agent = Agent(unread=1000)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        first = await leave(it, engine, CHAT, "/v1/chat/completions")
        await until_async(lambda: len(agent.asked) > 0)
        second = await leave(it, engine, CHAT, "/v1/chat/completions")
        await second.gone.wait()
        assert not first.gone.is_set()
        assert len({asked["rid"] for asked in agent.asked}) == 1
        agent.aborted.set()
        assert {counts(r)[1] for r in await it.records(count=2)} == {"final", "estimated"}


async def test_a_stop_waits_for_the_counts(tmp_path: Path):
    agent = Agent(unread=1)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        await leave(it, engine, CHAT, "/v1/chat/completions")
        it.server.should_exit = True
        (record,) = await it.records()
        assert counts(record) == EXACT


async def test_a_replica_that_stalls_meanwhile_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cancellations, "SECONDS", 30.0)
    agent = Agent(unread=1000)
    engine = ScriptedEngine(ends_when_told(agent))
    async with serving(tmp_path, agent, engine) as it:
        request = await leave(it, engine, CHAT, "/v1/chat/completions")
        await until_async(lambda: len(agent.asked) > 0)
        it.hear(1, phase="stalled")
        (record,) = await it.records()
        assert counts(record)[:2] == ("cancelled", "estimated")
        await request.gone.wait()
