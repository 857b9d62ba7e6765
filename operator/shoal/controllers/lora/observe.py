"""One pool as placing sees it: from the store and the streams."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from shoal.api import reasons
from shoal.api.adapters import AdapterSettings
from shoal.api.model import Model
from shoal.api.replica import AdapterState, ReplicaKeys
from shoal.controllers.lora.signals import AdapterSignals
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.lora.lifecycle.held import HeldState
from shoal.core.lora.placement import types
from shoal.core.status.observed import ModelProblem


class PoolObserver:
    """Makes snapshots."""

    def __init__(self, world: World, signals: AdapterSignals) -> None:
        self._world, self.signals = world, signals

    def homes(self, model_uid: str) -> list[facts.Pod]:
        """Replicas whose agents say that they take adapters: others were started before there was a pool."""
        found: list[facts.Pod] = []
        for pod in self._world.pods.by("model", model_uid):
            keys = None if pod.finished else self.signals.keys(pod.uid)
            if keys is not None and keys.adapter_slots is not None:
                found.append(pod)
        return found

    def counts(self, model_uid: str) -> tuple[int, int]:
        """(ready replicas, those of them that do not say what they have)."""
        pods = [p for p in self._world.pods.by("model", model_uid) if p.ready and not p.deleting]
        said = [self.signals.keys(p.uid) for p in pods if not self._world.is_lost(p)]
        taking = [k for k in said if k is None or k.adapter_slots is not None]
        return len(taking), sum(k is None or k.adapters is None for k in taking)

    def snapshot(
        self, model: Model, settings: AdapterSettings, adapters: Mapping[str, types.Adapter]
    ) -> types.PoolSnapshot:
        """The pool now. `adapters` is read while it is planned with, and not kept."""
        world = self._world
        limits = types.Limits(settings.slots, settings.cached)
        pods = sorted(world.pods.by("model", model.metadata.uid), key=lambda p: p.uid)
        return types.PoolSnapshot(
            limits=limits,
            replicas=tuple(r for p in pods if not p.finished and (r := self._replica(p, limits)) is not None),
            adapters=MappingProxyType(dict(adapters)),
            sources=tuple(self._source(g) for g in world.gateways() if g.was_ready and not world.is_lost(g)),
        )

    def _replica(self, pod: facts.Pod, limits: types.Limits) -> types.Replica | None:
        keys = self.signals.keys(pod.uid)
        if keys is not None and keys.adapter_slots is None:
            return None  # of before the pool
        own: types.Limits | None = None
        if keys is not None and keys.adapter_slots is not None and keys.adapter_slots != limits.slots - 1:
            # Of before a resize. What it caches is not said: no more than it has slots is certain.
            slots = keys.adapter_slots + 1
            own = replace(limits, slots=slots, cached=min(limits.cached, slots))
        return types.Replica(
            uid=pod.uid,
            pod=pod.key,
            ready=pod.ready and keys is not None,
            draining=pod.deleting or self._world.is_lost(pod) or (keys is not None and keys.phase == "draining"),
            resident=_resident(keys),
            limits=own,
        )

    def _source(self, gateway: facts.Pod) -> types.AdapterSignalSource:
        return types.AdapterSignalSource(
            gateway.name, self.signals.boot(gateway.uid), self.signals.adapter_demand(gateway.uid)
        )

    def states(self, model_uid: str, adapters: Mapping[str, types.Adapter]) -> dict[str, HeldState]:
        """By uid: what ready replicas say of adapters; one of which none says anything is absent."""
        said = dict(self._reported(model_uid))
        if not said:
            return {}
        found: dict[str, HeldState] = {}
        for uid, adapter in adapters.items():
            current = said.get(adapter.current.name) if adapter.current is not None else None
            following = said.get(adapter.next.name) if adapter.next is not None else None
            if current or following:
                found[uid] = HeldState(
                    loaded=_loaded(current),
                    failure=_failure(current),
                    next_loaded=_loaded(following),
                    next_failure=_failure(following),
                )
        return found

    def _reported(self, model_uid: str) -> Iterable[tuple[str, list[tuple[str, AdapterState]]]]:
        said: dict[str, list[tuple[str, AdapterState]]] = {}
        for pod in sorted(self._world.pods.by("model", model_uid), key=lambda p: p.key):
            keys = self.signals.keys(pod.uid) if pod.ready and not pod.deleting else None
            for name, state in (keys.adapters or {}).items() if keys is not None else ():
                said.setdefault(name, []).append((pod.key, state))
        return said.items()


def _resident(keys: ReplicaKeys | None) -> frozenset[str] | None:
    if keys is None or keys.adapters is None:
        return None
    return frozenset(name for name, state in keys.adapters.items() if state.state == "loaded")


def _loaded(said: list[tuple[str, AdapterState]] | None) -> int:
    return sum(state.state == "loaded" for _, state in said or ())


def _failure(said: list[tuple[str, AdapterState]] | None) -> ModelProblem | None:
    for pod, state in said or ():
        if state.state == "failed":
            return ModelProblem(state.reason or reasons.LOAD_FAILED, f"{state.message or 'no message'} (replica {pod})")
    return None
