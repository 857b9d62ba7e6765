"""The other gateways, by their demand streams: how many requests of a Model wait there, and how many gateways are
live."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Final

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core import facts
from shoal.core.quota.peerusage import UNKNOWN_PEERS, GatewayPeer, GatewayPeers
from shoal.core.routing.canary import CanaryCounts, CanaryHalt
from shoal.gateway.prefixes import PrefixShare
from shoal.gateway.tenantdemand import TenantUsageState
from shoal.kube import projections
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector
from shoal.kube.resources import PODS
from shoal.net.installkey import KeyRing
from shoal.net.stream import ListenerIdentity, gateway_peer
from shoal.net.tls import TLSCredentials
from shoal.signals.demand import CanariesCounted, DemandStreams
from shoal.signals.prefixes import PrefixStreams

SELECTOR: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY},{names.LABEL_PART_OF}={names.MANAGED_BY}"

_ATTEMPTS: Final = 2
"""To connect to a peer at the start, before its first message is no longer waited for. It may refuse the first one: a
certificate or a key may not have come yet."""


class Peers:
    """Follows every other gateway in this one's namespace. `changed` is called with the uid of a Model whose number of
    held requests changed at a peer, or None for every Model. `tenants` receives the peers' usage of tenants with
    limits, `prefixes` the prompts that they sent, `canaries_counted` how requests to canaries ended there."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        identity: ListenerIdentity,
        key_ring: KeyRing,
        *,
        changed: Callable[[str | None], None] = lambda _: None,
        tenants: TenantUsageState | None = None,
        port: int = names.OPS_PORT,
        credentials: TLSCredentials | None = None,
        prefixes: PrefixShare | None = None,
        canaries_counted: CanariesCounted | None = None,
    ) -> None:
        self._identity = identity
        self._key_ring = key_ring
        self._changed = changed
        self._port = port
        self._credentials = credentials
        self._tenants = TenantUsageState() if tenants is None else tenants
        self.streams = DemandStreams(
            self._on_demand, identity, self._tenants.peer_reported, canaries_counted, self._tenants.peer_lost
        )
        self.prefix_streams = None if prefixes is None else PrefixStreams(prefixes.heard, identity)
        self.reflector = Reflector(
            client,
            PODS,
            namespace=namespace,
            label_selector=SELECTOR,
            project=partial(_project, identity.name),
            on_event=lambda _kind, _pod: self.follow(),
        )

    def follow(self) -> None:
        """Connects streams to exactly the existing gateways. Called again after the install key changed."""
        if self.reflector.synced.is_set():
            self._tenants.retain({pod.uid for pod in self._pods()})
        own = self._key_ring.demand_keys("gateway")
        if not own:
            return
        peers = [
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
        ]
        self.streams.set_peers(peers)
        if self.prefix_streams is not None:
            self.prefix_streams.set_peers(peers)

    def start(self) -> None:
        """Opens the sessions; `follow` needs them."""
        self.streams.start()
        if self.prefix_streams is not None:
            self.prefix_streams.start()

    async def close(self) -> None:
        await self.streams.close()
        if self.prefix_streams is not None:
            await self.prefix_streams.close()

    @property
    def live(self) -> int:
        """Number of gateways with a live stream, including this one."""
        return 1 + len(self.streams.live())

    def held_by_peers(self, uid: str) -> int | None:
        """Held requests of a Model in the other gateways. None: unknown, because a peer's stream is not live."""
        if not self.reflector.synced.is_set():
            return None
        total = 0
        for pod in self._pods():
            stream = self.streams.get(pod.uid)
            if stream is not None:
                demand = stream.demand(uid)
                if not demand.whole:
                    return None
                total += max(0, demand.held)
            elif pod.was_ready and not pod.deleting:
                # A stopping peer without a live stream will hold nothing for much longer.
                return None
        return total

    def halted_canaries(self) -> dict[str, CanaryHalt]:
        """Canaries that another gateway has halted, by revision."""
        found: dict[str, CanaryHalt] = {}
        for stream in self.streams.live():
            found |= stream.canaries
        return found

    def canary_counts(self) -> Iterator[tuple[str, Mapping[str, CanaryCounts]]]:
        """What each of the other gateways has counted of canaries: the boot id of its process, and the counts since its
        start, by revision."""
        for stream in self.streams.live():
            if stream.boot is not None:
                yield stream.boot, stream.canary_counts

    def quota_peers(self) -> GatewayPeers:
        """The other gateways that serve requests, for the limits that all gateways share."""
        if not self.reflector.synced.is_set():
            return UNKNOWN_PEERS
        peers: list[GatewayPeer] = []
        for pod in self._pods():
            stream = self.streams.get(pod.uid)
            if stream is not None and stream.reports_tenants:
                peers.append(GatewayPeer(stream.boot, stream.received_at))
            elif stream is not None or (pod.was_ready and not pod.deleting):
                expected = stream is None and self.streams.awaits(pod.uid)
                peers.append(GatewayPeer(self._tenants.boot_of(pod.uid), None, expected))
        return peers

    def awaited(self) -> list[str] | None:
        """Pods, by name, of the other gateways that serve or served requests and whose first message has not come: it
        says what tenants with limits have used. A gateway to which the connection failed twice is left out. None: the
        other gateways are not listed yet."""
        if not self.reflector.synced.is_set():
            return None
        return [pod.name for pod in self._pods() if pod.was_ready and pod.ip is not None and self._awaits(pod.uid)]

    def _awaits(self, pod: str) -> bool:
        if self._tenants.boot_of(pod) is not None or self.streams.get(pod) is not None:
            return False
        return self.streams.failures(pod) < _ATTEMPTS

    def _pods(self) -> Collection[facts.Pod]:
        return [pod for pod in self.reflector.objects.values() if not pod.finished]

    def _on_demand(self, _gateway: str, models: Collection[str] | None) -> None:
        for uid in (None,) if models is None else models:
            self._changed(uid)


def _project(own: str, raw: JsonObject) -> facts.Pod | None:
    """Every gateway but this one."""
    pod = projections.pod(raw)
    return pod if pod is not None and pod.gateway and pod.name != own else None
