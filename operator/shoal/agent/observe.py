"""Looks at the pod every so often: the run folder's files and the engine beside it. Keeps nothing it did not see."""

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from pydantic import ValidationError

from shoal.agent.phase import Probe, phase
from shoal.agent.stream import Hub
from shoal.api import names
from shoal.api.replica import Phase, StageProgress
from shoal.engine.client import Counters, EngineClient, EngineError, EngineUnreachable, Loads

BUSY_SECONDS: Final = 0.5
"""Between two looks while requests run, or something is about to change."""
IDLE_SECONDS: Final = 1.0
COUNTERS_SECONDS: Final = 2.0
"""Between two readings of /metrics, which costs the engine more than /v1/loads does."""
_BOOT = re.compile(r"[A-Za-z0-9-]{1,64}")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What the shared folder says. None: no such file yet, or not a usable one."""

    stage: StageProgress | None
    engine_boot: str | None


def read_run_files(stage_file: Path, boot_file: Path) -> RunFiles:
    """Reads both files; whatever is in them, it raises nothing. Blocks."""
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


class Observer:
    """Turns looks into keys of the stream. What it knows of the engine belongs to one boot of it."""

    def __init__(
        self,
        hub: Hub,
        stage_file: Path = Path(names.STAGE_PROGRESS_FILE),
        boot_file: Path = Path(names.BOOT_FILE),
    ) -> None:
        self._hub = hub
        self._stage_file = stage_file
        self._boot_file = boot_file
        self._engine_boot: str | None = None
        self._was_ready = False
        self._silent = 0
        self._phase: Phase | None = None
        self._counters = Counters(None, None)
        self._counters_at = float("-inf")
        self.errors: dict[str, int] = {}
        """Failed calls to the engine by the kind of failure, for /metrics."""

    async def run(self, engine: EngineClient) -> None:
        """Looks for ever."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = await self.look(engine)

    async def look(self, engine: EngineClient) -> float:
        """One look; tells the hub; returns the seconds until the next."""
        files = await asyncio.to_thread(read_run_files, self._stage_file, self._boot_file)
        if files.engine_boot != self._engine_boot:
            log.info("engine.boot", engine_boot=files.engine_boot)
            self._engine_boot = files.engine_boot
            self._was_ready, self._silent, self._counters = False, 0, Counters(None, None)
            self._counters_at = float("-inf")
        probe: Probe | None = None
        loads: Loads | None = None
        if self._engine_boot is not None:
            probe, loads = await asyncio.gather(self._probe(engine), self._loads(engine))
            if probe is not Probe.CLOSED:
                await self._count(engine)
        now = phase(
            files.stage,
            self._engine_boot,
            probe,
            was_ready=self._was_ready,
            silent=self._silent,
            before=self._phase,
        )
        if now != self._phase:
            log.info("replica.phase", phase=now, before=self._phase)
            self._phase = now
        self._was_ready = self._was_ready or probe is Probe.READY
        self._hub.update(self._keys(files, loads))
        idle = now == "ready" and loads is not None and not loads.running and not loads.waiting
        return IDLE_SECONDS if idle else BUSY_SECONDS

    async def _probe(self, engine: EngineClient) -> Probe:
        try:
            probe = Probe.READY if await engine.ready() else Probe.NOT_READY
        except EngineUnreachable:
            probe = Probe.CLOSED
        except EngineError as error:
            self._note(error)
            probe = Probe.SILENT
        self._silent = self._silent + 1 if probe is Probe.SILENT else 0
        return probe

    async def _loads(self, engine: EngineClient) -> Loads | None:
        try:
            return await engine.loads()
        except EngineUnreachable:
            return None
        except EngineError as error:
            self._note(error)
            return None

    async def _count(self, engine: EngineClient) -> None:
        moment = time.monotonic()
        if moment - self._counters_at < COUNTERS_SECONDS:
            return
        self._counters_at = moment
        try:
            self._counters = await engine.counters()
        except EngineError as error:
            self._note(error)

    def _note(self, error: EngineError) -> None:
        kind = type(error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1
        log.debug("engine.call_failed", kind=kind, problem=str(error))

    def _keys(self, files: RunFiles, loads: Loads | None) -> dict[str, object]:
        return {
            "phase": self._phase,
            "fetched_bytes": files.stage.bytes_done if files.stage else None,
            "fetch_total_bytes": files.stage.bytes_total if files.stage else None,
            "engine_boot": self._engine_boot,
            "running": loads.running if loads else None,
            "waiting": loads.waiting if loads else None,
            "waiting_tokens": loads.waiting_tokens if loads else None,
            "kv_tokens_used": loads.kv_tokens_used if loads else None,
            "kv_tokens_total": loads.kv_tokens_total if loads else None,
            "prompt_tokens_total": self._counters.prompt_tokens,
            "generation_tokens_total": self._counters.generation_tokens,
        }
