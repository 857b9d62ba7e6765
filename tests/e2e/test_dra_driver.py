"""A Model on the devices of a real DRA driver, on a real kubelet: its claim is prepared, its GPU sickens, and it goes.

`make test-kubelet` runs this. Elsewhere no node has a kubelet that knows drivers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.api import names
from shoal_dev.demo import steps
from tests.e2e.conftest import Fleet, serves
from tests.support.devices import DRIVER, class_of_devices, device_class, resource_slice
from tests.support.waiting import until

NODE = os.environ.get("SHOAL_LIFECYCLE_NODE", "")
pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not NODE, reason="needs a node with a real kubelet: make test-kubelet"),
]

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("gpu-0", "gpu-1")
MODEL = "on-devices"
CLASS = "driven"


@dataclass(frozen=True, slots=True)
class RunningDriver:
    journal: Path
    sick: Path

    def said(self, what: str) -> list[dict[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["what"] == what]


@pytest.fixture(scope="module")
def driver(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningDriver]:
    """The driver, its DeviceClass and its slice."""
    folder = tmp_path_factory.mktemp("driver")
    running = RunningDriver(folder / "journal.jsonl", folder / "sick")
    running.sick.write_text("")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.touch(0o600)
    kubeconfig.write_bytes(fleet.lab.paths.admin_kubeconfig.read_bytes())
    config = folder / "config.json"
    kubectl = [str(fleet.tools.kubectl), f"--kubeconfig={kubeconfig}"]
    config.write_text(
        json.dumps(
            {
                "driver": DRIVER,
                "pool": NODE,
                "devices": DEVICES,
                "kubectl": kubectl,
                "journal": str(running.journal),
                "sick": str(running.sick),
            }
        )
    )
    (node,) = [p for p in fleet.lab.status().processes if p.name == f"node-{NODE}"]
    enter = [*fleet.lab.enter_command(), "nsenter", f"--target={node.pid}", "--mount", f"--wd={ROOT}", "--"]
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [*enter, sys.executable, "-m", "tests.kubelet.driver", str(config)], stdout=log, stderr=log, cwd=ROOT
        )
    try:
        until(lambda: bool(running.said("registered")), 90, (folder / "driver.log").read_text)
        fleet.apply(device_class(), resource_slice(NODE, *DEVICES), class_of_devices(CLASS))
        yield running
    finally:
        fleet.delete_model(MODEL)
        for kind, name in (("gpuclasses", CLASS), ("resourceslices", f"{NODE}-1-0"), ("deviceclasses", DRIVER)):
            fleet.kubectl("delete", kind, name, "--ignore-not-found", "--wait=false")
        process.terminate()
        process.wait(30)


def engines(fleet: Fleet) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={MODEL}"
    return fleet.get("pods", "-n", steps.DEMO_NAMESPACE, "-l", selector)


def device_of(fleet: Fleet, pod: dict[str, Any]) -> tuple[str, str]:
    """Uid of the pod's claim, and the device that it was given."""
    for claim in fleet.get("resourceclaims", "-n", steps.DEMO_NAMESPACE):
        status = claim.get("status", {})
        if any(user["uid"] == pod["metadata"]["uid"] for user in status.get("reservedFor", ())):
            (result,) = status["allocation"]["devices"]["results"]
            return claim["metadata"]["uid"], result["device"]
    raise AssertionError("no claim is reserved for the pod")


def health_of(pod: dict[str, Any]) -> dict[str, str]:
    """What the kubelet says of the devices of the pod's containers."""
    return {
        device["resourceID"]: device["health"]
        for container in pod["status"].get("containerStatuses", [])
        for resource in container.get("allocatedResourcesStatus", [])
        for device in resource["resources"]
    }


def serving(fleet: Fleet, other_than: str = "") -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def one() -> bool:
        found[:] = [p for p in engines(fleet) if serves(p) and p["metadata"]["uid"] != other_than]
        return len(found) == 1

    until(one, 300, lambda: (fleet.model(MODEL)["status"], fleet.get("events", "-n", steps.DEMO_NAMESPACE)[-5:]))
    return found[0]


def eventually(holds: Callable[[], object], driver: RunningDriver, within: float = 120) -> None:
    until(lambda: bool(holds()), within, lambda: driver.journal.read_text()[-2000:])


def test_a_claim_is_prepared_its_sick_device_left_and_all_is_unprepared(fleet: Fleet, driver: RunningDriver) -> None:
    fleet.make_model(MODEL, variants=[{"class": CLASS}], scaling={"minReplicas": 1, "maxReplicas": 1})
    first = serving(fleet)
    assert first["spec"]["nodeName"] == NODE
    claim, device = device_of(fleet, first)
    assert [p["devices"] for p in driver.said("prepared") if p["claim"] == claim] == [[device]]
    # What was prepared has reached the container that asked for the claim.
    exec_ = ("exec", first["metadata"]["name"], "-n", steps.DEMO_NAMESPACE, "-c", names.CONTAINER_ENGINE, "--")
    assert fleet.kubectl(*exec_, "printenv", "SHOAL_TEST_GPU").strip() == device
    # A kubelet calls the device by its name in the container runtime, and not as its slice does.
    said = {f"shoal.test/gpu={device}": "Healthy"}
    name = first["metadata"]["name"]
    eventually(lambda: [health_of(p) for p in engines(fleet) if p["metadata"]["name"] == name] == [said], driver)

    # It sickens: a replica on the other device first, then this one goes, and Shoal keeps the device out of use.
    driver.sick.write_text(device)

    def out() -> list[str]:
        status = json.loads(fleet.kubectl("get", "gpuclasses", CLASS, "-o", "json")).get("status", {})
        return [entry.get("device", "") for entry in status.get("quarantined", []) if entry["state"] == "Quarantined"]

    second = serving(fleet, first["metadata"]["uid"])
    other, healthy = device_of(fleet, second)
    assert healthy != device
    eventually(lambda: out() == [f"{DRIVER}/{NODE}/{device}"], driver)
    eventually(lambda: {p["claim"] for p in driver.said("unprepared")} == {claim}, driver, 300)

    fleet.delete_model(MODEL)
    eventually(lambda: {p["claim"] for p in driver.said("unprepared")} == {claim, other}, driver, 300)
    eventually(lambda: not fleet.get("resourceclaims", "-n", steps.DEMO_NAMESPACE), driver)
