"""Classes on which a Model's replicas fail to start: looked at while pods have been starting for long."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import structlog

from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.placement.backoff import ClassBackoff, observe

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0


class ClassBackoffs:
    """Kept in the Models' records: an operator that starts anew gives each class another chance."""

    def __init__(self, world: World, state: FleetState, cold: ColdStarts) -> None:
        self._world, self._state, self._cold = world, state, cold
        self._admitted: dict[str, datetime] = {}
        """Uid of a pod of a queue, or whose claim was refused -> when it last waited for quota, or was first seen."""

    async def run(self) -> None:
        """Looks every few seconds, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_SECONDS)

    def check(self) -> None:
        """Looks once at the Models with a replica that starts, and at those that have a backoff."""
        self._note_admissions()
        for uid in self._state.starting | {uid for uid, record in self._state.records() if record.backoffs}:
            record = self._state.record(uid)
            before = record.backoffs
            try:
                after = self._check(uid, before)
            except Exception:
                # One Model that cannot be looked at must not end the operator.
                log.exception("it is not known whether a class is in backoff for a Model", model_uid=uid)
                continue
            record.backoffs = after
            if after.keys() != before.keys():
                for name in after.keys() - before.keys():
                    log.warning("a class is in backoff for a Model", model_uid=uid, gpu_class=name, why=after[name].why)
                self._state.replan()

    def _note_admissions(self) -> None:
        """The API does not say when a gate was taken off, so it is noted while it is on."""
        now = self._world.now()
        starting = [pod for uid in self._state.starting for pod in self._world.pods.by("model", uid) if _starts(pod)]
        queued = [pod for pod in starting if pod.waited_for_quota or pod.gates]
        self._admitted = {p.uid: now if p.gated else self._admitted.get(p.uid, now) for p in queued}

    def _check(self, uid: str, before: Mapping[str, ClassBackoff]) -> dict[str, ClassBackoff]:
        custom = self._world.model_by_uid(uid)
        model = custom.object if custom is not None else None
        pods = [pod for pod in self._world.pods.by("model", uid) if not pod.finished]
        if not any(_starts(pod) for pod in pods):
            self._state.starting.discard(uid)
        if model is None:
            return {}
        rolling = {
            d.gpu_class
            for child in self._world.deployments_of(uid)
            if (d := child.deployment) is not None and (d.replacing or not d.rolled_out)
        }
        return observe(
            before,
            pods,
            now=self._world.now(),
            timeout=lambda name: self._cold.start_timeout(model, name),
            rolling=rolling,
            provision=self._cold.provision_seconds,
            admitted=self._admitted,
        )

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is not None and after.model_uid and _starts(after):
            self._state.starting.add(after.model_uid)


def _starts(pod: facts.Pod) -> bool:
    return not (pod.ready or pod.was_ready or pod.deleting or pod.finished)
