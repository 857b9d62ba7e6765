"""GPUs that sicken under load, on a real control plane: on a device plugin's node, and as devices of a DRA driver."""

import json
import os
from collections.abc import Generator
from typing import Any

import pytest

from shoal_dev.demo import healthact, steps
from shoal_dev.demo.clients import DemoClients
from tests.e2e.conftest import VALUES, Fleet
from tests.support.lab import make_lab
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

NODES = {
    "nodes": [
        {"name": "cpu-1"},
        {"name": "dra-1", "gpus": 3, "gpuProduct": "NVIDIA L4", "gpuMemoryMiB": 23034, "dra": True},
        {"name": "plugin-{n}", "count": 2, "gpus": 1, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068},
    ]
}
L4 = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA L4"'


def gpu_class(name: str, **spec: Any) -> dict[str, Any]:
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "GPUClass",
        "metadata": {"name": name},
        "spec": {"tolerations": tolerations, **spec},
    }


@pytest.fixture(scope="module")
def fleet() -> Generator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    lab = make_lab(NODES)
    try:
        fleet = Fleet(lab)
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
        fleet.kubectl("create", "namespace", steps.DEMO_NAMESPACE)
        fleet.kubectl("apply", "-f", str(steps.EXAMPLES / "tenant.yaml"))
        cel = {"deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": L4}}]}
        fleet.apply(
            gpu_class("l4", device=cel),
            gpu_class("l40s", nodeSelector={"nvidia.com/gpu.product": "NVIDIA-L40S"}, memoryPerGPU="48Gi"),
        )
        fleet.make_model("tiny-chat", variants=[{"class": "l40s"}], scaling={"minReplicas": 1, "maxReplicas": 1})
        fleet.make_model("tiny-code", variants=[{"class": "l4"}], scaling={"minReplicas": 1, "maxReplicas": 1})
        yield fleet
    finally:
        lab.down()


def quarantined(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    found = json.loads(fleet.kubectl("get", "gpuclasses", name, "-o", "json"))
    return found.get("status", {}).get("quarantined", [])


def clients(fleet: Fleet, model: str) -> DemoClients:
    base = f"http://127.0.0.1:{fleet.lab.forward_port()}"
    return DemoClients(base, steps.DEMO_KEY, f"{steps.DEMO_NAMESPACE}/{model}")


def test_a_node_that_a_problem_detector_reports(fleet: Fleet) -> None:
    found = healthact.replace_one(
        fleet,
        "tiny-chat",
        clients(fleet, "tiny-chat"),
        lambda pod: healthact.report(fleet, healthact.node_of(pod), sick=True),
        240,
    )
    assert found.quarantined_seconds <= found.gone_seconds
    assert found.ready_seconds <= found.gone_seconds, "a replacement first"
    assert found.answers > 0
    assert "GPUFellOffBus" in found.why
    assert found.node in found.why
    print(f"signal to quarantine {found.quarantined_seconds:.1f} s, to another replica {found.ready_seconds:.1f} s, "
          f"to its end {found.gone_seconds:.1f} s, {found.answers} answers")  # fmt: skip
    healthact.report(fleet, found.node, sick=False)
    told = healthact.shoal(fleet, "uncordon", "node", found.node)
    assert f"gpuclass/l40s: node {found.node} is put back into use" in told
    until(lambda: not quarantined(fleet, "l40s"), 60, lambda: quarantined(fleet, "l40s"))


def test_a_device_that_a_person_takes_out_and_one_that_its_driver_taints(fleet: Fleet) -> None:
    def sicken(pod: dict[str, Any]) -> None:
        # The lab taints the last devices of a node; the replica's is among them.
        (claim,) = [
            c
            for c in fleet.get("resourceclaims", "-n", steps.DEMO_NAMESPACE)
            if any(r["name"] == pod["metadata"]["name"] for r in c.get("status", {}).get("reservedFor", []))
        ]
        device: str = claim["status"]["allocation"]["devices"]["results"][0]["device"]
        held.append(f"gpu.nvidia.com/dra-1/{device}")
        healthact.shoal(fleet, "cordon", "gpu", "dra-1", device, "--reason", "burn-in")

    held: list[str] = []
    found = healthact.replace_one(fleet, "tiny-code", clients(fleet, "tiny-code"), sicken, 240)
    assert found.ready_seconds <= found.gone_seconds, "a replacement first"
    [entry] = quarantined(fleet, "l4")
    assert (entry["device"], entry["by"], entry["message"]) == (held[0], "Person", "burn-in")
    assert held[0] in found.why
    healthact.shoal(fleet, "uncordon", "gpu", "dra-1", held[0])
    until(lambda: not quarantined(fleet, "l4"), 60, lambda: quarantined(fleet, "l4"))
    # A driver's own word: all devices but those that are healthy get a taint that keeps pods off.
    fleet.lab.gpu_health("dra-1", healthy=2)
    until(lambda: [e["reason"] for e in quarantined(fleet, "l4")] == ["GPUUnhealthy"], 90,
          lambda: quarantined(fleet, "l4"))  # fmt: skip
