"""1,000 Models at once on 100 status-only nodes of a real control plane: time, truth of the counts, memory, quiet.

python -m tests.bench.bench_operator [--models 1000] [--nodes 100] [--quiet 60]
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shoal.api import names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector
from shoal.kube.resources import GPUCLASSES, MODELS, NAMESPACES, PODS
from tests.support.controlplane import ControlPlane, StatusKubelet, add_node, control_plane, free_ports, install_crds
from tests.support.operators import CONFIG, NAMESPACE, condition, gpu_class, model

_GPUS_PER_NODE = 8
_PODS_PER_CPU_NODE = 900
_PROBES = 40


@dataclass(slots=True)
class Seen:
    """What the bench's own watches have heard, with the time of hearing."""

    placed: dict[str, str] = field(default_factory=dict[str, str])
    """Model -> reason of its condition Placed, once that is decided."""
    ready: set[str] = field(default_factory=set[str])
    bound: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """class -> times at which an engine pod was bound."""
    told: dict[str, list[tuple[float, int]]] = field(default_factory=dict[str, list[tuple[float, int]]])
    """class -> (time, allocated) of its status."""
    pods: set[str] = field(default_factory=set[str])

    def model(self, kind: str, obj: JsonObject) -> None:
        name = obj["metadata"]["name"]
        found = condition(obj, "Placed")
        if kind == "upsert" and found.get("status") in ("True", "False"):
            self.placed[name] = found["reason"]
        if condition(obj, "Ready").get("status") == "True":
            self.ready.add(name)
        else:
            self.ready.discard(name)

    def pod(self, kind: str, obj: JsonObject) -> None:
        name = obj["metadata"].get("labels", {}).get(names.LABEL_GPU_CLASS)
        if kind == "upsert" and name and obj["spec"].get("nodeName") and obj["metadata"]["uid"] not in self.pods:
            self.pods.add(obj["metadata"]["uid"])
            self.bound.setdefault(name, []).append(time.monotonic())

    def gpu_class(self, kind: str, obj: JsonObject) -> None:
        counts: dict[str, Any] = (obj.get("status") or {}).get("gpus") or {}
        if kind == "upsert" and counts:
            self.told.setdefault(obj["metadata"]["name"], []).append((time.monotonic(), counts["allocated"]))

    def delays(self) -> list[float]:
        """Of each binding: seconds until the class's status counted it."""
        found: list[float] = []
        for name, times in self.bound.items():
            for number, bound in enumerate(sorted(times), 1):
                later = [at for at, allocated in self.told.get(name, []) if allocated >= number and at >= bound]
                if later:
                    found.append(later[0] - bound)
        return sorted(found)


def _memory(pid: int) -> tuple[float, float]:
    """(now, most so far) in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def _cpu(pid: int) -> float:
    """CPU seconds so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] if values else float("nan")


