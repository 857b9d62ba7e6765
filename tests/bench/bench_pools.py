"""1,000 Models with an InferencePool each, for proxies: what making them costs the operator, and a gateway that comes.

python -m tests.bench.bench_pools [--models 1000]

No node has a GPU: what is measured are the three objects of each Model, and that all of them follow the gateways.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from itertools import count as count_from
from pathlib import Path

from shoal.api.config import ExtProc
from shoal.kube.client import KubeClient
from shoal.kube.resources import ENDPOINTSLICES, GPUCLASSES, INFERENCEPOOLS, MODELS, NAMESPACES, PODS
from tests.bench.bench_devices import add_all
from tests.bench.bench_operator import _cpu, _memory, _own_writes, _start, _wrote_within
from tests.support.controlplane import ControlPlane, StatusKubelet, add_node, control_plane, install_crds
from tests.support.inferencepools import install_inference_pools
from tests.support.operators import CONFIG, NAMESPACE, gpu_class, model
from tests.support.signals import gateway_pod

PROXIES = CONFIG.model_copy(update={"ext_proc": ExtProc(enabled=True, proxy_namespaces=("ingress",))})


async def bench(plane: ControlPlane, folder: Path, count: int) -> None:
    async with await KubeClient.from_environment(kubeconfig=str(plane.kubeconfig)) as client:
        await install_crds(client)
        await install_inference_pools(client)
        for name in ("bench", NAMESPACE):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await client.apply(NAMESPACES, body, manager="bench")
        await add_node(client, "cpu-0", {}, 0)
        await client.apply(GPUCLASSES, gpu_class("h100", "H100"), manager="bench")
        nodes = StatusKubelet(client)
        nodes.pod_ips = map("10.244.0.{}".format, count_from(10))  # a slice has each address once
        kubelet = asyncio.create_task(nodes.run())
        operator = _start(plane, folder, config=PROXIES)

        async def until(expected: int) -> None:
            """All pools are there, and all slices have so many addresses."""
            async with asyncio.timeout(1800):
                while True:
                    pools = [p async for p in client.list(INFERENCEPOOLS, namespace="bench")]
                    slices = [s async for s in client.list(ENDPOINTSLICES, namespace="bench")]
                    true = sum(len(s.get("endpoints") or ()) == expected for s in slices)
                    if len(pools) == count == true:
                        return
                    await asyncio.sleep(1)

        try:
            await client.apply(PODS, gateway_pod("gateway-0"), manager="person")
            before, began = _cpu(operator.pid), time.monotonic()
            bodies = [model(f"m{i}", "bench", source={"uri": "file:///models/one"}) for i in range(count)]
            await add_all(client, MODELS, bodies)
            await until(1)
            made, spent = time.monotonic() - began, _cpu(operator.pid) - before
            print(f"operator: {count} Models with an InferencePool, a Service and an EndpointSlice each")
            print(f"  applied -> all objects there           {made:8.1f} s, {spent:.1f} s of CPU")
            while await _wrote_within(plane, 10):
                pass
            lines = len(plane.audit.read_text().splitlines())
            before, began = _cpu(operator.pid), time.monotonic()
            await client.apply(PODS, gateway_pod("gateway-1"), manager="person")
            await until(2)
            told, spent = time.monotonic() - began, _cpu(operator.pid) - before
            writes = len(_own_writes(plane, lines))
            print(f"  a gateway comes -> in every slice      {told:8.1f} s, {spent:.1f} s of CPU, {writes} writes")
            print("  memory now, at most                    {:8.0f}, {:.0f} MiB".format(*_memory(operator.pid)))
        finally:
            operator.terminate()
            kubelet.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kubelet
            operator.wait(timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        (folder / "plane").mkdir()
        with control_plane(folder / "plane") as plane:
            asyncio.run(bench(plane, folder, args.models))


if __name__ == "__main__":
    main()
