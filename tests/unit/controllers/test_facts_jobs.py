"""One Job per source, however many Models name it and whoever is looked at first."""

import asyncio
from typing import Any, cast

import pytest

from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.artifacts import Artifacts
from shoal.controllers.triggers import subscribe
from shoal.controllers.world import World
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, KubeError, ObjectInvalid
from shoal.kube.events import Recorder
from tests.support.operators import CONFIG, model


class JobServer:
    """Makes Jobs slowly; who applies another one of that name is refused, since a Job's template cannot be changed."""

    def __init__(self) -> None:
        self.jobs: dict[str, JsonObject] = {}
        self.refusals = 0
        """So many further calls fail before anything is made."""

    async def apply(self, _resource: Any, body: JsonObject, **_: Any) -> JsonObject:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise APIServerUnavailable("away")
        name = body["metadata"]["name"]
        known = self.jobs.setdefault(name, body)
        if known["spec"]["template"] != body["spec"]["template"]:
            raise ObjectInvalid("field is immutable")
        await asyncio.sleep(0)
        return known | {"metadata": known["metadata"] | {"uid": name, "resourceVersion": "1"}}


def place(*names: str) -> tuple[JobServer, World, Artifacts, list[Model]]:
    server = JobServer()
    client = cast("KubeClient", server)
    world = World(client, CONFIG, "shoal-system", Recorder(client, "test"))
    models: list[Model] = []
    for name in names:
        raw = model(name, "ns")
        raw["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1", "generation": 1}
        world.models.upsert(raw)
        models.append(Model.model_validate(raw))
    artifacts = Artifacts(world, lambda _key: None)
    subscribe(world.pods, artifacts.on_pod)
    subscribe(world.jobs, artifacts.on_job)
    subscribe(world.models, artifacts.on_model)
    return server, world, artifacts, models


async def test_models_that_name_one_source_and_are_looked_at_at_once_make_one_job() -> None:
    server, world, artifacts, models = place("one", "two", "three")
    readings = await asyncio.gather(*(artifacts.read(m) for m in models))
    assert len(server.jobs) == len(world.jobs) == 1
    assert all("reads the source's metadata" in r.waiting for r in readings)


async def test_when_the_first_one_fails_the_next_one_makes_it() -> None:
    server, world, artifacts, models = place("one", "two")
    server.refusals = 1
    first, second = await asyncio.gather(*(artifacts.read(m) for m in models), return_exceptions=True)
    assert isinstance(first, KubeError)
    assert not isinstance(second, BaseException)
    assert len(world.jobs) == 1


async def test_without_the_lock_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _, artifacts, models = place("one", "two")

    class Open(dict[str, asyncio.Lock]):
        def setdefault(self, key: str, default: asyncio.Lock | None = None) -> asyncio.Lock:  # pyright: ignore[reportIncompatibleMethodOverride]
            return asyncio.Lock()

    monkeypatch.setattr(artifacts, "_making", Open())
    results = await asyncio.gather(*(artifacts.read(m) for m in models), return_exceptions=True)
    assert any(isinstance(r, ObjectInvalid) for r in results)
    assert len(server.jobs) == 1
