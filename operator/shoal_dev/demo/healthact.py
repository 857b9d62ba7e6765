"""The act on a GPU that sickens under load: a replacement first, then the drain of that replica, and `why` names it."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from shoal.api import names
from shoal.api.meta import GROUP
from shoal.cli.client import run_command
from shoal_dev.demo import steps
from shoal_dev.demo.clients import DemoClients
from shoal_dev.demo.clusters import DemoCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import condition

T = TypeVar("T")

MODEL: Final = "tiny-chat"
CLIENTS: Final = 4
TOKENS: Final = 64
CONDITION: Final = "XIDErrors"
"""What a node problem detector writes."""


@dataclass(frozen=True, slots=True)
class ReplicaReplaced:
    """How one replica was replaced. Seconds since its GPU sickened."""

    pod: str
    node: str
    gpu_class: str
    quarantined_seconds: float
    ready_seconds: float
    """Another replica was ready."""
    gone_seconds: float
    answers: int
    """To clients meanwhile."""
    why: str
    """What `shoal why pod` printed while the replica still served."""


def run(cluster: DemoCluster, stages: Stages, timeout: float) -> None:
    """Plays the act and prints what happened.

    Raises ClickException when the replica is not replaced within `timeout` seconds, or a request is not answered.
    """
    console = stages.console
    console.print("\n[bold]A GPU sickens under load[/]: a problem detector reports an Xid error of its node")
    with cluster.gateway() as url, stages.stage("Replaced first, then drained, and no request lost"):
        clients = DemoClients(url, steps.DEMO_KEY, f"{steps.DEMO_NAMESPACE}/{MODEL}")
        found = replace_one(cluster, MODEL, clients, lambda pod: report(cluster, node_of(pod), sick=True), timeout)
    console.print(
        f"  node {found.node} was out of use after {found.quarantined_seconds:.0f} s, another replica ready after "
        f"{found.ready_seconds:.0f} s, the old one gone after {found.gone_seconds:.0f} s; "
        f"{found.answers} answers meanwhile"
    )
    console.print(f"\n[bold]kubectl shoal why pod/{found.pod} -n {steps.DEMO_NAMESPACE}[/], before it was gone")
    console.print(found.why, markup=False, soft_wrap=True)
    report(cluster, found.node, sick=False)
    console.print(f"[bold]kubectl shoal uncordon node {found.node}[/]")
    console.print(shoal(cluster, "uncordon", "node", found.node), markup=False, soft_wrap=True)


def replace_one(
    cluster: DemoCluster, model: str, clients: DemoClients, sicken: Callable[[dict[str, Any]], None], timeout: float
) -> ReplicaReplaced:
    """Has the GPU of one replica sicken while clients ask. Raises ClickException."""
    found: list[ReplicaReplaced] = []

    async def play() -> None:
        asking = asyncio.create_task(clients.many(CLIENTS, TOKENS))
        try:
            found.append(await asyncio.to_thread(_watch, cluster, model, clients, sicken, timeout))
        finally:
            clients.enough.set()
            await asking
        if clients.problems:
            raise click.ClickException(f"{len(clients.problems)} requests were lost; the first: {clients.problems[0]}")

    run_command(play())
    return found[0]


def _watch(
    cluster: DemoCluster, model: str, clients: DemoClients, sicken: Callable[[dict[str, Any]], None], timeout: float
) -> ReplicaReplaced:
    before = _until(lambda: [p for p in engines(cluster, model) if _ready(p)], timeout, "no replica is ready")
    old = before[0]
    name, gpu_class = old["metadata"]["name"], old["metadata"]["labels"][names.LABEL_GPU_CLASS]
    known = {pod["metadata"]["uid"] for pod in before}
    _until(lambda: clients.answers, timeout, "no request is answered")
    answered, began = len(clients.answers), time.monotonic()
    sicken(old)

    def quarantined() -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = _class(cluster, gpu_class).get("status", {}).get("quarantined", [])
        return [each for each in entries if each["node"] == node_of(old)]

    _until(quarantined, timeout, f"nothing of GPUClass {gpu_class} is out of use")
    out = time.monotonic() - began
    why = shoal(cluster, "why", f"pod/{name}", "-n", steps.DEMO_NAMESPACE)

    def others() -> list[dict[str, Any]]:
        return [p for p in engines(cluster, model) if _ready(p) and p["metadata"]["uid"] not in known]

    _until(others, timeout, "no other replica is ready")
    ready = time.monotonic() - began
    _until(
        lambda: old["metadata"]["uid"] not in {p["metadata"]["uid"] for p in engines(cluster, model)},
        timeout,
        f"replica {name} does not go",
    )
    gone = time.monotonic() - began
    return ReplicaReplaced(name, node_of(old), gpu_class, out, ready, gone, len(clients.answers) - answered, why)


def report(cluster: DemoCluster, node: str, *, sick: bool) -> None:
    """Writes a condition of a node, as a problem detector does."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    mine = {
        "type": CONDITION,
        "status": "True" if sick else "False",
        "reason": "XidError" if sick else "NoXidError",
        "message": "Xid 79: GPU has fallen off the bus" if sick else "",
        "lastTransitionTime": now,
        "lastHeartbeatTime": now,
    }
    patch = json.dumps({"status": {"conditions": [mine]}})  # conditions of other types stay
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", patch)


def engines(cluster: DemoCluster, model: str) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={model}"
    return cluster.get("pods", "-n", steps.DEMO_NAMESPACE, "-l", selector)


def node_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["nodeName"])


def shoal(cluster: DemoCluster, *args: str) -> str:
    """What `kubectl shoal ARGS` prints."""
    return cluster.tools.run(Path(sys.executable), ("-m", "shoal", *args), None, 60)


def _class(cluster: DemoCluster, name: str) -> dict[str, Any]:
    return json.loads(cluster.kubectl("get", f"gpuclasses.{GROUP}", name, "-o", "json"))


def _ready(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and condition(pod, "Ready").get("status") == "True"


def _until(read: Callable[[], T], timeout: float, otherwise: str) -> T:
    deadline = time.monotonic() + timeout
    while not (found := read()):
        if time.monotonic() > deadline:
            raise click.ClickException(f"{otherwise} after {timeout:.0f} s")
        time.sleep(0.2)
    return found
