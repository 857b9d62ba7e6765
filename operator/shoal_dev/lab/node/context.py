"""What all pods of one node share."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from shoal_dev.lab.kubeapi import Api
from shoal_dev.lab.node.config import GPU_RESOURCE, NodeConfig, NodeSpec
from shoal_dev.lab.node.disk import NodeDisk
from shoal_dev.lab.node.events import NodeEvents
from shoal_dev.lab.node.network import Network
from shoal_dev.lab.node.objects import NodeObjects
from shoal_dev.lab.node.runtime import Runtime


class Gpus:
    """The node's GPU indexes. The scheduler counts; this says which ones."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._healthy = count
        self._free = list(range(count))

    def set_healthy(self, healthy: int) -> None:
        """The ones with the highest indexes fail first. Those that a pod has, it keeps."""
        self._healthy = healthy

    def take(self, count: int) -> list[int]:
        """The lowest free ones. Raises ValueError when there are too few (a pod bound without the scheduler, or a GPU
        that failed meanwhile).

        A node that has none has no device plugin either: a capacity that somebody patched in is only a number, and a
        pod that asks for it starts without devices, as on a kubelet.
        """
        if self._count == 0:
            return []
        usable = [index for index in self._free if index < self._healthy]
        if count > len(usable):
            raise ValueError(
                f"requested number of devices unavailable for {GPU_RESOURCE}. "
                f"Requested: {count}, Available: {len(usable)}"
            )
        taken = usable[:count]
        self._free = [index for index in self._free if index not in taken]
        return taken

    def give_back(self, indexes: list[int]) -> None:
        self._free = sorted(self._free + indexes)


@dataclass(frozen=True, slots=True)
class NodeContext:
    config: NodeConfig
    node: NodeSpec
    api: Api
    runtime: Runtime
    objects: NodeObjects
    events: NodeEvents
    network: Network
    gpus: Gpus
    disk: NodeDisk
    labels: Callable[[], Awaitable[Mapping[str, str]]]
    """The Node object's, now."""
    http: aiohttp.ClientSession
    """For probes and hooks: no time-outs of its own, no kept connections."""
    scratch: Path
    """The node's tmpfs."""
    host_mounts: list[str]
    passable: Mapping[str, list[str]]
    """Image repository in the table -> folders that every user may walk through."""

    @property
    def log_dir(self) -> Path:
        return self.config.log_dir / self.node.name
