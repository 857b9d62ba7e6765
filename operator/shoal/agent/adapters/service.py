"""Runs the adapters of this replica: makes a decision on every change and executes it.

Everything runs in the event loop's thread; files and hashes are handled in other threads. One task calls the engine,
with one call at a time. The files of an adapter have one task at a time. A caller waits only for its own answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from shoal.agent.adapters.calls import Calls
from shoal.agent.adapters.files import AdapterFolder
from shoal.agent.adapters.metrics import AdapterMetrics, Timings
from shoal.agent.drain import Drain
from shoal.api import reasons
from shoal.api.adapters import LEASE_SECONDS, AdapterSettings, AdapterWanted, DesiredAdapters, Lease
from shoal.api.replica import Ack
from shoal.artifacts import ArtifactError
from shoal.core.lora.lifecycle.leases import Key
from shoal.core.lora.lifecycle.planstep import Denial, PlanStep, plan_step
from shoal.core.lora.lifecycle.registry import AdapterWaiter, Registry, RegistryEntry
from shoal.engine.port import AgentSide, EngineAdapters

TICK_SECONDS: Final = 0.25
"""Interval between decisions without events: leases, claims and pauses end by time."""
STAGE_SECONDS: Final = 300.0
"""Timeout for fetching one adapter."""
TIDY_SECONDS: Final = 60.0
"""Time after the agent's start until files that its predecessor staged, and that no engine can still be reading, are
removed."""

log = structlog.get_logger()

Fetch = Callable[[AdapterWanted, Path], Awaitable[object]]
"""Fetches and verifies an adapter's files into a folder. Raises ArtifactError."""


