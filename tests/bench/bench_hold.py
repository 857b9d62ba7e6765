"""Requests that wait at a gateway: what each costs in memory, and how quickly they go on.

python -m tests.bench.bench_hold [--requests 8000]

The gateway is a process of its own, as in a pod, with four replicas that take 128 requests each at a time. Clients and
the engine, which answers at once, are in this process, on the other core where there is one. Four figures:

- resident memory of the gateway for each request that waits, its client's connection included;
- from the replicas' becoming ready to the last answer, with all of them waiting: includes the engine's and the clients'
  own work, which share one process;
- with one that waits: from its first byte, a new connection's time included, until an operator has heard that it waits;
- and from the moment the gateway is told that a replica is ready to the request's arrival at it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Final, cast

from shoal.api import keys
from shoal.core.hold.fair import FairQueue
from shoal.net.stream import StreamPeer
from shoal.signals.demand import DemandStreams
from tests.bench.gateway_process import API_KEY, INSTALL_KEY

ANSWER: Final = json.dumps({"id": "x", "object": "chat.completion", "model": "bench/model", "choices": []}).encode()
REPLY: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)


class Engine(asyncio.Protocol):
    """Answers at once."""

    arrived: float | None = None

    def __init__(self) -> None:
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if Engine.arrived is None:
            Engine.arrived = time.perf_counter()
        self._rest += data
        while (head := self._rest.find(b"\r\n\r\n")) >= 0:
            at = self._rest.index(b"content-length: ") + 16
            whole = head + 4 + int(self._rest[at : self._rest.index(b"\r", at)])
            if len(self._rest) < whole:
                return
            self._rest = self._rest[whole:]
            self._transport.write(REPLY)


class Client(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.done.done():
            self.done.set_result(data[9:12])
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(b"cut")


class Operator:
    """Listens to the gateway as operators do."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        """A request waits there."""
        self.since = 0.0
        self._streams = DemandStreams(self._heard)

    def _heard(self, uid: str, _models: object) -> None:
        stream = self._streams.get(uid)
        if stream is None or not stream.demand("uid").held:
            self.waits.clear()
        elif not self.waits.is_set():
            self.since = time.perf_counter()
            self.waits.set()

    @contextlib.asynccontextmanager
    async def listening(self, port: int) -> AsyncGenerator[None]:
        key = keys.derive(INSTALL_KEY, "operator", keys.DEMAND)
        self._streams.start()
        try:
            self._streams.put(StreamPeer("gateway", "gateway", "127.0.0.1", key, port))
            async with asyncio.timeout(20):
                while self._streams.get("gateway") is None:
                    await asyncio.sleep(0.01)
            yield
        finally:
            await self._streams.close()


class Gateway:
    """The child process."""

    def __init__(self, child: "subprocess.Popen[str]", port: int, ops_port: int) -> None:
        self._child = child
        self._port = port
        self.ops_port = ops_port

    @property
    def memory(self) -> int:
        pages = int(Path(f"/proc/{self._child.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def say(self, word: str) -> int:
        """Gives a command; returns how many wait."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())

    async def until_held(self, count: int) -> None:
        while self.say("held") != count:
            await asyncio.sleep(0.02)

    async def ask(self, body: bytes) -> Client:
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (API_KEY.encode(), len(body), body)
        )
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: Client(request), "127.0.0.1", self._port))[1]


@contextlib.contextmanager
def gateway(engine_port: int) -> Generator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        port, ops_port = free_port(), free_port()
        command = [sys.executable, "-m", "tests.bench.gateway_process", str(engine_port), str(port), folder, "asleep"]
        env = {**os.environ, "BENCH_OPS_PORT": str(ops_port)}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        try:
            found = Gateway(child, port, ops_port)
            found.say("held")
            while not listening(port):
                time.sleep(0.05)
            yield found
        finally:
            child.terminate()
            child.wait(20)


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def body_of(size: int) -> bytes:
    empty = len(json.dumps({"model": "bench", "messages": [{"role": "user", "content": ""}]}))
    return json.dumps({"model": "bench", "messages": [{"role": "user", "content": "x" * (size - empty)}]}).encode()


async def many(engine_port: int, requests: int, size: int) -> tuple[float, float]:
    """KiB of each, and seconds from wake to the last answer."""
    with gateway(engine_port) as it:
        body = body_of(size)
        it.say("wake")
        first = [await it.ask(body) for _ in range(50)]  # what is made once is made now
        await asyncio.gather(*(client.done for client in first))
        it.say("sleep")
        before = it.memory
        clients: list[Client] = []
        while len(clients) < requests:
            clients += await asyncio.gather(*(it.ask(body) for _ in range(min(200, requests - len(clients)))))
        await it.until_held(requests)
        each = (it.memory - before) / requests / 1024
        began = time.perf_counter()
        it.say("wake")
        answers = await asyncio.gather(*(client.done for client in clients))
        seconds = time.perf_counter() - began
        if set(answers) != {b"200"}:
            raise SystemExit(f"not all were answered: { {a: answers.count(a) for a in set(answers)} }")
        return each, seconds


async def single(engine_port: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds from a request's first byte until an operator hears that it waits, and from the word that a replica
    is ready to the request's arrival there."""
    told: list[float] = []
    times: list[float] = []
    operator = Operator()
    with gateway(engine_port) as it:
        body = body_of(900)
        async with operator.listening(it.ops_port), asyncio.timeout(60 + rounds):
            for _ in range(rounds):
                began = time.perf_counter()
                client = await it.ask(body)
                await operator.waits.wait()
                told.append((operator.since - began) * 1000)
                Engine.arrived = None
                began = time.perf_counter()
                it.say("wake")
                await client.done
                arrived = cast(float | None, Engine.arrived)
                times.append(((arrived or began) - began) * 1000)
                it.say("sleep")
                while operator.waits.is_set():
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)  # a request that finds the gateway at rest, and not telling of the last one
    return sorted(told), sorted(times)


def order(requests: int) -> float:
    """Microseconds of the order alone: in and out of the queue."""
    queue: FairQueue[int] = FairQueue()
    began = time.perf_counter()
    for number in range(requests):
        queue.push(f"tenant-{number % 100}", number, 300)
    while queue.pop() is not None:
        pass
    return (time.perf_counter() - began) / requests * 1e6


async def main(requests: int, rounds: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, max(soft, 2 * requests + 4096))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    print(f"{requests} requests that wait, four replicas with room for 128 each")
    for size in (900, 45_000):
        each, seconds = await many(port, requests, size)
        print(
            f"  body of {size / 1000:>4g} KB: {each:6.1f} KiB each; all answered {seconds:.2f} s after the replicas "
            f"came ({requests / seconds:.0f} per second)"
        )
    print(f"  their order alone (fair queue over 100 tenants): {order(requests):.1f} us each, in and out")
    told, times = await single(port, rounds)
    for what, found in (
        ("first byte of a request at zero -> an operator hears that it waits", told),
        ("replica ready -> held request arrives there", times),
    ):
        print(
            f"{what}: p50 {found[len(found) // 2]:.2f} ms, p99 {found[int(len(found) * 0.99)]:.2f} ms, "
            f"max {found[-1]:.2f} ms ({rounds} wakes; goal p99 < 50 ms)"
        )
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    asyncio.run(main(options.requests, options.rounds))
