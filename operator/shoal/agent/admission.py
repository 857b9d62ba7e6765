"""What the TLS sidecar asks about each request that a proxy brings: whether a gateway admitted it
(`core/admission.py`).

It listens on localhost only, because the answer has the engine's key, which the sidecar then puts into the request.
"""

import time
from collections.abc import Callable

import structlog

from shoal.api import names
from shoal.core.admission import HEADER, Admissions
from shoal.net.asgi import Receive, Scope, Send

log = structlog.get_logger()

_HEADER = HEADER.encode()


class AdmissionApp:
    """ASGI. `engine_key`: None while the agent does not know it."""

    def __init__(self, host: str, engine_key: Callable[[], str | None], now: Callable[[], float] = time.time) -> None:
        self._engine_key, self._now = engine_key, now
        self._admissions = Admissions(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, headers = self._decide(scope)
        await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def _decide(self, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]]]:
        path: str = scope["path"]
        key = self._engine_key()
        if not path.startswith(names.ADMISSION_PREFIX):
            return 404, []
        if key is None:
            return 503, []
        told = dict(scope["headers"]).get(_HEADER, b"").decode("latin-1")
        verdict = self._admissions.take(key, path.removeprefix(names.ADMISSION_PREFIX), told, self._now())
        if verdict != "admitted":
            log.warning("a request that no gateway admitted", reason=verdict, path=path[:200])
            return (503 if verdict == "full" else 403), []
        return 200, [(b"authorization", f"Bearer {key}".encode())]
