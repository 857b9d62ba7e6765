"""A real HorizontalPodAutoscaler writes the number of gateways, by requests in progress and CPU: up while requests are
held, down again afterwards, and neither a request nor a usage record is lost."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.api.keys import hash_api_key
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE, LabCluster
from shoal_dev.lab.volumes import FOLDER
from tests.storm import journals, ledgerrows
from tests.support import podmetrics
from tests.support.lab import make_lab
from tests.support.pages import token
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

KEY = "sk-hpa-tests"
MODEL = "sleeper"
METRIC = "shoal_gateway_requests_in_flight"
IN_FLIGHT = 8
MOST = 3
HELD = 40
"""Requests that are held at once: five times what one gateway is to have."""
NODES = {
    "nodes": [
        {"name": "cpu-1"},
        {"name": "l40s-1", "gpus": 2, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068},
    ]
}
VALUES: dict[str, Any] = {
    "gateway": {
        "replicas": 1,
        # CPU is read as well, and is never what decides: a lab's machine may be slow.
        "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": MOST, "cpu": "4", "inFlight": IN_FLIGHT},
    },
    # A start that takes long: until then requests are held.
    "engines": {
        "simulator": {"enabled": True, "env": [{"name": "SHOAL_SIM_LOAD_SECONDS", "value": "45"}]},
        "cpuPerGPU": "100m",
        "memoryPerGPU": "512Mi",
    },
    "ledger": {"enabled": True},
    "cache": {"enabled": False},
}
AT_ONCE = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 5}]}
"""`behavior.scaleDown` for the test, after the same steps of one: the chart's is five minutes, and one per minute."""


@dataclass
class Clients:
    """Requests through the gateways' Service, each on a connection of its own."""

    url: str
    session: aiohttp.ClientSession
    sent: int = 0
    answered: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])

    async def until_served(self) -> None:
        """The gateway knows the tenant and the Model; its first replica may take long after that."""
        headers = {"Authorization": f"Bearer {KEY}"}
        async with asyncio.timeout(120):
            while True:
                async with self.session.get(f"{self.url}/v1/models", headers=headers) as response:
                    if response.status == 200 and any(m["id"] == MODEL for m in (await response.json())["data"]):
                        return
                await asyncio.sleep(0.5)

    async def ask(self, tokens: int) -> None:
        self.sent += 1
        id = f"hpa-{self.sent:05d}"
        body = {"model": MODEL, "prompt": "How deep is it?", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {KEY}", "x-request-id": id}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failed.append(f"{id}: {type(error).__name__} {error}")
            return
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        whole = response.status == 200 and events[-1:] == ["[DONE]"] and not any('"error"' in e for e in events)
        if whole:
            self.answered.append(id)
        else:
            self.failed.append(f"{id}: {response.status} {text[-300:]}")

    @contextlib.asynccontextmanager
    async def steadily(self, pause: float, tokens: int) -> AsyncGenerator[None]:
        """One request every `pause` seconds until the block ends; then all of them have their answers."""
        stop = asyncio.Event()

        async def send() -> None:
            async with asyncio.TaskGroup() as asks:
                while not stop.is_set():
                    asks.create_task(self.ask(tokens))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), pause)

        sending = asyncio.create_task(send())
        try:
            yield
        finally:
            stop.set()
            await sending


@pytest.fixture(scope="module")
def cluster() -> Generator[LabCluster]:
    lab = make_lab(NODES, hpa_sync_seconds=1.0)
    try:
        cluster = LabCluster(lab)
        steps.install(cluster, "simulator", steps.LAB_IMAGE, VALUES)
        cluster.kubectl("apply", "-f", str(steps.EXAMPLES / "gpuclasses.yaml"))
        cluster.kubectl("create", "namespace", "hpa")
        yield cluster
    finally:
        lab.down()


def _objects() -> Generator[dict[str, Any]]:
    spec: dict[str, Any] = {
        "source": {"uri": "file:///opt/shoal/models/tiny-chat"},
        "variants": [{"class": "l40s-48gb"}],
        "scaling": {"minReplicas": 1, "maxReplicas": 1},
        "hold": {"timeoutSeconds": 500},
    }
    metadata = {"name": MODEL, "namespace": "hpa"}
    yield {"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": spec}
    keys = [{"name": "hpa", "sha256": hash_api_key(KEY)}]
    granted = [{"namespace": "hpa", "name": MODEL}]
    yield {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "hpa"},
        "spec": {"keys": keys, "models": granted},
    }


