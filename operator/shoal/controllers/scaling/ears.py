"""What the scaler hears of replicas and gateways: a stream to each of their pods, or something that stands for it."""

import asyncio
from typing import Protocol

from shoal.api import keys, names
from shoal.api.lorapool import LoRAPool
from shoal.controllers.installkey import InstallKeys, InstallKeySource
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.scaling import Demand, Load
from shoal.kube.projections import Custom
from shoal.signals.listen import Changed, Listener
from shoal.signals.stream import Me, Peer


class Ears(Protocol):
    """None is "not heard", never zero."""

    def load(self, pod_uid: str) -> Load | None:
        """What a replica's agent says."""
        ...

    def demand(self, gateway_uid: str, model_uid: str) -> Demand | None:
        """What a gateway has of a Model; zeros when it is heard and has nothing."""
        ...

    def boot(self, gateway_uid: str) -> str | None:
        """The boot id of a gateway that is heard."""
        ...

    def age(self, uid: str) -> float | None:
        """Seconds since a pod of either kind was heard."""
        ...

    def tokens_per_second(self, pod_uid: str) -> float | None:
        """Of a replica, for people."""
        ...

    def arrivals_per_second(self, model_uid: str) -> float | None:
        """Requests of a Model, for people."""
        ...


class Streams:
    """Listens to every engine pod and every gateway that the store knows, whether this operator leads or not.

    `pooled`: of the engine pods only to those of Models with a LoRAPool. Which adapters they have is told in streams
    alone, wherever loads come from.
    """

    def __init__(
        self, world: World, install: InstallKeySource, changed: Changed, me: Me, *, pooled: bool = False
    ) -> None:
        self._world, self._install, self._pooled = world, install, pooled
        self.listener = Listener(changed, me)
        self._running = False
        world.pods.listeners.append(self._pod)
        install.changed.append(self._follow_all)
        if pooled:
            world.pools.listeners.append(self._pool)

    async def run(self) -> None:
        """Listens until cancelled."""
        await self._install.known.wait()
        self.listener.start()
        self._running = True
        try:
            self._follow_all()
            await asyncio.Event().wait()
        finally:
            self._running = False
            await self.listener.close()

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if not self._running:
            return
        if before is not None and (after is None or after.uid != before.uid or after.finished):
            self.listener.forget(before.uid)
        if after is not None and not after.finished:
            same = before is not None and (before.uid, before.ip, before.install_key) == (
                after.uid,
                after.ip,
                after.install_key,
            )
            if not same:
                self._follow(after)

    def _pool(self, _key: str, before: Custom[LoRAPool] | None, after: Custom[LoRAPool] | None) -> None:
        if before is None or after is None:
            self._follow_all()

    def _follow_all(self) -> None:
        if self._running:
            for pod in self._world.pods.values():
                if not pod.finished:
                    self._follow(pod)

    def _follow(self, pod: facts.Pod) -> None:
        install = self._install.keys
        if pod.ip is None or install is None:
            return
        if pod.model_uid is not None and self._pooled and not self._has_pool(pod.model_uid):
            self.listener.forget(pod.uid)
        elif pod.model_uid is not None:
            self.listener.listen_to_replica(pod.model_uid, _agent(pod, install, pod.model_uid))
        elif pod.gateway and pod.namespace == self._world.namespace:
            self.listener.listen_to_gateway(_gateway(pod, install))

    def _has_pool(self, model_uid: str) -> bool:
        custom = self._world.model_by_uid(model_uid)
        return custom is not None and custom.object is not None and self._world.pool_of(custom.object.key) is not None


def _agent(pod: facts.Pod, install: InstallKeys, model_uid: str) -> Peer:
    """A pod names the install key from which its keys were made, and knows no other."""
    key = install.current
    if pod.install_key == install.old_fingerprint and install.previous is not None:
        key = install.previous
    return Peer(pod.uid, pod.name, pod.ip or "", keys.derive(key, "operator", model_uid))


def _gateway(pod: facts.Pod, install: InstallKeys) -> Peer:
    """Its mounted key may be older than the Secret."""
    other = () if install.previous is None else (keys.derive(install.previous, "operator", keys.DEMAND),)
    return Peer(
        pod.uid,
        pod.name,
        pod.ip or "",
        keys.derive(install.current, "operator", keys.DEMAND),
        port=names.OPS_PORT,
        other_keys=other,
    )
