"""Events say on which layer their reason is."""

import asyncio
from typing import Any, cast

import pytest

from shoal.api.meta import JsonObject, ObjectMeta
from shoal.kube.client import KubeClient
from shoal.kube.events import LONGEST_NOTE, Event, Recorder, note
from shoal.kube.resources import MODELS, Resource

LLAMA = ObjectMeta(name="llama", namespace="chat", uid="u1")


class Posted:
    """A client that keeps what is created."""

    def __init__(self) -> None:
        self.bodies: list[JsonObject] = []
        self.done = asyncio.Event()

    async def create(self, _resource: Resource, body: JsonObject) -> None:
        self.bodies.append(body)
        self.done.set()


async def posted(event: Event) -> dict[str, Any]:
    client = Posted()
    recorder = Recorder(cast("KubeClient", client), "test")
    running = asyncio.create_task(recorder.run())
    recorder.emit(event)
    async with asyncio.timeout(60):
        await client.done.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return client.bodies[0]


async def test_a_warning_has_the_layer_for_people_and_for_programs() -> None:
    body = await posted(Event(MODELS, LLAMA, "Warning", "EngineFailed", "it ended", "Reconcile"))
    assert body["note"] == "it ended [L4 engine]"
    assert body["metadata"]["annotations"] == {"shoal.dev/layer": "L4"}


async def test_what_went_well_has_it_for_programs_only() -> None:
    body = await posted(Event(MODELS, LLAMA, "Normal", "ReplicasReady", "1 of 1 replicas ready", "Reconcile"))
    assert body["note"] == "1 of 1 replicas ready"
    assert body["metadata"]["annotations"] == {"shoal.dev/layer": "L4"}


async def test_a_reason_without_a_layer_has_none() -> None:
    body = await posted(Event(MODELS, LLAMA, "Warning", "SomethingElse", "x", "Reconcile"))
    assert (body["note"], "annotations" in body["metadata"]) == ("x", False)


def test_a_long_text_leaves_room_for_the_layer() -> None:
    text = note(Event(MODELS, LLAMA, "Warning", "Gated", "x" * 5000, "Reconcile"))
    assert len(text) == LONGEST_NOTE
    assert text.endswith(" [L2.5 artifact]")
