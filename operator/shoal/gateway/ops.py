"""/healthz, /readyz and /metrics, on a port of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shoal.gateway.app import Receive, Scope, Send

Readiness = Callable[[], Mapping[str, str]]
"""What is missing, by part; empty when ready."""


class Ops:
    """`refresh` brings gauges up to date before they are read."""

    def __init__(self, registry: CollectorRegistry, missing: Readiness, refresh: Callable[[], None]) -> None:
        self._registry = registry
        self._missing = missing
        self._refresh = refresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/healthz":
            # The event loop answers: that is what a restart could put right. What is missing is readyz's.
            await _answer(send, 200, {"status": "ok"})
        elif path == "/readyz":
            missing = self._missing()
            await _answer(send, 503 if missing else 200, {"status": "not ready" if missing else "ok", **missing})
        elif path == "/metrics":
            self._refresh()
            await _send(send, 200, CONTENT_TYPE_LATEST.encode(), generate_latest(self._registry))
        else:
            await _answer(send, 404, {"status": "unknown path"})


async def _answer(send: Send, status: int, body: Mapping[str, Any]) -> None:
    await _send(send, status, b"application/json", orjson.dumps(body))


async def _send(send: Send, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
