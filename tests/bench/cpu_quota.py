"""A share of the machine's CPU for one engine, as if it had a small machine of its own: what it does not use, others do
not get, and what others do costs it nothing. Linux's CPU controller of control groups, version 1 or 2, for root.
"""

import contextlib
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

PERIOD_US: Final = 10_000
"""Short, so that an engine that has used its share waits for a few milliseconds only."""
_ROOTS: Final = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_END_SECONDS: Final = 10.0


class NoQuota(Exception):
    """The machine has no CPU controller that this user may use."""


class CPUQuota:
    """A control group of at most so many CPUs. Processes join it with all that they start later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take_session(self, session: int) -> None:
        """All processes of a session."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                    (self._folder / "cgroup.procs").write_text(stat.parent.name)


@contextlib.contextmanager
def cpu_quota(name: str, cpus: float) -> Generator[CPUQuota]:
    """Processes in it must have ended at the end. Raises NoQuota."""
    folder = _made(f"shoal-bench-{os.getpid()}-{name}")
    try:
        _limit(folder, round(cpus * PERIOD_US))
        yield CPUQuota(folder)
    finally:
        until = time.monotonic() + _END_SECONDS
        while True:
            try:
                folder.rmdir()
                break
            except OSError:  # the last process of it is not quite gone
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _made(name: str) -> Path:
    for root in _ROOTS:
        folder = root / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / "cpu.cfs_quota_us").exists() or (folder / "cpu.max").exists():
                return folder
            folder.rmdir()
    raise NoQuota("no CPU controller of control groups that this user may use")


def _limit(folder: Path, quota_us: int) -> None:
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        return
    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
