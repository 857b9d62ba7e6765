"""Messages and conditions of Models whose replicas KEDA writes."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shoal.api.decisions import DrivenVariant, DriverStats
from shoal.api.model import Model
from shoal.controllers.keda.answers import ScalerEndpoint
from shoal.controllers.keda.observe import KEDAObserver
from shoal.controllers.keda.targets import Key, ScalerTargets
from shoal.controllers.world import World
from shoal.core.keda import judge
from shoal.core.status.conditions import ConditionUpdate

SWEEP_SECONDS: Final = 5.0
"""How often it is looked who has fallen silent."""
RECONNECT_SECONDS: Final = 60.0
"""From one time that KEDA is led out of a connection to the next, for one ScaledObject."""


@dataclass(slots=True)
class _Reconnects:
    """Out of connections, of one ScaledObject."""

    count: int = 0
    last: float = -math.inf
    """When, on the clock of `ScalerTargets`."""
    tried: bool = False
    """In this silence."""


class Conditions:
    """`run` while this operator leads."""

    def __init__(
        self,
        world: World,
        observer: KEDAObserver,
        targets: ScalerTargets,
        endpoint: ScalerEndpoint,
        wake: Callable[[str], None],
    ) -> None:
        """`wake` is called with the uid of a Model whose messages have changed."""
        self._world, self._observer, self._targets, self._endpoint = world, observer, targets, endpoint
        self._wake = wake
        self._problem: str | None = None
        self._silent: dict[Key, bool | None] = {}
        self._ways: dict[Key, _Reconnects] = {}

    def begin(self) -> None:
        """A new term."""
        self._silent.clear()
        self._ways.clear()

    def finding(self, model: Model) -> ConditionUpdate | None:
        """The condition ScalingActive; None: there is nothing to say."""
        return judge(self._observer.observed(model, self._endpoint.problem))

    def refused(self, model: Model) -> bool:
        """A ScaledObject was not taken, and it has to be looked again whether it is."""
        return self._observer.is_refused(model.metadata.uid)

    def reconnects(self, key: Key) -> int:
        """How often KEDA was led out of a connection in which it had fallen silent. It sets its questions no deadline:
        after a leader whose node vanished it waits in the old one for as long as TCP does, a quarter of an hour."""
        ways = self._ways.get(key)
        return 0 if ways is None else ways.count

    def stats(self, model: Model) -> DriverStats | None:
        """The condition with its numbers, for `kubectl shoal why`; None: there is nothing to say."""
        found = self.finding(model)
        if found is None:
            return None
        deployments = [c.deployment for c in self._world.deployments_of(model.metadata.uid)]
        variants = tuple(
            DrivenVariant(
                gpu_class=d.gpu_class, answered=self._targets.number((d.namespace, d.name)), replicas_written=d.replicas
            )
            for d in sorted((d for d in deployments if d is not None), key=lambda d: d.gpu_class)
        )
        return DriverStats(
            driver=self._observer.driver(model),
            status=found.status,
            reason=found.reason,
            message=found.message,
            variants=variants,
        )

    def scaled_by(self, model: Model) -> str:
        """Autoscalers that write the replicas of a Model of which Shoal itself carries out nothing, by name; empty:
        none does, or there is no telling yet."""
        self._observer.need()
        found = (
            hpa.name
            for child in self._world.deployments_of(model.metadata.uid)
            for hpa in self._world.autoscalers.by("target", f"{child.namespace}/{child.name}")
        )
        return ", ".join(f"HorizontalPodAutoscaler {name}" for name in sorted(found))

    async def run(self) -> None:
        """Tells who has fallen silent, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Wakes the Models whose messages have changed without an event."""
        if self._problem != (problem := self._endpoint.problem):
            self._problem = problem
            self.wake_all()
        before, self._silent = self._silent, {}
        for child in list(self._world.scaled_objects.values()):
            key = (child.namespace, child.name)
            silent = self._silent[key] = self._observer.silent(key)
            if silent:
                self._targets.mark_stale(key)
            scaled = child.scaled
            asks_nobody = scaled is None or scaled.deleting or scaled.paused_by is not None
            if self._should_reconnect(key, bool(silent) and not asks_nobody) or silent != before.get(key):
                self._wake(child.model_uid)
        self._ways = {key: ways for key, ways in self._ways.items() if key in self._silent}

    def _should_reconnect(self, key: Key, silent: bool) -> bool:
        """Whether to lead KEDA out now: once in each silence, since where KEDA is away it does not help."""
        ways = self._ways.setdefault(key, _Reconnects())
        if not silent:
            ways.tried = False
            return False
        now = self._targets.clock()
        if ways.tried or now - ways.last < RECONNECT_SECONDS:
            return False
        ways.count, ways.last, ways.tried = ways.count + 1, now, True
        return True

    def wake_all(self) -> None:
        """Every Model whose replicas KEDA writes."""
        for custom in list(self._world.models.values()):
            if custom.object is not None and self._observer.driver(custom.object) == "KEDA":
                self._wake(custom.metadata.uid)
