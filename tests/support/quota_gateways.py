"""Several gateways in one process that hear each other over real streams, and one engine behind them."""

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from shoal.api import keys
from shoal.core.quota.peerusage import GatewayPeer as Other
from shoal.core.quota.peerusage import GatewayPeers
from shoal.core.quota.share import PUBLISH_SECONDS, WIRE_SECONDS
from shoal.gateway.demand import DemandPublisher
from shoal.gateway.ops import gateway_ops
from shoal.net.server import make_server
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.signals.demand import DemandStreams
from tests.support.gateway import API_KEY, INSTALL_KEY, GatewayUnderTest, gateway, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.streams import Ring, until


class Member:
    """One gateway among the others."""

    def __init__(self, it: GatewayUnderTest, number: int) -> None:
        self.it = it
        self.uid = f"gateway-{number}"
        book = it.app.demand
        self.publisher = DemandPublisher(book)
        self.streams = DemandStreams(
            lambda _uid, _models: None,
            ListenerIdentity(self.uid, self.publisher.hub.boot),
            book.tenants.peer_reported,
            lost=book.tenants.peer_lost,
        )
        ops = gateway_ops(CollectorRegistry(), dict, lambda: None, self.publisher.hub, Ring(INSTALL_KEY))
        self.ops = make_server(ops, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
        it.app.quotas._read_peers = self.peers  # pyright: ignore[reportPrivateUsage]
        self.others: list[str] = []

    def peers(self) -> GatewayPeers:
        found = ((uid, self.streams.get(uid)) for uid in self.others)
        boot_of, awaits = self.it.app.demand.tenants.boot_of, self.streams.awaits
        return [
            Other(s.boot, s.received_at) if s is not None else Other(boot_of(uid), None, awaits(uid))
            for uid, s in found
        ]

    def follow(self, members: "Sequence[Member]") -> None:
        """Hears exactly these, of which it may be one itself."""
        others = [other for other in members if other is not self]
        said = keys.derive(INSTALL_KEY, "gateway", keys.DEMAND)
        self.others = [other.uid for other in others]
        self.streams.set_peers(StreamPeer(o.uid, o.uid, "127.0.0.1", said, o.ops.port) for o in others)

    async def stop(self) -> None:
        """Its process is gone."""
        await self.streams.close()
        self.publisher.close()
        self.ops.should_exit = True


@dataclass
class Crew:
    members: list[Member]
    start: Callable[[], Awaitable[Member]]
    """Starts one more, which hears nobody yet."""
    most_running: int = 0
    running: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then the engine keeps what it has."""
    longest_pause: float = 0.0
    """Seconds for which the loop of all of them did nothing else at a time: so late do messages come."""

    def limit(self, **spec: Any) -> None:
        for member in self.members:
            member.it.tenants["acme"] = tenant(**spec)
            member.it.changed()

    async def burst(self, count: int, body: dict[str, Any]) -> Counter[int]:
        """So many requests at a time, evenly over the gateways; how many had which status."""
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"authorization": f"Bearer {API_KEY}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def ask(member: Member) -> int:
                async with session.post(f"{member.it.url}/v1/chat/completions", json=body) as response:
                    await response.read()
                    return response.status

            turn = itertools.cycle(self.members)
            return Counter(await asyncio.gather(*(ask(next(turn)) for _ in range(count))))

    @property
    def shares(self) -> int:
        """How many shares a gateway may have had before it heard of the others' first: one where messages came in the
        time that is allowed for them. On a machine without CPU to spare they do not."""
        late = max(0.0, self.longest_pause - WIRE_SECONDS)
        return 1 + math.ceil(late / (PUBLISH_SECONDS + WIRE_SECONDS))

    async def watch_pauses(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0)
            self.longest_pause = max(self.longest_pause, loop.time() - before)
            await asyncio.sleep(0.01)

    @property
    def refused(self) -> int:
        """Requests that were refused with a 429."""
        codes = ("rate_limit_exceeded", "insufficient_quota")
        return int(sum(m.it.metric("shoal_gateway_rejected_total", reason=c) for m in self.members for c in codes))

    @property
    def used(self) -> int:
        """Requests that were let pass, ever."""
        return sum(m.it.app.demand.tenants.of("acme").own_use().requests for m in self.members)


@contextlib.asynccontextmanager
async def crew(tmp_path: Path, count: int = 4) -> AsyncGenerator[Crew]:
    """`count` gateways that have heard each other."""

    async def behave(request: EngineRequest) -> None:
        it.running += 1
        it.most_running = max(it.most_running, it.running)
        try:
            await it.release.wait()
            await serve_normally(request)
        finally:
            it.running -= 1

    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine(behave).running())
        # The gateways close their connections first; an engine that is cut off in the middle says so at length.
        stack.push_async_callback(until, lambda: not engine._handlers)  # pyright: ignore[reportPrivateUsage]
        serving: list[asyncio.Task[None]] = []
        numbers = itertools.count()

        async def start() -> Member:
            number = next(numbers)
            folder = tmp_path / str(number)
            folder.mkdir()
            member = Member(await stack.enter_async_context(gateway(folder, engine)), number)
            it.members.append(member)
            serving.append(asyncio.create_task(member.ops.serve()))
            await until(lambda: member.ops.started)
            member.streams.start()
            return member

        it = Crew([], start)
        for _ in range(count):
            await start()
        for member in it.members:
            member.follow(it.members)
        watching = asyncio.create_task(it.watch_pauses())
        try:
            await until(lambda: all(len(m.streams.live()) == count - 1 for m in it.members))
            it.longest_pause = 0.0  # nobody has used anything yet
            yield it
        finally:
            watching.cancel()
            it.release.set()
            for member in it.members:
                await member.stop()
            await asyncio.gather(*serving)
