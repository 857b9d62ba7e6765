"""One pod, from its binding to this node until its object is gone: the order of things is a kubelet's.

Init containers in order, a sidecar counting as done when it has started; then the main containers. At deletion all
hooks at once; mains get SIGTERM after their own hook; sidecars in reverse order, after their hook and after everything
that started later is over, hooks included; one budget for all. Then the terminal phase, and only then the deletion.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import KubeAPIError
from shoal_dev.lab.node import devices, fields, status
from shoal_dev.lab.node.container import FORCED_STOP_SECONDS, MINIMUM_STOP_SECONDS, GraceBudget, NodeContainer
from shoal_dev.lab.node.context import NodeContext
from shoal_dev.lab.node.launch import gpu_count
from shoal_dev.lab.node.network import NetworkError
from shoal_dev.lab.node.rootfs import Mount
from shoal_dev.lab.node.runtime import StartError
from shoal_dev.lab.node.volumes import PodFacts, PodVolumes, VolumeError

_log = structlog.get_logger()
Json = dict[str, Any]

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts to set a pod up; the last one repeats."""
STATUS_RETRY_SECONDS = 1.0
SETTLE_SECONDS = 0.05
"""After the last exit, so that a readiness probe under way cannot write behind the last status."""
DEFAULT_GRACE = 30
EVICTION_GRACE = 1
"""Whatever the pod asks for, as in a kubelet that evicts because of local storage."""
KUBELET_RESTART_SECONDS = 1.4
"""Until a kubelet that was restarted goes on with the end of a pod."""
ADMISSION_ATTEMPTS = 4
"""Pods that were deleted by force hold their GPUs for a moment after the scheduler has given them to others."""


@dataclass(frozen=True, slots=True)
class PodFailure:
    """Why the node itself ends the pod, which is then Failed for good."""

    reason: Literal["Evicted", "UnexpectedAdmissionError"]
    message: str


