"""Which classes Models have no luck with: looked at when pods have been starting for long, and told to the planner."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.placement.backoff import ClassBackoff, observe

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0


class ClassBackoffs:
    """Kept in memory: an operator that starts anew gives each class another chance."""

    def __init__(self, world: World, cold: ColdStarts, changed: Callable[[], None]) -> None:
        self._world, self._cold, self._changed = world, cold, changed
        self._backoffs: dict[str, dict[str, ClassBackoff]] = {}
        """Model's uid -> class -> setback."""
        self._starting: set[str] = set()
        """Models with a pod that was never ready, as far as its events say."""
        world.pods.listeners.append(self._pod)

    def of(self, model_uid: str) -> Mapping[str, str]:
        """class -> why it is the last choice for now."""
        return {name: setback.why for name, setback in self._backoffs.get(model_uid, {}).items()}

    async def run(self) -> None:
        """Looks every few seconds, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_SECONDS)

    def check(self) -> None:
        """Once over the Models that something starts of, and over those that had a setback."""
        for uid in list(self._starting | set(self._backoffs)):
            before = self._backoffs.get(uid, {})
            try:
                after = self._check(uid, before)
            except Exception:
                # One Model that cannot be looked at must not end the operator.
                log.exception("not known whether a Model has a setback", model_uid=uid)
                continue
            if after:
                self._backoffs[uid] = after
            else:
                self._backoffs.pop(uid, None)
            if after.keys() != before.keys():
                for name in after.keys() - before.keys():
                    log.warning("a Model has a setback", model_uid=uid, gpu_class=name, why=after[name].why)
                self._changed()

    def _check(self, uid: str, before: Mapping[str, ClassBackoff]) -> dict[str, ClassBackoff]:
        custom = self._world.model_by_uid(uid)
        model = custom.object if custom is not None else None
        pods = [pod for pod in self._world.pods.by("model", uid) if not pod.finished]
        if not any(_starts(pod) for pod in pods):
            self._starting.discard(uid)
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
        )

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is not None and after.model_uid and _starts(after):
            self._starting.add(after.model_uid)


def _starts(pod: facts.Pod) -> bool:
    return not (pod.ready or pod.was_ready or pod.deleting or pod.finished)
