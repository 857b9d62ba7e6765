"""A run folder, a key file, a fake engine and a real agent, and how a gateway and a kubelet talk to it."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from shoal.agent import observe, serve
from shoal.agent.adapters.files import AdapterFolder
from shoal.agent.adapters.service import AdapterService, Fetch
from shoal.agent.drain import Drain
from shoal.agent.hook import Hook
from shoal.agent.observe import EngineObserver
from shoal.agent.serve import EngineAgent
from shoal.agent.stage.adapter import IMPATIENT, stage_adapter
from shoal.agent.stalls import StallTracker
from shoal.agent.stream import AgentStream
from shoal.api import names
from shoal.api.adapters import AdapterSettings, AdapterWanted, DesiredAdapter, DesiredAdapters
from shoal.engine.kinds import DEFAULT
from shoal.engine.port import EngineKind
from shoal.manifests.pod import SILENT_ROUNDS, drain_script
from shoal.net.tls import TLSCredentials
from tests.support.controlplane import free_ports
from tests.support.fake_engine import FakeEngine
from tests.support.sources import LOCAL
from tests.support.waiting import until_async

KEYS = {"callers": {"gateway": "gateway-key", "operator": "operator-key"}, "engine": "engine-key", "admin": "admin-key"}


class Stream:
    """Reads messages and keeps the state as a gateway would."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.state: dict[str, object] = {}
        self.messages: list[dict[str, Any]] = []

    @property
    def boot(self) -> str:
        return self.messages[-1]["boot"]

    @property
    def seq(self) -> int:
        return self.messages[-1]["seq"]

    async def message(self) -> dict[str, object] | None:
        async with asyncio.timeout(30):
            line = await self._response.content.readline()
            await self._response.content.readline()
        if not line:
            return None
        message = json.loads(line.removeprefix(b"data: "))
        if message.get("full"):
            self.state = {}
        self.state |= message.get("keys", {})
        self.messages.append(message)
        return message

    async def until(self, **wanted: object) -> None:
        async with asyncio.timeout(60):
            while any(self.state.get(key) != value for key, value in wanted.items()):
                assert await self.message() is not None


