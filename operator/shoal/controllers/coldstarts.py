"""How long replicas take from their pod's creation to Ready, by Model and class: the last one that was seen."""

from collections import deque
from collections.abc import Mapping
from typing import Final

from shoal.api.model import ColdStartStatus, Model, StartStages
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.coldstart import KEPT, ColdStart, median, node_wait, of_pod
from shoal.core.status.variants import cold_start
from shoal.engine.port import STARTUP_SECONDS

TIMEOUT_FACTOR: Final = 3
"""Cold starts after which a replica that is not ready is given up."""
SHORTEST_TIMEOUT_SECONDS: Final = 300.0
LONGEST_TIMEOUT_SECONDS: Final = float(TIMEOUT_FACTOR * STARTUP_SECONDS)


class ColdStarts:
    """Measures how long pods take to become Ready."""

    def __init__(self, world: World, state: FleetState) -> None:
        self._world, self._state = world, state
        self._nodes: dict[str, deque[int]] = {}
        """class -> seconds in which an autoscaler added a node, the last few times."""

    def of(self, model: Model) -> Mapping[str, int]:
        """class -> seconds of the last cold start; those seen before this process began stand in the status."""
        before = {
            v.gpu_class: v.cold_start_seconds
            for v in (model.status.variants if model.status else ())
            if v.cold_start_seconds is not None
        }
        return before | self._state.record(model.metadata.uid).cold_starts

    def stages(self, model: Model) -> dict[str, ColdStartStatus]:
        """class -> stages of the last cold starts; those seen before this process began stand in the status."""
        found = {v.gpu_class: v.cold_start for v in (model.status.variants if model.status else ()) if v.cold_start}
        for name, starts in self._state.record(model.metadata.uid).start_stages.items():
            if (usual := median(starts)) is not None:
                found[name] = ColdStartStatus(last=_shown(starts[-1]), median=_shown(usual), starts=len(starts))
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
            longer = max(self._nodes.get(name, ()), default=round(said)) - waited
            if longer > 0:
                found[name] = longer
        return found

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is None or before is None or before.ready or not after.model_uid or not after.gpu_class:
            return
        seconds = cold_start(after)
        if seconds is not None:
            record = self._state.record(after.model_uid)
            record.cold_starts[after.gpu_class] = seconds
            node = self._world.nodes.get(after.node) if after.node is not None else None
            if node is not None and (waited := node_wait(after, node)) is not None:
                self._nodes.setdefault(after.gpu_class, deque(maxlen=KEPT)).append(waited)
            if (found := of_pod(after)) is not None:
                record.start_stages.setdefault(after.gpu_class, deque(maxlen=KEPT)).append(found)

    def on_graphs(self, pod: facts.Pod, seconds: float) -> bool:
        """The engine of a pod says for how long it captured graphs. Returns whether its start is one that counts."""
        if pod.model_uid is None or pod.gpu_class is None:
            return False
        starts = self._state.record(pod.model_uid).start_stages.get(pod.gpu_class, deque[ColdStart]())
        for i, start in enumerate(starts):
            if start.pod == pod.uid:
                starts[i] = start.with_graphs(seconds)
                return True
        return False


def _shown(start: ColdStart) -> StartStages:
    return StartStages(
        schedule=start.schedule, pull=start.pull, fetch=start.fetch, load=start.load, graph_capture=start.graphs
    )
