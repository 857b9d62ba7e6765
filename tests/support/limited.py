"""Work under limits: in a child process that has so much memory and so many seconds of processor, and counted in steps.

`run` is for what may end the process that does it, `counted` for what must cost the same whatever the numbers in it
are: steps and bytes are counted, never time.
"""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
MI = 2**20


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    ended: str
    """done, memory, cpu, or what else ended it."""
    value: Any = None
    peak_bytes: int = 0
    """Resident at most, beyond what was there before the work began."""


def run(work: Callable[[Any], Any], given: Any = None, *, memory: int = 256 * MI, cpu: int = 20) -> Outcome:
    """`work` is a function of a module, `given` and what it returns are JSON. `memory` is what it may take beyond what
    its imports took, in bytes of address space; `cpu` are seconds of processor."""
    order = json.dumps({"module": work.__module__, "name": work.__name__, "given": given, "memory": memory, "cpu": cpu})
    paths = os.pathsep.join((str(ROOT / "operator"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.limited"],
        input=order, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths},
        timeout=60 + 20 * cpu,
    )  # fmt: skip
    if done.returncode == -signal.SIGXCPU:
        return Outcome("cpu")
    if done.returncode == 0:
        return Outcome(**json.loads(done.stdout.rpartition("\n")[2]))
    return Outcome(f"exit code {done.returncode}: {done.stderr[-2000:]}")


def _child() -> None:
    order = json.loads(sys.stdin.read())
    work = getattr(import_module(order["module"]), order["name"])
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + order["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + order["cpu"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    try:
        outcome: dict[str, Any] = {"ended": "done", "value": work(order["given"])}
    except MemoryError:
        outcome = {"ended": "memory"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sys.stdout.write("\n" + json.dumps(outcome | {"peak_bytes": peak * 1024}))


class TooManySteps(BaseException):
    """More lines were run than were allowed. Whoever catches every Exception does not catch it."""


@dataclass(frozen=True)
class Cost:
    """What a call took."""

    lines: int
    """Lines of Python that were run; each turn of a loop or a generator is one at least."""
    peak_bytes: int
    """Of memory that it took and had at once."""


def counted(work: Callable[[], object], *, most_lines: int = 1_000_000) -> Cost:
    """Runs `work` and counts. Raises TooManySteps where it does not end within `most_lines`."""
    lines = 0

    def line(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal lines
        lines += 1
        if lines > most_lines:
            raise TooManySteps(f"more than {most_lines} lines")
        return line

    tracer = sys.gettrace()
    tracemalloc.start()
    try:
        sys.settrace(line)
        try:
            work()
        finally:
            sys.settrace(tracer)
        return Cost(lines, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    _child()
