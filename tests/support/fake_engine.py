"""A stand-in for the engine's side of the agent: what it answers is set by the test."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class FakeEngine:
    """Answers /ready, /v1/loads, /metrics and /server_info as SGLang does."""

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

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.path)
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
        if request.path == "/server_info":
            return web.json_response(
                {
                    "version": "0.5.23",
                    "context_length": 4096,
                    "api_key": self.key,
                    "internal_states": [{"memory_usage": {"token_capacity": 20000}}],
                }
            )
        return web.Response(status=404)

    def _http(self) -> str:
        lines = 'sglang:http_requests_total{endpoint="/ready",method="GET"} 9\n'
        lines += 'sglang:http_requests_active{endpoint="/metrics",method="GET"} 1\n'
        lines += f'sglang:http_requests_active{{endpoint="/v1/completions",method="POST"}} {self.active}\n'
        return lines + f'sglang:http_requests_total{{endpoint="/v1/completions",method="POST"}} {self.requests}\n'


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
