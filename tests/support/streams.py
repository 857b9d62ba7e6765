"""Gateways' ops ports and agents' streams in the test's own process."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from shoal.api import keys
from shoal.api.names import REPLICA_PATH
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.core.routing.score import ReplicaScores
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.demandmetrics import DemandMetrics
from shoal.gateway.ops import gateway_ops
from shoal.gateway.prefixes import PrefixShare
from shoal.net.hub import Caller, StreamHub
from shoal.net.server import make_server
from shoal.net.stream import StreamPeer
from tests.support.controlplane import free_ports

CURRENT = b"the current install key ........"
PREVIOUS = b"the install key before .........."


class Ring:
    """The install keys that a gateway knows."""

    def __init__(self, *known: bytes) -> None:
        self.known = known

    def demand_keys(self, role: keys.Role) -> tuple[str, ...]:
        return tuple(keys.derive(key, role, keys.DEMAND) for key in self.known)


class ToldGateway:
    """A gateway's ops port with a book behind it. It can be cut, and started again as another process."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.port = host, port
        self.ring = Ring(CURRENT, PREVIOUS)

    async def up(self) -> None:
        self.book = DemandState()
        self.publisher = DemandPublisher(self.book)
        registry = CollectorRegistry()
        registry.register(DemandMetrics(self.publisher.hub.boot, self.book, lambda: {"uid-llama": "chat/llama"}))
        self.prefixes = PrefixShare(ReplicaScores())
        hub = self.prefixes.hub
        ops = gateway_ops(registry, dict, lambda: None, self.publisher.hub, self.ring, prefixes=hub)
        self.port = self.port or free_ports(1)[0]  # nobody takes it while this one is down
        self._server = make_server(ops, host=self.host, port=self.port, keep_alive=5, stop_seconds=1)
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def down(self) -> None:
        self.publisher.close()
        self.prefixes.hub.close()
        self._server.should_exit = True
        await self._serving

    @property
    def hub(self) -> StreamHub:
        return self.publisher.hub

    def peer(
        self, uid: str = "gateway-1", role: keys.Role = "operator", key: bytes = CURRENT, *others: bytes
    ) -> StreamPeer:
        said = [keys.derive(k, role, keys.DEMAND) for k in (key, *others)]
        return StreamPeer(uid, f"shoal-system/{uid}", self.host, said[0], self.port, tuple(said[1:]))


@contextlib.asynccontextmanager
async def told_gateway(host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[ToldGateway]:
    it = ToldGateway(host, port)
    await it.up()
    try:
        yield it
    finally:
        await it.down()


@contextlib.asynccontextmanager
async def agents(*hubs: StreamHub) -> AsyncGenerator[list[StreamPeer]]:
    """An agent's stream for each hub, each on a port of its own."""
    async with contextlib.AsyncExitStack() as stack:
        peers: list[StreamPeer] = []
        for number, hub in enumerate(hubs):
            port = await stack.enter_async_context(agent(hub))
            peers.append(StreamPeer(f"pod-{number}", f"chat/pod-{number}", "127.0.0.1", "key", port))
        yield peers


@contextlib.asynccontextmanager
async def agent(hub: StreamHub, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[int]:
    """An agent's stream; yields its port. Every key is good."""
    runner = web.AppRunner(_app(hub), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner.addresses[0][1]
    finally:
        hub.close()
        await runner.cleanup()


def _app(hub: StreamHub) -> web.Application:
    async def replica(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with hub.reader(Caller("operator")) as reader, contextlib.suppress(ConnectionError):
            while True:
                try:
                    message = await reader.next(HEARTBEAT_SECONDS)
                except TimeoutError:
                    message = hub.heartbeat()
                if message is None:
                    return response
                await response.write(message)
        return response

    app = web.Application()
    app.router.add_get(REPLICA_PATH, replica)
    return app


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for something that must come; raises TimeoutError when it does not."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
