"""What KEDA costs the operator: 500 ScaledObjects at the external scaler, over TLS, as a share of one core.

python -m tests.bench.bench_keda_scaler [--objects 500] [--seconds 20]

KEDA's side is a process of its own (`keda_scaler_client`); the operator's side is its own server and its own book of
answers in this one, whose process time is the CPU. Also how long a wake takes to KEDA: one at a time, and all at once.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from shoal.controllers.keda.server import ScalerServer
from shoal.controllers.keda.targets import ScalerTargets
from shoal.controllers.keda.tls import CertificateFiles
from shoal.controllers.reservations import Reservations
from shoal.controllers.world import World
from shoal.runtime import logs
from tests.bench.keda_scaler_client import NAMESPACE
from tests.support.kedaclient import leading, write_certificate

_WAKES: Final = 100


@dataclass(slots=True)
class Operator:
    """Its book, and what its Deployments ask for."""

    objects: int
    standing: dict[str, int]
    book: ScalerTargets

    def say(self, name: str, replicas: int) -> None:
        self.book.set((NAMESPACE, name), name, "h100", 1, replicas)

    def everywhere(self, replicas: int, *, standing: int) -> None:
        for number in range(self.objects):
            self.standing[f"so-{number}"] = standing
            self.say(f"so-{number}", replicas)
            self.book.notify((NAMESPACE, f"so-{number}"))


@dataclass(slots=True)
class Seen:
    """One run of KEDA's process."""

    calls: float
    """Per second."""
    pushes: float
    """Per second."""
    cpu: float
    """Of this process, as a share of one core."""
    pushed: list[tuple[str, float]]


Meanwhile = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    pass


async def keda(
    server: ScalerServer, ca: Path, objects: int, seconds: float, mode: str, meanwhile: Meanwhile = _nothing
) -> Seen:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.keda_scaler_client"),
        *(str(server.port), str(ca), str(objects), str(seconds), mode),
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds + 120):
            assert await process.stdout.readline() == b"ready\n"
            began, cpu = time.monotonic(), time.process_time()
            await meanwhile()
            line = await process.stdout.readline()
            took, used = time.monotonic() - began, time.process_time() - cpu
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = json.loads(line)
    assert not found["errors"], f"{found['errors']} calls failed"
    pushed = [(name, at) for name, at in found["pushed"]]
    return Seen(found["calls"] / took, len(pushed) / took, used / took, pushed)


def tell(what: str, seen: Seen) -> None:
    print(f"{what:<58}{seen.calls:>9.0f}{seen.pushes:>9.1f}{100 * seen.cpu:>9.1f} %", flush=True)


def milliseconds(what: str, times: list[float]) -> None:
    cuts = statistics.quantiles(times, n=100)
    print(
        f"{what:<58} p50 {1000 * cuts[49]:.1f}  p99 {1000 * cuts[98]:.1f}  most {1000 * max(times):.1f} ms", flush=True
    )


async def one_at_a_time(operator: Operator, server: ScalerServer, ca: Path) -> None:
    begun: dict[str, float] = {}

    async def wakes() -> None:
        await asyncio.sleep(1)  # until KEDA's process does nothing else
        for number in range(min(_WAKES, operator.objects)):
            name = f"so-{number}"
            begun[name] = time.monotonic()
            operator.say(name, 1)
            await asyncio.sleep(0.02)
            operator.standing[name] = 1

    seen = await keda(server, ca, operator.objects, 0.05 * _WAKES + 2, "idle", wakes)
    first: dict[str, float] = {}
    for name, at in seen.pushed:
        first.setdefault(name, at)
    milliseconds(f"from the decision to KEDA: {len(begun)} wakes, one at a time", [first[n] - begun[n] for n in begun])


async def all_at_once(operator: Operator, server: ScalerServer, ca: Path) -> None:
    begun: list[float] = []

    async def wake() -> None:
        await asyncio.sleep(1)
        begun.append(time.monotonic())
        operator.everywhere(1, standing=0)

    seen = await keda(server, ca, operator.objects, 4, "idle", wake)
    first: dict[str, float] = {}
    for name, at in seen.pushed:
        first.setdefault(name, at)
    assert len(first) == operator.objects
    milliseconds(f"the same: all {operator.objects} at once", [at - begun[0] for at in first.values()])


def targets(standing: Mapping[str, int]) -> ScalerTargets:
    """What KEDA is answered; `standing`: name of a Deployment -> replicas that it has."""

    def deployment(key: str) -> Any:
        replicas = standing.get(key.split("/")[1])
        return None if replicas is None else SimpleNamespace(deployment=SimpleNamespace(replicas=replicas))

    world = cast("World", SimpleNamespace(deployments=SimpleNamespace(get=deployment)))
    return ScalerTargets(world, Reservations(lambda _uid: None), lambda _uid: None)


async def run(objects: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_certificate(Path(folder))
        ca = Path(folder) / "ca.crt"
        standing: dict[str, int] = {}
        operator = Operator(objects, standing, targets(standing))
        server = ScalerServer(
            operator.book,
            lambda: True,
            host="127.0.0.1",
            port=0,
            certificate=CertificateFiles(Path(folder), "shoal-scaler-tls"),
            endpoints=None,
        )
        operator.book.changed.append(server.answer_changed)
        server.need()
        async with leading(server):
            heading = f"{objects} ScaledObjects, 2 streams each, polled every 5 s"
            print(f"{heading:<58}{'calls/s':>9}{'pushes/s':>9}{'CPU':>11}")
            operator.everywhere(0, standing=0)
            tell("all at zero", await keda(server, ca, objects, seconds, "idle"))
            operator.everywhere(2, standing=2)
            tell("all serving, HPA every 15 s", await keda(server, ca, objects, seconds, "active"))
            operator.everywhere(1, standing=0)
            tell("all waking: pushed again every second", await keda(server, ca, objects, seconds, "active"))
            tell("as fast as it answers, 64 at a time", await keda(server, ca, objects, seconds / 2, "flood"))
            operator.everywhere(0, standing=0)
            await one_at_a_time(operator, server, ca)
            operator.everywhere(0, standing=0)
            await all_at_once(operator, server, ca)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    logs.configure("warning")
    asyncio.run(run(options.objects, options.seconds))


if __name__ == "__main__":
    main()
