"""What the node knows of its own Node object: labels that others set, how many of its GPUs are healthy, whether the
control plane takes it for ready.

A device plugin tells the kubelet of a GPU that has failed (an XID error, a lost link), and the kubelet lowers
`status.allocatable`. Here an annotation of the Node takes the place of the plugin. Another one takes the place of an
upgrade of a DRA driver: while it says so, there is no driver that publishes the node's devices.

A control plane that was away, or heard no Lease in time, takes the node for lost until the node itself says otherwise.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Literal

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import Api, KubeAPIError, LabReflector
from shoal_dev.lab.node import devices, fields
from shoal_dev.lab.node.config import GPU_RESOURCE, NodeConfig, NodeSpec
from shoal_dev.lab.node.context import Gpus
from shoal_dev.lab.node.registration import node_status

_log = structlog.get_logger()
Json = dict[str, Any]

HEALTHY_GPUS: Final = "lab.shoal.dev/healthy-gpus"
"""Annotation of a Node: so many of its GPUs work. Absent or no number: all."""
DRA_DRIVER: Final = "lab.shoal.dev/dra-driver"
"""Annotation of a Node. With the value `away`, the driver of its devices is not there."""
AWAY: Final = "away"
_STRATEGIC: Final = "application/strategic-merge-patch+json"
_RETRY_S: Final = 1.0
_SYNC_S: Final = 10.0


def healthy_gpus(node: Json, capacity: int) -> int:
    """From the annotation, within what the node has."""
    text = str(fields.mapping(node["metadata"], "annotations").get(HEALTHY_GPUS, capacity))
    return min(int(text), capacity) if text.isdecimal() else capacity


def driver_away(node: Json) -> bool:
    """From the annotation."""
    return fields.mapping(node["metadata"], "annotations").get(DRA_DRIVER) == AWAY


def taken_for_lost(node: Json) -> bool:
    """Whether the control plane has set the node's Ready condition to something else than this node reports."""
    conditions = fields.items(fields.mapping(node, "status"), "conditions")
    return any(c["type"] == "Ready" and c["status"] != "True" for c in conditions)


class OwnNode:
    """`run` follows the Node object; the rest answers from it."""

    def __init__(self, api: Api, config: NodeConfig, spec: NodeSpec, gpus: Gpus) -> None:
        self._api = api
        self._config = config
        self._spec = spec
        self._gpus = gpus
        self._labels: Mapping[str, str] = spec.labels
        self._seen: Json | None = None
        self._changed = asyncio.Event()
        self._published = spec.dra.count if spec.dra is not None else 0
        """Healthy devices in the slice; -1: there is no slice."""
        self._drivers = 1
        """Each driver publishes a new generation of the node's pool."""
        path = f"/api/v1/nodes?fieldSelector=metadata.name%3D{spec.name}"
        self._reflector = LabReflector(api, path, self._on_change)

    async def labels(self) -> Mapping[str, str]:
        """As the API server has them; as configured while that is away from the start."""
        try:
            async with asyncio.timeout(_SYNC_S):
                await self._reflector.synced.wait()
        except TimeoutError:
            _log.info("node_labels_unknown", node=self._spec.name)
        return self._labels

    def _on_change(self, kind: Literal["upsert", "delete"], node: Json) -> None:
        if kind == "delete":
            return
        self._seen, self._labels = node, fields.mapping(node["metadata"], "labels")
        self._gpus.set_healthy(healthy_gpus(node, self._spec.capacity.gpus))
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reflector.run())
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._report()
                except (KubeAPIError, aiohttp.ClientError, TimeoutError, OSError) as error:
                    _log.info("node_status_waits", node=self._spec.name, error=str(error) or type(error).__name__)
                    self._changed.set()
                    await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        node, capacity = self._seen, self._spec.capacity.gpus
        if node is not None and taken_for_lost(node):
            body = {"status": {"conditions": node_status(self._config, self._spec)["conditions"]}}
            await self._api.request("PATCH", f"/api/v1/nodes/{self._spec.name}/status", body, content_type=_STRATEGIC)
            _log.info("node_ready_again", node=self._spec.name)
        if node is not None and self._spec.dra is not None:
            healthy_now = -1 if driver_away(node) else healthy_gpus(node, self._spec.dra.count)
            if healthy_now != self._published:
                if healthy_now < 0:
                    await devices.withdraw(self._api, self._spec)
                    self._drivers += 1
                else:
                    uid = node["metadata"]["uid"]
                    await devices.publish(self._api, self._spec, uid, healthy_now, self._drivers)
                self._published = healthy_now
                _log.info("devices_published", node=self._spec.name, healthy=healthy_now)
        if node is None or not capacity:
            return
        reported: Json = fields.mapping(fields.mapping(node, "status"), "allocatable")
        healthy = str(healthy_gpus(node, capacity))
        if GPU_RESOURCE in reported and reported[GPU_RESOURCE] != healthy:
            body = {"status": {"allocatable": {GPU_RESOURCE: healthy}}}
            await self._api.request("PATCH", f"/api/v1/nodes/{self._spec.name}/status", body, content_type=_STRATEGIC)
            _log.info("gpus_healthy", node=self._spec.name, healthy=healthy)
