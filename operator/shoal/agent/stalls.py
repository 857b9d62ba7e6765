"""StallTracker of the engine, and the file that its liveness probe checks (architecture, section 7)."""

from pathlib import Path

import structlog

from shoal.api import names
from shoal.core.stall import StallClock, Work, follow, stalled

log = structlog.get_logger()


class StallTracker:
    """Tracks the stalls of one engine. Methods block on the file system of the run folder; they raise nothing."""

    def __init__(self, seconds: float, file: Path = Path(names.STALLED_FILE)) -> None:
        self._seconds = seconds
        self._file = file
        self._progress: StallClock | None = None
        # A restarted agent keeps its predecessor's verdict until the engine makes progress.
        self.stalled = self._written = file.exists()

    def reset(self) -> None:
        """Another engine process has started."""
        self._progress = None
        self._set(now=False)

    def observed(self, work: Work) -> None:
        """Records one observation."""
        found = self._progress is None and self.stalled
        self._progress = follow(self._progress, work)
        progressed = self._progress.since == work.at and not found
        if not self.stalled or progressed:
            self._set(now=stalled(self._progress, work.at, self._seconds))
        elif not self._written:
            self._set(now=True)

    def _set(self, *, now: bool) -> None:
        if now != self.stalled:
            log.warning("engine.stalled" if now else "engine.moves_again", seconds=self._seconds)
        # The file is written once: if it is missing, the start command of the next engine process has removed it.
        if now != self._written:
            try:
                if now:
                    self._file.touch()
                else:
                    self._file.unlink(missing_ok=True)
                self._written = now
            except OSError as error:
                log.error("stall.file", file=str(self._file), problem=error.strerror, consequence="no restart yet")
        self.stalled = now
