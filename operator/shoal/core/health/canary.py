"""Replicas that answer a greedy request otherwise than the others of their Model, class and revision.

Greedy answers of healthy engines begin alike and may differ later: which requests run in one batch moves the last bits
of a sum. So beginnings are compared. The known answer is what most replicas say, and it changes with them: where the
healthy ones do not give it any more, it is the known answer that was wrong.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

COMPARED: Final = 12
"""Characters at the beginning."""
ROUNDS: Final = 3
"""In a row, in which a replica has to differ."""
WITNESSES: Final = 2
"""Other replicas that must have said something else before a replica differs."""
_MOST_WITNESSES: Final = 16

CanaryVerdict = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Of a Model's replicas of one class and revision."""

    text: str
    witnesses: frozenset[str]
    """Uids of replicas that gave it."""


def judge(known: KnownAnswer | None, answers: Mapping[str, str]) -> tuple[KnownAnswer | None, dict[str, CanaryVerdict]]:
    """`answers`: uid of a replica -> its answer, of one round. Returns the answer that is known from now on."""
    groups: dict[str, set[str]] = {}
    for replica, text in sorted(answers.items()):
        groups.setdefault(text[:COMPARED], set()).add(replica)
    largest = max(sorted(groups), key=lambda text: len(groups[text]), default=None)
    if largest is not None and (
        known is None or (len(groups[largest]) >= WITNESSES and len(groups[largest]) * 2 > len(answers))
    ):
        before = known.witnesses if known is not None and known.text == largest else frozenset[str]()
        if known is None and len(groups[largest]) * 2 <= len(answers):
            return None, dict.fromkeys(answers, "unknown")  # nobody has a majority
        known = KnownAnswer(largest, _bounded(groups[largest], before))
    elif known is not None and known.text in groups:
        known = KnownAnswer(known.text, _bounded(groups[known.text], known.witnesses))
    return known, {replica: _verdict(known, replica, text[:COMPARED]) for replica, text in answers.items()}


def _bounded(now: set[str], before: frozenset[str]) -> frozenset[str]:
    earlier = sorted(before - now)[: max(0, _MOST_WITNESSES - len(now))]
    return frozenset(now).union(earlier)


def _verdict(known: KnownAnswer | None, replica: str, text: str) -> CanaryVerdict:
    others = len(known.witnesses - {replica}) if known is not None else 0
    if known is None or not others:
        return "unknown"
    if known.text == text:
        return "agrees"
    return "differs" if others >= WITNESSES else "unknown"


class CanaryWatch:
    """Rounds of canaries over time. Mutable; for one owner."""

    def __init__(self) -> None:
        self._known: dict[str, KnownAnswer] = {}
        self._rows: dict[str, int] = {}

    def round(self, group: str, answers: Mapping[str, str]) -> dict[str, CanaryVerdict]:
        """`group`: a Model, class and revision; `answers`: uid of a replica -> answer."""
        known, verdicts = judge(self._known.get(group), answers)
        if known is None:
            self._known.pop(group, None)
        else:
            self._known[group] = known
        for replica, verdict in verdicts.items():
            if verdict != "unknown":
                self._rows[replica] = self._rows.get(replica, 0) + 1 if verdict == "differs" else 0
        return verdicts

    def differs(self, replica: str) -> bool:
        """It has differed in every one of the last rounds."""
        return self._rows.get(replica, 0) >= ROUNDS

    def keep(self, replicas: Collection[str], groups: Collection[str]) -> None:
        """Forgets all others."""
        self._rows = {each: rows for each, rows in self._rows.items() if each in replicas}
        self._known = {each: known for each, known in self._known.items() if each in groups}
