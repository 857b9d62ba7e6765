"""How long replicas take from their pod's creation to Ready, by Model and class: the last one that was seen."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from shoal.api import demand as api
from shoal.api.model import ColdStartStatus, Model, StartStages
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.coldstart import (
    FIRST_TOKEN,
    GRAPH_CAPTURE,
    KEPT,
    ColdStart,
    FirstAnswer,
    advise,
    measured,
    median,
    node_wait,
    of_pod,
)
from shoal.core.status.variants import cold_start
from shoal.engine.port import STARTUP_SECONDS

TIMEOUT_FACTOR: Final = 3
"""Cold starts after which a replica that is not ready is given up."""
SHORTEST_TIMEOUT_SECONDS: Final = 300.0
LONGEST_TIMEOUT_SECONDS: Final = float(TIMEOUT_FACTOR * STARTUP_SECONDS)
_MOST_FIRST_TOKENS: Final = 256
"""Pods of one Model of which it is remembered."""

Learned = Callable[[str, str, str, float], object]
"""Called with the uid of a Model, a class, and a stage of a start there that no pod tells, with its seconds: once for
each start."""


class ColdStarts:
    """Measures how long pods take to become Ready."""

    def __init__(
        self, world: World, state: FleetState, learned: Learned = lambda _model, _class, _stage, _seconds: None
    ) -> None:
        self._world, self._state, self._learned = world, state, learned
        self._nodes: dict[str, deque[int]] = {}
        """uid of a class -> seconds in which an autoscaler added a node, the last few times."""

    def of(self, model: Model) -> Mapping[str, int]:
        """class -> seconds of the last cold start; those seen before this process began stand in the status."""
        before = {
            v.gpu_class: v.cold_start_seconds
            for v in (model.status.variants if model.status else ())
            if v.cold_start_seconds is not None
        }
        return before | self._state.record(model.metadata.uid).cold_starts

    def stages(self, model: Model) -> dict[str, ColdStartStatus]:
        """class -> stages of the last cold starts; those seen before this process began stand in the status. The advice
        is always this version's."""
        found = {
            v.gpu_class: v.cold_start.model_copy(update={"advice": advise(measured(v.cold_start.median))})
            for v in (model.status.variants if model.status else ())
            if v.cold_start
        }
        for name, starts in self._state.record(model.metadata.uid).start_stages.items():
            if (usual := median(starts)) is not None:
                found[name] = ColdStartStatus(
                    last=_shown(starts[-1]), median=_shown(usual), starts=len(starts), advice=advise(usual)
                )
        return found

    def start_timeout(self, model: Model, gpu_class: str) -> float:
        """Seconds after which a replica that is not ready is given up: three cold starts, within bounds. The time in
        which an autoscaler adds a node comes on top, since the last cold start may have been on an existing node."""
        known, provision = self.of(model).get(gpu_class), self.provision_seconds(gpu_class) or 0.0
        if known is None:
            return LONGEST_TIMEOUT_SECONDS + provision
        timeout = min(LONGEST_TIMEOUT_SECONDS, max(SHORTEST_TIMEOUT_SECONDS, float(TIMEOUT_FACTOR * known)))
        return timeout + provision

    def provision_seconds(self, gpu_class: str) -> float | None:
        """Seconds in which an autoscaler adds a node of the class; None: the class has the nodes that exist."""
        custom = self._world.classes.get(gpu_class)
        autoscaled = custom.object.spec.nodes.autoscaled if custom is not None and custom.object is not None else None
        return None if autoscaled is None else float(autoscaled.provision_seconds)

    def node_waits(self, model: Model) -> dict[str, int]:
        """class -> seconds that the next replica may take longer than the latest one, because it waits for a node: the
        latest may have found one. Longest of the last few waits on the class; while there was none, what the class
        says."""
        found: dict[str, int] = {}
        stages = self.stages(model)
        for name in self.of(model):
            if (said := self.provision_seconds(name)) is None:
                continue
            waited = stages[name].last.schedule if name in stages else 0
            known = self.node_wait(name)
            longer = (round(said) if known is None else known) - waited
            if longer > 0:
                found[name] = longer
        return found

    def node_wait(self, gpu_class: str) -> int | None:
        """Seconds in which an autoscaler added a node of the class, the longest of the last few times. Of those before
        this process began, the status has the longest. None: nothing was measured."""
        waits = self._waits(gpu_class)
        return None if waits is None else max(waits, default=None)

    def _waits(self, gpu_class: str) -> deque[int] | None:
        """The last few waits for a node of the class; None: nobody adds nodes, or the class cannot be read."""
        custom = self._world.classes.get(gpu_class)
        if custom is None or custom.object is None or custom.object.spec.nodes.autoscaled is None:
            return None
        if (known := self._nodes.get(custom.metadata.uid)) is None:
            status = custom.object.status
            before = status.provision_seconds if status is not None else None
            known = self._nodes[custom.metadata.uid] = deque(() if before is None else (before,), maxlen=KEPT)
        return known

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is None or before is None or not after.model_uid or not after.gpu_class:
            return
        if before.ready or before.was_ready:
            return  # a replica that is Ready again, after its node was silent for a while, has not started
        seconds = cold_start(after)
        if seconds is not None:
            record = self._state.record(after.model_uid)
            record.cold_starts[after.gpu_class] = seconds
            node = self._world.nodes.get(after.node) if after.node is not None else None
            waited = node_wait(after, node) if node is not None else None
            if waited is not None and (waits := self._waits(after.gpu_class)) is not None:
                waits.append(waited)
            if (found := of_pod(after)) is not None:
                record.start_stages.setdefault(after.gpu_class, deque(maxlen=KEPT)).append(found)
                self._put_first_token(after.model_uid, after.uid)

    def on_graphs(self, pod: facts.Pod, seconds: float) -> bool:
        """The engine of a pod says for how long it captured graphs, once. Returns whether its start is one that
        counts."""
        if pod.model_uid is None or (place := self._start(pod.model_uid, pod.uid)) is None:
            return False
        gpu_class, starts, i = place
        starts[i] = starts[i].with_graphs(seconds)
        self._learned(pod.model_uid, gpu_class, GRAPH_CAPTURE, seconds)
        return True

    def on_first_tokens(self, model_uid: str, told: Mapping[str, api.FirstToken]) -> bool:
        """A gateway tells of the first tokens of pods, perhaps again. Returns whether this changes a start that counts:
        of several gateways, the one that sent the first request knows."""
        if self._world.model_by_uid(model_uid) is None:
            return False
        known, changed = self._state.record(model_uid).first_tokens, False
        for pod, new in told.items():
            before = known.get(pod)
            if before is not None and before.after <= new.after:
                continue
            known[pod] = FirstAnswer(new.after, new.seconds, before is not None and before.counted)
            changed = self._put_first_token(model_uid, pod) or changed
        while len(known) > _MOST_FIRST_TOKENS:
            del known[next(iter(known))]
        return changed

    def _put_first_token(self, model_uid: str, pod: str) -> bool:
        """Gateways see an engine become ready a moment before its pod is Ready, so either may be known first."""
        known, place = self._state.record(model_uid).first_tokens, self._start(model_uid, pod)
        if place is None or (told := known.get(pod)) is None:
            return False
        gpu_class, starts, i = place
        starts[i] = starts[i].with_first_token(told.seconds)
        if told.seconds is not None and not told.counted:
            known[pod] = replace(told, counted=True)
            self._learned(model_uid, gpu_class, FIRST_TOKEN, told.seconds)
        return True

    def _start(self, model_uid: str, pod: str) -> tuple[str, deque[ColdStart], int] | None:
        """Where the start of a pod is kept; None: nowhere, since it was not measured or is long ago."""
        for gpu_class, starts in self._state.record(model_uid).start_stages.items():
            for i, start in enumerate(starts):
                if start.pod == pod:
                    return gpu_class, starts, i
        return None


def _shown(start: ColdStart) -> StartStages:
    return StartStages(
        schedule=start.schedule,
        pull=start.pull,
        fetch=start.fetch,
        load=start.load,
        graph_capture=start.graphs,
        first_token=start.first_token,
    )
