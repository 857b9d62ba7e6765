"""The gateway's streams to agents: what is heard, and when it is unknown again."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from aiohttp import web

from shoal.api import replica as api
from shoal.signals.replica import ReplicaStreams, StreamPeer

Script = Callable[[web.StreamResponse, int], Awaitable[None]]


class Agent:
    """Plays a script per connection."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.authorization: list[str] = []
        self.status = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.connections += 1
        self.authorization.append(request.headers["authorization"])
        response = web.StreamResponse(status=self.status, headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if self.status == 200:
            with contextlib.suppress(ConnectionError):
                await self.script(response, self.connections)
        return response


async def say(response: web.StreamResponse, **message: object) -> None:
    await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def listening(agent: Agent) -> AsyncGenerator[tuple[ReplicaStreams, list[api.ReplicaKeys | None]], None]:
    app = web.Application()
    app.router.add_get("/v1/replica", agent.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    heard: list[api.ReplicaKeys | None] = []
    streams = ReplicaStreams(lambda _uid, keys: heard.append(keys))
    streams.start()
    streams.set_peers([StreamPeer("pod-1", "chat/llama-1", "127.0.0.1", "the-key", port)])
    try:
        yield streams, heard
    finally:
        await streams.close()
        await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def forever(*_: object) -> None:
    await asyncio.sleep(60)


async def test_full_state_then_changes(caplog: pytest.LogCaptureFixture):
    async def script(response: web.StreamResponse, _: int) -> None:
        await say(response, boot="b1", seq=4, full=True, keys={"phase": "loading", "running": 1, "unheardOf": 7})
        await say(response, boot="b1", seq=4)  # a heartbeat
        await say(response, boot="b1", seq=5, keys={"phase": "ready", "engineBoot": "e1"})
        await forever()

    agent = Agent(script)
    async with listening(agent) as (streams, _):
        await until(lambda: bool(streams.keys()) and streams.keys()["pod-1"].phase == "ready")
        keys = streams.keys()["pod-1"]
        assert (keys.running, keys.engine_boot, keys.kv_tokens_used) == (1, "e1", None)
        assert agent.authorization == ["Bearer the-key"]
        streams.set_peers([])
        assert streams.keys() == {}


@pytest.mark.parametrize(
    "bad",
    [
        {"boot": "b1", "seq": 6, "keys": {"running": 9}},  # 5 is missing
        {"boot": "b1", "seq": 5},  # a heartbeat that knows more than we heard
        {"boot": "b2", "seq": 5, "keys": {"running": 9}},  # another agent process
        {"boot": "b1", "seq": "five"},
    ],
)
async def test_a_gap_or_a_restart_means_connect_again(bad: dict):
    async def script(response: web.StreamResponse, connection: int) -> None:
        await say(response, boot="b1", seq=4, full=True, keys={"running": connection})
        if connection == 1:
            await say(response, **bad)
        await forever()

    agent = Agent(script)
    async with listening(agent) as (streams, heard):
        await until(lambda: agent.connections == 2 and bool(streams.keys()))
        assert streams.keys()["pod-1"].running == 2
        assert None in heard  # unknown in between, never stale
        assert not any(keys is not None and keys.running == 9 for keys in heard)


async def test_silence_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "SILENCE_SECONDS", 0.3)

    async def script(response: web.StreamResponse, _: int) -> None:
        await say(response, boot="b1", seq=1, full=True, keys={"phase": "ready"})
        await forever()

    agent = Agent(script)
    async with listening(agent) as (_, heard):
        await until(lambda: agent.connections >= 2)
        assert None in heard


async def test_a_refused_key_is_no_stream():
    agent = Agent(forever)
    agent.status = 401
    async with listening(agent) as (streams, heard):
        await until(lambda: agent.connections >= 2)
        assert streams.keys() == {}
        assert heard == []
