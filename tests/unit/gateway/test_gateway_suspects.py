"""A request under which replicas die: one more gets it and never a third. The key that sent it is not suspect."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.core.hold import retries
from shoal.core.hold.limits import Limits
from shoal.core.hold.retries import Loss
from shoal.gateway import accepted
from shoal.gateway.upstream import Aborted, AbortHandle, UpstreamAddress, UpstreamAnswer, UpstreamError
from tests.support.gateway import GatewayUnderTest, gateway, lines, replica
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

FINE = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
POISON = {**FINE, "seed": 666}


def mortals(number: int) -> list[ScriptedEngine]:
    """Engines that die of a seed."""

    def engine() -> ScriptedEngine:
        async def behave(request: EngineRequest) -> None:
            if request.body.get("seed") == 666:
                it.die()
            else:
                await serve_normally(request)

        it = ScriptedEngine(behave)
        return it

    return [engine() for _ in range(number)]


def deaths(engines: Sequence[ScriptedEngine]) -> int:
    return sum(engine.dead for engine in engines)


def test_what_says_something_about_a_request_and_what_does_not():
    assert retries.died(Loss())
    assert retries.died(Loss(stalled=True))
    assert not retries.died(Loss(answers=True))
    assert not retries.died(Loss(leaving=True))


def test_two_deaths_are_the_end_whatever_else_may_be_tried():
    assert [retries.after(0, n, 3) for n in (1, 2, 3)] == ["again", "again", "tried"]
    assert [retries.after(1, n, 3) for n in (1, 2, 3)] == ["again", "again", "tried"]
    assert [retries.after(2, n, most) for n, most in ((2, 3), (2, 10), (3, 3))] == ["suspect"] * 3
    assert retries.after(1, 1, 1) == "tried"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_replicas_ends_two_of_five_and_its_key_goes_on(tmp_path: Path, stream: bool):
    engines = mortals(5)
    async with gateway(tmp_path, *engines) as it:
        response = await it.post({**POISON, "stream": stream})
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (502, "replica_lost_twice", "server_error")
        assert "do not send it again unchanged" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert deaths(engines) == 2
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status, record.data.attempts) == ("failed", 502, 2)
        assert record.data.count_source == "none"  # nobody pays for it
        tries = await it.records("attempt", 2)
        assert len({row.data.replica for row in tries}) == 2
        assert [(await it.post(FINE)).status for _ in range(6)] == [200] * 6
        assert it.metric("shoal_gateway_suspects_total", next="sent_again") == 1
        assert it.metric("shoal_gateway_suspects_total", next="ended") == 1


async def test_the_same_over_connections_that_were_used_before(tmp_path: Path):
    """Whose end looks like that of an old connection."""
    engines = mortals(5)
    async with gateway(tmp_path, *engines) as it:
        for _ in range(5):
            assert (await it.post(FINE)).status == 200
        assert (await it.post(POISON)).status == 502
        assert deaths(engines) == 2


async def test_without_suspicion_it_ends_more_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "died", lambda _loss: False)
    engines = mortals(5)
    async with gateway(tmp_path, *engines) as it:
        it.model(limits=Limits(max_requests=0))
        assert (await it.post(POISON)).status == 503
        assert deaths(engines) == 3


async def test_who_was_only_there_is_answered_by_another_replica(tmp_path: Path):
    """Four wait at a replica that dies: they are spread, although their prompts have one head."""
    head = {"messages": [{"role": "system", "content": "x" * 600}, {"role": "user", "content": "hi"}]}
    engines, gates = mortals(3), [asyncio.Event() for _ in range(3)]

    def waits(engine: ScriptedEngine, gate: asyncio.Event) -> None:
        serve = engine.behave

        async def behave(request: EngineRequest) -> None:
            if not request.body.get("seed"):
                await gate.wait()
            await serve(request)

        engine.behave = behave

    for engine, gate in zip(engines, gates, strict=True):
        waits(engine, gate)
    async with gateway(tmp_path, *engines) as it:
        posts = [asyncio.create_task(it.post({**FINE, **head})) for _ in range(4)]
        async with asyncio.timeout(20):
            while sum(len(e.requests) for e in engines) < 4:
                await asyncio.sleep(0.01)
        loaded = max(engines, key=lambda e: len(e.requests))
        there = len(loaded.requests)
        assert there == 4  # the head's favourite has all of them
        loaded.die()
        async with asyncio.timeout(20):
            while sum(len(e.requests) for e in engines) < 4 + there:
                await asyncio.sleep(0.01)
        assert sorted(len(e.requests) for e in engines) == [2, 2, 4]
        for gate in gates:
            gate.set()
        assert [(await p).status for p in posts] == [200] * 4


def losing(it: GatewayUnderTest, engine: ScriptedEngine, how: str) -> None:
    """The engine of the first replica loses what it has, and what is known of the replica says why."""

    async def behave(request: EngineRequest) -> None:
        if how == "deleted":
            it.pods["chat/llama-1"] = replica(1, deleting=True)
            it.changed()
        elif how == "draining":
            it.hear(1, phase="draining")
        elif how == "restarted":
            it.hear(1, engine_boot="another")
        if how in ("deleted", "draining"):
            engine.die()
        request.writer.transport.abort()

    engine.behave = behave


@pytest.mark.parametrize(
    ("how", "suspect"), [("cut", 0), ("deleted", 0), ("draining", 0), ("restarted", 1), ("starting", 1)]
)
async def test_only_a_death_under_it_makes_a_request_suspect(tmp_path: Path, how: str, suspect: int):
    first = ScriptedEngine(ready=503 if how == "starting" else 200)
    async with gateway(tmp_path, first, ScriptedEngine()) as it:
        losing(it, first, how)
        it.fleet.update("pod-2", None)
        post = asyncio.create_task(it.post(FINE))
        async with asyncio.timeout(20):
            while not first.requests:
                await asyncio.sleep(0.001)
        it.hear(2)
        assert (await post).status == 200
        assert it.metric("shoal_gateway_retries_total", reason="lost") == 1
        assert it.metric("shoal_gateway_suspects_total", next="sent_again") == suspect


class Asking:
    """A connection on which nothing comes."""

    handle: AbortHandle | None = None

    def __init__(self) -> None:
        self.cut = asyncio.Event()

    def abort(self, error: UpstreamError) -> None:
        self.cut.set()


async def test_a_client_that_leaves_while_the_engine_is_asked_has_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asking = Asking()
    (engine,) = mortals(1)
    async with gateway(tmp_path, engine, connect_seconds=60.0) as it:
        real = it.pool.start

        async def start(target: UpstreamAddress, head: bytes, body: bytes, abort: AbortHandle) -> UpstreamAnswer:
            if not head.startswith(b"GET /ready "):
                return await real(target, head, body, abort)
            abort.hold(asking)
            await asking.cut.wait()
            raise Aborted("the client left")

        monkeypatch.setattr(it.pool, "start", start)
        post = asyncio.create_task(it.post(POISON))
        async with asyncio.timeout(20):
            while asking.handle is None:
                await asyncio.sleep(0.001)
        post.cancel()
        (record,) = await it.records()
        assert record.data.outcome == "cancelled"


async def test_a_held_stream_hears_it_as_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its status is out already."""
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    engines = mortals(2)
    async with gateway(tmp_path, *engines) as it:
        it.pods.clear()
        it.changed()
        response = await it.post({**POISON, "stream": True})
        assert response.status == 200
        it.pods.update({f"chat/llama-{n}": replica(n) for n in (1, 2)})
        it.changed()
        (event,) = [json.loads(line) async for line in lines(response)]
        assert event["error"]["code"] == "replica_lost_twice"
        assert deaths(engines) == 2
