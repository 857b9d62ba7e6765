"""Weights in node caches before a replica asks for them: makes the Jobs that `core/prefetch.py` decides on."""

import asyncio
from typing import Final

import structlog

from shoal.api import names
from shoal.api.cache import CACHED_SCHEMES
from shoal.api.model import Model, PrefetchStatus
from shoal.controllers.modelqueue import ModelQueue
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import artifacts, children, facts, quantity
from shoal.core.gpus import takes_pods
from shoal.core.prefetch import ClassPrefetch, JobState, PrefetchDemand, decide
from shoal.core.status.conditions import shorten
from shoal.core.status.modelstatus import is_paused
from shoal.kube.errors import Conflict, Forbidden, ObjectInvalid
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import JOBS
from shoal.manifests.prefetch import prefetch_job

log = structlog.get_logger()

ALL: Final = "prefetch"
"""The one key of the queue: all Models are decided together."""
RECHECK_SECONDS: Final = 60.0
"""Nodes come and go, and replicas become ready: looked at again while a Model asks for prefetched weights."""
MOST_CLASSES: Final = 8
"""Of a Model that names no class."""
_LONGEST: Final = 512


class PrefetchController:
    def __init__(self, world: World, state: FleetState, models: ModelQueue, queue: WorkQueue) -> None:
        self._world, self._state, self._models, self.queue = world, state, models, queue

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if any(c is not None and c.object is not None and c.object.spec.prefetch for c in (before, after)):
            self.queue.add(ALL)

    def on_job(self, _key: str, before: facts.MetadataJob | None, after: facts.MetadataJob | None) -> None:
        if any(job is not None and job.node is not None for job in (before, after)):
            self.queue.add(ALL)

    def enqueue_all(self) -> None:
        self.queue.add(ALL)

    async def reconcile(self, _key: str) -> float | None:
        """Returns seconds after which to look again, or None."""
        world = self._world
        asking = {
            c.object.metadata.uid: c.object
            for c in world.models.values()
            if c.object is not None and c.object.spec.prefetch is not None and c.metadata.deletion_timestamp is None
        }
        for uid, record in self._state.records():
            if record.prefetch and uid not in asking:
                record.prefetch = ()
                self._models.add_uid(uid)
        if not asking:
            return None
        classes = world.accepted_classes()
        jobs: dict[str, list[facts.MetadataJob]] = {}
        for job in world.jobs.values():
            if job.node is not None and job.model_uid in asking:
                jobs.setdefault(job.model_uid, []).append(job)
        demands: list[PrefetchDemand] = []
        for uid, model in asking.items():
            if (demand := self._demand(model, jobs.get(uid, []))) is not None:
                demands.append(demand)
            await asyncio.sleep(0)  # a wake goes between the Models of a large fleet
        size = int(quantity.parse(world.config.cache.size))
        # A hash per Model and node: of a large fleet that is too long for the event loop.
        decided = await asyncio.to_thread(decide, demands, self._nodes(), size)
        for uid, model in asking.items():
            found = decided.get(uid)
            self._note(model, found.classes if found else (), self._without(model, found is None))
            known = artifacts.known(model)
            for name, node in found.start if found and known else ():
                if known is None or (gpu_class := classes.get(name)) is None:
                    continue
                body = prefetch_job(model, known, gpu_class, node, world.config)
                log.info("prefetching weights", model=model.key, node=node, job=body["metadata"]["name"])
                since = world.jobs.mark()
                try:
                    made = await world.client.apply(JOBS, body, manager=names.MANAGER_MODEL)
                except (Forbidden, ObjectInvalid, Conflict) as error:  # the others are not to wait
                    log.warning("a prefetch is refused", model=model.key, node=node, error=error.message)
                    continue
                world.jobs.upsert(made, since=since)
        return RECHECK_SECONDS

    def _demand(self, model: Model, mine: list[facts.MetadataJob]) -> PrefetchDemand | None:
        """None: its weights are not prefetched at all."""
        world, asked = self._world, model.spec.prefetch
        if asked is None or self._without(model, True):
            return None
        known = artifacts.known(model)
        classes = self._classes(model)
        manifest = known.digest if known else None
        jobs: dict[str, JobState] = {}
        for job in mine:
            # Anybody may write such an annotation in the namespace; the name tells which Jobs are Shoal's.
            if job.node is not None and job.name == children.prefetch_job(model.metadata.uid, job.node, manifest):
                jobs[job.node] = "active" if job.active else "failed" if job.failed else "done"
        return PrefetchDemand(
            uid=model.metadata.uid,
            nodes=asked.nodes,
            classes=classes,
            size=known.file_bytes if known else None,
            manifest=manifest,
            priority=model.spec.priority,
            created=model.metadata.creation_timestamp,
            replicas_on={p.node for p in world.pods.by("model", model.metadata.uid) if p.node and p.ready},
            jobs=jobs,
        )

    def _classes(self, model: Model) -> tuple[str, ...]:
        """Those that the Model names for its weights, else its own, else all, of which the first ones by name."""
        asked = model.spec.prefetch
        own = tuple(v.gpu_class for v in model.spec.variants)
        named = tuple(asked.classes) if asked is not None else ()
        return named or own or tuple(sorted(self._world.accepted_classes()))[:MOST_CLASSES]

    def _without(self, model: Model, asked: bool) -> str:
        """Why weights of the Model are not prefetched; empty: they are."""
        if not asked:
            return ""
        if not self._world.config.cache.enabled:
            return "the node cache is off (chart value cache.enabled)"
        if model.spec.source.uri.partition("://")[0] not in CACHED_SCHEMES:
            return "the node cache does not fetch sources of this kind"
        return "the Model is paused" if is_paused(model) else ""

    def _nodes(self) -> dict[str, list[str]]:
        """Class -> its nodes that take pods and have a cache."""
        selector = self._world.config.cache.node_selector.items()
        classes = self._world.accepted_classes()
        return {
            name: [
                n.name for n in own if takes_pods(n, classes[name].spec.tolerations) and selector <= n.labels.items()
            ]
            for name, own in self._state.gpus.members().items()
            if name in classes
        }

    def _note(self, model: Model, decided: tuple[ClassPrefetch, ...], without: str) -> None:
        record = self._state.record(model.metadata.uid)
        found = tuple(self._status(model, each) for each in decided) or tuple(
            PrefetchStatus(gpu_class=name, nodes=0, message=without) for name in self._classes(model)
        )
        if found != record.prefetch:
            record.prefetch = found
            self._models.add_uid(model.metadata.uid)

    def _status(self, model: Model, decided: ClassPrefetch) -> PrefetchStatus:
        said = [decided.short] if decided.short else []
        if decided.failed:
            said.append(f"failed on {', '.join(decided.failed[:3])}: {self._why(model, decided.failed[0])}")
        text = shorten("; ".join(said), _LONGEST) if said else None
        return PrefetchStatus(gpu_class=decided.gpu_class, nodes=len(decided.nodes), ready=decided.ready, message=text)

    def _why(self, model: Model, node: str) -> str:
        known = artifacts.known(model)
        name = children.prefetch_job(model.metadata.uid, node, known.digest if known else None)
        for pod in self._world.pods.by("job", f"{model.metadata.namespace}/{name}"):
            if (ended := pod.container(names.COMPONENT_PREFETCH)) is not None and ended.exit_message:
                return artifacts.stage_words(ended.exit_message)
        job = self._world.jobs.get(f"{model.metadata.namespace}/{name}")
        return (job.failed if job else None) or "no message"
