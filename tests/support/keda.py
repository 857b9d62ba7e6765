"""A lab with the real KEDA and Prometheus, Shoal in it, and what tests ask of them."""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal_dev.demo import steps
from shoal_dev.demo.clients import DemoClients
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab.addons import keda, prometheus
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.gobuild import MANIFESTS
from tests.e2e.conftest import Fleet
from tests.support.pages import token
from tests.support.waiting import until
from tests.support.watching import Recorder

KEY: Final = "sk-keda-tests"
SPACE: Final = steps.DEMO_NAMESPACE
NODES: Final = {
    "nodes": [
        {"name": "cpu-1"},
        {"name": "l40s-{n}", "count": 2, "gpus": 4, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068},
    ]
}
VALUES: Final[Mapping[str, Any]] = {
    "operator": {"scaling": {"keda": {"pollingSeconds": 1}}},
    **prometheus.values(),
    "ledger": {"enabled": False},
    # These tests edit what Shoal made, as somebody in a cluster without the policy could.
    "admission": {"children": {"enabled": False}},
}
DRIVEN: Final = {"driver": "KEDA", "minReplicas": 0, "idleSeconds": 5, "stabilizationSeconds": 3}
"""`spec.scaling` of a Model of these tests."""
SMALL: Final = {"extraArgs": ["--max-running-requests=2"]}
"""`spec.engine`: a few clients are a queue."""
MODELS: Final = (
    "woken", "crowded", "shown", "switched", "stuck", "lonely", "blind", "touched", "shared", "taken", "led",
    "orphaned", "copied", "measured", "pushed", "early", "removed", "renewed", "vanished",
    "pictured",
)  # fmt: skip
"""What the tenant of these tests may ask."""
CUT: Final = """
table inet vanished {
  chain in { type filter hook input priority 0; iif != "lo" drop; }
  chain out { type filter hook output priority 0; oif != "lo" drop; }
}
"""
"""For nft: nothing comes in or goes out, the end of a connection neither."""
DEPLOYMENTS: Final = {"deployments": f"/apis/apps/v1/namespaces/{SPACE}/deployments"}


class KEDAFleet(Fleet):
    """Models are made in the namespace of the demo."""

    # --- Models -------------------------------------------------------------------------------------------------------

    def drive(self, name: str, driver: str) -> None:
        patch = json.dumps({"spec": {"scaling": {"driver": driver}}})
        self.kubectl("patch", "models.shoal.dev", name, "-n", SPACE, "--type=merge", "-p", patch)

    def deployment(self, name: str) -> str:
        """Name of the Model's only Deployment."""
        [found] = self.get("deployments", "-n", SPACE, "-l", f"shoal.dev/model={name}")
        return found["metadata"]["name"]

    def replicas(self, name: str) -> int:
        """What the Model's Deployments are asked for."""
        return sum(d["spec"]["replicas"] for d in self.get("deployments", "-n", SPACE, "-l", f"shoal.dev/model={name}"))

    def until_replicas(self, name: str, wanted: int, within: float = 120) -> None:
        until(lambda: self.replicas(name) == wanted, within, lambda: self.told(name))

    def told(self, name: str) -> object:
        """For a failure's message."""
        return self.model(name).get("status"), self.scaled_objects(name), self.hpas(name)

    def active(self, name: str, reason: str, within: float = 60) -> str:
        """Waits until ScalingActive has this reason, and returns its message."""
        return self.expect(name, "ScalingActive", reason, within=within)

    # --- KEDA's objects -----------------------------------------------------------------------------------------------

    def scaled_objects(self, name: str) -> list[dict[str, Any]]:
        return self.get("scaledobjects.keda.sh", "-n", SPACE, "-l", f"shoal.dev/model={name}")

    def hpas(self, name: str) -> list[dict[str, Any]]:
        target = {d["metadata"]["name"] for d in self.get("deployments", "-n", SPACE, "-l", f"shoal.dev/model={name}")}
        return [h for h in self.get("hpa", "-n", SPACE) if h["spec"]["scaleTargetRef"]["name"] in target]

    # --- KEDA itself --------------------------------------------------------------------------------------------------

    def keda_runs(self, workload: str, replicas: int) -> None:
        """Switches one of KEDA's Deployments on or off, and waits until it is so."""
        self.kubectl("scale", f"deployment/{workload}", "-n", keda.NAMESPACE, f"--replicas={replicas}")
        rollout = ("rollout", "status", f"deployment/{workload}", "-n", keda.NAMESPACE, "--timeout=120s")
        self.kubectl(*rollout, timeout=130)
        until(lambda: len(self._pods_of(workload)) == replicas, 120, lambda: self._pods_of(workload))
        if replicas:
            keda.wait_until_ready(self.lab)

    def _pods_of(self, workload: str) -> list[str]:
        pods = self.get("pods", "-n", keda.NAMESPACE)
        return [p["metadata"]["name"] for p in pods if p["metadata"]["name"].startswith(f"{workload}-")]

    # --- Shoal's operators --------------------------------------------------------------------------------------------

    @contextmanager
    def vanished(self, pod: str) -> Generator[None]:
        """The node of one of Shoal's pods has lost its power, as far as the others can tell. Afterwards there is
        another pod in its place."""
        target = str(self.lab.first_process(f"{NAMESPACE}/{pod}"))
        command = ["nsenter", "--target", target, "--net", "nft", "-f", "-"]
        done = subprocess.run(command, input=CUT, text=True, check=False, timeout=10, capture_output=True)
        if done.returncode:
            raise LabError(f"nft: {done.stderr.strip()}")
        try:
            yield
        finally:
            self.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--force", "--grace-period=0")

    def metric(self, pod: str, name: str) -> float:
        """What one of Shoal's pods counts under a series' name and labels, summed; 0 where it says nothing."""
        found = [p for p in self.get("pods", "-n", NAMESPACE) if p["metadata"]["name"] == pod]
        if not found or "podIP" not in found[0]["status"]:
            return 0.0  # it has just gone, or has just been made
        url = f"http://{found[0]['status']['podIP']}:{names.OPS_PORT}/metrics"
        shown = ("-H", f"Authorization: Bearer {token(self)}")
        lines = self.lab.exec("curl", "-s", "--max-time", "5", *shown, url, check=False).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    # --- requests -----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.lab.forward_port()}"

    def ask(self, name: str, tokens: int = 4) -> str:
        """One request; raises openai's error with the gateway's words."""
        with openai.OpenAI(base_url=f"{self.address}/v1", api_key=KEY, max_retries=0, timeout=180) as client:
            answer = client.chat.completions.create(
                model=f"{SPACE}/{name}", messages=[{"role": "user", "content": "hi"}], max_tokens=tokens
            )
        return answer.choices[0].message.content or ""

    @contextmanager
    def asked(self, name: str, clients: int, tokens: int = 48) -> Generator[DemoClients]:
        """So many clients ask again and again meanwhile, in a thread of their own."""
        load = DemoClients(self.address, KEY, f"{SPACE}/{name}")
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(load.many(clients, tokens)))
        thread.start()
        try:
            yield load
        finally:
            loop.call_soon_threadsafe(load.enough.set)
            thread.join(timeout=180)
            assert not thread.is_alive()
            loop.close()

    @contextmanager
    def history(self, folder: Path) -> Generator["History"]:
        """Every number that Deployments were asked for meanwhile."""
        with Recorder(self.tools.kubectl, self.tools.env, DEPLOYMENTS, folder) as recorder:
            known = [d["metadata"]["name"] for d in self.get("deployments", "-n", SPACE)]
            recorder.wait_for("deployments", known)
            yield History(recorder)


