"""Stalls of the engine, and the file on which its liveness probe looks (architecture, section 7)."""

from pathlib import Path

import structlog

from shoal.api import names
from shoal.core.stall import StallClock, Work, follow, stalled

log = structlog.get_logger()


class Stalls:
    """Follows one engine. Its calls block on the file system of the run folder; they raise nothing."""

    def __init__(self, seconds: float, file: Path = Path(names.STALLED_FILE)) -> None:
        self._seconds = seconds
        self._file = file
        self._progress: StallClock | None = None
        # An agent that restarted goes on with what its predecessor found, until the engine moves.
        self.stalled = self._written = file.exists()

    def forget(self) -> None:
        """Another process of the engine has started."""
        self._progress = None
        self._set(now=False)

    def observed(self, work: Work) -> None:
        """Takes a further look."""
        found = self._progress is None and self.stalled
        self._progress = follow(self._progress, work)
        moved = self._progress.since == work.at and not found
        if not self.stalled or moved:
            self._set(now=stalled(self._progress, work.at, self._seconds))
        elif not self._written:
            self._set(now=True)

    def _set(self, *, now: bool) -> None:
        if now != self.stalled:
            log.warning("engine.stalled" if now else "engine.moves_again", seconds=self._seconds)
        # Written once: a file that is gone was removed by the command of the engine's next process.
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
