"""Reads the sources of adapters: one Job per pool and batch, never one per adapter.

A Job says what it reads in an annotation, so that a restarted operator waits for it instead of making another one. What
fails and may pass is read again once its Job is gone: how long a Job stays is the back-off, which doubles. A Job that
ends without a word is repeated in smaller batches, so that one adapter cannot keep the others from being read.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from shoal.api import names, reasons
from shoal.api.adapterfacts import BATCH_ADAPTERS, AdapterBatch, AdapterFacts, AdapterToRead
from shoal.api.adapters import AdapterSettings
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.lora.format.facts import job_name, results
from shoal.core.lora.lifecycle.revisions import FINAL
from shoal.core.status.observed import ModelProblem
from shoal.kube.errors import KubeError
from shoal.kube.resources import JOBS
from shoal.manifests.adapterfacts import adapter_facts_job

log = structlog.get_logger()

SETTLE_SECONDS: Final = 0.3
"""Adapters are applied in bunches: a batch waits so long for company."""
AT_A_TIME: Final = 8
"""Jobs of one pool."""
KEEP_SECONDS: Final = 60
"""How long the first Job stays after its end."""
LONGEST_KEEP_SECONDS: Final = 3600
REFUSED_SECONDS: Final = 30.0
"""After the API server refused a Job: a quota, an admission policy."""


@dataclass(frozen=True, slots=True)
class AdapterReading:
    """What is known of one source. Exactly one of the three is set."""

    found: AdapterFacts | None = None
    problem: ModelProblem | None = None
    """What is wrong with it. One that may pass is read again by and by."""
    waiting: str = ""

    @property
    def final(self) -> bool:
        """Reading it again finds the same."""
        return self.found is not None or (self.problem is not None and self.problem.reason in FINAL)


@dataclass(slots=True)
class _Source:
    """A source that adapters wait for."""

    key: str
    uri: str
    digest: str | None
    pool_key: str
    adapters: set[str] = field(default_factory=set[str])
    reading: AdapterReading | None = None
    tries: int = 0

    @property
    def problem(self) -> bool:
        """It could not be read, and may be later."""
        return self.reading is not None and not self.reading.final


class AdapterReader:
    """Call `ask` in a reconcile. `run` creates the Jobs. `changed` is called with the adapters that have new facts."""

    def __init__(self, world: World, changed: Callable[[str], None]) -> None:
        self._world, self._changed = world, changed
        self._sources: dict[str, _Source] = {}
        """By read key."""
        self._waiting: dict[str, str] = {}
        """Adapter -> the read key that it waits for."""
        self._pending: dict[str, OrderedDict[str, None]] = {}
        """Pool -> read keys that wait for a Job."""
        self._pools: dict[str, tuple[LoRAPool, AdapterSettings]] = {}
        self._some = asyncio.Event()
        self._later: dict[str, asyncio.TimerHandle] = {}

    # --- asking -----------------------------------------------------------------------------------------------------

    def read(self, adapter: LoRAAdapter, key: str, pool: LoRAPool, settings: AdapterSettings) -> AdapterReading:
        """What is known of the adapter's source under this read key; has it read if nothing does."""
        name = adapter.key
        if self._waiting.get(name) != key:
            self.forget(name)
            self._waiting[name] = key
        self._pools[pool.key] = (pool, settings)
        source = self._sources.get(key)
        if source is None:
            spec = adapter.spec.source
            source = self._sources[key] = _Source(key, spec.uri, spec.digest, pool.key)
        source.adapters.add(name)
        if source.reading is None:
            self._read_jobs(source)
        if source.reading is None or (not source.reading.final and not self._jobs(source)):
            self._want(source)
        return source.reading or AdapterReading(waiting="its source is being read")

    def forget(self, adapter_key: str) -> None:
        """The adapter waits for nothing any more."""
        key = self._waiting.pop(adapter_key, None)
        source = self._sources.get(key) if key is not None else None
        if source is None:
            return
        source.adapters.discard(adapter_key)
        if not source.adapters:
            del self._sources[source.key]
            if (waiting := self._pending.get(source.pool_key)) is not None:
                waiting.pop(source.key, None)

    async def retry(self, pool_key: str) -> None:
        """What kept sources of a pool from being read is mended, perhaps: those that failed are read at once, as if it
        were their first time. Their Jobs go now and not when their time is over. Raises KubeError."""
        for job in self._world.jobs.by("pool", pool_key):
            failed = [source for source in self._read_by(job) if source.problem]
            if job.active or not failed:
                continue
            at_once: JsonObject = {"spec": {"ttlSecondsAfterFinished": 0}}
            await self._world.client.merge_patch(JOBS, job.name, job.namespace, at_once, manager=names.MANAGER_LORAPOOL)
            for source in failed:
                source.tries = 0

    def _want(self, source: _Source) -> None:
        if not self._jobs(source):
            self._pending.setdefault(source.pool_key, OrderedDict())[source.key] = None
            self._some.set()

    def _jobs(self, source: _Source) -> list[facts.MetadataJob]:
        """The Jobs that read it, also ended ones that are still there."""
        return [job for job in self._world.jobs.by("reads", source.key) if _made_for(job, source.pool_key)]

    def _read_by(self, job: facts.MetadataJob | None) -> list[_Source]:
        """Sources that this Job reads."""
        if job is None or job.pool is None or not _made_for(job, job.pool):
            return []
        found = (self._sources.get(key) for key in job.reads)
        return [source for source in found if source is not None and source.pool_key == job.pool]

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _read_jobs(self, source: _Source) -> None:
        """What Jobs said that are still there, perhaps made by an operator before this one."""
        for job in self._jobs(source):
            for pod in self._world.pods.by("job", job.key):
                said = results(pod).get(source.key)
                if said is not None:
                    source.reading = _reading(said)
                    return

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is None or after.job is None:
            return
        sources = self._read_by(self._world.jobs.get(f"{after.namespace}/{after.job}"))
        said = results(after) if sources else {}
        for source in sources:
            if source.reading is not None and source.reading.final:
                continue
            found = said.get(source.key)
            if found is not None:
                self._set_reading(source, _reading(found))

    def on_job(self, _key: str, before: facts.MetadataJob | None, after: facts.MetadataJob | None) -> None:
        for source in self._read_by(after or before):
            if source.reading is not None and source.reading.final:
                continue
            if after is None:
                self._want(source)
            elif not after.active and source.reading is None:
                self._read_jobs(source)
                if source.reading is not None:
                    self._wake(source)
                elif after.failed is not None:
                    what = f"Job {after.key} that reads it failed: {after.failed}; it is tried again"
                    self._set_reading(source, AdapterReading(problem=ModelProblem(reasons.STAGE_FAILED, what)))
        if after is None or not after.active:
            self._some.set()  # room for another Job

    def _set_reading(self, source: _Source, answer: AdapterReading, *, tried: bool = True) -> None:
        if tried and not answer.final:
            source.tries += 1
        if source.reading != answer:
            source.reading = answer
            self._wake(source)

    def _wake(self, source: _Source) -> None:
        for adapter in source.adapters:
            self._changed(adapter)

    # --- making Jobs ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Makes Jobs until cancelled."""
        try:
            while True:
                await self._some.wait()
                await asyncio.sleep(SETTLE_SECONDS)
                self._some.clear()
                for pool_key in list(self._pending):
                    try:
                        await self._make_for(pool_key)
                    except Exception:
                        # One pool whose Jobs cannot be made must not end the operator.
                        log.exception("adapters of a pool are not read", pool=pool_key)
                        self._retry_later(pool_key)
        finally:
            for timer in self._later.values():
                timer.cancel()
            self._later.clear()

    async def _make_for(self, pool_key: str) -> None:
        pool, settings = self._pools[pool_key]
        room = AT_A_TIME - sum(job.active for job in self._world.jobs.by("pool", pool_key))
        for batch in list(self._batches(pool_key))[: max(0, room)]:
            try:
                await self._make(pool, settings, batch)
            except KubeError as error:
                log.warning("a Job that reads adapters was not made", pool=pool_key, error=error.message)
                what = f"the API server refuses the Job that would read it: {error.message}"
                for source in batch:
                    self._set_reading(source, AdapterReading(problem=ModelProblem(reasons.REFUSED, what)), tried=False)
                self._retry_later(pool_key)
                return
            for source in batch:
                self._pending[pool_key].pop(source.key, None)
        if not self._pending[pool_key]:
            del self._pending[pool_key]

    def _batches(self, pool_key: str) -> Iterable[list[_Source]]:
        """Of those that failed before, small ones of their own."""
        by_tries: dict[int, list[_Source]] = {}
        for key in list(self._pending[pool_key]):
            source = self._sources.get(key)
            if source is None or self._jobs(source):
                self._pending[pool_key].pop(key)
            else:
                by_tries.setdefault(source.tries, []).append(source)
        for tries, sources in sorted(by_tries.items()):
            size = max(1, BATCH_ADAPTERS >> (2 * tries))
            for start in range(0, len(sources), size):
                yield sources[start : start + size]

    async def _make(self, pool: LoRAPool, settings: AdapterSettings, batch: list[_Source]) -> None:
        keep = min(LONGEST_KEEP_SECONDS, KEEP_SECONDS * 2 ** min(10, max(s.tries for s in batch)))
        wanted = AdapterBatch(
            adapters=tuple(AdapterToRead(key=s.key, uri=s.uri, digest=s.digest) for s in batch),
            credentials=settings.credentials,
            max_bytes=settings.max_bytes,
        )
        table = self._world.jobs
        since = table.mark()
        body = adapter_facts_job(pool, wanted, self._world.config, keep_seconds=keep)
        log.info("reading adapters", pool=pool.key, adapters=len(batch), job=body["metadata"]["name"])
        table.upsert(await self._world.client.apply(JOBS, body, manager=names.MANAGER_LORAPOOL), since=since)

    def _retry_later(self, pool_key: str) -> None:
        if pool_key not in self._later:
            loop = asyncio.get_running_loop()
            self._later[pool_key] = loop.call_later(REFUSED_SECONDS, self._due, pool_key)

    def _due(self, pool_key: str) -> None:
        self._later.pop(pool_key, None)
        self._some.set()


def _made_for(job: facts.MetadataJob, pool_key: str) -> bool:
    """Whether it has the namespace, the pool and the name with which the operator makes Jobs for this pool. Anybody
    may write the annotation, and a read key is no secret; a CronJob cannot make a Job of such a name."""
    return job.pool == pool_key and job.name == job_name(pool_key, job.reads)


def _reading(said: AdapterFacts | ModelProblem) -> AdapterReading:
    if isinstance(said, AdapterFacts):
        return AdapterReading(found=said)
    return AdapterReading(problem=said)
