"""A node autoscaler for a storm: it does with the lab's nodes what Karpenter and Cluster Autoscaler do with machines.

A pod of the class that the scheduler finds no node for brings a node, after a while and up to the most. A node without
pods gets a taint, is looked at once more, and goes. Its events are those of Cluster Autoscaler, under its name. A
machine is one of the lab's nodes that is switched on, with an empty disk and a new Node object; names are used again
once no pod is bound to them. (`tests/e2e/operator/test_operator_karpenter.py` has the real Karpenter, whose nodes run
no processes.)
"""

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import orjson

from shoal.api import names
from shoal_dev.lab.api import Lab
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.kubeapi import Api, KubeAPIError, LabReflector, Object
from shoal_dev.lab.node.config import GPU_RESOURCE
from tests.storm.nodes import CLASS, FILE, GPUS_PER_NODE, MOST, NAMES, PREFIX, Event

REPORTER: Final = "cluster-autoscaler"
_LOOK_SECONDS: Final = 0.5
_DELAY_SECONDS: Final = (3.0, 10.0)
"""From a pending pod to a machine that starts."""
_EMPTY_SECONDS: Final = 12.0
"""After which a node without pods goes."""
_SETTLES_SECONDS: Final = 2.0
"""A pod that the scheduler had bound before it saw the taint is there by then."""
_TAINT: Final = {"key": "ToBeDeletedByClusterAutoscaler", "value": "storm", "effect": "NoSchedule"}
_ERRORS: Final = (KubeAPIError, aiohttp.ClientError, TimeoutError, OSError, LabError)
"""The API server may be away, which is part of the storm."""

State = Literal["coming", "there", "leaving"]


