"""Nodes that start nothing: pods turn Ready after a delay and go when deleted. For fleets of thousands of pods.

One process, one watch, few calls: one status write per pod, and one deletion.
"""

import asyncio
import signal
from typing import Any, Literal

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import Api, KubeAPIError, LabReflector
from shoal_dev.lab.node import fields, registration
from shoal_dev.lab.node.config import NodeConfig, StatusOnly
from shoal_dev.lab.node.status import timestamp

_log = structlog.get_logger()
Json = dict[str, Any]

PARALLEL_CALLS = 16
ATTEMPTS = 5
_OVER = ("Succeeded", "Failed")


async def run(config: NodeConfig, settings: StatusOnly) -> None:
    """Until SIGTERM."""
    api = Api(config.kubeconfig)
    api.server = config.api_server
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with api:
        fleet = StatusOnlyNodes(config, settings, api)
        spread = config.lease_seconds / registration.RENEWALS / len(config.nodes)
        tasks = [
            asyncio.create_task(registration.keep_registered(api, config, node, number * min(spread, 0.02)))
            for number, node in enumerate(config.nodes)
        ]
        tasks += [asyncio.create_task(fleet.run()), asyncio.create_task(_until(stop))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for task in done:
            task.result()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


class StatusOnlyNodes:
    def __init__(self, config: NodeConfig, settings: StatusOnly, api: Api) -> None:
        self._config = config
        self._api = api
        self._delay = settings.ready_delay_seconds
        self._termination_messages = settings.termination_messages
        self._names = {node.name for node in config.nodes}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """By uid and what is being done."""
        self._calls = asyncio.Semaphore(PARALLEL_CALLS)
        self._count = 0

    async def run(self) -> None:
        try:
            # one watch for all: these nodes share an identity that may see every pod
            await LabReflector(self._api, "/api/v1/pods?fieldSelector=spec.nodeName!%3D", self._on_change).run()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _on_change(self, kind: Literal["upsert", "delete"], pod: Json) -> None:
        if pod["spec"].get("nodeName") not in self._names:
            return
        metadata: Json = pod["metadata"]
        if kind == "delete":
            if (task := self._tasks.get((metadata["uid"], "ready"))) is not None:
                task.cancel()
        elif "deletionTimestamp" in metadata:
            self._once(metadata["uid"], "delete", pod)
        elif fields.mapping(pod, "status").get("phase") not in ("Running", *_OVER):
            self._once(metadata["uid"], "ready", pod)

    def _once(self, uid: str, what: str, pod: Json) -> None:
        key = (uid, what)
        if key not in self._tasks:
            work = self._become_ready(pod) if what == "ready" else self._delete(pod)
            task = self._tasks[key] = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _become_ready(self, pod: Json) -> None:
        await asyncio.sleep(self._delay)
        self._count += 1
        status = self._ended(pod) if self._ends(pod) else self._status(pod)
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        await self._call("PATCH", f"{_path(pod)}/status", body, "application/strategic-merge-patch+json")

    async def _delete(self, pod: Json) -> None:
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod["metadata"]["uid"]},
        }
        await self._call("DELETE", _path(pod), body, "application/json")

    async def _call(self, method: str, path: str, body: Json, content_type: str) -> None:
        for attempt in range(ATTEMPTS):
            try:
                async with self._calls:
                    await self._api.request(method, path, body, content_type=content_type)
                return
            except KubeAPIError as error:
                if error.status in (404, 409):
                    return
                _log.warning("status_only_refused", path=path, error=str(error))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                _log.info("status_only_waits", path=path, error=str(error))
            await asyncio.sleep(0.2 * 2**attempt)

    def _ends(self, pod: Json) -> bool:
        spec = pod["spec"]
        return spec.get("restartPolicy") == "Never" and any(
            c["name"] in self._termination_messages for c in spec["containers"]
        )

    def _ended(self, pod: Json) -> Json:
        status, now = self._status(pod), timestamp()
        for container in status["containerStatuses"]:
            over = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}
            said = self._termination_messages.get(container["name"])
            container |= {
                "ready": False,
                "started": False,
                "state": {"terminated": over | ({"message": said} if said else {})},
            }
        for condition in status["conditions"]:
            if condition["type"] in ("Ready", "ContainersReady"):
                condition |= {"status": "False", "reason": "PodCompleted"}
        return status | {"phase": "Succeeded"}

    def _status(self, pod: Json) -> Json:
        now = timestamp()
        # unique among 62,000; nothing answers there, and pods that run may have the same one
        address = f"{self._config.pod_prefix}.{self._count // 250 % 250}.{2 + self._count % 250}"

        def container(spec: Json, sidecar: bool = True) -> Json:
            state: Json = {"running": {"startedAt": now}}
            if not sidecar:
                state = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}
            return {
                "name": spec["name"],
                "image": spec["image"],
                "imageID": f"process://{spec['image']}",
                "containerID": f"status-only://{pod['metadata']['uid']}/{spec['name']}",
                "ready": True,
                "started": sidecar,
                "restartCount": 0,
                "state": state,
            }

        inits: list[Json] = fields.items(pod["spec"], "initContainers")
        return {
            "phase": "Running",
            "hostIP": self._config.host_address,
            "hostIPs": [{"ip": self._config.host_address}],
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now,
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
            ],
            "initContainerStatuses": [container(c, c.get("restartPolicy") == "Always") for c in inits],
            "containerStatuses": [container(c) for c in pod["spec"]["containers"]],
        }


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
