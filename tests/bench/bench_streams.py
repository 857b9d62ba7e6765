"""What listening costs: an operator and a gateway with 2,000 agents and 8 gateways, as shares of one core.

python -m tests.bench.bench_streams [--agents 2000] [--gateways 8] [--models 500] [--rate 200] [--seconds 20]

The agents are real hubs in processes of their own; every busy one looks at its engine twice a second, as agents do, so
each tells about once a second and whenever KV use moves by 2 points. The listener is the operator's own, with what it
does for every message; CPU is the process time of the listening process alone.
"""

import argparse
import asyncio
import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator

import uvloop

from shoal.api import keys
from shoal.api.replica import ReplicaKeys
from shoal.core.routing.choice import ReplicaSignal
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.runtime import logs
from shoal.signals.demand import DemandStreams
from shoal.signals.live import LiveSignals
from shoal.signals.replica import ReplicaStreams
from tests.support.streams import CURRENT

_PER_PROCESS = 500
_LOOKS_PER_SECOND = 2.0
_FIRST_PORT = 21000
_START_SECONDS = 90.0
"""Until everybody is heard, on a machine that has other things to do."""


@contextlib.contextmanager
def others(count: int, share: float, gateways: int, models: int, rate: float) -> Generator[None]:
    """The agents and the gateways."""
    commands = [
        ["agents", str(_FIRST_PORT + first), str(min(_PER_PROCESS, count - first)), str(_LOOKS_PER_SECOND), str(share)]
        for first in range(0, count, _PER_PROCESS)
    ]
    commands += [["gateway", str(_FIRST_PORT - 1 - n), str(models), str(rate)] for n in range(gateways)]
    started: list[subprocess.Popen[str]] = []
    try:
        started += [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.streams_process", *command], stdout=subprocess.PIPE, text=True
            )
            for command in commands
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def peers(count: int, gateways: int, role: keys.Role) -> tuple[list[StreamPeer], list[StreamPeer]]:
    agents = [StreamPeer(f"pod-{n}", f"ns/pod-{n}", "127.0.0.1", "key", _FIRST_PORT + n) for n in range(count)]
    key = keys.derive(CURRENT, role, keys.DEMAND)
    return agents, [StreamPeer(f"g-{n}", f"g-{n}", "127.0.0.1", key, _FIRST_PORT - 1 - n) for n in range(gateways)]


async def as_operator(count: int, gateways: int, models: int, seconds: float) -> None:
    calls = [0, 0]

    def changed(model: str | None, urgent: bool) -> None:
        calls[urgent] += 1

    signals = LiveSignals(changed, ListenerIdentity("operator", "boot"))
    signals.start()
    agents, others_ = peers(count, gateways, "operator")
    began, cpu = time.monotonic(), time.process_time()
    for number, peer in enumerate(agents):
        signals.listen_to_replica(f"model-{number % models}", peer)
    for peer in others_:
        signals.listen_to_gateway(peer)
    await _until_heard(lambda: len(signals.replicas.live()) + len(signals.gateways.live()), count + gateways)
    print(f"  connected in {time.monotonic() - began:.1f} s, with {time.process_time() - cpu:.2f} s of CPU")
    calls[:] = [0, 0]
    await _measure("operator", seconds, calls)
    live = (len(signals.replicas.live()), len(signals.gateways.live()))
    failures = sum(s.failures for s in (*signals.replicas.live(), *signals.gateways.live()))
    print(f"  live at the end: {live[0]} agents, {live[1]} gateways; {failures} reconnects")
    await signals.close()


async def as_gateway(count: int, gateways: int, seconds: float) -> None:
    heard: dict[str, ReplicaSignal] = {}
    calls = [0, 0]

    def replica(uid: str, said: ReplicaKeys | None) -> None:
        calls[0] += 1
        if said is None:
            heard.pop(uid, None)
        else:
            heard[uid] = ReplicaSignal(said.phase, said.engine_boot)

    replicas = ReplicaStreams(replica, ListenerIdentity("gateway-0", "boot"))
    demand = DemandStreams(lambda _uid, models: calls.__setitem__(0, calls[0] + len(models or ())), ListenerIdentity())
    agents, others_ = peers(count, gateways - 1, "gateway")
    replicas.start()
    demand.start()
    replicas.set_peers(agents)
    demand.set_peers(others_)
    await _until_heard(lambda: len(heard) + len(demand.live()), count + gateways - 1)
    calls[:] = [0, 0]
    await _measure("gateway", seconds, calls)
    await replicas.close()
    await demand.close()


async def _until_heard(live: Callable[[], int], wanted: int) -> None:
    began = time.monotonic()
    while (now := live()) < wanted:
        if time.monotonic() - began > _START_SECONDS:
            print(f"  only {now} of {wanted} streams are up after {_START_SECONDS:.0f} s: this machine is too busy")
            return
        await asyncio.sleep(0.05)


async def _measure(who: str, seconds: float, calls: list[int]) -> None:
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    used, took = time.process_time() - cpu, time.monotonic() - began
    total = sum(calls)
    print(
        f"  {who}: {100 * used / took:.1f} % of one core; {total / took:.0f} changes per second"
        f" ({calls[1] / took:.1f} of them urgent), {1e6 * used / max(1, total):.1f} us each;"
        f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second at each gateway")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="of agents that are busy")
    parser.add_argument("--only", choices=["operator", "gateway"])
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logs.configure("warning")
    print(
        f"{given.agents} agents; {given.gateways} gateways, each {given.rate:g} requests/s over {given.models} Models"
    )
    for share in given.shares:
        print(f"{share:.0%} of the agents are busy")
        with others(given.agents, share, given.gateways, given.models, given.rate):
            if given.only != "gateway":
                asyncio.run(as_operator(given.agents, given.gateways, given.models, given.seconds))
            if given.only != "operator":
                uvloop.run(as_gateway(given.agents, given.gateways, given.seconds))


if __name__ == "__main__":
    main()
