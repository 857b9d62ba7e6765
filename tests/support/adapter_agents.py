"""Adapters in a gateway's tests: declared as the API server tells of them, and agents that grant leases."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.api import adapters as api
from shoal.api import keys, names
from shoal.api.loraadapter import engine_name
from shoal.api.replica import Ack
from shoal.core.routing.resolveadapters import DeclaredAdapter, DeclaredPool
from shoal.gateway.acks import Acks
from shoal.gateway.directory import project_adapter, project_pool
from shoal.net.stream import StreamPeer
from tests.support.gateway import INSTALL_KEY, GatewayUnderTest, gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

KEY = keys.derive(INSTALL_KEY, "gateway", "uid-llama")
V1, V2 = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def pool(name: str = "pool", namespace: str = "chat", model: str = "llama", *, accepted: bool = True, **spec: Any):
    obj = {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}"},
        "spec": {"modelRef": {"name": model}, **spec},
        "status": {"conditions": [_condition("Accepted", accepted, "Valid" if accepted else "PoolClaimed")]},
    }
    found = project_pool(obj, lambda _: None)
    assert found is not None
    return found


def adapter(
    name: str = "support",
    namespace: str = "chat",
    *,
    revision: str | None = V1,
    tenants: tuple[str, ...] = ("acme",),
    created: str = "2026-02-01T00:00:00Z",
    pool: str = "pool",
    pool_namespace: str | None = None,
    served: tuple[str, ...] = (),
    reason: str = "Valid",
    uid: str | None = None,
) -> DeclaredAdapter:
    status: dict[str, Any] = {"conditions": [_condition("Accepted", reason == "Valid", reason)]}
    if revision is not None:
        status |= {"revision": revision, "uri": f"s3://adapters/{name}", "rank": 8, "sizeBytes": 1000}
    reference = {"name": pool} | ({"namespace": pool_namespace} if pool_namespace else {})
    obj = {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{namespace}-{name}",
            "creationTimestamp": created,
        },
        "spec": {
            "poolRef": reference,
            "servedNames": list(served),
            "source": {"uri": f"s3://adapters/{name}"},
            "tenants": list(tenants),
        },
        "status": status,
    }
    found = project_adapter(obj, lambda _: None)
    assert found is not None
    return found


def name_of(key: str = "chat/support", revision: str = V1) -> str:
    return engine_name(key, revision)


def _condition(kind: str, status: bool, reason: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": str(status),
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


Answer = Callable[[api.Ensure], Awaitable[tuple[int, dict[str, Any]]]]


@dataclass
class AdapterAgent:
    """Serves the stream of one replica, takes acknowledgements, grants leases. What it grants, its engine has."""

    number: int
    adapters: dict[str, dict[str, str]] | None = field(default_factory=dict)
    slots: int = 3
    answer: Answer | None = None
    boot: str = ""
    engine_boot: str = ""
    lease_seconds: float = 10.0
    held_back: bool = False
    """What it says is on its way, and not received yet."""
    cancels: bool = False
    """Whose caller hangs up is not answered any more."""
    numbers_grants: bool = True
    """Agents of older versions do not."""
    port: int = 0
    seq: int = 0
    ensured: list[api.Ensure] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    _streams: list[web.StreamResponse] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boot = self.boot or f"agent-{self.number}"
        self.engine_boot = self.engine_boot or f"boot-{self.number}"

    @property
    def has(self) -> set[str]:
        """What its engine has."""
        return {name for name, said in (self.adapters or {}).items() if said["state"] in ("loaded", "retiring")}

    def peer(self) -> StreamPeer:
        return StreamPeer(f"pod-{self.number}", f"chat/llama-{self.number}", "127.0.0.1", KEY, self.port)

    async def say(self, **keys: Any) -> None:
        """Tells a change; `adapters` is what it has now in any case."""
        self.said.update(keys)
        self.seq += 1
        if not self.held_back:
            await self.tell(**keys)

    async def tell(self, **keys: Any) -> None:
        """The last that it said is heard."""
        for stream in list(self._streams):
            with contextlib.suppress(ConnectionError):
                await self._write(stream, keys={"adapters": self.adapters, **keys})

    async def set(self, **states: str) -> None:
        """States by engine name; "gone" for none."""
        assert self.adapters is not None
        for name, state in states.items():
            if state == "gone":
                self.adapters.pop(name, None)
            else:
                self.adapters[name] = {"state": state}
        await self.say()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["AdapterAgent", None]:
        app = web.Application()
        app.router.add_get(names.REPLICA_PATH, self._stream)
        app.router.add_post(names.ACK_PATH, self._ack)
        app.router.add_post(f"{names.ADAPTERS_PATH}/{{name}}/ensure", self._ensure)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=self.cancels)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        keys = {"phase": "ready", "engineBoot": self.engine_boot, "adapterSlots": self.slots, "adapterSlotsLeased": 0}
        await self._write(response, full=True, keys={**keys, "adapters": self.adapters, **self.said})
        self._streams.append(response)
        await asyncio.sleep(60)
        return response

    async def _ack(self, request: web.Request) -> web.Response:
        self.acks.append(Ack.model_validate_json(await request.read()))
        return web.Response(status=204)

    async def _ensure(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        wanted = api.Ensure.model_validate_json(await request.read())
        assert wanted.name == request.match_info["name"]
        self.ensured.append(wanted)
        if self.answer is not None:
            status, body = await self.answer(wanted)
            if status != 200:
                return web.json_response(body, status=status)
        fresh = wanted.name not in self.has
        await self.set(**{wanted.name: "loaded"})
        return web.json_response(
            {"name": wanted.name, "engineBoot": self.engine_boot, "loaded": fresh, "seconds": self.lease_seconds}
            | {"seq": self.seq, "grant": len(self.ensured) if self.numbers_grants else 0}
        )

    async def _write(self, stream: web.StreamResponse, **message: Any) -> None:
        said = {"boot": self.boot, "seq": self.seq, **message}
        await stream.write(b"data: " + json.dumps(said).encode() + b"\n\n")


def tuned_engine(agent: AdapterAgent) -> ScriptedEngine:
    """SGLang with adapters: what answers is in the field `system_fingerprint` of its answers (not SGLang's own)."""

    async def behave(request: EngineRequest) -> None:
        name = request.body.get("lora_path")
        if ":" in request.model:
            name = request.model.partition(":")[2]
        if name is not None and name not in agent.has:
            text = f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: dict_keys(['a.b@0'])"
            body = {"object": "error", "message": text, "type": "BadRequestError", "code": 400}
            await request.answer(400, json.dumps(body).encode())
        else:
            await serve_normally(request)

    return ScriptedEngine(behave)


@dataclass
class TunedGateway:
    """A gateway with replicas that serve adapters."""

    it: GatewayUnderTest
    agents: list[AdapterAgent]
    engines: list[ScriptedEngine]
    pools: dict[str, DeclaredPool]
    adapters: dict[str, DeclaredAdapter]

    def changed(self) -> None:
        for source in ("models", "tenants", "pods", "pools", "adapters"):
            self.it.directory.mark(source)
        self.it.directory.rebuild()

    def declare(self, *adapters: DeclaredAdapter) -> None:
        for one in adapters:
            self.adapters[one.key] = one
        self.changed()

    async def ask(self, model: str = "support", **rest: Any):
        return await self.it.post({"model": model, "messages": [{"role": "user", "content": "hi"}], **rest})

    def asked(self) -> list[str | None]:
        """What the engines were asked for: names of adapters, None for the base."""
        return [r.body.get("lora_path") for engine in self.engines for r in engine.requests]


@contextlib.asynccontextmanager
async def tuned(
    tmp_path: Path, *agents: AdapterAgent, live: bool = True, **settings: Any
) -> AsyncGenerator[TunedGateway, None]:
    """A gateway, a pool and the adapter `chat/support` for the tenant `acme`."""
    async with contextlib.AsyncExitStack() as stack:
        for agent in agents:
            await stack.enter_async_context(agent.running())
        engines = [tuned_engine(agent) for agent in agents]
        it = await stack.enter_async_context(gateway(tmp_path, *engines, live=False, **settings))
        it.fleet.streams.start()
        acks = Acks(it.fleet, it.me, it.agents, it.app.leases)
        stack.push_async_callback(acks.close)
        stack.push_async_callback(it.fleet.streams.close)
        found = TunedGateway(it, list(agents), engines, it.pools, it.adapters)
        found.pools["chat/pool"] = pool()
        found.declare(adapter())
        if live:
            it.fleet.streams.set_peers(agent.peer() for agent in agents)
            async with asyncio.timeout(20):
                while len(it.fleet.live) < len(agents):
                    await asyncio.sleep(0.005)
        yield found
