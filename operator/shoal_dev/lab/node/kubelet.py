"""The node itself: its Node object, its Lease, and the pods bound to it."""

import asyncio
import shutil
import signal
import socket
from typing import Any, Literal

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import Api, LabReflector
from shoal_dev.lab.node import disk as disks
from shoal_dev.lab.node import fields, images, linux, registration
from shoal_dev.lab.node.config import NodeConfig
from shoal_dev.lab.node.context import Gpus, NodeContext
from shoal_dev.lab.node.events import NodeEvents
from shoal_dev.lab.node.network import Network
from shoal_dev.lab.node.objects import NodeObjects
from shoal_dev.lab.node.ownnode import OwnNode
from shoal_dev.lab.node.pod import NodePod
from shoal_dev.lab.node.runtime import Runtime
from shoal_dev.lab.node.server import KubeletServer

_log = structlog.get_logger()
Json = dict[str, Any]

_OVER = ("Succeeded", "Failed")


async def run(config: NodeConfig, spawner: socket.socket) -> None:
    """Runs the node until SIGTERM."""
    node = config.nodes[0]
    scratch = config.run_dir / "scratch"
    _clean(config)
    scratch.mkdir(parents=True)
    # in this node's own mount namespace: it goes with the node, whatever ends it
    linux.mount("tmpfs", str(scratch), "tmpfs", linux.MS_NODEV, "mode=0755")
    api = Api(node.kubeconfig or config.kubeconfig)
    api.server = config.api_server
    runtime = Runtime(spawner)
    gpus = Gpus(node.capacity.gpus)
    own = OwnNode(api, config, node, gpus)
    disk = disks.root_of(config.data_dir)
    disk.mkdir(parents=True, exist_ok=True)
    async with (
        api,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        ) as http,
    ):
        context = NodeContext(
            config=config,
            node=node,
            api=api,
            runtime=runtime,
            objects=NodeObjects(api),
            events=NodeEvents(api, node.name),
            network=Network(config, runtime),
            gpus=gpus,
            disk=disks.NodeDisk(disk),
            labels=own.labels,
            http=http,
            scratch=scratch,
            host_mounts=images.host_mounts([config.run_dir, config.data_dir]),
            passable={name: images.passable_folders(image) for name, image in config.images.items()},
        )
        kubelet = Kubelet(context)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, kubelet.restarted)
        tasks = [
            asyncio.create_task(work)
            for work in (
                KubeletServer(config, {node.name: kubelet.pods}).run(),
                registration.keep_registered(api, config, node),
                own.run(),
                context.events.run(),
                kubelet.run(),
                _until(stop),
            )
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        _clean(config, keep_scratch=True)
        for task in done:
            task.result()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def _clean(config: NodeConfig, keep_scratch: bool = False) -> None:
    """What a killed process of this node left on disk. Processes, mounts and networks went with it."""
    for folder in (config.data_dir / "pods", config.run_dir / "containers"):
        shutil.rmtree(folder, ignore_errors=True)
    if not keep_scratch:
        shutil.rmtree(config.run_dir / "scratch", ignore_errors=True)


class Kubelet:
    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self.pods: dict[str, NodePod] = {}
        """By uid."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._context.node.name}"
        try:
            await LabReflector(self._context.api, path, self._on_change).run()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def restarted(self) -> None:
        """What containers notice of a kubelet that ends and starts again beside them."""
        _log.info("kubelet_restarted", pods=len(self.pods))
        for pod in self.pods.values():
            pod.kubelet_restarted()

    def _on_change(self, kind: Literal["upsert", "delete"], item: Json) -> None:
        metadata: Json = item["metadata"]
        uid: str = metadata["uid"]
        for other in list(self.pods.values()):
            # deleted and made again under the same name while no watch was open
            same_name = all(other.metadata[key] == metadata[key] for key in ("namespace", "name"))
            if same_name and other.uid != uid:
                other.removed()
        pod = self.pods.get(uid)
        if kind == "delete":
            if pod is not None:
                pod.removed()
            return
        if pod is not None:
            pod.update(item)
            return
        over = fields.mapping(item, "status").get("phase") in _OVER
        if over and "deletionTimestamp" not in metadata:
            return
        pod = self.pods[uid] = NodePod(self._context, item)
        self._tasks[uid] = asyncio.create_task(self._run_pod(pod))

    async def _run_pod(self, pod: NodePod) -> None:
        try:
            await pod.run()
        except Exception:
            _log.exception("pod_failed", pod=pod.metadata["name"], namespace=pod.metadata["namespace"])
        finally:
            self.pods.pop(pod.uid, None)
            self._tasks.pop(pod.uid, None)