async def _make_fleet(client: KubeClient, models: int, nodes: int) -> None:
    await install_crds(client)
    for name in ("bench", NAMESPACE):
        await client.apply(
            NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, manager="bench"
        )
    for i in range(models // _PODS_PER_CPU_NODE + 1):
        await add_node(client, f"cpu-{i}", {}, 0)
    await asyncio.gather(
        *(
            add_node(client, f"node-{i}", {"nvidia.com/gpu.product": "L4" if i % 2 else "H100"}, _GPUS_PER_NODE)
            for i in range(nodes)
        )
    )
    await add_node(client, "probe", {"nvidia.com/gpu.product": "Probe"}, _GPUS_PER_NODE)
    await client.apply(GPUCLASSES, gpu_class("l4", "L4", cost="0.43", memory="24Gi"), manager="bench")
    await client.apply(GPUCLASSES, gpu_class("h100", "H100", cost="2.49"), manager="bench")
    await client.apply(GPUCLASSES, gpu_class("probe", "Probe", cost="9"), manager="bench")


async def bench(plane: ControlPlane, directory: Path, count: int, nodes: int, quiet: float) -> None:
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await _make_fleet(client, count, nodes)
        operator = _start(plane, directory)
        kubelet, seen = StatusKubelet(client), Seen()
        tasks = [
            asyncio.create_task(kubelet.run()),
            asyncio.create_task(Reflector(client, MODELS, on_event=seen.model).run()),
            asyncio.create_task(Reflector(client, PODS, on_event=seen.pod).run()),
            asyncio.create_task(Reflector(client, GPUCLASSES, on_event=seen.gpu_class).run()),
        ]
        try:
            await asyncio.sleep(6)  # synced, leading
            idle = _memory(operator.pid)[0]
            begin, lines = time.monotonic(), len(plane.audit.read_text().splitlines())
            limit = asyncio.Semaphore(16)
            variants = [{"class": "l4"}, {"class": "h100"}]

            async def create(i: int) -> None:
                async with limit:  # a source each: as many Jobs as Models
                    body = model(f"m{i}", "bench", variants=variants, source={"uri": f"file:///models/m{i}"})
                    await client.apply(MODELS, body, manager="person")

            await asyncio.gather(*(create(i) for i in range(count)))
            applied = time.monotonic() - begin
            room = min(count, nodes * _GPUS_PER_NODE)
            async with asyncio.timeout(1800):
                while len(seen.placed) < count:
                    await asyncio.sleep(0.2)
                placed = time.monotonic() - begin
                while len(seen.ready) < room:
                    await asyncio.sleep(0.2)
            took = time.monotonic() - begin
            busy = _cpu(operator.pid)
            now, most = _memory(operator.pid)
            while await _wrote_within(plane, 10):
                pass  # events are posted slowly on purpose: the fleet is quiet when the last one is out
            lines_then = len(plane.audit.read_text().splitlines())
            cpu_then = _cpu(operator.pid)
            await asyncio.sleep(quiet)
            written = _own_writes(plane, lines_then)
            cpu_quiet = _cpu(operator.pid) - cpu_then
            delays = seen.delays()
            probes = await _probe(client, seen)
            reasons = {r: list(seen.placed.values()).count(r) for r in sorted(set(seen.placed.values()))}
            print(f"operator: {count} Models applied at once, each with a source of its own, on {nodes} nodes")
            print(f"  applied by the client                {applied:8.1f} s")
            print(f"  every Model placed, or told why not  {placed:8.1f} s  {reasons}")
            print(f"  all {room} that have room Ready         {took:8.1f} s")
            print(f"  CPU of the operator until then       {busy:8.1f} s")
            print(f"  memory before, after, at most        {idle:8.0f}, {now:.0f}, {most:.0f} MiB")
            print(f"  writes of the operator in all        {len(_own_writes(plane, lines)):8d}")
            print(
                f"  binding -> its class's count is true  p50 {_percentile(delays, 50):.2f} s, "
                f"p99 {_percentile(delays, 99):.2f} s over {len(delays)} bindings while all of them start"
            )
            print(
                f"  the same of pods that are not Shoal's p50 {_percentile(probes, 50):.2f} s, "
                f"p99 {_percentile(probes, 99):.2f} s over {len(probes)} pods, one by one, afterwards"
            )
            print(f"  writes in {quiet:.0f} quiet seconds           {len(written):8d}  (Leases excepted)")
            print(f"  CPU in {quiet:.0f} quiet seconds              {cpu_quiet:8.2f} s")
            if written:
                print("  " + ", ".join(sorted(set(written))))
        finally:
            operator.terminate()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
            operator.wait(timeout=20)


def _start(
    plane: ControlPlane, directory: Path, port: int | None = None, config: OperatorConfig = CONFIG
) -> "subprocess.Popen[bytes]":
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", by_alias=True)))
    port = port or free_ports(1)[0]
    with (directory / "operator.log").open("wb") as log:
        return subprocess.Popen(
            [Path(sys.executable).with_name("shoal"), "operator", "run", "--host=127.0.0.1", f"--port={port}"],
            env=os.environ
            | {"KUBECONFIG": str(plane.kubeconfig), "SHOAL_CONFIG": str(file), "POD_NAMESPACE": NAMESPACE},
            stdout=log,
            stderr=log,
        )


async def _probe(client: KubeClient, seen: Seen) -> list[float]:
    """Binds pods that are not Shoal's, one by one: seconds until the class counts each."""
    found: list[float] = []
    for number in range(_PROBES):
        before = len(seen.told.get("probe", []))
        name = f"probe-{number}"
        body: JsonObject = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "bench"},
            "spec": {
                "nodeName": "probe",
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                ],
            },
        }
        begin = time.monotonic()
        await client.create(PODS, body)
        found.append(await _until_told(seen, before, 1) - begin)
        before = len(seen.told.get("probe", []))
        await client.delete(PODS, name, "bench")
        await _until_told(seen, before, 0)
    return found


async def _until_told(seen: Seen, before: int, allocated: int) -> float:
    async with asyncio.timeout(60):
        while True:
            for at, count in seen.told.get("probe", [])[before:]:
                if count == allocated:
                    return at
            await asyncio.sleep(0.02)


async def _wrote_within(plane: ControlPlane, seconds: float) -> bool:
    lines = len(plane.audit.read_text().splitlines())
    await asyncio.sleep(seconds)
    return bool(_own_writes(plane, lines))


def _own_writes(plane: ControlPlane, from_line: int) -> list[str]:
    """Writes by field managers of the operator; the bench's own client is told apart by what it writes."""
    lines = plane.audit.read_text().splitlines()[from_line:]
    found: list[str] = []
    for line in lines:
        event = json.loads(line)
        uri, resource = event["requestURI"], event["objectRef"]["resource"]
        if event.get("userAgent") != "shoal" or resource == "leases":
            continue
        if "fieldManager=shoal-" in uri or resource in ("events", "secrets"):
            found.append(f"{event['verb']} {resource}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        root = Path(folder)
        (root / "plane").mkdir()
        with control_plane(root / "plane") as plane:
            asyncio.run(bench(plane, root, args.models, args.nodes, args.quiet))


if __name__ == "__main__":
    main()
