"""The scaler's signals of replicas and gateways: a stream to each of their pods, or a replacement of the streams."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from shoal.api.lorapool import LoRAPool
from shoal.controllers import peers
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.scaling import Demand, Load
from shoal.kube.projections import Custom
from shoal.net.stream import ListenerIdentity
from shoal.net.tls import TLSCredentials
from shoal.signals.live import Changed, FirstTokensReported, LiveSignals


class ScalingSignals(Protocol):
    """None means that the signal is stale, never zero."""

    def load(self, pod_uid: str) -> Load | None:
        """What a replica's agent says."""
        ...

    def demand(self, gateway_uid: str, model_uid: str) -> Demand | None:
        """A gateway's demand for a Model; zeros while its stream is live and it has none."""
        ...

    def boot(self, gateway_uid: str) -> str | None:
        """Boot id of a gateway whose stream is live."""
        ...

    def age(self, uid: str) -> float | None:
        """Seconds since the last message of a pod of either kind."""
        ...

    def tokens_per_second(self, pod_uid: str) -> float | None:
        """Of a replica, for people."""
        ...

    def arrivals_per_second(self, model_uid: str) -> float | None:
        """Requests of a Model, for people."""
        ...


class SignalStreams:
    """Listens to every engine pod and every gateway that the store knows, whether this operator leads or not.

    `pooled`: of the engine pods only to those of Models with a LoRAPool. Only streams report which
    adapters they have, wherever loads come from.
    """

    def __init__(
        self,
        world: World,
        install: InstallKeySource,
        changed: Changed,
        identity: ListenerIdentity,
        *,
        pooled: bool = False,
        credentials: TLSCredentials | None = None,
        repriced: Callable[[], None] = lambda: None,
        canaries_halted: Callable[[], None] = lambda: None,
        first_tokens: FirstTokensReported = lambda _model, _told: None,
    ) -> None:
        """`repriced` is called when the ledger's currency changes, or why it refuses price lists; `canaries_halted`
        when gateways halt a canary."""
        self._world, self._install, self._pooled = world, install, pooled
        self._credentials = credentials
        self.listener = LiveSignals(changed, identity, repriced, canaries_halted, first_tokens)
        self._running = False

    async def run(self) -> None:
        """Listens until cancelled."""
        await self._install.known.wait()
        self.listener.start()
        self._running = True
        try:
            self.follow_all()
            await asyncio.Event().wait()
        finally:
            self._running = False
            await self.listener.close()

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if not self._running:
            return
        told = None if before is None else _stream_key(before)
        if before is not None and (
            after is None or after.uid != before.uid or after.finished or not _has_stream(after)
        ):
            self.listener.forget(before.uid)
        if after is not None and not after.finished and _stream_key(after) != told:
            self._follow(after)

    def on_pool(self, _key: str, before: Custom[LoRAPool] | None, after: Custom[LoRAPool] | None) -> None:
        if self._pooled and (before is None or after is None):
            self.follow_all()

    def follow_all(self) -> None:
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
            self.listener.listen_to_replica(pod.model_uid, peers.agent(pod, install, pod.model_uid, self._credentials))
        elif pod.gateway and pod.namespace == self._world.namespace:
            self.listener.listen_to_gateway(peers.gateway(pod, install, self._credentials))

    def _has_pool(self, model_uid: str) -> bool:
        custom = self._world.model_by_uid(model_uid)
        return custom is not None and custom.object is not None and self._world.pool_of(custom.object.key) is not None


def _stream_key(pod: facts.Pod) -> tuple[str | None, ...]:
    """All that a stream to a pod depends on."""
    return pod.uid, pod.ip, pod.install_key, pod.model_uid


def _has_stream(pod: facts.Pod) -> bool:
    return pod.model_uid is not None or pod.gateway
