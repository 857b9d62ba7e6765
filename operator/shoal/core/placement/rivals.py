"""Which other Models stand between a Model and its GPUs."""

from collections.abc import Iterable, Sequence

from shoal.core.placement.case import Case
from shoal.core.placement.room import Room
from shoal.core.placement.types import Demand

_Holders = list[tuple[int, int, str]]
"""(priority, -GPUs, key) of the Models on one class, the highest priority first."""


class Rivals:
    def __init__(self, cases: Sequence[Case], rooms: dict[str, Room]) -> None:
        self._cases, self._rooms = cases, rooms
        self._holders: dict[str, _Holders] | None = None
        self._going: dict[str, list[Demand]] | None = None
        self._yielding: set[tuple[str, str]] = set()
        """(uid, class): a replica there goes only when another one is ready."""
        self._known: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = {}

    def before(self, case: Case) -> str | None:
        """The Models of higher priority that have the GPUs this one would run on; None where there is none."""
        demand = case.demand
        if case.evicted_by:
            classes = sorted({gpu_class for gpu_class, _ in case.evicted})
            return _sentence([f"{d.key} (priority {d.priority})" for d in case.evicted_by], classes)
        for candidate in case.order:
            room = self._rooms.get(candidate.gpu_class)
            if room is None or room.largest < candidate.gpus:
                continue
            held, names = self._above(candidate.gpu_class, demand.priority)
            if held >= candidate.gpus:
                return _sentence(names, [candidate.gpu_class])
        return None

    def going(self, case: Case, gpu_class: str) -> str:
        """Who gives up the GPUs for which a replica waits, and how long that may take."""
        if self._going is None:
            self._going = {}
            for other in self._cases:
                self._yielding.update((other.demand.uid, name) for name in other.yielding)
                for name, standing in other.demand.standing.items():
                    if standing.terminating:
                        self._going.setdefault(name, []).append(other.demand)
        losers = {loser.uid: loser for loser, of in case.evicts if of == gpu_class}
        for demand in self._going.get(gpu_class, ()):
            losers.setdefault(demand.uid, demand)
        if not losers:
            return "pods that are being deleted still hold"
        known = sorted(losers.values(), key=lambda d: d.key)
        names = [_name(case, d) for d in known]
        seconds = max(d.drain_seconds for d in known)
        text = f"{_names(names)} give{'s' if len(names) == 1 else ''} up"
        if any((d.uid, gpu_class) in self._yielding for d in known):
            return f"{text} when others serve in their place"
        return f"{text}, within {seconds} s"

    def _above(self, gpu_class: str, priority: int) -> tuple[int, tuple[str, ...]]:
        """GPUs of a class that Models above a priority have, and who they are, the largest first."""
        found = self._known.get((gpu_class, priority))
        if found is None:
            if self._holders is None:
                self._holders = self._look()
            above = [h for h in self._holders.get(gpu_class, ()) if h[0] > priority]
            above.sort(key=lambda h: (h[1], h[2]))
            names = tuple(f"{key} (priority {rank})" for rank, _, key in above)
            found = self._known[gpu_class, priority] = (-sum(h[1] for h in above), names)
        return found

    def _look(self) -> dict[str, _Holders]:
        found: dict[str, _Holders] = {}
        for case in self._cases:
            for candidate in case.demand.candidates:
                replicas = case.replicas(candidate.gpu_class)
                if replicas:
                    entry = (case.demand.priority, -replicas * candidate.gpus, case.demand.key)
                    found.setdefault(candidate.gpu_class, []).append(entry)
        return found


def _name(case: Case, other: Demand) -> str:
    if other.uid == case.demand.uid:
        return "its own replica that goes"
    return f"{other.key} (priority {other.priority})"


def _sentence(names: Sequence[str], classes: Iterable[str]) -> str:
    have = "has" if len(names) == 1 else "have"
    return f"{_names(names)}, which {have} GPUs of {' and '.join(classes)}"


def _names(names: Sequence[str], most: int = 2) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(names)
