"""One lab for the faults: Shoal by helm, nodes that can be broken one by one, and a hub of faulty repositories."""

import json
import os
import time
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli.main import main
from shoal_dev.demo import steps
from shoal_dev.lab.api import Lab
from tests.e2e.conftest import HUB_NAMESPACE, VALUES, Fleet
from tests.faults.lab import rows
from tests.faults.lab.cluster import CLASSES, NODES, gpu_class
from tests.faults.lab.rows import LabFault
from tests.support.helperpods import helper_pod
from tests.support.lab import make_lab
from tests.support.waiting import until

WITHIN = 240.0
"""Seconds until a fault must be told; the machine runs some sixty engines meanwhile."""


class BrokenFleet(Fleet):
    """The lab, and what people ask of it."""

    def shoal(self, *args: str) -> dict[str, Any]:
        """What `shoal ARGS -o json` prints."""
        command = [*args, "-o", "json", "--kubeconfig", str(self.lab.kubeconfig)]
        done = CliRunner().invoke(main, command)
        return json.loads(done.stdout) if done.stdout.strip() else {"error": done.output, "exception": done.exception}

    def why(self, fault: LabFault) -> dict[str, Any]:
        return self.shoal("why", fault.subject, "-n", fault.space)

    def doctor(self) -> list[dict[str, Any]]:
        return self.shoal("doctor", "--all")["results"]

    def node_condition(self, node: str, type: str, status: str, reason: str = "", message: str = "") -> None:
        """As a problem detector writes it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        mine = {"type": type, "status": status, "reason": reason or type, "message": message}
        mine |= {"lastTransitionTime": now, "lastHeartbeatTime": now}
        patch = json.dumps({"status": {"conditions": [mine]}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", patch)


def apply(fleet: Fleet, objects: Iterable[dict[str, Any]]) -> None:
    """Pools before adapters, all others as they come: an object that is there twice is applied once."""
    found = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]): o for o in objects}
    if found:
        fleet.apply(*found.values())


@pytest.fixture(scope="session")
def broken_fleet() -> Generator[BrokenFleet]:
    """Shoal, the classes, the hub, and the namespaces; nothing is broken yet."""
    given = os.environ.get("SHOAL_FAULTS_LAB")  # one that somebody else made, and removes
    lab = Lab.get(given) if given else make_lab(NODES, faults=True)
    try:
        fleet = BrokenFleet(lab)
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
        fleet.apply(*(gpu_class(name) for name in CLASSES))
        fleet.apply(*(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            for name in (*rows.SPACES, HUB_NAMESPACE)
        ))  # fmt: skip
        for name in (*rows.SPACES, HUB_NAMESPACE):
            until(lambda name=name: "default" in fleet.kubectl("get", "serviceaccounts", "-n", name), 30)
        service = {"selector": {"app": "hub"}, "ports": [{"port": 80, "targetPort": 8080}]}
        fleet.apply(
            helper_pod("hub", HUB_NAMESPACE, "tests.support.faultyhub", "8080", "/opt/shoal/models/tiny-chat",
                       image=steps.LAB_IMAGE),
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hub", "namespace": HUB_NAMESPACE},
             "spec": service},
        )  # fmt: skip
        fleet.kubectl("wait", "--for=condition=Ready", "pod/hub", "-n", HUB_NAMESPACE, "--timeout=120s", timeout=130)
        yield fleet
    finally:
        if not given:
            lab.down()
