"""Observes the pod periodically: the files in the run folder, and the engine. It keeps nothing that was not
observed."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import structlog
from pydantic import ValidationError

from shoal.agent.adapters.service import AdapterService
from shoal.agent.drain import Drain
from shoal.agent.stalls import StallTracker
from shoal.agent.stream import AgentStream
from shoal.api import names
from shoal.api.replica import Phase, StageProgress
from shoal.core.drain import EngineObservation
from shoal.core.stall import Work
from shoal.engine.port import Counters, EngineClient, EngineError, EngineTimeout, EngineUnreachable, Loads

SILENT_LIMIT: Final = 3
"""Number of consecutive unanswered probes after which the phase is unknown; a busy engine may miss one."""


class Probe(Enum):
    """Result of a request to the engine's /ready."""

    READY = "ready"
    NOT_READY = "not ready"
    """503: the engine is starting, or is shutting down."""
    CLOSED = "closed"
    """The port is closed."""
    SILENT = "silent"
    """The port is open, but there was no usable response."""


def phase(
    stage: StageProgress | None,
    engine_boot: str | None,
    probe: Probe | None,
    *,
    was_ready: bool,
    silent: int,
    before: Phase | None,
    stalled: bool = False,
    draining: bool = False,
) -> Phase | None:
    """The phase; None: unknown.

    `probe` is the last probe of this start of the engine, `was_ready` whether this start was ever ready, `silent` the
    number of consecutive unanswered probes, `before` the previous phase. `stalled` and `draining` are decisions of the
    agent. They override the probe, because gateways stop sending on both.
    """
    if stalled:
        return "stalled"
    if draining:
        return "draining"
    if engine_boot is None:
        if stage is None:
            return None
        return "loading" if stage.state == "done" else "fetching"
    match probe:
        case Probe.READY:
            return "ready"
        case Probe.NOT_READY:
            # SGLang returns 503 from SIGTERM on, while it finishes running requests.
            return "draining" if was_ready else "loading"
        case Probe.SILENT if was_ready:
            return before if silent < SILENT_LIMIT else None
        case Probe.CLOSED | Probe.SILENT | None:
            return "loading"


