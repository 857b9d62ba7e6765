"""What stands of each Model, as the planner reads it: Deployments, their pods, and decisions on their way."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.placement import Held, ReplicaState
from shoal.kube.projections import Child

BROKEN = " (broken GPU)"
"""Stands behind the node's name for pods that hold a device which the kubelet calls unhealthy: no class has such a
node, so these pods count as stranded, and are replaced."""


def place(pod: facts.Pod) -> str | None:
    """Where the planner sees the pod."""
    return f"{pod.node}{BROKEN}" if pod.node and pod.broken_device else pod.node


@dataclass(slots=True)
class _WakeReservation:
    """Replicas that were asked for ahead of the plan: a Model wakes."""

    gpu_class: str
    replicas: int
    gpus: int
    written: bool = False


ExternalReservations = Callable[[str], Mapping[str, tuple[int, int]]]
"""Model's uid -> class -> (replicas, GPUs of each) that somebody else was told to write."""


class ReplicaStates:
    """Kept per Model until one of its objects changes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._states: dict[str, dict[str, ReplicaState]] = {}
        self._applying: dict[str, dict[str, tuple[int, int]]] = {}
        """Model's uid -> class -> (replicas, GPUs of each) that are being applied and that no Deployment shows yet."""
        self._reserved: dict[str, _WakeReservation] = {}
        """Model's uid -> what wakes it, until a plan has seen it: whatever was decided before must not lower that."""
        self.reserved_elsewhere: ExternalReservations = lambda _uid: {}
        """What KEDA was told: its HPA may write it at any moment, and a plan that did not count it would give the same
        GPUs away."""
        world.pods.listeners.append(self._pod)
        world.deployments.listeners.append(self._deployment)
        world.scaled_objects.listeners.append(self._deployment)

    def of(self, model_uid: str) -> Mapping[str, ReplicaState]:
        found = self._states.get(model_uid)
        if found is None:
            found = self._states[model_uid] = self._observe(model_uid)
        return found

    def begin_apply(self, model_uid: str, variants: Iterable[tuple[str, int, int]]) -> None:
        """(class, replicas, GPUs of each) that are about to be applied: a plan made meanwhile counts on them."""
        self._applying[model_uid] = {name: (replicas, gpus) for name, replicas, gpus in variants}
        self._states.pop(model_uid, None)

    def end_apply(self, model_uid: str) -> None:
        """What was applied stands in the Deployments, or has failed."""
        if self._applying.pop(model_uid, None) is not None:
            self._states.pop(model_uid, None)

    def refresh(self, model_uid: str) -> None:
        """Something else is promised to the Model."""
        self._states.pop(model_uid, None)

    def forget(self, model_uid: str) -> None:
        """The Model is gone."""
        self._states.pop(model_uid, None)
        self._applying.pop(model_uid, None)
        self._reserved.pop(model_uid, None)

    def begin(self) -> None:
        """A new term: nothing is on its way."""
        self._applying.clear()
        self._reserved.clear()
        self._states.clear()

    # --- ahead of the plan ------------------------------------------------------------------------------------------

    def reserve(self, model_uid: str, gpu_class: str, replicas: int, gpus: int) -> None:
        """So many replicas are about to be asked for on a class before a plan says so."""
        self._reserved[model_uid] = _WakeReservation(gpu_class, replicas, gpus)
        self._states.pop(model_uid, None)

    def reserved(self, model_uid: str, gpu_class: str) -> int:
        """Replicas that were asked for ahead of the plan; 0: none."""
        raised = self._reserved.get(model_uid)
        return raised.replicas if raised is not None and raised.gpu_class == gpu_class else 0

    def reserved_gpus(self, gpu_class: str) -> int:
        """GPUs of a class for which replicas were asked ahead of the plan."""
        return sum(r.replicas * r.gpus for r in self._reserved.values() if r.gpu_class == gpu_class)

    def written(self, model_uid: str) -> None:
        """They stand in the Deployment now: the next plan decides about them."""
        raised = self._reserved.get(model_uid)
        if raised is not None:
            raised.written = True

    def release(self, model_uid: str) -> None:
        """They could not be asked for."""
        if self._reserved.pop(model_uid, None) is not None:
            self._states.pop(model_uid, None)

    def written_reservations(self) -> Mapping[str, object]:
        """What was lifted and stands in its Deployment, by Model: the plan that is made now reads it there."""
        return {uid: raised for uid, raised in self._reserved.items() if raised.written}

    def planned(self, reservations: Mapping[str, object]) -> None:
        """That plan is made, and counts. What was lifted anew meanwhile it has not seen."""
        for uid, raised in reservations.items():
            if self._reserved.get(uid) is raised:
                self.release(uid)

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        for pod in (before, after):
            if pod is not None and pod.model_uid:
                self._states.pop(pod.model_uid, None)

    def _deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child in (before, after):
            if child is not None:
                self._states.pop(child.model_uid, None)

    def _observe(self, model_uid: str) -> dict[str, ReplicaState]:
        pods: dict[str, list[facts.Pod]] = {}
        for pod in self._world.pods.by("model", model_uid):
            if pod.gpu_class and not pod.finished:
                pods.setdefault(pod.gpu_class, []).append(pod)
        found = {
            d.gpu_class: _standing(d, pods.pop(d.gpu_class, []))
            for c in self._world.deployments_of(model_uid)
            if (d := c.deployment) is not None and not d.deleting
        }
        for name, left in pods.items():
            # Their Deployment is gone: they go too, though the garbage collector may not have told them yet, and hold
            # their GPUs until then. Counted as replicas they would call for that Deployment again, and so for ever.
            going = {node: Held(0, 0, held.pods + held.terminating) for node, held in _on(left).items()}
            found[name] = ReplicaState(0, max(_gpus(p) for p in left), going, pods=0)
        coming = dict(self.reserved_elsewhere(model_uid))
        for child in self._world.scaled_objects.by("model", model_uid):
            # Of a term before this one: an HPA goes to its minimum whatever it is answered.
            if (scaled := child.scaled) is not None and not scaled.deleting and scaled.gpu_class in found:
                before = coming.get(scaled.gpu_class, (0, found[scaled.gpu_class].gpus))
                coming[scaled.gpu_class] = (max(before[0], scaled.minimum), before[1])
        for name, (replicas, gpus) in self._applying.get(model_uid, {}).items():
            coming[name] = (max(replicas, coming.get(name, (0, 0))[0]), gpus)
        if (raised := self._reserved.get(model_uid)) is not None:
            before = coming.get(raised.gpu_class, (0, raised.gpus))
            coming[raised.gpu_class] = (max(before[0], raised.replicas), before[1])
        for name, (replicas, gpus) in coming.items():
            seen = found.get(name)
            if seen is None:
                found[name] = ReplicaState(replicas, gpus, {})
            elif replicas > seen.replicas:
                found[name] = ReplicaState(replicas, gpus, seen.by_node, pods=seen.pods, settled=seen.settled)
        return found


def _standing(deployment: facts.Deployment, pods: list[facts.Pod]) -> ReplicaState:
    return ReplicaState(
        replicas=deployment.replicas,
        gpus=deployment.gpus_per_replica,
        by_node=_on(pods),
        pods=sum(not p.deleting for p in pods),
        settled=deployment.rolled_out,
    )


def _on(pods: Iterable[facts.Pod]) -> dict[str, Held]:
    counted: dict[str, list[int]] = {}
    for pod in pods:
        where = place(pod)
        if where is None:
            continue
        count = counted.setdefault(where, [0, 0, 0])
        if pod.deleting:
            count[2] += 1
        else:
            count[0] += 1
            count[1] += pod.ready
    return {where: Held(*count) for where, count in counted.items()}


def _gpus(pod: facts.Pod) -> int:
    return max(pod.requests.values(), default=0)