class NodePod:
    """`run` until the pod is over and gone; `update` tells of a newer object, `removed` of its disappearance."""

    def __init__(self, node: NodeContext, pod: Json) -> None:
        self.node = node
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.spec: Json = pod["spec"]
        self.address = ""
        self.hostname: str = (self.spec.get("hostname") or pod["metadata"]["name"])[:63]
        self.terminating = False
        self.folder = node.scratch / "pods" / self.uid
        inits: list[Json] = fields.items(self.spec, "initContainers")
        self.inits = [
            NodeContainer(self, c, "sidecar" if c.get("restartPolicy") == "Always" else "init") for c in inits
        ]
        self.mains = [NodeContainer(self, c, "main") for c in self.spec["containers"]]
        self._data = node.config.data_dir / "pods" / self.uid
        self._gpus: dict[str, list[int]] = {}
        self._claimed: dict[str, list[int]] = {}
        """By container: GPUs that are devices. The scheduler keeps their accounts."""
        self._sandbox = False
        self._start_time = fields.mapping(pod, "status").get("startTime") or status.timestamp()
        self._conditions: list[Json] = fields.mapping(pod, "status").get("conditions") or []
        self._tasks: set[asyncio.Task[None]] = set()
        self._dirty = asyncio.Event()
        self._deletion = asyncio.Event()
        self._finished = asyncio.Event()
        self._force = False
        self._budget: GraceBudget | None = None
        self._stops: list[asyncio.Task[None]] = []
        self._reported: Json | None = None
        facts = PodFacts(pod, "", node.node.name, node.config.host_address, node.node.capacity.resources())
        self._verdict: PodFailure | None = None
        self.volumes = PodVolumes(
            facts, node, self.folder / "volumes", self._data, lambda reason, text: self.event(reason, text, "Warning")
        )

    # --- what containers ask of their pod ---------------------------------------------------------------------------

    @property
    def metadata(self) -> Json:
        return self.pod["metadata"]

    @property
    def grace(self) -> int:
        value = self.spec.get("terminationGracePeriodSeconds")
        return DEFAULT_GRACE if value is None else int(value)

    @property
    def containers(self) -> list[NodeContainer]:
        return self.inits + self.mains

    @property
    def log_folder(self) -> Path:
        name = f"{self.metadata['namespace']}_{self.metadata['name']}_{self.uid}"
        return self.node.log_dir / name

    @property
    def ending(self) -> bool:
        """Nothing may be started any more. Comes a moment before `terminating`."""
        return self.terminating or self._deletion.is_set()

    def container_spec(self, name: str) -> Json:
        return next(container.spec for container in self.containers if container.name == name)

    def gpus_of(self, name: str) -> list[int]:
        return self._gpus.get(name, []) or self._claimed.get(name, [])

    def changed(self) -> None:
        """The status has to be reported again."""
        self._dirty.set()

    def event(self, reason: str, message: str, kind: str = "Normal", container: str = "") -> None:
        self.node.events.report(self.pod, reason, message, kind, container)

    def keep(self, task: asyncio.Task[None]) -> None:
        """A task that lives until it ends or the pod does."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def pause(self, seconds: float) -> None:
        """Sleeps; a deletion ends it."""
        await asyncio.sleep(0)  # always gives way, also when the pod is deleted already
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._deletion.wait()

    def files(self) -> list[Mount]:
        """What a kubelet puts into every container."""
        folder = self.folder / "etc"
        return [
            Mount(source=str(folder / name), target=f"/etc/{name}", read_only=False)
            for name in ("hosts", "hostname", "resolv.conf")
        ]

    # --- what the node tells ----------------------------------------------------------------------------------------

    def update(self, pod: Json) -> None:
        before = self.metadata
        self.pod = pod
        if any(before.get(key) != pod["metadata"].get(key) for key in ("labels", "annotations")):
            self.volumes.refresh()
        if self._reported is not None and status.readiness(pod["status"]) != status.readiness(self._reported):
            # The control plane takes pods of a node that it took for lost for unready, and leaves it to the node to say
            # otherwise; a kubelet writes its own word again.
            self._reported = None
            self.changed()
        if "deletionTimestamp" in pod["metadata"]:
            seconds = int(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            if self._budget is not None and self.terminating:
                self._budget.shorten(seconds)
            self._deletion.set()

    def removed(self) -> None:
        """The object is gone, by a forced deletion: the processes follow quickly."""
        if not self._deletion.is_set():
            self._force = True
        self._deletion.set()

    def kubelet_restarted(self) -> None:
        """Whatever the kubelet had under way is lost, and begun again: an end with all of its grace period."""
        for task in self._stops:  # before the hooks: the end of those would let SIGTERM follow
            task.cancel()
        for container in self.containers:
            container.kubelet_restarted()

    # --- the life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when the object is gone. Cancelling it leaves the processes to PID 1 of the node."""
        reporter = asyncio.create_task(self._report_changes())
        try:
            if "deletionTimestamp" in self.metadata:
                self._deletion.set()
            lost = self._over_by_restart()
            if not self._deletion.is_set() and not lost:
                self._spawn(self._live())
            await self._wait_for_end()
            for container in self.containers:
                await container.no_restart_due.wait()
            while not await self._terminate():
                pass
            reporter.cancel()
            await self._end_tasks()
            if self._verdict is None or self._verdict.reason == "Evicted":  # else no container was ever made
                for container in self.containers:
                    container.settle()
            await asyncio.sleep(SETTLE_SECONDS)
            self._give_gpus_back()  # the scheduler gives them away at the terminal phase
            # the terminal phase first: it takes the pod out of the EndpointSlices; then the object
            await self._report()
            await self._clean()
            await self._deletion.wait()
            await self._delete()
        finally:
            reporter.cancel()
            await self._end_tasks()

    async def _wait_for_end(self) -> None:
        """Until the pod is deleted or has finished by itself."""
        tasks = [asyncio.create_task(self._deletion.wait()), asyncio.create_task(self._finished.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    def _over_by_restart(self) -> bool:
        """Takes over what an earlier process of this node reported: everything it ran is dead.

        True when that ends the pod (restartPolicy Never).
        """
        reported: Json = fields.mapping(self.pod, "status")
        reports = fields.items(reported, "initContainerStatuses") + fields.items(reported, "containerStatuses")
        before = {entry["name"]: entry for entry in reports}
        lost = False
        for container in self.containers:
            entry = fields.mapping(before, container.name)
            if not entry.get("containerID"):
                continue
            end: Json | None = entry["state"].get("terminated")
            if end is None and "running" in entry["state"]:
                end = status.terminated(
                    137, entry["state"]["running"].get("startedAt"), entry["containerID"], "The node was restarted",
                    "ContainerStatusUnknown",
                )  # fmt: skip
            container.record.restarts = int(entry.get("restartCount") or 0) + 1
            container.record.last = {"terminated": end} if end else fields.mapping(entry, "lastState")
            if self.spec.get("restartPolicy") == "Never" and end is not None:
                lost = lost or container.kind == "main"
                if container.kind == "main":
                    container.record.state = {"terminated": end}
        if lost:
            self._finished.set()
        return lost

    async def _live(self) -> None:
        if not await self._set_up():
            return
        self._spawn(self.volumes.keep_fresh())
        self._spawn(self._evict_when_full())
        for container in self.inits:
            if self.terminating or self._deletion.is_set():
                return
            task = self._spawn(container.run())
            if container.kind == "sidecar":
                await container.up.wait()
                continue
            await asyncio.wait([task])
            end = container.record.terminated
            if end is None or end["exitCode"] != 0:
                self._finished.set()  # restartPolicy Never: the pod has failed
                return
        if self.terminating or self._deletion.is_set():
            return
        tasks = [self._spawn(container.run()) for container in self.mains]
        await asyncio.wait(tasks)
        self._finished.set()

    async def _set_up(self) -> bool:
        """Volumes, network, GPUs. False when the pod was deleted meanwhile, or rejected."""
        self.changed()
        attempt = 0
        while not self._deletion.is_set():
            try:
                if not self._gpus:
                    self._take_gpus()
                await self._claimed_gpus()
                await self._attach()
                await self.volumes.set_up()
                return True
            except devices.NotAllocated as error:
                self.event("FailedPrepareDynamicResources", f"Failed to prepare dynamic resources: {error}", "Warning")
            except VolumeError as error:
                self.event("FailedMount", str(error), "Warning")
            except (NetworkError, StartError, TimeoutError, OSError) as error:
                self.event("FailedCreatePodSandBox", f"Failed to create pod sandbox: {error}", "Warning")
            except ValueError as error:
                if attempt + 1 >= ADMISSION_ATTEMPTS:
                    text = f"Pod was rejected: Allocate failed due to {error}, which is unexpected"
                    self._give_up(PodFailure("UnexpectedAdmissionError", text))
                    return False
            await self.pause(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
            attempt += 1
        return False

    def _take_gpus(self) -> None:
        wanted = {container.name: gpu_count(container.spec) for container in self.containers}
        taken = self.node.gpus.take(sum(wanted.values()))
        for name, count in wanted.items():
            self._gpus[name], taken = taken[:count], taken[count:]

    async def _claimed_gpus(self) -> None:
        """Devices that the scheduler has allocated to claims of the pod. Raises NotAllocated."""
        if self.node.node.dra is None or not self.spec.get("resourceClaims"):
            return
        claims = await devices.allocated(self.node.api, self.node.node, self.pod)
        for container in self.containers:
            wanted = fields.items(fields.mapping(container.spec, "resources"), "claims")
            self._claimed[container.name] = [index for each in wanted for index in claims.get(each["name"], [])]

    def _give_gpus_back(self) -> None:
        self.node.gpus.give_back([index for indexes in self._gpus.values() for index in indexes])
        self._gpus.clear()

    async def _evict_when_full(self) -> None:
        self._give_up(PodFailure("Evicted", await self.volumes.overflow()))

    def _give_up(self, verdict: PodFailure) -> None:
        self._verdict = verdict
        self.event(verdict.reason, verdict.message, "Warning")
        self._finished.set()

    async def _attach(self) -> None:
        if self._sandbox:
            return
        address = self.address or self.node.network.allocate(fields.mapping(self.pod, "status").get("podIP"))
        self.address = address
        await self.node.network.attach(self.uid, self.hostname, address)
        self.volumes.set_address(address)
        self._sandbox = True
        self._write_files()
        self.changed()

    def _write_files(self) -> None:
        folder = self.folder / "etc"
        folder.mkdir(parents=True, exist_ok=True)
        namespace, domain = self.metadata["namespace"], self.node.config.cluster_domain
        names = [self.hostname]
        if self.spec.get("subdomain"):
            names.insert(0, f"{self.hostname}.{self.spec['subdomain']}.{namespace}.svc.{domain}")
        hosts = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost", f"{self.address}\t{' '.join(names)}"]
        aliases: list[Json] = fields.items(self.spec, "hostAliases")
        hosts += [f"{alias['ip']}\t{' '.join(alias['hostnames'])}" for alias in aliases]
        search = f"{namespace}.svc.{domain} svc.{domain} {domain}"
        resolver = f"search {search}\nnameserver {self.node.config.dns_address}\noptions ndots:5\n"
        if self.spec.get("dnsPolicy") == "Default":
            with contextlib.suppress(OSError):
                resolver = Path("/etc/resolv.conf").read_text()
        contents = {"hosts": "\n".join(hosts) + "\n", "hostname": f"{self.hostname}\n", "resolv.conf": resolver}
        for name, text in contents.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o644)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _terminate(self) -> bool:
        """Ends all containers; False when a restart of the kubelet came between."""
        self.terminating = True
        deleted = self._deletion.is_set()
        seconds = int(self.metadata.get("deletionGracePeriodSeconds") or 0) if deleted and not self._force else 0
        if not deleted:
            # the pod has finished, and only its sidecars are left; or it is evicted
            seconds = self.grace if self._verdict is None else EVICTION_GRACE
        forced = seconds == 0
        # a kubelet gives even a forced deletion one second
        self._budget = budget = GraceBudget(max(seconds, 1), FORCED_STOP_SECONDS if forced else MINIMUM_STOP_SECONDS)
        sidecars = [container for container in self.inits if container.kind == "sidecar"]
        others = [container for container in self.containers if container.kind != "sidecar"]
        earlier = self._stops = [asyncio.create_task(container.stop(budget)) for container in others]
        for container in reversed(sidecars):
            waits = tuple(earlier)

            async def turn(waits: tuple[asyncio.Task[None], ...] = waits) -> None:
                # the whole stop of those, hooks included, and not just the end of their processes
                if waits:
                    await asyncio.wait(waits)

            earlier.append(asyncio.create_task(container.stop(budget, turn)))
        if earlier:
            await asyncio.wait(earlier)
        self._stops = []
        if any(task.cancelled() for task in earlier):
            await asyncio.sleep(KUBELET_RESTART_SECONDS)
            return False
        for task in earlier:
            task.result()
        for container in self.containers:
            if container.process is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await container.process.wait()
        return True

    async def _clean(self) -> None:
        if self.address:
            with contextlib.suppress(NetworkError, TimeoutError):
                await self.node.network.detach(self.uid, self.address)
        await self.volumes.tear_down()
        await asyncio.to_thread(_remove, self.folder)

    async def _delete(self) -> None:
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        while True:
            try:
                await self.node.api.request("DELETE", self._path, body)
                break
            except KubeAPIError as error:
                if error.status in (404, 409):
                    break
                _log.warning("delete_fails", pod=self._path, error=str(error))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                _log.info("delete_waits", pod=self._path, error=str(error))
            await asyncio.sleep(STATUS_RETRY_SECONDS)
        await asyncio.to_thread(_remove, self.log_folder)

    # --- reporting --------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.metadata['namespace']}/pods/{self.metadata['name']}"

    async def _report_changes(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._report()

    async def _report(self) -> None:
        """Writes the status until it is written or the pod is gone."""
        while True:
            body = self._status()
            if body == self._reported:
                return
            try:
                patch: Json = {"metadata": {"uid": self.uid}, "status": body}
                content_type = "application/strategic-merge-patch+json"
                await self.node.api.request("PATCH", f"{self._path}/status", patch, content_type=content_type)
                self._reported = body
                return
            except KubeAPIError as error:
                if error.status in (404, 409) or is_of_another_pod(error):
                    return
                _log.warning("status_refused", pod=self._path, error=str(error))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                _log.info("status_waits", pod=self._path, error=str(error))
            await asyncio.sleep(STATUS_RETRY_SECONDS)

    def _status(self) -> Json:
        records = [container.record for container in self.containers]
        policy = self.spec.get("restartPolicy", "Always")
        over = self.terminating and all(c.process is None or c.process.exit_code is not None for c in self.containers)
        phase = status.phase(records, policy, over and self._deletion.is_set())
        verdict = self._verdict
        if verdict is not None and over:
            phase = "Failed"
        self._conditions = status.conditions(records, phase, self._sandbox, self._conditions)
        body: Json = {
            "phase": phase,
            "hostIP": self.node.config.host_address,
            "hostIPs": [{"ip": self.node.config.host_address}],
            "startTime": self._start_time,
            "conditions": self._conditions,
            "containerStatuses": [container.record.status() for container in self.mains],
        }
        if verdict is not None:
            body |= {"reason": verdict.reason, "message": verdict.message}
        if verdict is not None and verdict.reason == "Evicted":
            body["conditions"] = [*self._conditions, status.disruption(verdict.message)]
        if self.inits:
            body["initContainerStatuses"] = [container.record.status() for container in self.inits]
        if self.address:
            # replace: a strategic merge would add to the address of the pod's life before a restart of the node
            body |= {"podIP": self.address, "podIPs": [{"$patch": "replace"}, {"ip": self.address}]}
        return body

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.keep(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # a defect of the node: the pod must not hang silently
            _log.error("pod_task_failed", pod=self._path, exc_info=task.exception())
            self.event("NodeDefect", f"the lab's node failed: {task.exception()!r}", "Warning")

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def is_of_another_pod(error: KubeAPIError) -> bool:
    """Whether a status was refused because the pod is gone and another one has its name already: here with another uid,
    or on another node. A pod that went on telling of itself would never end."""
    if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return "metadata.uid" in str(error)
    return error.status == HTTPStatus.FORBIDDEN and "spec.nodeName set to itself" in str(error)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
