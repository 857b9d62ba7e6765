"""Many agents' streams, or gateways' demand, in one process: the other side of `bench_streams`.

python -m tests.bench.streams_process agents FIRST-PORT COUNT CHANGES-PER-SECOND BUSY-SHARE
python -m tests.bench.streams_process gateway PORT MODELS REQUESTS-PER-SECOND

An agent's state is what an engine under load says: some requests run, KV use and token counters move with every look.
Idle ones send heartbeats only. All of it goes through the real hubs.
"""

import asyncio
import contextlib
import random
import sys
import time

import uvloop
from prometheus_client import CollectorRegistry

from shoal.agent.stream import AgentStream as AgentHub
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.ops import gateway_ops
from shoal.net.hub import StreamHub
from shoal.net.server import make_server
from tests.support.streams import CURRENT, Ring

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def _serve(hub: StreamHub, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An agent's stream, in the chunks that its server sends."""
    with contextlib.suppress(ConnectionError, RuntimeError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_HEAD)
        with hub.reader() as messages:
            while True:
                try:
                    message = await messages.next(HEARTBEAT_SECONDS)
                except TimeoutError:
                    message = hub.heartbeat()
                if message is None:
                    break
                writer.write(b"%x\r\n%b\r\n" % (len(message), message))
                await writer.drain()
    writer.close()


class _Engine:
    """What the agent of a busy engine sees."""

    def __init__(self, number: int, busy: bool) -> None:
        self.hub = AgentHub()
        self._random = random.Random(number)  # noqa: S311 - a load, not a secret
        self._prompt, self._generated = 0, 0
        self._boot = f"boot-{number}"
        self.busy = busy
        self.look()

    def look(self) -> None:
        chance = self._random
        running = chance.randint(10, 60) if self.busy else 0
        self._prompt += 400 * running
        self._generated += 20 * running
        self.hub.update(
            {
                "phase": "ready",
                "engine_boot": self._boot,
                "running": running,
                "max_running": 256,
                "waiting": 0,
                "waiting_tokens": 0,
                "kv_tokens_used": running * 2000 + chance.randint(0, 1500),
                "kv_tokens_total": 400_000,
                "prompt_tokens_total": self._prompt,
                "generation_tokens_total": self._generated,
            }
        )


async def agents(first_port: int, count: int, per_second: float, share: float) -> None:
    engines = [_Engine(n, n < count * share) for n in range(count)]
    servers = [
        await asyncio.start_server(lambda r, w, hub=engine.hub: _serve(hub, r, w), "127.0.0.1", first_port + number)
        for number, engine in enumerate(engines)
    ]
    print("ready", flush=True)
    busy = [e for e in engines if e.busy]
    began, told = time.monotonic(), 0
    while servers[0].is_serving():
        # Looks are spread over the period, as independent pods' are.
        due = int((time.monotonic() - began) * per_second * len(busy))
        for turn in range(told, due):
            busy[turn % len(busy)].look()
        told = max(told, due)
        await asyncio.sleep(0.005)


async def gateway(port: int, models: int, per_second: float) -> None:
    book = DemandState()
    publisher = DemandPublisher(book)
    ops = gateway_ops(CollectorRegistry(), dict, lambda: None, publisher.hub, Ring(CURRENT))
    server = make_server(ops, host="127.0.0.1", port=port, keep_alive=5)
    serving = asyncio.create_task(server.serve())
    chance = random.Random(port)  # noqa: S311
    flying: list[tuple[float, str]] = []
    began, sent = time.monotonic(), 0
    print("ready", flush=True)
    while not serving.done():
        now = time.monotonic()
        due = int((now - began) * per_second)
        for _ in range(sent, due):
            uid = f"00000000-0000-0000-0000-{chance.randrange(models):012d}"
            book.arrived(uid)
            book.sent(uid)
            flying.append((now + chance.expovariate(0.2), uid))
        sent = due
        for _when, uid in [f for f in flying if f[0] <= now]:
            book.ended(uid)
        flying = [f for f in flying if f[0] > now]
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "agents":
        uvloop.run(agents(int(rest[0]), int(rest[1]), float(rest[2]), float(rest[3])))
    else:
        uvloop.run(gateway(int(rest[0]), int(rest[1]), float(rest[2])))
