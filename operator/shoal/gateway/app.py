"""The OpenAI API: a pure ASGI application. `request.py` and `dispatch.py` handle one request."""

from collections.abc import Callable
from typing import Final

from shoal.gateway.request import GatewayRequest
from shoal.gateway.shared import Gateway
from shoal.net.asgi import Receive, Scope, Send

HEALTH_PATH: Final = "/healthz"
"""For the health checks of load balancers, which know only this port and have no key. The answer is a status and one
word: whether this gateway takes requests. The reasons are on the ops port."""


class GatewayApp:
    """The application of one gateway. It counts the requests in progress. `ready`: whether the gateway takes
    requests."""

    __slots__ = ("_gateway", "_ready")

    def __init__(self, gateway: Gateway, ready: Callable[[], bool] = lambda: True) -> None:
        self._gateway, self._ready = gateway, ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == HEALTH_PATH and scope["method"] in ("GET", "HEAD"):
            await self._health(scope["method"], send)
            return
        gateway = self._gateway
        request = GatewayRequest(gateway, scope, receive, send)
        gateway.in_flight += 1
        try:
            await request.run()
        finally:
            gateway.in_flight -= 1

    async def _health(self, method: str, send: Send) -> None:
        status, word = (200, b"ok\n") if self._ready() else (503, b"not ready\n")
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(word)),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else word})
