"""A single thing that is wrong, before it is known what explains what."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum
from typing import Final

from shoal.core.layers.advice import State
from shoal.core.layers.faults import advice
from shoal.core.layers.types import Evidence

MOST_EVIDENCE: Final = 5
"""Of one cause; more of the same are counted."""


class Level(IntEnum):
    """What it was seen on. On one layer, a node's fault explains a pod's, and a pod's a condition."""

    NODE = 0
    POD = 1
    OBJECT = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reason with what shows it."""

    reason: str
    message: str
    level: Level
    evidence: tuple[Evidence, ...]
    pods: frozenset[str] = frozenset()
    """Keys of the pods that it affects."""
    tried: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    reached: State | None = None
    """None: the state of the reason's row."""
    aside: bool = False
    """Of something beside serving, such as the request log: it explains nothing else."""
    everywhere: bool = field(default=False)
    """It affects every place where a replica could run."""
    about: str = ""
    """Name of the Model or adapter that it is about, where each has a cause of its own."""
    do: str = ""
    """What to do, where it is more exact than that of the reason."""

    @property
    def state(self) -> State:
        return self.reached or advice(self.reason).state

    @property
    def rank(self) -> tuple[int, int]:
        return advice(self.reason).layer.order, self.level


def age(now: datetime, at: datetime | None) -> int | None:
    """Seconds, never negative: the clocks of the cluster and of the reader differ."""
    return None if at is None else max(0, int((now - at).total_seconds()))


def merged(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One candidate per reason, and per thing that it is about: the most upstream sight of it, with the evidence of
    all."""
    found: dict[tuple[str, bool, str], list[Candidate]] = {}
    for each in candidates:
        found.setdefault((each.reason, each.aside, each.about), []).append(each)
    return [_merge(same) for same in found.values()]


def _merge(same: list[Candidate]) -> Candidate:
    first = min(same, key=lambda c: c.level)
    evidence = tuple(dict.fromkeys(e for c in sorted(same, key=lambda c: c.level) for e in c.evidence))
    if len(evidence) > MOST_EVIDENCE:
        more = Evidence(f"and {len(evidence) - MOST_EVIDENCE} more of the same", "", None)
        evidence = (*evidence[:MOST_EVIDENCE], more)
    return replace(
        first,
        evidence=evidence,
        pods=frozenset[str]().union(*(c.pods for c in same)),
        tried=tuple(dict.fromkeys(t for c in same for t in c.tried))[:MOST_EVIDENCE],
        consequences=tuple(dict.fromkeys(t for c in same for t in c.consequences)),
        reached="fault" if any(c.state == "fault" for c in same) else first.reached,
        everywhere=any(c.everywhere for c in same),
    )
