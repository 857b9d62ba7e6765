"""Events for people (`kubectl describe`): one per change of a condition, counted instead of repeated."""

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import structlog

from shoal.api import names
from shoal.api.meta import JsonObject, ObjectMeta
from shoal.core.layers.faults import layer_of
from shoal.kube.client import KubeClient
from shoal.kube.errors import AlreadyExists, KubeError
from shoal.kube.queue import TokenBucket
from shoal.kube.resources import EVENTS, Resource

log = structlog.get_logger()

LONGEST_NOTE: Final = 1000
_QUEUE: Final = 1000
"""Events that wait; beyond that the oldest are dropped: events are advice, conditions are the record."""


@dataclass(frozen=True, slots=True)
class Event:
    resource: Resource
    metadata: ObjectMeta
    type: Literal["Normal", "Warning"]
    reason: str
    note: str
    action: str


class Recorder:
    """`emit` never waits; `run` posts in the background, slowly."""

    def __init__(self, client: KubeClient, instance: str):
        self._client, self._instance = client, instance
        self._waiting: deque[Event] = deque(maxlen=_QUEUE)
        self._wake = asyncio.Event()
        self._bucket = TokenBucket(rate=50, burst=200)

    def emit(self, event: Event) -> None:
        self._waiting.append(event)
        self._wake.set()

    async def run(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            event = self._waiting.popleft()
            await asyncio.sleep(self._bucket.take())
            try:
                await self._post(event)
            except KubeError as error:
                log.info("event not posted", reason=event.reason, object=event.metadata.name, error=error.message)
            except Exception:
                log.exception("event not posted", reason=event.reason, object=event.metadata.name)

    async def _post(self, event: Event) -> None:
        metadata = event.metadata
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        # The name is made of what the event says: the same event, also by another operator, is the same object.
        said = hashlib.sha256(f"{metadata.uid}/{event.type}/{event.reason}/{event.note}".encode()).hexdigest()[:16]
        name, namespace = f"{metadata.name[:200]}.{said}", metadata.namespace or "default"
        body: JsonObject = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": namespace, **_annotations(event.reason)},
            "eventTime": now,
            "type": event.type,
            "reason": event.reason,
            "action": event.action,
            "note": note(event),
            "regarding": {
                "apiVersion": event.resource.api_version,
                "kind": event.resource.kind,
                "name": metadata.name,
                "namespace": metadata.namespace or "",
                "uid": metadata.uid,
            },
            "reportingController": "shoal.dev/operator",
            "reportingInstance": self._instance,
        }
        try:
            await self._client.create(EVENTS, body)
        except AlreadyExists:
            known = await self._client.get(EVENTS, name, namespace)
            repeated: JsonObject = known.get("series") or {}
            count = int(repeated.get("count") or 1) + 1
            series = {"series": {"count": count, "lastObservedTime": now}}
            await self._client.merge_patch(EVENTS, name, namespace, series, manager="shoal-operator")


def note(event: Event) -> str:
    """The text of an event, for people. Behind a warning stands its layer."""
    layer = layer_of(event.reason) if event.type == "Warning" else None
    suffix = f" [{layer.label}]" if layer is not None else ""
    return event.note[: LONGEST_NOTE - len(suffix)] + suffix


def _annotations(reason: str) -> JsonObject:
    layer = layer_of(reason)
    return {"annotations": {names.ANNOTATION_LAYER: layer.value}} if layer is not None else {}
