"""Reads sources: one small Job per source of a namespace, whose result stays in the status of its Models."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

import structlog

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Model
from shoal.controllers.world import World
from shoal.core import artifacts, facts
from shoal.core.artifacts import SourceReading
from shoal.kube.projections import Custom
from shoal.kube.resources import JOBS
from shoal.manifests.facts import facts_job

log = structlog.get_logger()

KEEP_SECONDS: Final = 60
"""How long the first Job stays after its end; each further one for the same source twice as long: the back-off."""
LONGEST_KEEP_SECONDS: Final = 3600
_REMEMBERED: Final = 20_000


class Artifacts:
    """`changed` is called with the key of each Model whose source may have new facts."""

    def __init__(self, world: World, changed: Callable[[str], None]) -> None:
        self._world, self._changed = world, changed
        self._tries: OrderedDict[str, int] = OrderedDict()
        """Key of a Job -> how often it was made."""
        self._reported: OrderedDict[str, ArtifactFacts] = OrderedDict()
        """Key of a Job -> what it said: it may be gone before its Model's turn comes."""
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Key of a Job -> held while it is made: Models that name the same source are looked at at the same time."""

    async def read(self, model: Model) -> SourceReading:
        """What is known of the source; makes the Job when nothing reads it. Raises KubeError."""
        key = self._key(model)
        reading = self._known(model, key)
        if not reading.needs_job:
            return reading
        async with self._making.setdefault(key, asyncio.Lock()):
            # Another Model of the same source may have made it meanwhile: theirs differ, and a Job cannot be changed.
            reading = self._known(model, key)
            if reading.needs_job:
                await self._make(model, key)
        return reading

    def _known(self, model: Model, key: str) -> SourceReading:
        world = self._world
        return artifacts.read(
            model,
            # Looked at only where this Model's own status says nothing: there may be many.
            same_source=(m.object for m in world.models.by("source", key) if m.object is not None),
            job=world.jobs.get(key),
            pods=world.pods.by("job", key),
            now=world.now(),
            reported=self._reported.get(key),
        )

    async def _make(self, model: Model, key: str) -> None:
        tries = self._tries.get(key, 0)
        self._tries[key] = tries + 1
        self._tries.move_to_end(key)
        while len(self._tries) > _REMEMBERED:
            self._tries.popitem(last=False)
        keep = min(LONGEST_KEEP_SECONDS, KEEP_SECONDS * 2**tries)
        table = self._world.jobs
        since = table.mark()
        body = facts_job(model, self._world.config, keep_seconds=keep)
        log.info("reading a source's metadata", model=model.key, job=body["metadata"]["name"], attempt=tries + 1)
        table.upsert(await self._world.client.apply(JOBS, body, manager=names.MANAGER_MODEL), since=since)

    @staticmethod
    def _key(model: Model) -> str:
        return f"{model.metadata.namespace}/{artifacts.source_key(model)}"

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        pod = after or before
        if pod is None or not pod.job:
            return
        key = f"{pod.namespace}/{pod.job}"
        found = artifacts.facts_of(pod)
        if found is not None and self._without_facts(key):
            self._reported[key] = found
            while len(self._reported) > _REMEMBERED:
                self._reported.popitem(last=False)
        self._wake(key)

    def on_job(self, key: str, before: facts.MetadataJob | None, after: facts.MetadataJob | None) -> None:
        self._wake(key)

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        """Facts that one Model has got are those of all that name the same source."""
        now = after.object if after else None
        was = before.object if before else None
        if was is not None and now is None and not self._world.models.by("source", self._key(was)):
            self._reported.pop(self._key(was), None)  # a Model that names it later reads it anew
        if now is None or artifacts.known(now) is None or (was is not None and artifacts.known(was) is not None):
            return
        self._reported.pop(self._key(now), None)
        self._wake(self._key(now))

    def _wake(self, key: str) -> None:
        for model in self._without_facts(key):
            self._changed(model.key)

    def _without_facts(self, key: str) -> list[Model]:
        named = [custom.object for custom in self._world.models.by("source", key)]
        return [model for model in named if model is not None and artifacts.known(model) is None]
