"""Which other Models hold the GPUs that a Model waits for."""

from collections.abc import Iterable, Sequence

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.modelplan import ModelPlan
from shoal.core.placement.types import Demand

_Holders = list[tuple[int, int, str]]
"""(priority, -GPUs, key) of the Models on one class, the highest priority first."""


class Contenders:
    def __init__(self, plans: Sequence[ModelPlan], capacities: dict[str, ClassCapacity]) -> None:
        self._plans, self._capacities = plans, capacities
        self._holders: dict[str, _Holders] | None = None
        self._releasing: dict[str, list[Demand]] | None = None
        self._yielding: set[tuple[str, str]] = set()
        """(uid, class): a replica there goes only when its replacement is ready."""
        self._known: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = {}

    def outranking(self, plan: ModelPlan) -> str | None:
        """The Models of higher priority that hold GPUs this Model could use; None: there are none."""
        demand = plan.demand
        if plan.evicted_by:
            classes = sorted({gpu_class for gpu_class, _ in plan.evicted})
            return _sentence([f"{d.key} (priority {d.priority})" for d in plan.evicted_by], classes)
        for candidate in plan.order:
            capacity = self._capacities.get(candidate.gpu_class)
            if capacity is None or capacity.largest < candidate.gpus:
                continue
            held, names = self._above(candidate.gpu_class, demand.priority)
            if held >= candidate.gpus:
                return _sentence(names, [candidate.gpu_class])
        return None

    def releasing(self, plan: ModelPlan, gpu_class: str) -> str:
        """Which Models release the GPUs that a replica waits for, and within how many seconds."""
        if self._releasing is None:
            self._releasing = {}
            for other in self._plans:
                self._yielding.update((other.demand.uid, name) for name in other.yielding)
                for name, state in other.demand.replica_states.items():
                    if state.terminating:
                        self._releasing.setdefault(name, []).append(other.demand)
        losers = {loser.uid: loser for loser, of in plan.evicts if of == gpu_class}
        for demand in self._releasing.get(gpu_class, ()):
            losers.setdefault(demand.uid, demand)
        if not losers:
            return "pods that are being deleted still hold"
        known = sorted(losers.values(), key=lambda d: d.key)
        names = [_name(plan, d) for d in known]
        seconds = max(d.drain_seconds for d in known)
        text = f"{_names(names)} give{'s' if len(names) == 1 else ''} up"
        if any((d.uid, gpu_class) in self._yielding for d in known):
            return f"{text} when others serve in their place"
        return f"{text}, within {seconds} s"

    def _above(self, gpu_class: str, priority: int) -> tuple[int, tuple[str, ...]]:
        """GPUs of a class held by Models above a priority, and the names of these Models, the largest first."""
        found = self._known.get((gpu_class, priority))
        if found is None:
            if self._holders is None:
                self._holders = self._collect_holders()
            above = [h for h in self._holders.get(gpu_class, ()) if h[0] > priority]
            above.sort(key=lambda h: (h[1], h[2]))
            names = tuple(f"{key} (priority {rank})" for rank, _, key in above)
            found = self._known[gpu_class, priority] = (-sum(h[1] for h in above), names)
        return found

    def _collect_holders(self) -> dict[str, _Holders]:
        found: dict[str, _Holders] = {}
        for plan in self._plans:
            for candidate in plan.demand.candidates:
                replicas = plan.replicas(candidate.gpu_class)
                if replicas:
                    entry = (plan.demand.priority, -replicas * candidate.gpus, plan.demand.key)
                    found.setdefault(candidate.gpu_class, []).append(entry)
        return found


def _name(plan: ModelPlan, other: Demand) -> str:
    if other.uid == plan.demand.uid:
        return "its own replica that goes"
    return f"{other.key} (priority {other.priority})"


def _sentence(names: Sequence[str], classes: Iterable[str]) -> str:
    have = "has" if len(names) == 1 else "have"
    return f"{_names(names)}, which {have} GPUs of {' and '.join(classes)}"


def _names(names: Sequence[str], most: int = 2) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(names)
