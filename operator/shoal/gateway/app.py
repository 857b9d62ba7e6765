"""The OpenAI API: a pure ASGI application. `request.py` and `dispatch.py` handle one request."""

from shoal.gateway.request import GatewayRequest
from shoal.gateway.shared import Gateway
from shoal.net.asgi import Receive, Scope, Send


class GatewayApp:
    """The application of one gateway. It counts the requests in progress."""

    __slots__ = ("_gateway",)

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        gateway = self._gateway
        request = GatewayRequest(gateway, scope, receive, send)
        gateway.in_flight += 1
        try:
            await request.run()
        finally:
            gateway.in_flight -= 1
