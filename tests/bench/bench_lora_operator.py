"""20,000 LoRAAdapters of one pool on a real API server: time to know and plan them, memory, writes when quiet.

Most are there already when the operator starts, as after a restart: read, checked and told by one before it. Those of
`--new` are applied to the running operator and go the whole way, through Jobs.

python -m tests.bench.bench_lora_operator [--adapters 20000] [--new 1000] [--quiet 60]
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import tempfile
import time
from itertools import repeat
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.core.lora import pool as pools
from shoal.core.lora.lifecycle.revisions import Revisions, demands, read_key
from shoal.core.status import adapterstatus
from shoal.core.status.observed import ServedNames
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector
from shoal.kube.resources import GPUCLASSES, LORA_ADAPTERS, LORA_POOLS, MODELS, NAMESPACES
from tests.bench.bench_operator import _cpu, _memory, _own_writes, _start, _wrote_within
from tests.support.addresses import pod_ip
from tests.support.controlplane import ControlPlane, StatusKubelet, add_node, control_plane, free_ports, install_crds
from tests.support.lora_fleet import POOLED_FACTS, Sources, adapter, pool, pool_agent, revision_of
from tests.support.operators import NAMESPACE, condition, eventually, gpu_class, model
from tests.support.streams import until

NS = "bench"
_AT_ONCE = 24
_WARM = 50
"""Every so many-th adapter is kept on a replica; the others are on demand."""


async def _fleet(client: KubeClient) -> None:
    await install_crds(client)
    for name in (NS, NAMESPACE):
        body: JsonObject = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await client.apply(NAMESPACES, body, manager="bench")
    await add_node(client, "cpu", {}, 0)
    await add_node(client, "gpu", {"nvidia.com/gpu.product": "H100"}, 8)
    await client.apply(GPUCLASSES, gpu_class("h100", "H100", cost="2.49"), manager="bench")
    await client.apply(MODELS, model("base", NS, scaling={"minReplicas": 2}), manager="bench")
    await client.apply(LORA_POOLS, pool(NS, slotsPerReplica=64, cachedPerReplica=512), manager="bench")


def _body(number: int, count: int) -> JsonObject:
    warm = number % max(_WARM, count // 400) == 0
    return adapter(NS, f"a{number:05d}", residency="Warm" if warm else "OnDemand")


async def _make(client: KubeClient, count: int) -> None:
    """Adapters as another operator has left them."""
    found = LoRAPool.model_validate(await client.get(LORA_POOLS, "pool", NS))
    asked = demands(pools.settings(found, ArtifactFacts.model_validate(POOLED_FACTS)))
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        async with limit:
            stored = await client.apply(LORA_ADAPTERS, _body(number, count), manager="person")
            told = LoRAAdapter.model_validate(stored)
            uri = told.spec.source.uri
            revision = AdapterRevision(revision=revision_of(uri), uri=uri, rank=16, size_bytes=27_000_000)
            known = Revisions(revision, None, read_key(told, asked))
            seen = adapterstatus.Seen(told, ServedNames((told.metadata.name,), ()), known)
            created = told.metadata.creation_timestamp
            assert created is not None
            status = adapterstatus.status(seen, created).model_dump(mode="json", by_alias=True, exclude_none=True)
            body: JsonObject = {k: stored[k] for k in ("apiVersion", "kind")}
            body |= {"metadata": {"name": told.metadata.name, "namespace": NS}, "status": status}
            await client.apply_status(LORA_ADAPTERS, body, manager=names.MANAGER_LORAADAPTER)

    await asyncio.gather(*(one(number) for number in range(count)))


async def bench(plane: ControlPlane, directory: Path, count: int, new: int, quiet: float) -> None:
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await _fleet(client)
        kubelet, sources = StatusKubelet(client), Sources()
        kubelet.said, kubelet.adapters_said = (0, {"facts": POOLED_FACTS}), sources.said
        address = pod_ip(3)
        kubelet.pod_ips = repeat(address)
        ready: set[str] = set()

        def heard(kind: str, obj: JsonObject) -> None:
            if kind == "upsert" and condition(obj, "Ready").get("status") == "True":
                ready.add(obj["metadata"]["name"])

        begin = time.monotonic()
        await _make(client, count)
        made = time.monotonic() - begin
        tasks = [
            asyncio.create_task(kubelet.run()),
            asyncio.create_task(Reflector(client, LORA_ADAPTERS, on_event=heard).run()),
        ]
        operator: subprocess.Popen[bytes] | None = None
        try:
            async with pool_agent(address, slots=64) as agent:
                begin, lines = time.monotonic(), len(plane.audit.read_text().splitlines())
                (port,) = free_ports(1)
                operator = _start(plane, directory, port)
                await eventually(
                    lambda: client.get(LORA_POOLS, "pool", NS),
                    lambda p: ((p.get("status") or {}).get("adapters") or {}).get("available", 0) >= count,
                    seconds=900,
                )
                await until(lambda: bool(agent.holds), 120)
                known = time.monotonic() - begin
                while await _wrote_within(plane, 10):
                    pass
                cpu_start, (rss, _) = _cpu(operator.pid), _memory(operator.pid)
                at_start = [w for w in _own_writes(plane, lines) if "loraadapters" in w]
                applied_from = len(plane.audit.read_text().splitlines())

                begin = time.monotonic()
                limit = asyncio.Semaphore(_AT_ONCE)

                async def apply(number: int) -> None:
                    async with limit:
                        await client.apply(LORA_ADAPTERS, _body(number, count), manager="person")

                await asyncio.gather(*(apply(number) for number in range(count, count + new)))
                applied = time.monotonic() - begin
                async with asyncio.timeout(1800):
                    while len(ready) < count + new:
                        await asyncio.sleep(0.2)
                told = time.monotonic() - begin
                while await _wrote_within(plane, 10):
                    pass
                plans = await _plans(port)
                lines_then, cpu_then = len(plane.audit.read_text().splitlines()), _cpu(operator.pid)
                await asyncio.sleep(quiet)
                written = _own_writes(plane, lines_then)
                _, most = _memory(operator.pid)
                print(f"operator: {count} LoRAAdapters of one pool that were read before, then {new} new ones")
                print(f"  made by the client, each with a status  {made:8.1f} s")
                print(f"  start -> all known, counted and planned {known:8.1f} s")
                print(f"  CPU of the operator until quiet         {cpu_start:8.1f} s")
                print(f"  status writes to adapters at the start  {len(at_start):8d}")
                print(f"  memory                                  {rss:8.0f} MiB, at most {most:.0f}")
                print(f"  {new} new: applied, then all Ready       {applied:8.1f} s, {told:.1f} s")
                print(f"  Jobs for them                           {len(_jobs(plane, applied_from)):8d}")
                print(f"  plans of the pool                       {plans}")
                print(f"  writes in {quiet:.0f} quiet seconds              {len(written):8d}  (Leases excepted)")
                print(f"  CPU in {quiet:.0f} quiet seconds                 {_cpu(operator.pid) - cpu_then:8.2f} s")
                if written:
                    print("  " + ", ".join(sorted(set(written))))
        finally:
            if operator is not None:
                operator.terminate()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
            if operator is not None:
                operator.wait(timeout=20)


def _jobs(plane: ControlPlane, from_line: int) -> set[str]:
    """Those that read adapters, by name, as they were made: they are gone soon after they have ended."""
    asked = (json.loads(line) for line in plane.audit.read_text().splitlines()[from_line:])
    named = {a["objectRef"].get("name", "") for a in asked if a["objectRef"]["resource"] == "jobs"}
    return {name for name in named if name.startswith("adapter-facts-")}


async def _plans(port: int) -> str:
    """How many, and how long, as the operator's own metrics say."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as response:
        text = await response.text()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    values = {s.name: s.value for s in samples if s.name.startswith("shoal_adapter_plan_seconds_") and not s.labels}
    number, total = values["shoal_adapter_plan_seconds_count"], values["shoal_adapter_plan_seconds_sum"]
    return f"{number:.0f}, {1000 * total / max(1, number):.0f} ms each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=20_000)
    parser.add_argument("--new", type=int, default=1000)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        root = Path(folder)
        (root / "plane").mkdir()
        with control_plane(root / "plane") as plane:
            asyncio.run(bench(plane, root, args.adapters, args.new, args.quiet))


if __name__ == "__main__":
    main()
