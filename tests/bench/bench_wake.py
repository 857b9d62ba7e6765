"""From a request that is held to `/scale` written, and what an idle fleet costs: a real API server, an operator in a
process of its own, gateways and agents with real streams.

python -m tests.bench.bench_wake [--models 2000] [--wakes 300] [--every 0.25] [--quiet 60]
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import cycle
from pathlib import Path

from shoal.agent.stream import AgentStream as AgentHub
from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core.artifacts import source_key
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector
from shoal.kube.resources import DEPLOYMENTS, GPUCLASSES, MODELS, NAMESPACES, PODS, SECRETS
from shoal.net import gctuning
from tests.bench.bench_operator import _cpu, _own_writes, _percentile, _start
from tests.bench.streams_process import _serve
from tests.support.controlplane import FACTS, ControlPlane, StatusKubelet, add_node, control_plane, install_crds
from tests.support.operators import NAMESPACE, condition, gpu_class, model
from tests.support.signals import IDLE, gateway_pod
from tests.support.streams import CURRENT, ToldGateway

_GPUS_PER_NODE = 8
_IDLE_SECONDS = 1
_BENCH = "bench"


class Seen:
    """Models, Deployments and pods as the bench's own watches have heard of them."""

    def __init__(self) -> None:
        self.models: dict[str, JsonObject] = {}
        self.replicas: dict[str, int] = {}
        self.ready: set[str] = set()
        """Models that have a Ready pod."""

    def model(self, kind: str, obj: JsonObject) -> None:
        if kind == "upsert":
            self.models[obj["metadata"]["name"]] = obj

    def deployment(self, kind: str, obj: JsonObject) -> None:
        if kind == "upsert":
            self.replicas[obj["metadata"]["labels"][names.LABEL_MODEL]] = obj["spec"]["replicas"]

    def pod(self, kind: str, obj: JsonObject) -> None:
        name = obj["metadata"].get("labels", {}).get(names.LABEL_MODEL)
        if not name:
            return
        ready = condition(obj, "Ready").get("status") == "True"
        if kind == "upsert" and ready and "deletionTimestamp" not in obj["metadata"]:
            self.ready.add(name)
        else:
            self.ready.discard(name)

    def uid(self, name: str) -> str:
        return self.models[name]["metadata"]["uid"]


class Fleet:
    """Models at zero, an operator, two gateways, and one agent for all pods."""

    def __init__(self, client: KubeClient, plane: ControlPlane, directory: Path) -> None:
        self.client, self.plane, self.directory = client, plane, directory
        net = f"127.{os.getpid() % 200 + 20}"
        self.gateways = [ToldGateway(f"{net}.0.{i + 1}", names.OPS_PORT) for i in range(2)]
        self.agents = {f"{net}.1.{i + 1}": AgentHub() for i in range(8)}
        self.kubelet = StatusKubelet(client)
        self.kubelet.pod_ips = cycle(self.agents)
        self.seen = Seen()
        self.every = 0.25
        """Seconds between two wakes: the figures are of each by itself, not of how many at once."""

    @contextlib.asynccontextmanager
    async def up(self, models: int, nodes: int, idle_seconds: int) -> AsyncGenerator["subprocess.Popen[bytes]"]:
        client = self.client
        await install_crds(client)
        for name in (_BENCH, NAMESPACE):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await client.apply(NAMESPACES, body, manager=_BENCH)
        await add_node(client, "cpu-0", {}, 0)
        for i in range(nodes):
            await add_node(client, f"node-{i}", {"nvidia.com/gpu.product": "L4"}, _GPUS_PER_NODE)
        await client.apply(GPUCLASSES, gpu_class("l4", "L4", cost="0.43", memory="24Gi"), manager=_BENCH)
        key = {"current": base64.b64encode(CURRENT).decode()}
        secret = {"name": names.ROOT_KEY_SECRET, "namespace": NAMESPACE}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "data": key}
        await client.apply(SECRETS, body, manager=_BENCH)
        self.say(IDLE)
        async with contextlib.AsyncExitStack() as stack:
            for number, gateway in enumerate(self.gateways):
                await gateway.up()
                stack.push_async_callback(gateway.down)
                await self._gateway_pod(f"shoal-gateway-{number}", gateway.host)
            for address, hub in self.agents.items():
                server = await asyncio.start_server(partial(_serve, hub), address, names.AGENT_PORT)
                stack.callback(server.close)
                stack.callback(hub.close)
            tasks = [
                asyncio.create_task(one)
                for one in (
                    self.kubelet.run(),
                    Reflector(client, MODELS, on_event=self.seen.model).run(),
                    Reflector(client, DEPLOYMENTS, on_event=self.seen.deployment).run(),
                    Reflector(client, PODS, on_event=self.seen.pod).run(),
                )
            ]
            stack.push_async_callback(_end, tasks)
            await self._models(models, idle_seconds)
            operator = _start(self.plane, self.directory)
            try:
                print("waiting until all are told", flush=True)
                async with asyncio.timeout(600):
                    while not all(_is_told(m) for m in self.seen.models.values()) or len(self.seen.models) < models:
                        await asyncio.sleep(0.2)
                while await self._wrote_within(5):
                    pass
                gctuning.tune_gc()  # as gateways do: their pauses would count as the operator's
                yield operator
            finally:
                operator.terminate()
                operator.wait(timeout=20)

    def say(self, keys: Mapping[str, object]) -> None:
        """What every agent says from now on."""
        for hub in self.agents.values():
            hub.update(dict(keys))

    async def _gateway_pod(self, name: str, ip: str) -> None:
        # Bound to no node: the kubelet of this bench leaves it as it is.
        body = gateway_pod(name)
        body["spec"]["schedulerName"] = "nobody"
        await self.client.apply(PODS, body, manager=_BENCH)
        started, ready = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
        turned = {"type": "Ready", "status": "True", "lastTransitionTime": ready}
        status = {"phase": "Running", "podIP": ip, "startTime": started, "conditions": [turned]}
        await self.client.merge_patch(PODS, name, NAMESPACE, {"status": status}, manager=_BENCH, subresource="status")

    async def _models(self, count: int, idle_seconds: int) -> None:
        """They have been at zero before this operator began."""
        limit = asyncio.Semaphore(16)
        asleep = {
            "type": "Ready",
            "status": "True",
            "reason": "ScaledToZero",
            "message": "no request",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }

        async def make(i: int) -> None:
            async with limit:
                body = model(f"m{i}", _BENCH, variants=[{"class": "l4"}], scaling={"idleSeconds": idle_seconds})
                await self.client.apply(MODELS, body, manager="person")
                known = FACTS | {"readBy": source_key(Model.model_validate(body))}
                status = {"status": {"conditions": [asleep], "artifact": known}}
                await self.client.merge_patch(MODELS, f"m{i}", _BENCH, status, manager=_BENCH, subresource="status")

        await asyncio.gather(*(make(i) for i in range(count)))

    async def _wrote_within(self, seconds: float) -> bool:
        lines = len(self.plane.audit.read_text().splitlines())
        await asyncio.sleep(seconds)
        return bool(_own_writes(self.plane, lines))

    async def until(self, holds: Callable[[], bool], seconds: float = 600) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.05)


