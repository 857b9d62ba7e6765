"""Events about pods, counted instead of repeated."""

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from shoal_dev.lab.kubeapi import Api, KubeAPIError
from shoal_dev.lab.node.status import timestamp

_log = structlog.get_logger()

FLUSH_SECONDS = 5.0
"""A repeated event's count is written so often at most."""
_REMEMBERED = 2000
_OVERFLOW = 500


@dataclass(slots=True)
class _Event:
    body: dict[str, Any]
    written: int = 0
    """The count that the API server has."""


class NodeEvents:
    """Reports are queued, and written by `run`. Lost when the API server is away: events are best effort."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self._events: dict[tuple[str, str, str, str], _Event] = {}
        self._new: asyncio.Queue[_Event] = asyncio.Queue(_OVERFLOW)

    def report(self, pod: dict[str, Any], reason: str, message: str, kind: str = "Normal", container: str = "") -> None:
        metadata = pod["metadata"]
        key = (metadata["uid"], container, reason, message)
        known = self._events.get(key)
        if known is not None:
            known.body["count"] += 1
            known.body["lastTimestamp"] = timestamp()
            return
        reference = {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion"),
        }
        if container:
            reference["fieldPath"] = f"spec.containers{{{container}}}"
        now = timestamp()
        event = _Event(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {
                    "name": f"{metadata['name'][:200]}.{secrets.token_hex(8)}",
                    "namespace": metadata["namespace"],
                },
                "involvedObject": reference,
                "reason": reason,
                "message": message[:1024],
                "type": kind,
                "count": 1,
                "source": {"component": "kubelet", "host": self._node},
                "reportingComponent": "kubelet",
                "reportingInstance": self._node,
                "firstTimestamp": now,
                "lastTimestamp": now,
            }
        )
        if len(self._events) >= _REMEMBERED:
            self._events.pop(next(iter(self._events)))
        self._events[key] = event
        with contextlib.suppress(asyncio.QueueFull):
            self._new.put_nowait(event)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_new())
            tasks.create_task(self._write_counts())

    async def _write_new(self) -> None:
        while True:
            event = await self._new.get()
            namespace = event.body["metadata"]["namespace"]
            count = event.body["count"]
            await self._try("POST", f"/api/v1/namespaces/{namespace}/events", event.body, "application/json")
            event.written = count

    async def _write_counts(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            for event in list(self._events.values()):
                count = event.body["count"]
                if event.written and count > event.written:
                    metadata = event.body["metadata"]
                    path = f"/api/v1/namespaces/{metadata['namespace']}/events/{metadata['name']}"
                    body = {"count": count, "lastTimestamp": event.body["lastTimestamp"]}
                    await self._try("PATCH", path, body, "application/merge-patch+json")
                    event.written = count

    async def _try(self, method: str, path: str, body: dict[str, Any], content_type: str) -> None:
        try:
            await self._api.request(method, path, body, content_type=content_type)
        except (KubeAPIError, aiohttp.ClientError, TimeoutError, OSError) as error:
            _log.debug("event_lost", error=str(error))