class History:
    """What a watch of the Deployments told."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def of(self, deployment: str) -> list[int]:
        """Its numbers in order, each change once."""
        numbers: list[int] = []
        for _, item in self._recorder.events("deployments"):
            if item["metadata"]["name"] == deployment and numbers[-1:] != [item["spec"]["replicas"]]:
                numbers.append(item["spec"]["replicas"])
        return numbers


def prepare(fleet: KEDAFleet, values: Mapping[str, Any] = VALUES) -> None:
    """Installs Shoal, its GPU classes, and a tenant for MODELS."""
    steps.install(fleet, "simulator", steps.LAB_IMAGE, values)
    fleet.kubectl("apply", "-f", str(steps.EXAMPLES / "gpuclasses.yaml"))
    space = {"name": SPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    tenant = {
        "keys": [{"name": "k", "sha256": hash_api_key(KEY)}],
        "models": [{"namespace": SPACE, "name": name} for name in MODELS],
    }
    fleet.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": space},
        {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "keda-tests"}, "spec": tenant},
    )


def uninstall(fleet: KEDAFleet) -> None:
    """Takes KEDA away as its documentation says: its kinds first, while its operator can still let go of them."""
    kinds = ("scaledobjects.keda.sh", "triggerauthentications.keda.sh")
    fleet.kubectl("delete", "customresourcedefinitions", *kinds, "--timeout=120s", timeout=130)
    objects = fleet.kubectl("kustomize", str(keda.find_or_build(print) / MANIFESTS / "default"))
    fleet.kubectl("delete", "--ignore-not-found", "--timeout=120s", "-f", "-", stdin=objects, timeout=180)


def leader(fleet: Fleet) -> str:
    """The operator's pod that the Lease names."""

    def holder() -> str:
        leases = fleet.get("leases", "-n", NAMESPACE)
        return next(e for e in leases if e["metadata"]["name"] == "shoal-operator")["spec"].get("holderIdentity") or ""

    until(lambda: bool(holder()), 60)
    return holder()


def stays(probe: Any, wanted: object, seconds: float) -> None:
    """`probe` gives `wanted` for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert probe() == wanted
        time.sleep(0.5)
