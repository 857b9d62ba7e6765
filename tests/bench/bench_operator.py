"""500 Models at once on status-only nodes of a real control plane: time, memory, and what a quiet minute costs.

python -m tests.bench.bench_operator [--models 500] [--quiet 60]
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
from pathlib import Path

import yaml

from shoal.api.meta import JsonObject
from shoal.kube.client import Client
from shoal.kube.reflector import Reflector
from shoal.kube.resources import GPUCLASSES, MODELS, NAMESPACES
from tests.support.controlplane import ControlPlane, StatusKubelet, add_node, control_plane, free_ports, install_crds
from tests.support.operators import CONFIG, NAMESPACE, condition, gpu_class, model

_GPUS_PER_NODE = 8


def _memory(pid: int) -> tuple[float, float]:
    """(now, most so far) in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def _cpu(pid: int) -> float:
    """CPU seconds so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def bench(plane: ControlPlane, directory: Path, count: int, quiet: float) -> None:
    async with await Client.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await install_crds(client)
        for name in ("bench", NAMESPACE):
            await client.apply(
                NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, manager="bench"
            )
        await asyncio.gather(
            *(
                add_node(client, f"node-{i}", {"nvidia.com/gpu.product": "L4" if i % 2 else "H100"}, _GPUS_PER_NODE)
                for i in range(count // _GPUS_PER_NODE + 2)
            )
        )
        await client.apply(GPUCLASSES, gpu_class("l4", "L4", cost="0.43"), manager="bench")
        await client.apply(GPUCLASSES, gpu_class("h100", "H100", cost="2.49"), manager="bench")
        config = directory / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG.model_dump(mode="json", by_alias=True)))
        (port,) = free_ports(1)
        with (directory / "operator.log").open("wb") as log:
            operator = subprocess.Popen(
                [Path(sys.executable).with_name("shoal"), "operator", "run", "--host=127.0.0.1", f"--port={port}"],
                env=os.environ
                | {"KUBECONFIG": str(plane.kubeconfig), "SHOAL_CONFIG": str(config), "POD_NAMESPACE": NAMESPACE},
                stdout=log,
                stderr=log,
            )
        kubelet = StatusKubelet(client)
        ready: dict[str, bool] = {}
        done = asyncio.Event()

        def heard(kind: str, obj: JsonObject) -> None:
            if kind == "upsert":
                ready[obj["metadata"]["name"]] = condition(obj, "Ready").get("status") == "True"
                if len(ready) == count and all(ready.values()):
                    done.set()

        watch = Reflector(client, MODELS, on_event=heard)
        tasks = [asyncio.create_task(kubelet.run()), asyncio.create_task(watch.run())]
        try:
            await asyncio.sleep(6)  # synced, leading
            idle = _memory(operator.pid)[0]
            begin, lines = time.monotonic(), len(plane.audit.read_text().splitlines())
            limit = asyncio.Semaphore(16)

            async def create(i: int) -> None:
                async with limit:
                    await client.apply(MODELS, model(f"m{i}", "bench"), manager="person")

            await asyncio.gather(*(create(i) for i in range(count)))
            applied = time.monotonic() - begin
            async with asyncio.timeout(1200):
                await done.wait()
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
            print(f"operator: {count} Models applied at once")
            print(f"  applied by the client                {applied:8.1f} s")
            print(f"  every Model Ready                    {took:8.1f} s")
            print(f"  CPU of the operator until then       {busy:8.1f} s")
            print(f"  memory before, after, at most        {idle:8.0f}, {now:.0f}, {most:.0f} MiB")
            print(f"  writes of the operator in all        {len(_own_writes(plane, lines)):8d}")
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
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        root = Path(folder)
        (root / "plane").mkdir()
        with control_plane(root / "plane") as plane:
            asyncio.run(bench(plane, root, args.models, args.quiet))


if __name__ == "__main__":
    main()
