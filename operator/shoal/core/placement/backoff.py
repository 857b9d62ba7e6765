"""Classes on which a Model has no luck, remembered for a while: there its replicas do not become ready, or find no node
for want of something that is not a GPU. The plan takes such a class last (`Demand.setbacks`).

Without the memory, a replica that was given up would be asked for again in the same breath.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from shoal.api import names
from shoal.core.facts import Pod

UNSCHEDULABLE_SECONDS: Final = 300.0
"""An autoscaler may bring a node with more CPU or memory in that time."""
CRASHES: Final = 3
"""Ends of an engine that never was ready, after which another class is tried: it may want more memory than there is."""
RETRY_SECONDS: Final = 3600.0
"""After which the class is as good as any other again."""

_MISSING: Final = re.compile(r"(\d+) Insufficient ([^\s,]+?)[,.]?(?=\s|$)")


@dataclass(frozen=True, slots=True)
class ClassBackoff:
    """A Model's bad experience with a class."""

    why: str
    until: datetime


def observe(
    known: Mapping[str, ClassBackoff],
    pods: Iterable[Pod],
    *,
    now: datetime,
    timeout: Callable[[str], float],
    rolling: Collection[str] = (),
) -> dict[str, ClassBackoff]:
    """class -> setback: those of `known` that still hold, and what the Model's `pods` show now.

    `patience`: seconds after which a replica on a class is given up that never was ready (three cold starts). On the
    classes of `rolling` a rollout is under way, and what does not start there is of a new revision: no fault of the
    class. A class with a ready replica of the Model works.
    """
    found = {name: setback for name, setback in known.items() if setback.until > now}
    mine = [pod for pod in pods if pod.gpu_class and not pod.deleting and not pod.finished]
    works = {pod.gpu_class for pod in mine if pod.ready}
    until = now + timedelta(seconds=RETRY_SECONDS)
    for pod in sorted(mine, key=lambda pod: pod.name):
        name = pod.gpu_class or ""
        if pod.ready or pod.was_ready or pod.created is None or name in rolling or name in found:
            continue
        age = (now - pod.created).total_seconds()
        if pod.node is None:
            lacks = other_than_gpus(pod.unschedulable or "")
            if lacks and age >= UNSCHEDULABLE_SECONDS:
                found[name] = ClassBackoff(f"for {_minutes(age)} no node there had room for a replica: {lacks}", until)
        elif name not in works and (ended := _crashes(pod)) is not None:
            found[name] = ClassBackoff(ended, until)
        elif name not in works and age >= timeout(name):
            found[name] = ClassBackoff(f"a replica there was not ready after {_minutes(age)}, three cold starts", until)
    return found


def _crashes(pod: Pod) -> str | None:
    """What the engine of a replica says that ends again and again; None: it does not."""
    engine = pod.container(names.CONTAINER_ENGINE)
    if engine is None or engine.exit_code is None or engine.restarts < CRASHES:
        return None
    lines = (engine.exit_message or engine.exit_reason or "").strip().splitlines()
    last = f": {lines[-1].strip()}" if lines else ""
    return f"the engine of a replica there ended {engine.restarts} times with exit code {engine.exit_code}{last}"


def other_than_gpus(sentence: str) -> str | None:
    """What the scheduler misses on nodes that have the GPUs, in its own words; None: GPUs are what is missing.

    Extended resources, such as GPUs, have a slash in their names. A node that lacks both is named under both.
    """
    gpus, others = 0, dict[str, int]()
    for count, resource in _MISSING.findall(sentence.partition("preemption:")[0]):
        if "/" in resource:
            gpus = max(gpus, int(count))
        else:
            others[resource] = int(count)
    lacking = [f"Insufficient {name} on {count} node(s)" for name, count in sorted(others.items()) if count > gpus]
    return ", ".join(lacking) or None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
