"""How faults come into a running cluster that no object makes, and how they are undone."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from shoal.api import names, reasons
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab.node import memory
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.faults.lab.conftest import BrokenFleet

Undo = Callable[[], object]
Injection = Callable[["BrokenFleet"], Undo]
"""Makes a fault; what it returns unmakes it."""
CACHE: Final = "/var/lib/shoal/cache"
"""The node cache's folder on a node's disk."""


def nothing() -> None:
    """The undo of what need not be undone."""


# --- nodes ------------------------------------------------------------------------------------------------------------


def silent(node: str) -> Injection:
    """The machine is off."""

    def make(fleet: "BrokenFleet") -> Undo:
        fleet.lab.kill_node(node)
        return lambda: fleet.lab.start_node(node)

    return make


def condition(node: str, type: str, reason: str, message: str, *, bad: str = "True") -> Injection:
    """As a problem detector writes it."""

    def make(fleet: "BrokenFleet") -> Undo:
        fleet.node_condition(node, type, bad, reason, message)
        return lambda: fleet.node_condition(node, type, "False" if bad == "True" else "True")

    return make


def node_event(node: str, reason: str, message: str) -> Injection:
    def make(fleet: "BrokenFleet") -> Undo:
        fleet.node_event(node, reason, message)
        return nothing

    return make


def healthy_gpus(node: str, healthy: int, of: int = 2) -> Injection:
    """As a device plugin that takes GPUs out."""

    def make(fleet: "BrokenFleet") -> Undo:
        fleet.lab.gpu_health(node, healthy=healthy)
        return lambda: fleet.lab.gpu_health(node, healthy=of)

    return make


def devices(node: str, resource: str, capacity: int, allocatable: int) -> Injection:
    """A further resource of the node, of which some devices are lost."""

    def make(fleet: "BrokenFleet") -> Undo:
        status = {"capacity": {resource: str(capacity)}, "allocatable": {resource: str(allocatable)}}
        patch = json.dumps({"status": status})
        fleet.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", patch)
        return nothing

    return make


def kubectl(make: tuple[str, ...], undo: tuple[str, ...]) -> Injection:
    def injection(fleet: "BrokenFleet") -> Undo:
        fleet.kubectl(*make)
        return lambda: fleet.kubectl(*undo)

    return injection


def no_name_server(node: str) -> Injection:
    """Pods of the node do not reach the cluster's DNS: their questions are refused."""

    def make(fleet: "BrokenFleet") -> Undo:
        prefix = fleet.cache_pod(node)["status"]["podIP"].rpartition(".")[0]
        table = f"dns_of_{node.replace('-', '_')}"
        rules = [f"ip saddr {prefix}.0/24 {protocol} dport 53 reject" for protocol in ("udp", "tcp")]
        fleet.nft(_refused(table, *rules))
        return lambda: fleet.nft(f"delete table inet {table}")

    return make


def full_cache(node: str) -> Injection:
    """The node cache's disk has room for nothing; its pod is started anew there."""

    def make(fleet: "BrokenFleet") -> Undo:
        pod = fleet.cache_pod(node)["metadata"]["name"]
        unmount = fleet.small_disk(node, str(fleet.lab.paths.node_disk(node)) + CACHE, "256k")
        fleet.kubectl("delete", "pod", pod, "-n", NAMESPACE)
        return unmount

    return make


# --- replicas ---------------------------------------------------------------------------------------------------------


def signalled(model: str, number: signal.Signals, space: str) -> Injection:
    """All processes of an engine's container get a signal."""

    def make(fleet: "BrokenFleet") -> Undo:
        def send(each: signal.Signals) -> None:
            first = fleet.lab.first_process(f"{space}/{fleet.engine(model, space)}:{names.CONTAINER_ENGINE}")
            for process in memory.processes(first):
                with contextlib.suppress(ProcessLookupError):  # the first process takes the others with it
                    os.kill(process, each)

        send(number)
        return lambda: send(signal.SIGCONT)

    return make


def cut_off(model: str, space: str, policy: dict[str, Any]) -> Injection:
    """A NetworkPolicy, and what a network does that enforces it: gateways do not reach the replica. Its node does."""

    def make(fleet: "BrokenFleet") -> Undo:
        pod = fleet.engine(model, space)
        process = fleet.lab.first_process(f"{space}/{pod}:{names.CONTAINER_ENGINE}")
        gateways = ", ".join(fleet.gateway_addresses())
        fleet.apply(policy)
        fleet.nft(_refused("cut", f"ip saddr {{ {gateways} }} drop"), process)
        until(lambda: not fleet.gateways_reach(pod, space), 60)

        def undo() -> None:
            fleet.nft("delete table inet cut", process)
            fleet.kubectl("delete", "-f", "-", stdin=json.dumps(policy))

        return undo

    return make


def _refused(table: str, *rules: str) -> str:
    """A table of nftables for what comes in."""
    chain = "\n".join(("type filter hook input priority 0;", *rules))
    return f"table inet {table} {{\n chain input {{\n{chain}\n }}\n}}\n"


def partitioned(node: str) -> Injection:
    """As a device plugin after MIG was turned on: slices in place of GPUs."""

    def make(fleet: "BrokenFleet") -> Undo:
        amounts = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "14"}
        patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
        fleet.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)
        return nothing

    return make


def held(model: str, space: str) -> Injection:
    """A Model is deleted that somebody's finalizer holds."""

    def make(fleet: "BrokenFleet") -> Undo:
        def finalizers(value: list[str]) -> None:
            patch = json.dumps({"metadata": {"finalizers": value}})
            fleet.kubectl("patch", "models.shoal.dev", model, "-n", space, "--type=merge", "-p", patch)

        finalizers(["example.com/inventory"])
        fleet.kubectl("delete", "models.shoal.dev", model, "-n", space, "--wait=false")
        return lambda: finalizers([])

    return make


# --- objects ----------------------------------------------------------------------------------------------------------


def applied(*objects: dict[str, Any]) -> Injection:
    def make(fleet: "BrokenFleet") -> Undo:
        fleet.apply(*objects)
        return nothing

    return make


def applied_later(*objects: dict[str, Any]) -> Injection:
    """Objects that are younger than those before them: the API's times have whole seconds."""

    def make(fleet: "BrokenFleet") -> Undo:
        time.sleep(1.1)
        fleet.apply(*objects)
        return nothing

    return make


def rewritten(repository: str, adapter: str, space: str, *then: dict[str, Any], **becomes: Any) -> Injection:
    """A repository becomes another one after an adapter of it was loaded. Then objects are applied."""

    def make(fleet: "BrokenFleet") -> Undo:
        where = ("loraadapter", adapter, "-n", space, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].reason}")
        until(lambda: fleet.kubectl("get", *where) == reasons.RESIDENT, 240)
        fleet.hub(repository, **becomes)
        fleet.apply(*then)
        return nothing

    return make
