"""The act on GPUs that sicken under load: a replacement first, then the drain of that replica, and `why` names it.

One is of a node with a device plugin, and a problem detector reports it. The other one is a device of a DRA driver,
which taints it. Both sicken at the same time.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from shoal.api import names
from shoal.api.meta import GROUP
from shoal.cli.client import run_command
from shoal_dev.demo import steps
from shoal_dev.demo.clients import DemoClients
from shoal_dev.demo.clusters import DemoCluster, LabCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import condition

T = TypeVar("T")

MODEL: Final = "tiny-chat"
CLIENTS: Final = 4
TOKENS: Final = 64
CONDITION: Final = "XIDErrors"
"""What a node problem detector writes."""
DEVICES_NAMESPACE: Final = "devices"
DEVICES_MODEL: Final = "tiny-device"
DEVICES_KEY: Final = "sk-demo-devices-7d20c5b1f8"
"""The key whose hash stands in the example: public, not a secret."""


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


@dataclass(frozen=True, slots=True)
class SickReplica:
    """A replica of a Model whose GPU is to sicken while clients ask for the Model."""

    model: str
    clients: DemoClients
    sicken: Callable[[dict[str, Any]], None]
    """Called with its pod."""
    namespace: str = steps.DEMO_NAMESPACE


def run(cluster: LabCluster, stages: Stages, timeout: float) -> None:
    """Plays the act and prints what happened. `steps.apply_devices` was called before.

    Raises ClickException when a replica is not replaced within `timeout` seconds, or a request is not answered.
    """
    console = stages.console
    console.print(
        "\n[bold]Two GPUs sicken under load[/]: a problem detector reports an Xid error of a node, and a DRA driver "
        "taints a device"
    )
    with cluster.gateway() as url, stages.stage("Replaced first, then drained, and no request lost"):
        of_node = SickReplica(
            MODEL,
            DemoClients(url, steps.DEMO_KEY, f"{steps.DEMO_NAMESPACE}/{MODEL}"),
            lambda pod: report(cluster, node_of(pod), sick=True),
        )
        of_device = SickReplica(
            DEVICES_MODEL,
            DemoClients(url, DEVICES_KEY, f"{DEVICES_NAMESPACE}/{DEVICES_MODEL}"),
            lambda pod: cluster.lab.gpu_health(node_of(pod), healthy=0),
            DEVICES_NAMESPACE,
        )
        found = replace_all(cluster, [of_node, of_device], timeout)
    for sick, each in zip((of_node, of_device), found, strict=True):
        what = f"node {each.node}" if sick is of_node else f"the device of node {each.node}"
        console.print(
            f"  {what} was out of use after {each.quarantined_seconds:.0f} s, another replica ready after "
            f"{each.ready_seconds:.0f} s, the old one gone after {each.gone_seconds:.0f} s; "
            f"{each.answers} answers meanwhile"
        )
        console.print(f"\n[bold]kubectl shoal why pod/{each.pod} -n {sick.namespace}[/], before it was gone")
        console.print(each.why, markup=False, soft_wrap=True)
    node, device = (each.node for each in found)
    report(cluster, node, sick=False)
    console.print(f"[bold]kubectl shoal uncordon node {node}[/]")
    console.print(shoal(cluster, "uncordon", "node", node), markup=False, soft_wrap=True)
    cluster.lab.gpu_health(device, healthy=1)
    # Its class would be one more for the Models of the other acts.
    cluster.kubectl("delete", "--wait=false", "-f", str(steps.EXAMPLES / steps.DEVICES_FILE))


def replace_one(
    cluster: DemoCluster, model: str, clients: DemoClients, sicken: Callable[[dict[str, Any]], None], timeout: float
) -> ReplicaReplaced:
    """Has the GPU of one replica sicken while clients ask. Raises ClickException."""
    return replace_all(cluster, [SickReplica(model, clients, sicken)], timeout)[0]


def replace_all(cluster: DemoCluster, sick: Sequence[SickReplica], timeout: float) -> list[ReplicaReplaced]:
    """Has the GPUs of several replicas sicken at the same time, each while clients ask. Raises ClickException."""
    found: list[ReplicaReplaced] = []

    async def play() -> None:
        asking = [asyncio.create_task(each.clients.many(CLIENTS, TOKENS)) for each in sick]
        try:
            found.extend(await asyncio.gather(*(asyncio.to_thread(_watch, cluster, each, timeout) for each in sick)))
        finally:
            for each in sick:
                each.clients.enough.set()
            await asyncio.gather(*asking)
        problems = [problem for each in sick for problem in each.clients.problems]
        if problems:
            raise click.ClickException(f"{len(problems)} requests were lost; the first: {problems[0]}")

    run_command(play())
    return found


def _watch(cluster: DemoCluster, sick: SickReplica, timeout: float) -> ReplicaReplaced:
    clients, namespace = sick.clients, sick.namespace

    def replicas() -> list[dict[str, Any]]:
        return engines(cluster, sick.model, namespace)

    before = _until(lambda: [p for p in replicas() if _ready(p)], timeout, f"no replica of {sick.model} is ready")
    old = before[0]
    name, gpu_class = old["metadata"]["name"], old["metadata"]["labels"][names.LABEL_GPU_CLASS]
    known = {pod["metadata"]["uid"] for pod in before}
    _until(lambda: clients.answers, timeout, "no request is answered")
    answered, began = len(clients.answers), time.monotonic()
    sick.sicken(old)

    def quarantined() -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = _class(cluster, gpu_class).get("status", {}).get("quarantined", [])
        return [each for each in entries if each["node"] == node_of(old)]

    _until(quarantined, timeout, f"nothing of GPUClass {gpu_class} is out of use")
    out = time.monotonic() - began
    why = shoal(cluster, "why", f"pod/{name}", "-n", namespace)

    def others() -> list[dict[str, Any]]:
        return [p for p in replicas() if _ready(p) and p["metadata"]["uid"] not in known]

    _until(others, timeout, f"no other replica of {sick.model} is ready")
    ready = time.monotonic() - began
    _until(
        lambda: old["metadata"]["uid"] not in {p["metadata"]["uid"] for p in replicas()},
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


def engines(cluster: DemoCluster, model: str, namespace: str = steps.DEMO_NAMESPACE) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={model}"
    return cluster.get("pods", "-n", namespace, "-l", selector)


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