@dataclass(slots=True)
class Machine:
    """One that is on, or will be. Times are of the monotonic clock."""

    name: str
    state: State
    due: float
    """When it is switched on."""
    started: bool = False
    empty_since: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the API server has of nodes and pods, as far as it matters here."""

    ready: frozenset[str]
    """Nodes."""
    bound: Mapping[str, tuple[Object, ...]]
    """Node -> its pods that have not ended, without those of DaemonSets."""
    waiting: tuple[Object, ...]
    """Pods of the class for which the scheduler finds no node."""

    @classmethod
    def of(cls, nodes: Iterable[Object], pods: Iterable[Object]) -> "Cluster":
        bound: dict[str, tuple[Object, ...]] = {}
        waiting: list[Object] = []
        for pod in pods:
            if pod["status"].get("phase") in ("Succeeded", "Failed"):
                continue
            if node := pod["spec"].get("nodeName"):
                if not any(owner["kind"] == "DaemonSet" for owner in pod["metadata"].get("ownerReferences", ())):
                    bound[node] = (*bound.get(node, ()), pod)
            elif pod["metadata"].get("labels", {}).get(names.LABEL_GPU_CLASS) == CLASS and _unschedulable(pod):
                waiting.append(pod)
        ready = frozenset(node["metadata"]["name"] for node in nodes if _condition(node, "Ready") == "True")
        return cls(ready, bound, tuple(sorted(waiting, key=_name)))


def missing(cluster: Cluster, machines: Iterable[Machine], most: int = MOST) -> int:
    """How many nodes are to come: enough for what waits, beside what is free or on its way, and `most` in all."""
    on = list(machines)
    wanted = sum(map(gpus, cluster.waiting))
    for machine in on:
        if machine.state != "leaving":
            wanted -= GPUS_PER_NODE - sum(map(gpus, cluster.bound.get(machine.name, ())))
    return max(0, min(-(-wanted // GPUS_PER_NODE), most - len(on)))


def gpus(pod: Object) -> int:
    """GPUs that a pod asks for."""
    limits = (c.get("resources", {}).get("limits", {}) for c in pod["spec"].get("containers", ()))
    return sum(int(each.get(GPU_RESOURCE, 0)) for each in limits)


@dataclass(slots=True)
class NodeProvider:
    """Runs beside the storm, in a thread of its own; faults take its nodes away."""

    lab: Lab
    folder: Path
    random: random.Random
    stocked: bool = True
    """Whether there are machines to be had."""
    _machines: dict[str, Machine] = field(default_factory=dict[str, Machine])
    _used: dict[str, float] = field(default_factory=dict[str, float])
    """Name -> when its last machine went."""
    _refused: set[str] = field(default_factory=set[str])
    """Uids of pods that were told that no machine is to be had."""
    _placed: set[str] = field(default_factory=set[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of the machines; never held over a call."""

    # --- for the storm ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """All machines are off at first."""
        for number in range(1, NAMES + 1):
            name = f"{PREFIX}{number}"
            self.lab.kill_node(name)
            self.lab.kubectl("delete", "node", name, "--ignore-not-found", "--wait=false")
            self._used[name] = 0.0
        self.note("begins")
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._run())
        thread = threading.Thread(target=self._until_cancelled, args=(loop, task), name="node-provider")
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(60)

    def note(
        self,
        event: Event,
        node: str = "",
        pods: Iterable[str] = (),
        why: str = "",
        *,
        good: bool = True,
        at: float | None = None,
    ) -> None:
        """One line of the journal of nodes. `at`: Unix seconds; None: now."""
        line = {
            "at": time.time() if at is None else at,
            "event": event,
            "node": node,
            "pods": sorted(pods),
            "why": why,
            "good": good,
        }
        with (self.folder / FILE).open("ab", buffering=0) as file:
            file.write(orjson.dumps(line) + b"\n")

    def nodes(self) -> list[str]:
        """Those that are there to stay."""
        with self._lock:
            return sorted(m.name for m in self._machines.values() if m.state == "there")

    def notice(self, node: str) -> bool:
        """The machine will be taken away: nothing is counted on it any more. False: it is leaving already."""
        with self._lock:
            machine = self._machines.get(node)
            if machine is None or machine.state != "there":
                return False
            machine.state = "leaving"
            return True

    def take(self, node: str, why: str, pods: Iterable[str]) -> None:
        """The power is off, and the Node goes. `pods`: what was still there. Raises LabError."""
        with contextlib.suppress(LabError):  # off already, and its Node could not be deleted then
            self.lab.kill_node(node)
        self.forget(node, why, pods)

    def forget(self, node: str, why: str, pods: Iterable[str]) -> None:
        """The Node of a machine that is off goes. Raises LabError."""
        self.lab.kubectl("delete", "node", node, "--ignore-not-found", "--wait=false")
        with self._lock:
            self._machines.pop(node, None)
            self._used[node] = time.monotonic()
        self.note("gone", node, pods, why)

    def set_stock(self, stocked: bool) -> None:
        """From now on machines can be had, or not. Those that are on their way come."""
        with self._lock:
            self.stocked = stocked
            self._refused.clear()
        self.note("stock", good=stocked)

    # --- its own thread -----------------------------------------------------------------------------------------------

    def _until_cancelled(self, loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(asyncio.sleep(0.1))  # a closed connection lets go of its socket in a later turn
        loop.close()

    async def _run(self) -> None:
        def changed(_kind: str, _item: Object) -> None:
            return

        async with Api(self.lab.kubeconfig) as api, asyncio.TaskGroup() as tasks:
            nodes = LabReflector(api, "/api/v1/nodes", changed)
            pods = LabReflector(api, "/api/v1/pods", changed)
            for reflector in (nodes, pods):
                tasks.create_task(reflector.run())
                await reflector.synced.wait()
            while True:
                with contextlib.suppress(*_ERRORS):
                    await self._look(api, Cluster.of(nodes.objects.values(), pods.objects.values()))
                await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, api: Api, cluster: Cluster) -> None:
        self._note_arrivals(cluster)
        await self._start(cluster)
        with self._lock:
            wanted, stocked = missing(cluster, self._machines.values()), self.stocked
        if wanted and stocked:
            await self._order(api, cluster, wanted)
        elif wanted:
            await self._refuse(api, cluster)
        await self._shrink(api, cluster)

    def _note_arrivals(self, cluster: Cluster) -> None:
        with self._lock:
            machines = list(self._machines.values())
        for machine in machines:
            if machine.state == "coming" and machine.started and machine.name in cluster.ready:
                machine.state = "there"
                self.note("came", machine.name)
            for pod in cluster.bound.get(machine.name, ()):
                uid = pod["metadata"]["uid"]
                if uid not in self._placed and _condition(pod, "Ready") == "True":
                    self._placed.add(uid)
                    self.note("placed", machine.name, [_name(pod)])

    async def _order(self, api: Api, cluster: Cluster, count: int) -> None:
        with self._lock:
            free = [n for n in self._used if n not in self._machines and not cluster.bound.get(n)]
            before = len(self._machines)
            chosen = sorted(free, key=lambda name: self._used[name])[:count]
            due = time.monotonic() + self.random.uniform(*_DELAY_SECONDS)
            self._machines |= {name: Machine(name, "coming", due) for name in chosen}
        for name in chosen:
            self.note("asked", name, map(_name, cluster.waiting))
        if chosen:
            text = f"pod triggered scale-up: [{{{CLASS} {before}->{before + len(chosen)} (max: {MOST})}}]"
            for pod in cluster.waiting:
                await _report(api, pod, "TriggeredScaleUp", text)

    async def _refuse(self, api: Api, cluster: Cluster) -> None:
        for pod in cluster.waiting:
            uid = pod["metadata"]["uid"]
            if uid not in self._refused:
                self._refused.add(uid)
                self.note("refused", pods=[_name(pod)])
                text = "pod didn't trigger scale-up: 1 in backoff after failed scale-up"
                await _report(api, pod, "NotTriggerScaleUp", text)

    async def _start(self, cluster: Cluster) -> None:
        with self._lock:
            due = [m for m in self._machines.values() if not m.started and m.due <= time.monotonic()]
        for machine in due:
            if machine.name in cluster.ready:
                continue  # the watch has yet to say that its last Node is gone
            await asyncio.to_thread(self.lab.replace_node, machine.name)
            machine.started = True

    async def _shrink(self, api: Api, cluster: Cluster) -> None:
        now = time.monotonic()
        with self._lock:
            there = [m for m in self._machines.values() if m.state == "there"]
        for machine in there:
            if cluster.bound.get(machine.name):
                machine.empty_since = None
            elif machine.empty_since is None:
                machine.empty_since = now
            elif now - machine.empty_since >= _EMPTY_SECONDS and self.notice(machine.name):
                machine.empty_since = None
                await self._remove_empty(api, machine)

    async def _remove_empty(self, api: Api, machine: Machine) -> None:
        """With a taint first; a pod that was bound meanwhile keeps the node."""
        path = f"/api/v1/nodes/{machine.name}"
        try:
            taints = (await api.request("GET", path))["spec"].get("taints", [])
            await _set_taints(api, path, [*taints, _TAINT])
            await asyncio.sleep(_SETTLES_SECONDS)
            found = await api.request("GET", "/api/v1/pods", params={"fieldSelector": f"spec.nodeName={machine.name}"})
            if not Cluster.of((), found["items"]).bound:
                await asyncio.to_thread(self.take, machine.name, "empty", ())
                return
            await _set_taints(api, path, taints)
        except _ERRORS:
            # It is looked at again. A taint that stays keeps pods off, and the node empty.
            machine.state = "there"
            raise
        machine.state = "there"


async def _set_taints(api: Api, path: str, taints: list[Any]) -> None:
    content = "application/merge-patch+json"
    await api.request("PATCH", path, {"spec": {"taints": taints}}, content_type=content)


async def _report(api: Api, pod: Object, reason: str, message: str) -> None:
    """An event about a pod, as Cluster Autoscaler writes it."""
    metadata, now = pod["metadata"], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    reference = {"apiVersion": "v1", "kind": "Pod"} | {k: metadata[k] for k in ("namespace", "name", "uid")}
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:200]}.{secrets.token_hex(8)}", "namespace": metadata["namespace"]},
        "involvedObject": reference,
        "reason": reason,
        "message": message,
        "type": "Normal",
        "count": 1,
        "source": {"component": REPORTER},
        "reportingComponent": REPORTER,
        "firstTimestamp": now,
        "lastTimestamp": now,
    }
    await api.request("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", body)


def _condition(item: Object, kind: str) -> str | None:
    return next((c["status"] for c in item.get("status", {}).get("conditions", ()) if c["type"] == kind), None)


def _unschedulable(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and any(
        c["type"] == "PodScheduled" and c["status"] == "False" and c.get("reason") == "Unschedulable"
        for c in pod["status"].get("conditions", ())
    )


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
