"""Fuzzing in a child process with limits of memory and of processor time: what ends the child, or makes it raise what
nobody expects, is a finding."""

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.limited import MI, run
from tests.support.mutants import Mutants

OBJECTS = int(os.environ.get("SHOAL_FUZZ_OBJECTS", "200"))
"""Of each target."""
SEED = int(os.environ.get("SHOAL_FUZZ_SEED", "1"))
OBJECT_SECONDS = 10.0
"""Of processor time, for one object: nothing is measured, but one that takes so long would stop a loop."""
_FEW = 5

Target = Callable[[Mutants, int], None]
"""Makes the n-th object and works on it. May raise only what its user expects."""
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    """Registers a target by the name of its function."""
    TARGETS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Report:
    objects: int
    findings: list[str]
    ended: str
    peak_bytes: int


class _Slow(BaseException):
    pass


def _alarm(*_: object) -> None:
    raise _Slow


def fuzz_one(given: dict[str, Any]) -> dict[str, Any]:
    """In the child."""
    from importlib import import_module

    import_module(given["module"])
    work = TARGETS[given["target"]]
    signal.signal(signal.SIGVTALRM, _alarm)
    findings: list[str] = []
    done = 0
    for number in range(given["objects"]):
        mutants = Mutants(given["seed"] * 1_000_003 + number)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, OBJECT_SECONDS)
            work(mutants, number)
        except (_Slow, MemoryError) as error:
            findings.append(f"object {number}: {type(error).__name__.lstrip('_')}")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            findings.append(f"object {number}: {type(error).__name__} at {place}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        done += 1
        if len(findings) >= _FEW:
            break
    return {"objects": done, "findings": findings}


def fuzz(module: str, name: str, *, objects: int = OBJECTS, memory: int = 512 * MI, cpu: int = 120) -> Report:
    given = {"module": module, "target": name, "objects": objects, "seed": SEED}
    outcome = run(fuzz_one, given, memory=memory, cpu=cpu)
    if outcome.ended != "done":
        return Report(0, [f"the child ended: {outcome.ended}"], outcome.ended, outcome.peak_bytes)
    return Report(outcome.value["objects"], outcome.value["findings"], "done", outcome.peak_bytes)