BUSY_SECONDS: Final = 0.5
"""Interval between observations while requests run or a change is imminent."""
IDLE_SECONDS: Final = 1.0
COUNTERS_SECONDS: Final = 2.0
"""Interval between reads of /metrics, which cost the engine more than /v1/loads."""
_BOOT = re.compile(r"[A-Za-z0-9-]{1,64}")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Content of the shared folder. None: the file does not exist or is not usable."""

    stage: StageProgress | None
    engine_boot: str | None


def read_run_files(stage_file: Path, boot_file: Path) -> RunFiles:
    """Reads both files. Never raises; blocks."""
    stage: StageProgress | None = None
    text = _head(stage_file, 16384)
    if text is not None:
        try:
            stage = StageProgress.model_validate_json(text)
        except ValidationError:
            stage = None
    boot = _head(boot_file, 128)
    match = _BOOT.fullmatch(boot.decode(errors="replace").strip()) if boot else None
    return RunFiles(stage, match.group() if match else None)


def _head(path: Path, limit: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return None


class EngineObserver:
    """Converts observations to keys of the stream. Its knowledge of the engine belongs to one start of the engine."""

    def __init__(
        self,
        stream: AgentStream,
        drain: Drain,
        stalls: StallTracker,
        run_dir: Path = Path(names.RUN_DIR),
        adapters: AdapterService | None = None,
    ) -> None:
        self._stream = stream
        self._drain = drain
        self._stalls = stalls
        self._adapters = adapters
        self._stage_file = run_dir / Path(names.STAGE_PROGRESS_FILE).name
        self._boot_file = run_dir / Path(names.BOOT_FILE).name
        self._clock = drain.clock
        self._start_over(None)
        self._phase: Phase | None = None
        self._keys: dict[str, object] = {}
        self.errors: dict[str, int] = {}
        """Failed calls to the engine by kind of failure, for /metrics."""
        drain.publish = self.publish_draining
        if adapters is not None:
            adapters.publish = self.publish_adapters

    def _start_over(self, engine_boot: str | None) -> None:
        """Starts over with another engine process."""
        self._engine_boot = engine_boot
        self._was_ready = False
        self._silent = 0
        self._counters = Counters(None, None)
        self._counters_at = float("-inf")

    @property
    def stalled(self) -> bool:
        return self._stalls.stalled

    async def run(self, engine: EngineClient) -> None:
        """Observes until cancelled."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = await self.observe(engine)

    def publish_draining(self) -> int:
        """Publishes at once, in a message of its own, that the replica drains; returns the seq of that message, or of
        an earlier message that said so."""
        if self._phase != "stalled":
            self._set_phase("draining")
        self._keys = {**self._keys, "phase": self._phase}
        self._stream.update(self._keys)
        return self._stream.seq

    def publish_adapters(self) -> int:
        """Publishes the keys of the adapters at once; returns the seq of the message that contains them."""
        self._keys = {**self._keys, **self._of_adapters()}
        self._stream.update(self._keys)
        return self._stream.seq

    def _of_adapters(self) -> Mapping[str, object]:
        return self._adapters.keys() if self._adapters is not None else {}

    async def observe(self, engine: EngineClient) -> float:
        """Makes one observation and publishes it; returns the seconds until the next."""
        at = self._clock()
        files = await asyncio.to_thread(read_run_files, self._stage_file, self._boot_file)
        if files.engine_boot != self._engine_boot:
            log.info("engine.boot", engine_boot=files.engine_boot)
            if self._engine_boot is not None:
                await asyncio.to_thread(self._stalls.reset)
            self._start_over(files.engine_boot)
        probe: Probe | None = None
        loads: Loads | EngineError | None = None
        counters: Counters | None = None
        if self._engine_boot is not None:
            probe, loads = await asyncio.gather(self._probe(engine), self._loads(engine))
            # A drain needs current counters in every observation; otherwise the last values suffice.
            if probe is not Probe.CLOSED and (
                self._drain.draining or self._clock() - self._counters_at >= COUNTERS_SECONDS
            ):
                counters = await self._count(engine)
        self._was_ready = self._was_ready or probe is Probe.READY
        known = loads if isinstance(loads, Loads) else None
        if self._was_ready:
            await asyncio.to_thread(self._stalls.observed, self._work(at, loads))
        self._drain.observed(self._observation(at, probe, known, counters))
        if self._adapters is not None:
            serves = self._was_ready and probe in (Probe.READY, Probe.SILENT)
            idle = known is not None and known.running == 0 and known.waiting == 0
            self._adapters.observed(self._engine_boot, up=serves, idle_at=at if idle else None)
        # No await from here on: a drain that began meanwhile has published its phase, which must not be overwritten.
        self._set_phase(
            phase(
                files.stage,
                self._engine_boot,
                probe,
                was_ready=self._was_ready,
                silent=self._silent,
                before=self._phase,
                stalled=self._stalls.stalled,
                draining=self._drain.draining,
            )
        )
        self._keys = self._state(files, known)
        self._stream.update(self._keys)
        if self._adapters is not None:
            self._adapters.step()
        idle = self._phase == "ready" and known is not None and not known.running and not known.waiting
        return IDLE_SECONDS if idle else BUSY_SECONDS

    def _set_phase(self, now: Phase | None) -> None:
        if now != self._phase:
            log.info("replica.phase", phase=now, before=self._phase)
            self._phase = now

    async def _probe(self, engine: EngineClient) -> Probe:
        try:
            probe = Probe.READY if await engine.ready() else Probe.NOT_READY
        except EngineUnreachable:
            probe = Probe.CLOSED
        except EngineError as error:
            self._record_error(error)
            probe = Probe.SILENT
        self._silent = self._silent + 1 if probe is Probe.SILENT else 0
        return probe

    async def _loads(self, engine: EngineClient) -> Loads | EngineError:
        try:
            return await engine.loads()
        except EngineError as error:
            if not isinstance(error, EngineUnreachable):
                self._record_error(error)
            return error

    async def _count(self, engine: EngineClient) -> Counters | None:
        self._counters_at = self._clock()
        try:
            self._counters = await engine.counters()
        except EngineError as error:
            self._record_error(error)
            return None
        return self._counters

    def _record_error(self, error: EngineError) -> None:
        kind = type(error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1
        log.debug("engine.call_failed", kind=kind, problem=str(error))

    def _work(self, at: float, loads: Loads | EngineError | None) -> Work:
        counted = (self._counters.prompt_tokens, self._counters.generation_tokens)
        finished = None if counted == (None, None) else sum(count or 0 for count in counted)
        if not isinstance(loads, Loads):
            return Work(at, "none" if isinstance(loads, EngineTimeout) else "other", finished=finished)
        return Work(
            at,
            "load",
            running=loads.running,
            waiting=loads.waiting,
            active=self._counters.active if loads.active is None else loads.active,
            computed=loads.computed,
            kv_tokens_used=loads.kv_tokens_used,
            finished=finished,
            published=loads.published,
        )

    def _observation(
        self, at: float, probe: Probe | None, loads: Loads | None, counters: Counters | None
    ) -> EngineObservation:
        return EngineObservation(
            at=at,
            boot=self._engine_boot,
            listening=None if probe is Probe.SILENT else probe not in (Probe.CLOSED, None),
            running=loads.running if loads else None,
            waiting=loads.waiting if loads else None,
            active=counters.active if counters else None,
            requests=counters.requests if counters else None,
            stalled=self._stalls.stalled,
        )

    def _state(self, files: RunFiles, loads: Loads | None) -> dict[str, object]:
        return {
            **self._of_adapters(),
            "phase": self._phase,
            "fetched_bytes": files.stage.bytes_done if files.stage else None,
            "fetch_total_bytes": files.stage.bytes_total if files.stage else None,
            "engine_boot": self._engine_boot,
            "running": loads.running if loads else None,
            "waiting": loads.waiting if loads else None,
            "waiting_tokens": loads.waiting_tokens if loads else None,
            "kv_tokens_used": loads.kv_tokens_used if loads else None,
            "kv_tokens_total": loads.kv_tokens_total if loads else None,
            "max_running": loads.max_running if loads else None,
            "tokens_per_step": _two_digits(loads.tokens_per_step) if loads else None,
            "prompt_tokens_total": self._counters.prompt_tokens,
            "generation_tokens_total": self._counters.generation_tokens,
            "graph_seconds": self._counters.graph_seconds,
        }


def _two_digits(value: float | None) -> float | None:
    """As precise as anyone reads it: each change of a key is a message to all readers."""
    return None if value is None else round(value, 2)