def autoscaler(cluster: LabCluster) -> dict[str, Any]:
    return json.loads(cluster.kubectl("get", "hpa", "shoal-gateway", "-n", NAMESPACE, "-o", "json"))


def gateways(cluster: LabCluster) -> list[dict[str, Any]]:
    return cluster.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=gateway")


def ready(cluster: LabCluster) -> int:
    conditions = (pod["status"].get("conditions", ()) for pod in gateways(cluster))
    return sum(any(c["type"] == "Ready" and c["status"] == "True" for c in each) for each in conditions)


def active(cluster: LabCluster) -> bool:
    conditions = autoscaler(cluster).get("status", {}).get("conditions", ())
    return any(c["type"] == "ScalingActive" and c["status"] == "True" for c in conditions)


def stored(cluster: LabCluster) -> set[str]:
    """Client's ids of the requests whose final record the ledger has."""
    (file,) = cluster.lab.paths.node_data.glob(f"*/disk{FOLDER}/{NAMESPACE}_shoal-ledger_*/ledger.sqlite")
    rows = ledgerrows.read(f"sqlite:///file:{file}?mode=ro&uri=true").rows
    finals = [row.client_id for row in rows if row.ended and row.attempt == 0 and row.client_id is not None]
    assert len(finals) == len(set(finals)), "a request was recorded twice"
    return set(finals)


async def test_gateways_come_with_held_requests_and_go_without_losing_one(cluster: LabCluster, tmp_path: Path) -> None:
    lab = cluster.lab
    with podmetrics.serving(lab, tmp_path, token(cluster), (METRIC,)) as log:
        until(lambda: active(cluster), 120, lambda: (autoscaler(cluster).get("status"), log.read_text()[-2000:]))
        assert len(gateways(cluster)) == 1
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = Clients(f"http://127.0.0.1:{lab.forward_port()}", session)
            for item in _objects():
                cluster.kubectl("apply", "-f", "-", stdin=json.dumps(item))
            await clients.until_served()
            held = [asyncio.create_task(clients.ask(8)) for _ in range(HELD)]

            async def wait(condition: Any, within: float) -> None:
                await asyncio.to_thread(until, condition, within, lambda: (autoscaler(cluster)["status"], clients))

            await wait(lambda: ready(cluster) >= 2, 240)
            shown = autoscaler(cluster)["status"]
            print(f"{ready(cluster)} gateways for {HELD} held requests; {json.dumps(shown['currentMetrics'])}")
            assert any(m["type"] == "Pods" for m in shown["currentMetrics"])
            assert any(m["type"] == "Resource" for m in shown["currentMetrics"]), "CPU is known as well"
            await asyncio.gather(*held)
            assert clients.failed == []
            # Fewer than one gateway is to have; a stream lasts for several looks of the autoscaler.
            async with clients.steadily(4.0, 300):
                body = json.dumps({"spec": {"behavior": {"scaleDown": AT_ONCE}}})
                cluster.kubectl("patch", "hpa", "shoal-gateway", "-n", NAMESPACE, "--type=merge", "-p", body)
                await wait(lambda: len(gateways(cluster)) == 1, 300)
                await asyncio.sleep(5)
            assert clients.failed == []
            assert len(clients.answered) == clients.sent
    # What the gateways that went had recorded is the ledger's, although nobody opens their volumes again.
    spools = sorted(lab.paths.node_data.glob(f"*/disk{FOLDER}/{NAMESPACE}_spool-shoal-gateway-*/{journals.SPOOL}"))
    assert len(spools) >= 2
    gone = [file for file in spools if "spool-shoal-gateway-0" not in file.parent.name]
    assert [journals.unshipped(file) for file in gone] == [0] * len(gone)
    asked, began = set(clients.answered), time.monotonic()
    while (found := stored(cluster)) != asked:
        assert time.monotonic() - began < 60, f"not recorded: {sorted(asked - found)}; {sorted(found - asked)}"
        await asyncio.sleep(1)
    print(f"{clients.sent} requests, all answered and recorded once; {len(spools)} gateways and then one")
