"""The view of pools and adapters for people: where adapters are, how they are used, why one is not placed."""

from collections.abc import Iterable, Iterator, Mapping

from shoal.api import reasons
from shoal.api.adapterstats import AdapterStats, PoolStats, ReplicaAdapters
from shoal.api.demand import AdapterDemand
from shoal.api.loraadapter import LoRAAdapter, engine_name
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.controllers.lora.placer import Placer
from shoal.controllers.lora.signals import AdapterSignals
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.status.conditions import find

_NOTHING = AdapterDemand(model="")


class AdapterView:
    """The view is computed only when it is requested."""

    def __init__(self, world: World, placer: Placer, signals: AdapterSignals) -> None:
        self._world, self._placer, self._signals = world, placer, signals

    def pool_keys(self, namespace: str | None, pool: str | None) -> list[str]:
        """Those of a namespace (None: all), or the one of this name."""
        found: list[str] = []
        for key in self._world.pools.known_keys():
            where, _, name = key.partition("/")
            if namespace in (None, where) and pool in (None, name):
                found.append(key)
        return sorted(found)

    def adapters(self, pool_key: str) -> Iterator[AdapterStats]:
        """Its adapters, in the order of their names."""
        pool, model = self._pool(pool_key)
        pods = self._pods(model)
        heard = [
            (p, k.adapters) for p in pods if (k := self._signals.keys(p.uid)) is not None and k.adapters is not None
        ]
        resident: dict[str, list[str]] = {}
        for pod, said in heard:
            for name, state in said.items():
                if state.state == "loaded":
                    resident.setdefault(name, []).append(pod.name)
        demands = [d for _, d in self._demands() if d is not None]
        customs = self._world.adapters.by("pool", pool_key) if pool is not None else ()
        for custom in sorted(customs, key=lambda c: (c.metadata.namespace or "", c.metadata.name)):
            if custom.object is not None:
                yield self._adapter(custom.object, resident if heard or not pods else None, demands, pods)

    def pool(self, pool_key: str, adapters: Iterable[AdapterStats]) -> PoolStats | None:
        """The pool with these of its adapters; None: it is gone."""
        pool, model = self._pool(pool_key)
        if pool is None:
            return None
        ready = find(pool.status.conditions, reasons.READY) if pool.status else None
        return PoolStats(
            pool=pool.key,
            model=pool.model_key,
            slots=pool.spec.slots,
            cached=pool.spec.cached,
            ready=ready.status if ready else "Unknown",
            reason=ready.reason if ready else "",
            message=ready.message if ready else "",
            stale=tuple(sorted(name for name, demand in self._demands() if demand is None)),
            replicas=tuple(self._replica(p) for p in self._pods(model)),
            adapters=tuple(adapters),
        )

    def _pool(self, key: str) -> tuple[LoRAPool | None, Model | None]:
        custom = self._world.pools.get(key)
        pool = custom.object if custom is not None else None
        model = self._world.models.get(pool.model_key) if pool is not None else None
        return pool, model.object if model is not None else None

    def _pods(self, model: Model | None) -> list[facts.Pod]:
        found = self._world.pods.by("model", model.metadata.uid) if model is not None else ()
        return sorted((p for p in found if not p.finished), key=lambda p: p.name)

    def _demands(self) -> Iterable[tuple[str, Mapping[str, AdapterDemand] | None]]:
        world = self._world
        for gateway in world.gateways():
            if gateway.was_ready and not world.is_lost(gateway):
                yield gateway.name, self._signals.adapter_demand(gateway.uid)

    def _replica(self, pod: facts.Pod) -> ReplicaAdapters:
        keys = self._signals.keys(pod.uid)
        if keys is None:
            return ReplicaAdapters(pod=pod.name, ready=pod.ready, live=False)
        said = keys.adapters
        return ReplicaAdapters(
            pod=pod.name,
            ready=pod.ready,
            live=True,
            slots=keys.adapter_slots,
            leased=keys.adapter_slots_leased,
            waiting=keys.adapters_waiting,
            loaded=None if said is None else sum(s.state == "loaded" for s in said.values()),
            failed=None if said is None else sum(s.state == "failed" for s in said.values()),
            loads=keys.adapter_loads_total,
            evictions=keys.adapter_evictions_total,
        )

    def _adapter(
        self,
        adapter: LoRAAdapter,
        resident: Mapping[str, list[str]] | None,
        demands: list[Mapping[str, AdapterDemand]],
        pods: list[facts.Pod],
    ) -> AdapterStats:
        uid, current = adapter.metadata.uid, adapter.current
        following = adapter.status.next if adapter.status else None
        ready = find(adapter.status.conditions, reasons.READY) if adapter.status else None
        accepted = find(adapter.status.conditions, reasons.ACCEPTED) if adapter.status else None
        if ready is not None and ready.status == "True" and accepted and accepted.reason == reasons.NOT_GRANTED:
            ready = ready.model_copy(update={"reason": accepted.reason, "message": accepted.message})
        verdict = self._placer.verdict(uid)
        homes = set(verdict.homes) if verdict is not None else set[str]()
        mine = [d.get(uid, _NOTHING) for d in demands]
        name = engine_name(adapter.key, current.revision) if current is not None else ""
        no_room = verdict is not None and verdict.reason is not None
        return AdapterStats(
            adapter=adapter.key,
            residency=adapter.spec.residency,
            revision=name.rpartition("@")[2] or None,
            next=engine_name(adapter.key, following.revision).rpartition("@")[2] if following else None,
            rank=current.rank if current else None,
            size_bytes=current.size_bytes if current else None,
            ready=ready.status if ready else "Unknown",
            reason=verdict.reason if no_room and verdict and verdict.reason else ready.reason if ready else "",
            message=verdict.message if no_room and verdict else ready.message if ready else "",
            wanted=verdict.wanted if verdict is not None else None,
            resident=None if resident is None else tuple(resident.get(name, ())),
            desired=tuple(p.name for p in pods if p.uid in homes),
            in_flight=sum(d.in_flight for d in mine) if demands else None,
            held=sum(d.held for d in mine) if demands else None,
            arrivals=sum(d.arrivals for d in mine) if demands else None,
            misses=sum(d.misses for d in mine) if demands else None,
            last_used=self._placer.last_used(uid),
        )
