"""The other gateways, as this one hears them: how much of a Model waits there, and how many of them live."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core import facts
from shoal.core.quota.others import UNKNOWN_CROWD, Crowd
from shoal.core.quota.others import Peer as Other
from shoal.gateway.tenantdemand import TenantBook
from shoal.kube import projections
from shoal.kube.client import Client
from shoal.kube.reflector import Reflector
from shoal.kube.resources import PODS
from shoal.net.tls import Credentials
from shoal.serving.installkey import KeyRing
from shoal.signals.demand import DemandStreams
from shoal.signals.stream import Me, gateway_peer

SELECTOR: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY},{names.LABEL_PART_OF}={names.MANAGED_BY}"


class Peers:
    """Follows every other gateway in this one's namespace. `changed` hears the uid of a Model of which more or less
    waits elsewhere, or None for every Model. `tenants` hears what they have of tenants with limits."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        me: Me,
        key_ring: KeyRing,
        *,
        changed: Callable[[str | None], None] = lambda _: None,
        tenants: TenantBook | None = None,
        port: int = names.OPS_PORT,
        credentials: Credentials | None = None,
    ) -> None:
        self._me = me
        self._key_ring = key_ring
        self._changed = changed
        self._port = port
        self._credentials = credentials
        self._tenants = TenantBook() if tenants is None else tenants
        self.streams = DemandStreams(self._heard, me, self._tenants.hear)
        self.reflector = Reflector(
            client,
            PODS,
            namespace=namespace,
            label_selector=SELECTOR,
            project=partial(_project, me.name),
            on_event=lambda _kind, _pod: self.follow(),
        )

    def follow(self) -> None:
        """Listens to exactly the gateways that there are; again after the install key changed."""
        if self.reflector.synced.is_set():
            self._tenants.retain({pod.uid for pod in self._pods()})
        own = self._key_ring.demand_keys("gateway")
        if not own:
            return
        self.streams.set_peers(
            gateway_peer(
                pod.uid,
                pod.key,
                pod.ip,
                own[0],
                mtls=pod.mtls,
                credentials=self._credentials,
                other_keys=own[1:],
                port=self._port,
            )
            for pod in self._pods()
            if pod.ip is not None
        )

    @property
    def live(self) -> int:
        """Gateways with a live stream, this one counted."""
        return 1 + len(self.streams.live())

    def held_elsewhere(self, uid: str) -> int | None:
        """Requests of a Model that wait in the other gateways. None: not known, for one of them is not heard."""
        if not self.reflector.synced.is_set():
            return None
        total = 0
        for pod in self._pods():
            stream = self.streams.get(pod.uid)
            if stream is not None:
                said = stream.demand(uid)
                if not said.whole:
                    return None
                total += max(0, said.held)
            elif pod.was_ready and not pod.deleting:
                # One that is going and says nothing any more holds nothing for much longer.
                return None
        return total

    def crowd(self) -> Crowd:
        """The other gateways that serve requests, for the limits that all share."""
        if not self.reflector.synced.is_set():
            return UNKNOWN_CROWD
        crowd: list[Other] = []
        for pod in self._pods():
            stream = self.streams.get(pod.uid)
            if stream is not None and stream.tells_tenants:
                crowd.append(Other(stream.boot, stream.heard_at))
            elif stream is not None or (pod.was_ready and not pod.deleting):
                crowd.append(Other(self._tenants.boot_of(pod.uid), None))
        return crowd

    def _pods(self) -> Collection[facts.Pod]:
        return [pod for pod in self.reflector.objects.values() if not pod.finished]

    def _heard(self, _gateway: str, models: Collection[str] | None) -> None:
        for uid in (None,) if models is None else models:
            self._changed(uid)


def _project(own: str, raw: JsonObject) -> facts.Pod | None:
    """Every gateway but this one."""
    pod = projections.pod(raw)
    return pod if pod is not None and pod.gateway and pod.name != own else None
