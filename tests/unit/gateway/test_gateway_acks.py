"""What a gateway tells the agents: which state it acts on, and what it has in flight."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.api import keys, names
from shoal.api.replica import Ack
from shoal.core.routing.choice import NoReplica, ReplicaSignal, usable
from shoal.gateway import acks
from shoal.gateway.connections import Pool
from shoal.gateway.replicapool import ReplicaPool
from shoal.net.installkey import KeyRing
from shoal.net.stream import ListenerIdentity
from shoal.signals.replica import StreamPeer
from tests.support.gateway import INSTALL_KEY, replica

ME = ListenerIdentity("shoal-gateway-0", "boot-of-the-gateway")
KEY = keys.derive(INSTALL_KEY, "gateway", "uid-llama")


class FakeAgent:
    """Serves a stream that the test writes, and takes acknowledgements."""

    def __init__(self) -> None:
        self.boot = "agent-1"
        self.seq = 0
        self.phase = "ready"
        self.acks: list[Ack] = []
        self.answers: list[int] = []
        """Status of the next answers; afterwards 204."""
        self.hang = asyncio.Event()
        self.hang.set()
        self.port = 0
        self.connections: set[Any] = set()
        self.streams: list[web.StreamResponse] = []
        self._came = asyncio.Condition()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await self._write(response, full=True, keys={"phase": self.phase, "engineBoot": "e"})
        self.streams.append(response)
        await asyncio.sleep(60)
        return response

    async def ack(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        self.connections.add(request.transport)
        ack = Ack.model_validate_json(await request.read())
        async with self._came:
            self.acks.append(ack)
            self._came.notify_all()
        await self.hang.wait()
        return web.Response(status=self.answers.pop(0) if self.answers else 204)

    async def say(self, phase: str) -> None:
        self.phase = phase
        self.seq += 1
        for stream in self.streams:
            await self._write(stream, keys={"phase": phase})

    async def until(self, met: Callable[[Ack], bool]) -> Ack:
        async with asyncio.timeout(20), self._came:
            while True:
                if found := [a for a in self.acks if met(a)]:
                    return found[0]
                await self._came.wait()

    async def _write(self, stream: web.StreamResponse, **message: Any) -> None:
        said = {"boot": self.boot, "seq": self.seq, **message}
        await stream.write(b"data: " + json.dumps(said).encode() + b"\n\n")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["FakeAgent", None]:
        app = web.Application()
        app.router.add_get(names.REPLICA_PATH, self.stream)
        app.router.add_post(names.ACK_PATH, self.ack)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def acknowledging(tmp_path: Path, agent: FakeAgent) -> AsyncGenerator[ReplicaPool, None]:
    (tmp_path / "key").mkdir()
    fleet = ReplicaPool(KeyRing(tmp_path / "key"), ME)
    pool = Pool(keep_alive=30.0)
    sending = acks.Acks(fleet, ME, pool)
    fleet.streams.start()
    fleet.streams.set_peers([StreamPeer("pod-1", "chat/llama-1", "127.0.0.1", KEY, agent.port)])
    try:
        yield fleet
    finally:
        await fleet.streams.close()
        await sending.close()
        pool.close()


async def test_says_what_it_acts_on_and_what_runs_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acks, "HEARTBEAT_SECONDS", 600.0)  # only what is said at once
    async with FakeAgent().running() as agent, acknowledging(tmp_path, agent) as fleet:
        first = await agent.until(lambda _: True)
        assert (first.gateway, first.boot) == (ME.name, ME.boot)
        assert (first.agent_boot, first.seq, first.running) == ("agent-1", 0, 0)
        fleet.enter(replica(1))
        fleet.enter(replica(1))
        await agent.say("draining")
        assert (await agent.until(lambda a: a.seq == 1)).running == 2
        assert isinstance(usable([replica(1)], fleet.live), NoReplica)  # what it says, it does
        fleet.leave(replica(1))
        fleet.leave(replica(1))
        assert (await agent.until(lambda a: a.seq == 1 and a.running == 0)).agent_boot == "agent-1"
        assert len(agent.streams) == 1  # said because of what happened, not because of a new stream
        assert len(agent.connections) == 1  # kept, not opened anew each time


async def test_repeats_itself_and_speaks_at_once_only_when_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acks, "HEARTBEAT_SECONDS", 0.05)
    async with FakeAgent().running() as agent, acknowledging(tmp_path, agent) as fleet:
        await agent.until(lambda _: len(agent.acks) >= 3)
        monkeypatch.setattr(acks, "HEARTBEAT_SECONDS", 60.0)
        await asyncio.sleep(0.2)
        count = len(agent.acks)
        fleet.enter(replica(1))
        fleet.leave(replica(1))  # it serves: nobody waits for this
        await asyncio.sleep(0.1)
        assert len(agent.acks) == count


@pytest.mark.parametrize("status", [409, 500, 503])
async def test_says_it_again_when_the_agent_did_not_take_it(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(acks, "RETRY_SECONDS", 0.01)
    agent = FakeAgent()
    agent.answers = [status, status]
    async with agent.running(), acknowledging(tmp_path, agent):
        await agent.until(lambda _: len(agent.acks) == 3)


async def test_an_agent_that_does_not_answer_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acks, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(acks, "RETRY_SECONDS", 0.01)
    async with FakeAgent().running() as agent:
        agent.hang.clear()
        async with acknowledging(tmp_path, agent):
            await agent.until(lambda _: len(agent.acks) >= 3)
            agent.hang.set()


async def test_an_agent_of_an_older_version_is_not_pestered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acks, "RETRY_SECONDS", 0.01)
    agent = FakeAgent()
    agent.answers = [404] * 50
    async with agent.running(), acknowledging(tmp_path, agent):
        await agent.until(lambda _: True)
        await asyncio.sleep(0.2)
        assert len(agent.acks) == 1


async def test_a_replica_that_was_draining_when_its_stream_ended_serves_no_more_on_hearsay(tmp_path: Path):
    (tmp_path / "key").mkdir()
    fleet = ReplicaPool(KeyRing(tmp_path / "key"))
    pods = [replica(1), replica(2)]
    for pod in pods:
        fleet.live[pod.uid] = ReplicaSignal("ready", "e")
    fleet.live["pod-1"] = ReplicaSignal("draining", "e")
    fleet.update("pod-1", None)
    fleet.update("pod-2", None)
    found = usable(pods, fleet.live, fleet.leaving)
    assert not isinstance(found, NoReplica)
    assert [pod.uid for pod in found.replicas] == ["pod-2"]