def _is_told(obj: JsonObject) -> bool:
    """The operator has looked at it: until then its status is the bench's."""
    return bool((obj.get("status") or {}).get("replicas"))


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def scales(plane: ControlPlane, from_line: int) -> list[tuple[str, float, float]]:
    """(Deployment, time of the answer, time of the request) of each write of `/scale`, by the API server's own
    record."""
    found: list[tuple[str, float, float]] = []
    for line in plane.audit.read_text().splitlines()[from_line:]:
        event = json.loads(line)
        reference = event["objectRef"]
        if reference.get("subresource") == "scale" and event["responseStatus"]["code"] == 200:
            began, ended = (
                datetime.fromisoformat(event[name]).timestamp()
                for name in ("requestReceivedTimestamp", "stageTimestamp")
            )
            found.append((reference["name"], ended, began))
    return found


def decisions(log: Path) -> list[tuple[str, float]]:
    """(Model, time) of each decision that changed a number, from the operator's log."""
    found: list[tuple[str, float]] = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError):
            said = json.loads(line)
            if said["event"] == "replicas":
                found.append((said["model"].split("/")[1], datetime.fromisoformat(said["timestamp"]).timestamp()))
    return found


def _delays(begun: Iterable[tuple[str, float]], written: list[tuple[str, float, float]]) -> list[float]:
    """Of each beginning, milliseconds until the first write of its Deployment after it."""
    found: list[float] = []
    for name, at in begun:
        later = [t for deployment, t, _ in written if deployment == f"{name}-l4" and t >= at]
        if later:
            found.append(1000 * (min(later) - at))
    return found


def _say(what: str, values: list[float], goal: str = "") -> None:
    p50, p99, most = (_percentile(values, p) for p in (50, 99, 100))
    print(f"  {what:64} p50 {p50:7.1f} ms  p99 {p99:7.1f} ms  most {most:7.1f} ms  of {len(values)}{goal}")


@dataclass(slots=True)
class Cycle:
    """What one turn of wakes and returns to zero took, in milliseconds."""

    decided: list[float] = field(default_factory=list[float])
    """From held to the operator's decision."""
    woken: list[float] = field(default_factory=list[float])
    """From held to `/scale` written."""
    asleep: list[float] = field(default_factory=list[float])
    """From the decision to go to zero to `/scale` written."""
    asked: list[float] = field(default_factory=list[float])
    """From the decision until the API server had the request."""
    served: list[float] = field(default_factory=list[float])
    """What the API server itself took for each write of `/scale`."""


