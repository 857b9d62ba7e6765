"""A fleet in memory, with a Deployment controller, a scheduler and engines that behave as the real ones: what a plan
brings about is seen after some steps, and the scheduler binds pods where it likes."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from shoal.core.placement import (
    Candidate,
    ClassSupply,
    Demand,
    Held,
    Moves,
    NodeSupply,
    Placement,
    ReplicaState,
    plan,
)

_START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class FleetNode:
    name: str
    gpu_class: str
    gpus: int
    takes_pods: bool = True


@dataclass(slots=True)
class FleetPod:
    model: str
    gpu_class: str
    gpus: int
    node: str | None = None
    ready: bool = False
    terminating: int = 0
    """Steps until it is gone; 0: not terminating."""


def demand(
    key: str,
    *candidates: Candidate,
    wanted: int = 1,
    priority: int = 0,
    age: int = 0,
    standing: Mapping[str, ReplicaState] | None = None,
    **more: object,
) -> Demand:
    """A Demand; `age` orders Models of equal priority: the lower, the older."""
    made = Demand(
        key=key,
        uid=key,
        wanted=wanted,
        candidates=candidates,
        minimum=wanted,
        priority=priority,
        created=_START + timedelta(minutes=age),
        replica_states=standing or {},
    )
    return replace(made, **more)  # type: ignore[arg-type]


def candidate(gpu_class: str, gpus: int = 1, cost: str | None = None, **more: object) -> Candidate:
    made = Candidate(gpu_class, gpus, Decimal(cost) if cost is not None else None)
    return replace(made, **more)  # type: ignore[arg-type]


def supply(name: str, *free: int, of: int | None = None, releasing: Iterable[int] = ()) -> ClassSupply:
    """A class with one node per number; `of` GPUs each (default: all are free)."""
    going = [*releasing, *([0] * len(free))]
    rooms = [NodeSupply(f"{name}-{i}", f, of if of is not None else f, going[i]) for i, f in enumerate(free)]
    return ClassSupply(name, tuple(rooms))


def standing(gpus: int, *ready: int, replicas: int | None = None, name: str = "", terminating: int = 0) -> ReplicaState:
    """A Deployment with so many ready pods on nodes `name`-0, `name`-1, ..."""
    on = {f"{name}-{i}": Held(n, n) for i, n in enumerate(ready) if n}
    if terminating:
        first = on.get(f"{name}-0", Held(0))
        on[f"{name}-0"] = replace(first, terminating=terminating)
    count = sum(ready) if replicas is None else replicas
    return ReplicaState(count, gpus, on, count)


class Fleet:
    """The cluster. `step` lets everybody act once."""

    def __init__(self, nodes: Iterable[FleetNode], models: Iterable[Demand], seed: int = 0, drain: int = 2) -> None:
        self.nodes = {n.name: n for n in nodes}
        self.models = {m.uid: m for m in models}
        self.pods: list[FleetPod] = []
        self.replicas: dict[tuple[str, str], tuple[int, int]] = {}
        """(model, class) -> (replicas, GPUs)."""
        self.moves = Moves()
        self.drain = drain
        self.start_chance = 0.7
        """That a bound pod turns ready in a step."""
        self.random = random.Random(seed)  # noqa: S311
        self.placements: dict[str, Placement] = {}

    # --- what the planner sees --------------------------------------------------------------------------------------

    def held(self, node: str, *, terminating: bool | None = None) -> int:
        return sum(
            p.gpus for p in self.pods if p.node == node and (terminating is None or bool(p.terminating) == terminating)
        )

    def supplies(self) -> list[ClassSupply]:
        classes = sorted({n.gpu_class for n in self.nodes.values()})
        return [
            ClassSupply(
                name,
                tuple(
                    NodeSupply(n.name, n.gpus - self.held(n.name), n.gpus, self.held(n.name, terminating=True))
                    for n in self.nodes.values()
                    if n.gpu_class == name and n.takes_pods
                ),
            )
            for name in classes
        ]

    def demands(self) -> list[Demand]:
        found = [replace(m, replica_states=self.standing(m.uid)) for m in self.models.values()]
        self.random.shuffle(found)
        return found

    def standing(self, model: str) -> dict[str, ReplicaState]:
        classes = {c for (m, c) in self.replicas if m == model} | {p.gpu_class for p in self.pods if p.model == model}
        return {name: self._standing(model, name) for name in sorted(classes)}

    def _standing(self, model: str, gpu_class: str) -> ReplicaState:
        replicas, gpus = self.replicas.get((model, gpu_class), (0, 1))
        mine = [p for p in self.pods if p.model == model and p.gpu_class == gpu_class]
        on: dict[str, Held] = {}
        for pod in mine:
            if pod.node is not None:
                old = on.get(pod.node, Held(0))
                on[pod.node] = Held(
                    old.pods + (not pod.terminating),
                    old.ready + (pod.ready and not pod.terminating),
                    old.terminating + bool(pod.terminating),
                )
        return ReplicaState(replicas, mine[0].gpus if mine else gpus, on, sum(not p.terminating for p in mine))

    # --- who acts ---------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, Placement]:
        """Plan, apply, then Deployments, scheduler, engines and kubelets."""
        self.placements = plan(self.demands(), self.supplies(), moves=self.moves)
        leaving: dict[tuple[str, str], dict[str, int]] = {}
        for model, placement in self.placements.items():
            keep = {v.gpu_class for v in placement.variants}
            for key in [k for k in self.replicas if k[0] == model and k[1] not in keep]:
                del self.replicas[key]
            for variant in placement.variants:
                self.replicas[model, variant.gpu_class] = (variant.replicas, variant.gpus)
                leaving[model, variant.gpu_class] = dict(variant.leaving)
        self._replica_sets(leaving)
        self._scheduler()
        for pod in list(self.pods):
            if pod.terminating == 1:
                self.pods.remove(pod)
            elif pod.terminating:
                pod.terminating -= 1
            elif pod.node is not None and self.random.random() < self.start_chance:
                pod.ready = True
        return self.placements

    def _replica_sets(self, leaving: dict[tuple[str, str], dict[str, int]]) -> None:
        keys = {(p.model, p.gpu_class) for p in self.pods} | set(self.replicas)
        for key in sorted(keys):
            replicas, gpus = self.replicas.get(key, (0, 1))
            mine = [p for p in self.pods if (p.model, p.gpu_class) == key and not p.terminating]
            first = leaving.get(key, {})
            # As a ReplicaSet ranks them: not bound, not ready, deletion cost.
            mine.sort(key=lambda p: (p.node is not None, p.ready, -first.get(p.node or "", 0)))
            for pod in mine[: max(0, len(mine) - replicas)]:
                if pod.node is None:
                    self.pods.remove(pod)
                else:
                    pod.terminating = self.random.randint(1, self.drain)
                    pod.ready = False
            for _ in range(replicas - len(mine)):
                self.pods.append(FleetPod(*key, gpus))

    def _scheduler(self) -> None:
        waiting = [p for p in self.pods if p.node is None]
        waiting.sort(key=lambda p: -self.models[p.model].priority)
        for pod in waiting:
            fitting = [
                n.name
                for n in self.nodes.values()
                if n.gpu_class == pod.gpu_class and n.takes_pods and n.gpus - self.held(n.name) >= pod.gpus
            ]
            if fitting:
                pod.node = self.random.choice(sorted(fitting))

    # --- what tests ask ---------------------------------------------------------------------------------------------

    def ready(self, model: str) -> int:
        return sum(p.ready for p in self.pods if p.model == model and not p.terminating)

    def wanted_replicas(self) -> dict[tuple[str, str], int]:
        return {key: n for key, (n, _) in self.replicas.items() if n}
