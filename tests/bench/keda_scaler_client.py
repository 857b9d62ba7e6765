"""KEDA's side of many ScaledObjects, in a process of its own: the other side of `bench_keda_scaler`.

python -m tests.bench.keda_scaler_client PORT CA-FILE OBJECTS SECONDS idle|active|flood

Over one connection, as KEDA's: each ScaledObject has its two streams, each poll (5 s) and, where the HPA is at work,
each sync of it (15 s) calls GetMetrics and IsActive. With `flood` it calls as fast as it is answered instead. Prints
`ready`, and at the end one line of JSON: calls, errors, and when each `true` came, on the monotonic clock.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import grpc.aio

from shoal.controllers.keda.protocol import externalscaler_pb2 as pb
from shoal.controllers.keda.protocol.externalscaler_pb2_grpc import ExternalScalerStub
from tests.support.kedaclient import HOST

NAMESPACE: Final = "ml"
POLL_SECONDS: Final = 5.0
HPA_SECONDS: Final = 15.0
FLOOD: Final = 64
"""Calls on their way at the same time."""


class KEDA:
    """What it did and heard."""

    def __init__(self, stub: Any) -> None:
        self._stub: Any = stub
        self.calls, self.errors = 0, 0
        self.pushed: list[tuple[str, float]] = []
        self.heard: set[tuple[str, str]] = set()
        """(ScaledObject, stream) of which something has come."""

    async def streams(self, name: str) -> None:
        ref = pb.ScaledObjectRef(namespace=NAMESPACE, name=name)

        async def active() -> None:
            # The first stream of a term ends at once; KEDA's wait of 2 s is no part of what is measured.
            while True:
                async for said in self._stub.StreamIsActive(ref):
                    self.heard.add((name, "active"))
                    if said.result:
                        self.pushed.append((name, time.monotonic()))

        async def specs() -> None:
            async for _ in self._stub.StreamMetricSpec(ref):
                self.heard.add((name, "specs"))

        await asyncio.gather(active(), specs())

    async def poll(self, name: str, seconds: float) -> None:
        await asyncio.sleep(random.uniform(0, seconds))  # noqa: S311 - a load, not a secret
        while True:
            began = time.monotonic()
            await self.ask(name)
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def flood(self, name: str) -> None:
        while True:
            await self.ask(name)

    async def ask(self, name: str) -> None:
        ref = pb.ScaledObjectRef(namespace=NAMESPACE, name=name)
        try:
            await self._stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=ref, metricName="replicas"), timeout=10)
            await self._stub.IsActive(ref, timeout=10)
            self.calls += 2
        except grpc.aio.AioRpcError:
            self.errors += 1


async def main(port: int, ca: bytes, objects: int, seconds: float, mode: str) -> None:
    options = [("grpc.ssl_target_name_override", HOST)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca), options) as channel:
        keda = KEDA(ExternalScalerStub(channel))
        names = [f"so-{n}" for n in range(objects)]
        running = [asyncio.ensure_future(keda.streams(name)) for name in names]
        async with asyncio.timeout(60):
            while len(keda.heard) < 2 * objects:
                await asyncio.sleep(0.05)
        if mode == "flood":
            running += [asyncio.ensure_future(keda.flood(names[n % objects])) for n in range(FLOOD)]
        else:
            running += [asyncio.ensure_future(keda.poll(name, POLL_SECONDS)) for name in names]
            if mode == "active":
                running += [asyncio.ensure_future(keda.poll(name, HPA_SECONDS)) for name in names]
        keda.pushed.clear()
        print("ready", flush=True)
        await asyncio.sleep(seconds)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        print(json.dumps({"calls": keda.calls, "errors": keda.errors, "pushed": keda.pushed}), flush=True)


if __name__ == "__main__":
    asyncio.run(
        main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
    )