class AdapterService:
    """`fetch` stages adapters. `engine`: of the kind beside this agent. `publish` sends `keys` on the stream and
    returns the message's seq."""

    def __init__(
        self, settings: AdapterSettings, drain: Drain, files: AdapterFolder, fetch: Fetch, engine: AgentSide
    ) -> None:
        self._settings = settings
        self._drain = drain
        self._files = files
        self._fetch = fetch
        self._clock = drain.clock
        now = drain.clock()
        self.registry = Registry(settings.cached, settings.slots - 1, now, since_1970=time.time() - now)
        self._timings = Timings()
        self._calls = Calls(self.registry, files, self._timings, drain.clock, files_first=engine.files_before_unload)
        self._answers: dict[AdapterWaiter, asyncio.Future[Lease | Denial]] = {}
        self._refusals: dict[str, int] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._engine: EngineAdapters | None = None
        self._work: dict[str, asyncio.Task[None]] = {}
        """Latest task of each adapter's files."""
        self._staging: dict[str, asyncio.Task[None]] = {}
        self._tidied = False
        self.metrics: Final = AdapterMetrics(self.registry, self._timings, lambda: self._refusals)
        self.publish: Callable[[], int] = lambda: 0

    @property
    def pool(self) -> str:
        return self._settings.pool

    def keys(self) -> Mapping[str, object]:
        """The adapters' keys of the stream."""
        return self.registry.stream_keys()

    async def run(self, engine: EngineAdapters) -> None:
        """Runs until cancelled."""
        await self._files.remove_incomplete()
        self._engine = engine
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    self.step()
                    await asyncio.sleep(TICK_SECONDS)
        finally:
            self._tasks = self._engine = None

    # --- events -------------------------------------------------------------------------------------------------------

    def observed(self, boot: str | None, *, up: bool, idle_at: float | None = None) -> None:
        """The observer has observed the engine. The registry is updated now; decisions follow with the next step."""
        if self.registry.observed(boot, self._clock(), up=up, idle_at=idle_at) and boot is not None:
            log.info("adapters.engine", engine_boot=boot, floor=len(self.registry.desired))

    def acked(self, ack: Ack) -> None:
        """A gateway has acknowledged the stream, and the drain has recorded it."""
        running = frozenset(name for name, count in ack.running_by_adapter.items() if count)
        self.registry.acked((ack.gateway, ack.boot), running, self._clock(), ack.given_back)
        self.step()

    def set_desired(self, desired: DesiredAdapters) -> None:
        """The operator has sent the desired adapters."""
        before = self.registry.desired
        self.registry.set_desired(desired.adapters)
        if before != self.registry.desired:
            log.info("adapters.floor", operator=desired.operator, adapters=len(self.registry.desired))
        self.step()

    async def ensure(self, wanted: AdapterWanted, key: Key | None, seconds: float) -> Lease | Denial:
        """Loads the adapter if needed and returns a lease for a gateway, or a denial after at most `seconds`."""
        if self._tasks is None:
            return self._refused(Denial(503, reasons.ENGINE_NOT_READY, "the agent has just started", 2))
        waiter = AdapterWaiter(wanted, key, self._clock())
        answer = self._answers[waiter] = asyncio.get_running_loop().create_future()
        self.registry.waiters.append(waiter)
        try:
            self.step()
            async with asyncio.timeout(None if answer.done() else seconds):
                result = await answer
        except TimeoutError:
            result = _late(waiter, self.registry)
        finally:
            del self._answers[waiter]
            if waiter in self.registry.waiters:
                self.registry.waiters.remove(waiter)
        return self._refused(result) if isinstance(result, Denial) else result

    def _refused(self, denial: Denial) -> Denial:
        self._refusals[denial.reason] = self._refusals.get(denial.reason, 0) + 1
        return denial

    # --- decisions ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Makes and executes a decision."""
        if self._tasks is None:
            return
        self._step()
        if any(e.state == "retiring" for e in self.registry.entries.values()) and not self.registry.busy:
            # An adapter that retires without any claim on it can be unloaded at once.
            self._step()

    def _step(self) -> None:
        now = self._clock()
        decided = plan_step(
            self.registry,
            self._drain.gateways,
            now,
            draining=self._drain.draining,
            drain_seconds=self._drain.seconds,
        )
        seq = self.publish()
        self.registry.published(seq, now)
        self._answer(decided, seq, now)
        for name in decided.discard:
            self._discard(name)
        for wanted in decided.stage:
            entry = self.registry.entries[wanted.name]
            self._staging[wanted.name] = self._spawn(wanted.name, partial(self._stage, wanted, entry))
        if decided.call is not None and self._tasks is not None and self._engine is not None:
            self._tasks.create_task(self._execute(self._engine, decided))

    def _answer(self, decided: PlanStep, seq: int, now: float) -> None:
        for waiter, denial in decided.denials:
            self._set(waiter, denial)
        for waiter in decided.grants:
            entry = self.registry.entries[waiter.wanted.name]
            staged, loading = (entry.staged_seconds, entry.load_seconds) if waiter.missed else (0.0, 0.0)
            waited = now - waiter.since
            self._timings.wait.observe(waited)
            lease = Lease(
                name=waiter.wanted.name,
                engine_boot=self.registry.boot or "",
                seq=seq,
                seconds=LEASE_SECONDS if waiter.key is not None else 0.0,
                grant=waiter.grant,
                loaded=waiter.missed,
                staged_seconds=staged,
                load_seconds=loading,
                waited_seconds=max(waited - staged - loading, 0.0),
            )
            self._set(waiter, lease)

    def _set(self, waiter: AdapterWaiter, result: Lease | Denial) -> None:
        answer = self._answers.get(waiter)
        if answer is not None and not answer.done():
            answer.set_result(result)

    async def _execute(self, engine: EngineAdapters, decided: PlanStep) -> None:
        assert decided.call is not None  # noqa: S101 - the caller has looked
        for name in await self._calls.execute(engine, decided.call):
            self._spawn(name, partial(self._remove, name))
        await self._remove_leftovers()
        self.step()

    # --- files --------------------------------------------------------------------------------------------------------

    async def _stage(self, wanted: AdapterWanted, entry: RegistryEntry) -> None:
        registry, name, began = self.registry, wanted.name, self._clock()
        failure: ArtifactError | None = None
        try:
            async with asyncio.timeout(STAGE_SECONDS):
                await self._fetch(wanted, self._files.path(name))
        except ArtifactError as error:
            failure = error
        except TimeoutError:
            failure = ArtifactError(reasons.SOURCE_UNREACHABLE, f"its files did not arrive within {STAGE_SECONDS:g} s")
        except OSError as error:
            failure = ArtifactError(reasons.DISK_FULL, f"its files cannot be written: {error.strerror}")
        except Exception as error:
            # A source that nobody thought of: the other adapters' requests must not end with this agent.
            log.exception("adapter.stage_broke", adapter=name)
            failure = ArtifactError(reasons.SOURCE_UNREACHABLE, f"its files cannot be fetched: {type(error).__name__}")
        now = self._clock()
        if registry.entries.get(name) is not entry or entry.state != "staging":
            return
        if failure is not None:
            log.warning("adapter.stage_failed", adapter=name, reason=failure.reason, problem=str(failure))
            registry.failed(name, failure.reason, str(failure), now)
        else:
            self._timings.stage.observe(now - began)
            registry.staged(name, now - began)
        self.step()

    def _discard(self, name: str) -> None:
        staging = self._staging.pop(name, None)
        if staging is not None:
            staging.cancel()
        self._spawn(name, partial(self._remove, name))

    async def _remove(self, name: str) -> None:
        try:
            await self._files.remove(name)
        except OSError as error:
            log.error("adapter.files_stay", adapter=name, problem=error.strerror)

    async def _remove_leftovers(self) -> None:
        if self._tidied or self._clock() < self.registry.started + TIDY_SECONDS:
            return
        self._tidied = True
        for name in await self._files.all():
            if name not in self.registry.entries and name not in self._work:
                self._spawn(name, partial(self._remove, name))

    def _spawn(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """Work on an adapter's files, after what is under way with them."""
        assert self._tasks is not None  # noqa: S101 - only a step comes here
        task = self._tasks.create_task(_after(self._work.get(name), work))
        self._work[name] = task
        task.add_done_callback(partial(self._forget, name))
        return task

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._work.get(name) is task:
            del self._work[name]
        if self._staging.get(name) is task:
            del self._staging[name]


async def _after(before: asyncio.Task[None] | None, work: Callable[[], Coroutine[None, None, None]]) -> None:
    if before is not None:
        await asyncio.wait([before])
    await work()


def _late(waiter: AdapterWaiter, registry: Registry) -> Denial:
    """What to say to a caller who has waited long enough."""
    name = waiter.wanted.name
    if waiter.admitted is None and not waiter.slow:
        return Denial(503, reasons.SLOTS_FULL, f"all {registry.slots} slots are used by other adapters", 1)
    failure, entry = registry.failures.get(name), registry.entries.get(name)
    if failure is not None:
        return Denial(503, failure.reason, failure.message, 2)
    if entry is None:
        return Denial(503, reasons.SLOTS_FULL, f"all {registry.places} places hold adapters in use", 1)
    return Denial(503, reasons.LOADING_ADAPTER, f"it is {entry.state} still", 1)
