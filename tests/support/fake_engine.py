"""A stand-in for the engine's side of the agent: what it answers is set by the test."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class FakeEngine:
    """Answers /ready, /v1/loads and /metrics as SGLang does."""

    ready: int = 200
    ranks: list[dict[str, object]] = field(default_factory=lambda: [load()])
    metrics: str = ""
    """Besides the HTTP families."""
    active: int = 0
    requests: int = 0
    """HTTP requests for answers, as its metrics count them."""
    raw_loads: str | None = None
    """Sent instead of the loads, for garbage."""
    hang: bool = False
    key: str = "engine-key"
    seen: list[str] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    """Loaded adapters: path by name."""
    calls: list[str] = field(default_factory=list)
    """`load NAME` and `unload NAME`, in order."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Loads and unloads wait while it is not set. It is, unless a test clears it."""
    refuses: dict[str, str] = field(default_factory=dict)
    """What loading an adapter is answered with, by name."""
    deadly: set[str] = field(default_factory=set[str])
    """Adapters whose load ends the engine, and shuts the gate for the next one."""
    dead: bool = False
    """Every connection breaks."""
    aborted: list[str] = field(default_factory=list)
    """Ids that it was asked to abort."""
    in_call: int = 0
    most_in_call: int = 0

    says: str | None = " Paris."
    """What it writes after any prompt; None: its model writes nothing."""
    completed: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """Bodies of /v1/completions."""

    def __post_init__(self) -> None:
        self.gate.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        app.router.add_post("/load_lora_adapter", self._load)
        app.router.add_post("/unload_lora_adapter", self._unload)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _abort(self, request: web.Request) -> web.Response:
        if self.hang:
            await asyncio.sleep(30)
        if request.headers.get("Authorization") != "Bearer admin-key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _complete(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer engine-key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        asked = await request.json()
        self.completed.append(asked)
        if self.says is None:
            return web.json_response({"error": "this model is an embedding model"}, status=400)
        return web.json_response({"choices": [{"index": 0, "text": self.says}]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        async with self._call(f"load {name}"):
            if name in self.deadly:
                self.dead = True
                self.gate.clear()
                return break_off(request)
            if name in self.adapters:
                return self._result(f"Failed to load LoRA adapter {name} because it is already loaded")
            if name in self.refuses:
                return self._result(self.refuses[name])
            self.adapters[name] = body["lora_path"]
            return self._result()

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        async with self._call(f"unload {name}"):
            if self.adapters.pop(name, None) is None:
                return self._result(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.adapters)}")
            return self._result()

    @asynccontextmanager
    async def _call(self, what: str) -> AsyncGenerator[None]:
        self.calls.append(what)
        self.in_call += 1
        self.most_in_call = max(self.most_in_call, self.in_call)
        try:
            await self.gate.wait()
            yield
        finally:
            self.in_call -= 1

    def _result(self, problem: str | None = None) -> web.Response:
        body = {"success": problem is None, "error_message": problem, "loaded_adapters": self.adapters}
        return web.json_response(body, status=200 if problem is None else 400)

    async def _answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.path)
        if self.dead:
            return break_off(request)
        if self.hang:
            await asyncio.sleep(30)
        if request.path == "/ready":
            return web.Response(status=self.ready)
        if request.path == "/metrics":
            return web.Response(text=self.metrics + self._http())
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/loads":
            if self.raw_loads is not None:
                return web.Response(text=self.raw_loads)
            return web.json_response({"timestamp": 1.0, "loads": self.ranks})
        if request.path == "/v1/models":
            cards = [{"id": "base", "root": "base", "parent": None}]
            cards += [{"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items()]
            return web.json_response({"object": "list", "data": cards})
        return web.Response(status=404)

    def _http(self) -> str:
        lines = 'sglang:http_requests_total{endpoint="/ready",method="GET"} 9\n'
        lines += 'sglang:http_requests_active{endpoint="/metrics",method="GET"} 1\n'
        lines += f'sglang:http_requests_active{{endpoint="/v1/completions",method="POST"}} {self.active}\n'
        return lines + f'sglang:http_requests_total{{endpoint="/v1/completions",method="POST"}} {self.requests}\n'


def break_off(request: web.Request) -> web.Response:
    """Closes the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def load(*, running: int = 0, waiting: int = 0, waiting_tokens: int = 0, used: int = 0) -> dict[str, object]:
    """One rank of /v1/loads."""
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": waiting_tokens,
        "num_used_tokens": used,
        "max_total_num_tokens": 1000,
        "max_running_requests": 32,
    }
