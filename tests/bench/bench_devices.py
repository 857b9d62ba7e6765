"""1,000 nodes with 8 devices each, in ResourceSlices: what they cost the operator on a real control plane.

python -m tests.bench.bench_devices [--nodes 1000] [--models 100] [--changes 40] [--quiet 60]

Prints the time from the operator's start to a true count, the CPU for one changed slice, the time from a slice's change
and from a taint to what the status says, memory, and what a quiet fleet costs.
"""

import argparse
import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector
from shoal.kube.resources import DEVICECLASSES, GPUCLASSES, MODELS, NAMESPACES, PODS, RESOURCESLICES, Resource
from tests.bench.bench_operator import _cpu, _memory, _percentile, _start
from tests.support.controlplane import ControlPlane, StatusKubelet, add_node, control_plane, install_crds
from tests.support.devices import class_of_devices, device_class, resource_slice
from tests.support.operators import NAMESPACE, condition, model

DEVICES: Final = tuple(f"gpu-{index}" for index in range(8))
_OF_MODELS: Final = "bench"
"""Namespace of the Models."""
_AT_ONCE: Final = 16
_MODELS_AT_ONCE: Final = 4
CLASS: Final = "devices"


@dataclass(slots=True)
class Status:
    """The newest status of the class, and Models that are ready."""

    operator: "subprocess.Popen[bytes] | None" = None
    gpus: dict[str, int] = field(default_factory=dict[str, int])
    quarantined: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ready: set[str] = field(default_factory=set[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def gpu_class(self, kind: str, obj: JsonObject) -> None:
        status: dict[str, Any] = obj.get("status") or {}
        if kind == "upsert" and obj["metadata"]["name"] == CLASS:
            self.gpus, self.quarantined = status.get("gpus", {}), status.get("quarantined", [])
            self.changed.set()

    def model(self, kind: str, obj: JsonObject) -> None:
        if kind == "upsert" and condition(obj, "Ready").get("status") == "True":
            self.ready.add(obj["metadata"]["name"])
            self.changed.set()

    async def until(self, what: Any, seconds: float = 600) -> float:
        """When it held, in monotonic seconds. Raises RuntimeError where the operator has ended meanwhile."""
        async with asyncio.timeout(seconds):
            while not what():
                if self.operator is not None and (code := self.operator.poll()) is not None:
                    raise RuntimeError(f"the operator ended with {code}")
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 1)
        return time.monotonic()


async def publish(client: KubeClient, node: str, *tainted: int, generation: int = 1) -> None:
    devices = [f"{name}!" if index in tainted else name for index, name in enumerate(DEVICES)]
    await client.apply(RESOURCESLICES, resource_slice(node, *devices, generation=generation), manager="driver")


async def add_all(client: KubeClient, resource: Resource, bodies: Iterable[JsonObject]) -> None:
    """A few at a time: an API server on a few cores has an operator to serve beside them."""
    limit = asyncio.Semaphore(_MODELS_AT_ONCE)

    async def add(body: JsonObject) -> None:
        async with limit:
            await client.apply(resource, body, manager="person")

    await asyncio.gather(*map(add, bodies))


async def make_fleet(client: KubeClient, nodes: int) -> None:
    await install_crds(client)
    for name in (_OF_MODELS, NAMESPACE):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await client.apply(NAMESPACES, body, manager="bench")
    await client.apply(DEVICECLASSES, device_class(), manager="bench")
    limit = asyncio.Semaphore(_AT_ONCE)

    async def node(index: int) -> None:
        async with limit:
            await add_node(client, f"node-{index}", {}, 0)
            await publish(client, f"node-{index}")

    await asyncio.gather(*(node(index) for index in range(nodes)))
    await client.apply(GPUCLASSES, class_of_devices(CLASS, hourlyCost={"amount": "2.49"}), manager="bench")


async def bench(plane: ControlPlane, folder: Path, args: argparse.Namespace) -> None:
    nodes, total = args.nodes, args.nodes * len(DEVICES)
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await make_fleet(client, nodes)
        status = Status()
        tasks = [
            asyncio.create_task(StatusKubelet(client).run()),
            asyncio.create_task(Reflector(client, GPUCLASSES, on_event=status.gpu_class).run()),
            asyncio.create_task(Reflector(client, MODELS, on_event=status.model).run()),
        ]
        began = time.monotonic()
        operator = status.operator = _start(plane, folder)
        try:
            counted = await status.until(lambda: status.gpus.get("free") == total) - began
            print(f"operator: {nodes} nodes with {len(DEVICES)} devices each, in {nodes} ResourceSlices")
            print(f"  start -> all {total} counted             {counted:8.1f} s, {_cpu(operator.pid):.1f} s of CPU")
            await _models(client, status, operator, args.models)
            free = await _free(client, nodes)
            await _changes(client, status, operator, free[: args.changes], total)
            await _quarantines(client, status, operator, free[: args.taints], total)
            before, at = _cpu(operator.pid), time.monotonic()
            await asyncio.sleep(args.quiet)
            quiet = (_cpu(operator.pid) - before) / (time.monotonic() - at)
            now, most = _memory(operator.pid)
            print(f"  CPU while nothing changes              {quiet * 100:8.1f} % of a core, over {args.quiet:.0f} s")
            print(f"  memory now, at most                    {now:8.0f}, {most:.0f} MiB")
        finally:
            operator.terminate()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
            operator.wait(timeout=20)


async def _models(client: KubeClient, status: Status, operator: "subprocess.Popen[bytes]", count: int) -> None:
    before, began = _cpu(operator.pid), time.monotonic()
    one: dict[str, Any] = {"variants": [{"class": CLASS}], "scaling": {"minReplicas": 1}}
    await add_all(client, MODELS, [model(f"m{index}", _OF_MODELS, **one) for index in range(count)])
    took = await status.until(lambda: len(status.ready) == count, 1800) - began
    spent = _cpu(operator.pid) - before
    print(f"  {count} Models of one replica each Ready    {took:8.1f} s, {spent:.1f} s of CPU")


async def _free(client: KubeClient, nodes: int) -> list[str]:
    """Nodes without a replica: a device that one has counts whatever taint it gets, until its pod is gone."""
    used = {str(pod["spec"].get("nodeName")) async for pod in client.list(PODS, namespace=_OF_MODELS)}
    return [name for name in (f"node-{index}" for index in range(nodes)) if name not in used]


async def _changes(
    client: KubeClient, status: Status, operator: "subprocess.Popen[bytes]", nodes: list[str], total: int
) -> None:
    """A free device gets a taint, and loses it: what the class offers must say so. Too short for a quarantine."""
    seen: list[float] = []
    before = _cpu(operator.pid)
    for node in nodes:
        for tainted, expected in (((7,), total - 1), ((), total)):
            began = time.monotonic()
            await publish(client, node, *tainted)
            seen.append(await status.until(lambda e=expected: status.gpus.get("allocatable") == e) - began)
    each = (_cpu(operator.pid) - before) / len(seen)
    p50, p99 = _percentile(seen, 50), _percentile(seen, 99)
    print(f"  a slice's change -> the status is true  p50 {p50:.2f} s, p99 {p99:.2f} s over {len(seen)}")
    print(f"  CPU for one of them                    {each * 1000:8.0f} ms")


async def _quarantines(
    client: KubeClient, status: Status, operator: "subprocess.Popen[bytes]", nodes: list[str], total: int
) -> None:
    """A device of each of these nodes gets a taint at once, and keeps it."""
    began, before = time.monotonic(), _cpu(operator.pid)
    await asyncio.gather(*(publish(client, node, 7) for node in nodes))
    out = await status.until(lambda: len(status.quarantined) >= len(nodes)) - began
    spent = _cpu(operator.pid) - before
    print(
        f"  {len(nodes)} devices get a taint -> out of use   {out:8.1f} s, of which 15 s make sure; "
        f"{spent:.1f} s of CPU, {total - status.gpus.get('allocatable', 0)} not offered"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--changes", type=int, default=40)
    parser.add_argument("--taints", type=int, default=40, help="devices that sicken at once; a class has room for 64")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        (folder / "plane").mkdir()
        with control_plane(folder / "plane") as plane:
            asyncio.run(bench(plane, folder, args))


if __name__ == "__main__":
    main()
