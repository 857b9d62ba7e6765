"""One lab for the faults: Shoal by helm, nodes that can be broken one by one, and a hub of faulty repositories."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shoal.api import names
from shoal.cli.main import main
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab.api import Lab
from tests.e2e.conftest import HUB_NAMESPACE, VALUES, Fleet
from tests.faults.lab import rows
from tests.faults.lab.cluster import CLASSES, NODES, WELL, gpu_class
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

    def node_event(self, node: str, reason: str, message: str) -> None:
        """As a problem detector reports it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
        about = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
        self.apply(
            {"apiVersion": "events.k8s.io/v1", "kind": "Event",
             "metadata": {"name": f"{node}-1", "namespace": "default"}, "regarding": about, "type": "Warning",
             "reason": reason, "note": message, "action": "Detected", "eventTime": now,
             "reportingController": "example.com/detector", "reportingInstance": node},
        )  # fmt: skip

    def serves(self, model: str, space: str) -> bool:
        return self.condition(model, "Ready", space).get("status") == "True"

    def pods(self, space: str, selector: str) -> list[dict[str, Any]]:
        """Those that are not going."""
        found = json.loads(self.kubectl("get", "pods", "-n", space, "-l", selector, "-o", "json"))["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def engine(self, model: str, space: str) -> str:
        """Name of a Model's pod whose engine runs; waits for one."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={model}"

        def running() -> list[str]:
            return [
                pod["metadata"]["name"]
                for pod in self.pods(space, selector)
                for each in pod["status"].get("containerStatuses", ())
                if each["name"] == names.CONTAINER_ENGINE and "running" in each["state"]
            ]

        until(lambda: bool(running()), WITHIN)
        return running()[0]

    def cache_pod(self, node: str) -> dict[str, Any]:
        """The node cache's pod there."""
        found = self.pods(NAMESPACE, f"{names.LABEL_COMPONENT}={names.COMPONENT_CACHE}")
        return next(pod for pod in found if pod["spec"].get("nodeName") == node)

    def gateways(self) -> list[dict[str, Any]]:
        return self.pods(NAMESPACE, f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY}")

    def gateway_addresses(self) -> list[str]:
        return [pod["status"]["podIP"] for pod in self.gateways()]

    def gateways_reach(self, pod: str, space: str) -> bool:
        """Whether one of the gateways gets a connection to the engine of a pod."""
        address = self.kubectl("get", "pod", pod, "-n", space, "-o", "jsonpath={.status.podIP}")
        code = f"import socket; socket.create_connection(({address!r}, {names.ENGINE_TLS_PORT}), 1)"
        return any(self._connects(gateway["metadata"]["name"], code) for gateway in self.gateways())

    def _connects(self, gateway: str, code: str) -> bool:
        try:
            self.kubectl("exec", "-n", NAMESPACE, gateway, "--", "python", "-c", code)
        except click.ClickException:
            return False
        return True

    def nft(self, rules: str, process: int | None = None) -> None:
        """Loads rules into the lab's network, or into that of a pod's process."""
        enter = self.lab.enter_command() if process is None else ["nsenter", f"--net=/proc/{process}/ns/net", "--"]
        subprocess.run([*enter, "nft", "-f", "-"], input=rules, text=True, check=True, capture_output=True, timeout=30)

    def small_disk(self, node: str, folder: str, size: str) -> Callable[[], object]:
        """Another disk of this size in place of a folder of the node's; what is returned takes it away."""
        (process,) = (each.pid for each in self.lab.status().processes if each.name == f"node-{node}")
        # By its number in the lab, whose /proc the command sees; the node's own /proc is that of its children.
        inside = ["nsenter", f"--mount=/proc/{process}/ns/mnt", f"--pid=/proc/{process}/ns/pid_for_children", "--"]
        self.lab.exec(*inside, "mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "faults", folder)
        return lambda: self.lab.exec(*inside, "umount", "--lazy", folder)

    def volume(self, pod: dict[str, Any], name: str) -> str:
        """The folder of a pod's claim on its node, by its path on this machine."""
        claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"]
                  if "persistentVolumeClaim" in v}  # fmt: skip
        where = ("-n", pod["metadata"]["namespace"], "-o", "jsonpath={.spec.volumeName}")
        made = self.kubectl("get", "pvc", claims[name], *where)
        path = self.kubectl("get", "pv", made, "-o", "jsonpath={.spec.local.path}")
        return f"{self.lab.paths.node_disk(pod['spec']['nodeName'])}{path}"

    def hub(self, repository: str, **values: Any) -> None:
        """Changes a repository of the hub."""
        code = (
            "import sys, urllib.request as u; "
            f"u.urlopen('http://127.0.0.1:8080/control/{repository}', sys.argv[1].encode()).read()"
        )
        self.kubectl("exec", "-n", HUB_NAMESPACE, "hub", "--", "python", "-c", code, json.dumps(values))


_APPLIED_AT_ONCE = 10
"""Objects of one command: as their pods start, the machine is busy."""


def apply(fleet: Fleet, objects: Iterable[dict[str, Any]]) -> None:
    """Pools before adapters, all others as they come: an object that is there twice is applied once."""
    found = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]): o for o in objects}
    every = list(found.values())
    for at in range(0, len(every), _APPLIED_AT_ONCE):
        fleet.apply(*every[at : at + _APPLIED_AT_ONCE])


@pytest.fixture(scope="session")
def broken_fleet() -> Generator[BrokenFleet]:
    """Shoal, the classes, the hub, and the namespaces; nothing is broken yet."""
    given = os.environ.get("SHOAL_FAULTS_LAB")  # one that somebody else made, and removes
    lab = Lab.get(given) if given else make_lab(NODES, faults=True)
    try:
        fleet = BrokenFleet(lab)
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
        # Classes with a cost are used first: a Model of several classes begins on the one where all is well.
        priced = gpu_class(WELL, hourlyCost={"amount": "0.5", "currency": "USD"})
        fleet.apply(priced, *(gpu_class(name) for name in CLASSES if name != WELL))
        fleet.apply(*(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": rows.LABELS.get(name, {})}}
            for name in (*rows.SPACES, HUB_NAMESPACE)
        ))  # fmt: skip
        for name in (*rows.SPACES, HUB_NAMESPACE):
            until(lambda name=name: "default" in fleet.kubectl("get", "serviceaccounts", "-n", name), 30)
        service = {"selector": {"app": "hub"}, "ports": [{"port": 80, "targetPort": 8080}]}
        fleet.apply(
            helper_pod("hub", HUB_NAMESPACE, "tests.support.faultyhub", "8080", "/opt/shoal/models/tiny-chat",
                       "/opt/shoal/adapters/poet", image=steps.LAB_IMAGE),
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hub", "namespace": HUB_NAMESPACE},
             "spec": service},
        )  # fmt: skip
        fleet.kubectl("wait", "--for=condition=Ready", "pod/hub", "-n", HUB_NAMESPACE, "--timeout=120s", timeout=130)
        yield fleet
    finally:
        if not given:
            lab.down()