class Pod:
    """One engine pod as its callers see it, with a fake engine, or the one at `engine_url`."""

    def __init__(
        self,
        folder: Path,
        *,
        drain_seconds: float = 900,
        stall_seconds: float = 180,
        engine_url: str | None = None,
        pool: AdapterSettings | None = None,
        bring: Fetch | None = None,
        kind: EngineKind = DEFAULT,
        max_running: int | None = None,
    ) -> None:
        self.folder = folder
        self._kind, self._max_running = kind, max_running
        self.keys = folder / "agent.json"
        self.engine = FakeEngine()
        self.url = ""
        self.stop = asyncio.Event()
        self.engine_server = TestServer(self.engine.app())
        self.hub = AgentStream()
        self.drain = Drain(drain_seconds)
        self.files = AdapterFolder(folder / "adapters")
        self.adapters = None
        if pool is not None:
            stage = partial(
                stage_adapter,
                settings=pool,
                rules=kind.pod.adapter_rules,
                sources=replace(IMPATIENT, network=LOCAL),
            )
            self.adapters = AdapterService(
                pool,
                self.drain,
                self.files,
                bring or stage,
                kind.agent,
            )
        self._stall_seconds = stall_seconds
        self._engine_url = engine_url
        self.port = 0

    def stage(self, text: str) -> None:
        (self.folder / "stage.json").write_text(text)

    def boot(self, name: str) -> None:
        (self.folder / "boot").write_text(name + "\n")

    @property
    def stalled_file(self) -> Path:
        return self.folder / "stalled"

    @property
    def has_keys(self) -> bool:
        """Whether the agent can read its key file."""
        try:
            serve.read_keys(self.keys)
        except ValueError:
            return False
        return True

    def up(self) -> bool:
        """Whether the agent listens."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @asynccontextmanager
    async def running(
        self, credentials: TLSCredentials | None = None, tls_port: int = names.AGENT_TLS_PORT
    ) -> AsyncGenerator["Pod"]:
        await self.engine_server.start_server()
        stalls = StallTracker(self._stall_seconds, self.stalled_file)
        observer = EngineObserver(self.hub, self.drain, stalls, self.folder, self.adapters)
        url = self._engine_url or str(self.engine_server.make_url(""))
        agent = EngineAgent(
            url,
            self.keys,
            self.hub,
            observer,
            self.drain,
            self.adapters,
            credentials,
            kind=self._kind,
            max_running=self._max_running,
        )
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        beside = [Hook(self.drain, self.folder).run]
        serving = serve.serve(
            agent, self.hub, host="127.0.0.1", port=self.port, tls_port=tls_port, stop=self.stop, beside=beside
        )
        task = asyncio.create_task(serving)
        try:
            await until_async(self.up)
            if self.has_keys:
                while (await self.get("/v1/replica", "wrong"))[0] == 503:
                    await asyncio.sleep(0.01)
            yield self
        finally:
            self.stop.set()
            await task
            await self.engine_server.close()

    @asynccontextmanager
    async def stream(self, key: str = "gateway-key", caller: str = "", boot: str = "") -> AsyncGenerator[Stream]:
        headers = {"Authorization": f"Bearer {key}"}
        if caller:
            headers |= {names.HEADER_CALLER: caller, names.HEADER_BOOT: boot}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/v1/replica", headers=headers) as response,
        ):
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            yield Stream(response)

    async def get(self, path: str, key: str | None = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def ack(
        self,
        stream: Stream,
        running: int,
        *,
        caller: str = "gw-0",
        boot: str = "g",
        key: str = "gateway-key",
        **more: Any,
    ) -> tuple[int, str]:
        """Acknowledges what the stream said last."""
        body = {"gateway": caller, "boot": boot, "agentBoot": stream.boot, "seq": stream.seq, "running": running} | more
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(self.url + names.ACK_PATH, json=body) as response,
        ):
            return response.status, await response.text()

    async def abort(self, key: str | None = "gateway-key", **body: Any) -> tuple[int, str]:
        """Asks for the end of a request, as a gateway does."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(self.url + names.ABORT_PATH, json=body) as response,
        ):
            return response.status, await response.text()

    async def ensure(
        self,
        stream: Stream | None,
        wanted: AdapterWanted,
        *,
        caller: str = "gw-0",
        boot: str = "g",
        key: str = "gateway-key",
        seconds: float = 10.0,
        **more: Any,
    ) -> tuple[int, dict[str, Any]]:
        """Asks for an adapter, as a gateway with this stream does."""
        agent = stream.boot if stream is not None else self.hub.boot
        body = wanted.model_dump(by_alias=True, include={"name", "revision", "uri"})
        body |= {"gateway": caller, "boot": boot, "agentBoot": agent, "waitSeconds": seconds} | more
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
            session.post(f"{self.url}{names.ADAPTERS_PATH}/{wanted.name}/ensure", json=body) as response,
        ):
            return response.status, await response.json()

    async def floor(self, *adapters: DesiredAdapter, key: str = "operator-key") -> tuple[int, str]:
        """Says what the replica should hold, as an operator does."""
        body = DesiredAdapters(operator="op-0", boot="o", adapters=adapters).model_dump_json()
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
            session.put(self.url + names.ADAPTERS_PATH, data=body) as response,
        ):
            return response.status, await response.text()

    @property
    def drain_file(self) -> Path:
        return self.folder / "drain"

    async def hook(self, rounds: int = SILENT_ROUNDS) -> str:
        """What the kubelet runs when the engine is to stop. Returns why the agent let it go; empty: it did not."""
        script = drain_script(str(self.drain_file), str(self.folder / "draining"), settle=0, rounds=rounds)
        process = await asyncio.create_subprocess_exec("sh", "-c", script)
        try:
            assert await process.wait() == 0
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        stop = self.drain.stopped
        return f"{stop.reason}: {stop.message}" if stop is not None and not self.drain_file.exists() else ""


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks as often as a test wants to see them."""
    monkeypatch.setattr(observe, "BUSY_SECONDS", 0.02)
    monkeypatch.setattr(observe, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(observe, "COUNTERS_SECONDS", 0.0)
    monkeypatch.setattr(serve, "KEYS_SECONDS", 0.02)