async def wake_and_sleep(fleet: Fleet, chosen: list[str]) -> Cycle:
    """Each of the chosen Models wakes with a request that is held, and goes back to zero."""
    lines, since = len(fleet.plane.audit.read_text().splitlines()), time.time()
    begun: dict[str, float] = {}
    held: list[tuple[str, float, ToldGateway]] = []
    for name in chosen:
        gateway, uid = random.choice(fleet.gateways), fleet.seen.uid(name)  # noqa: S311
        begun[name] = time.time()
        started = time.monotonic()
        gateway.book.arrived(uid)
        gateway.book.held(uid, 100, started)
        held.append((uid, started, gateway))
        await asyncio.sleep(random.uniform(0.5, 1.5) * fleet.every)  # noqa: S311
    await fleet.until(lambda: fleet.seen.ready >= set(chosen))
    answered = time.time()
    for uid, started, gateway in held:
        gateway.book.released(uid, 100, started)
    await fleet.until(lambda: all(fleet.seen.replicas.get(n) == 0 for n in chosen))
    await fleet.until(lambda: not fleet.seen.ready & set(chosen))
    written = scales(fleet.plane, lines)
    decided = [d for d in decisions(fleet.directory / "operator.log") if d[1] >= since]
    up = [d for d in decided if d[1] < answered]
    return Cycle(
        asked=_delays(up, [(name, began, began) for name, _, began in written]),
        decided=[1000 * (at - begun[name]) for name, at in up],
        woken=_delays(begun.items(), written),
        asleep=_delays([d for d in decided if d[1] >= answered], written),
        served=[1000 * (ended - began) for _, ended, began in written if ended < answered],
    )


async def wakes(plane: ControlPlane, directory: Path, models: int, count: int, every: float) -> None:
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        fleet = Fleet(client, plane, directory)
        batch = min(50, count)
        fleet.every = every
        async with fleet.up(models, 40, _IDLE_SECONDS):
            print(f"wakes: {models} Models at zero, 2 gateways, operator in a process of its own", flush=True)
            chosen = [f"m{i}" for i in random.Random(1).sample(range(models), batch)]  # noqa: S311
            first = await wake_and_sleep(fleet, chosen)
            _say("held -> /scale 1 written, the first time: a Deployment is made", first.woken)
            turns: list[Cycle] = []
            for _ in range(-(-count // batch)):
                # The last turn's statuses, that the next one's first wakes would wait behind, are written.
                while await fleet._wrote_within(2):
                    pass
                turns.append(await wake_and_sleep(fleet, chosen))
            _say("held -> decided", [ms for turn in turns for ms in turn.decided])
            _say("held -> /scale 1 written", [ms for turn in turns for ms in turn.woken], "  (goal: p99 < 50 ms)")
            _say("  of that, decided -> the API server has the request", [ms for turn in turns for ms in turn.asked])
            _say("  of that, the API server's own time for it", [ms for turn in turns for ms in turn.served])
            _say("decided to go to zero -> /scale 0 written", [ms for turn in turns for ms in turn.asleep])


async def idle(plane: ControlPlane, directory: Path, quiet: float) -> None:
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        fleet = Fleet(client, plane, directory)
        async with fleet.up(500, 10, 600) as operator:
            busy = [f"m{i}" for i in range(50)]
            for name in busy:
                fleet.gateways[0].book.arrived(fleet.seen.uid(name))
            await fleet.until(lambda: fleet.seen.ready >= set(busy))
            while await fleet._wrote_within(5):
                pass
            lines, cpu, began = len(plane.audit.read_text().splitlines()), _cpu(operator.pid), time.monotonic()
            chance = random.Random(1)  # noqa: S311
            requests = 0
            while time.monotonic() - began < quiet:
                # Five requests a second of each busy Model, and an agent that tells of them each second.
                for name in busy:
                    book, uid = chance.choice(fleet.gateways).book, fleet.seen.uid(name)
                    for _ in range(5):
                        book.arrived(uid)
                        book.sent(uid)
                        asyncio.get_running_loop().call_later(chance.uniform(0.2, 3.0), book.ended, uid)
                        requests += 1
                running = chance.randint(1, 12)
                told = {"running": running, "kv_tokens_used": 300 * running}
                told |= {"prompt_tokens_total": 100 * requests, "generation_tokens_total": 50 * requests}
                fleet.say(IDLE | told)
                await asyncio.sleep(1)
            took = time.monotonic() - began
            written = _own_writes(plane, lines)
            share = (_cpu(operator.pid) - cpu) / took
            print("500 Models, 450 of them at zero, 50 with one replica and 5 requests/s each")
            print(f"  CPU of the operator    {100 * share:6.1f} % of a core over {took:.0f} s")
            print(f"  writes per minute      {60 * len(written) / took:6.1f}  (Leases excepted) {sorted(set(written))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--wakes", type=int, default=300)
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two wakes")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds; 0: wakes only")
    args = parser.parse_args()
    both = (partial(wakes, models=args.models, count=args.wakes, every=args.every), partial(idle, quiet=args.quiet))
    for run in both if args.quiet else both[:1]:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            root = Path(folder)
            (root / "plane").mkdir()
            with control_plane(root / "plane") as plane:
                asyncio.run(run(plane, root))


if __name__ == "__main__":
    main()
