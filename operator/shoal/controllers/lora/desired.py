"""Tells each agent what its replica should hold: on change, and again after the agent started anew."""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Final

import aiohttp
import prometheus_client
import structlog

from shoal.api import names
from shoal.api.adapters import DesiredAdapter, DesiredAdapters
from shoal.controllers import peers
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.lora.signals import AdapterSignals
from shoal.controllers.world import World
from shoal.core import facts
from shoal.kube.queue import WorkQueue
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.net.tls import NoCertificate, TLSCredentials, dial

log = structlog.get_logger()

SECONDS: Final = 5.0
"""For one answer. The agent only takes note; it loads afterwards."""
SENT = prometheus_client.Counter(
    "shoal_adapter_desired_writes", "Sets of desired adapters sent to agents, by outcome: written, failed.", ["outcome"]
)


class DesiredAdaptersRefused(Exception):
    """An agent did not take its floor; the text says why."""


@dataclass(slots=True)
class _PodState:
    """Of one pod."""

    pod_key: str
    desired: tuple[DesiredAdapter, ...]
    digest: str
    boot: str | None = None
    """Boot id of the agent that got `told`."""
    sent_digest: str = ""


class DesiredAdapterWriter:
    """Call `want` with what a replica should hold, `heard` when an agent may have restarted, and `run` while this
    operator leads."""

    def __init__(
        self,
        world: World,
        install: InstallKeySource,
        signals: AdapterSignals,
        queue: WorkQueue,
        identity: ListenerIdentity,
        credentials: TLSCredentials | None = None,
    ) -> None:
        self._world, self._install, self._signals, self.queue, self._identity = world, install, signals, queue, identity
        self._credentials = credentials
        self._wanted: dict[str, _PodState] = {}
        """By uid of the pod."""
        self._session: aiohttp.ClientSession | None = None

    def set(self, pod: facts.Pod, desired: tuple[DesiredAdapter, ...]) -> None:
        """What the replica should hold from now on."""
        known = self._wanted.get(pod.uid)
        if known is not None and known.desired == desired:
            return
        digest = hashlib.sha256("\n".join(f"{a.name} {a.uri} {a.pinned}" for a in desired).encode()).hexdigest()
        if known is None:
            self._wanted[pod.uid] = _PodState(pod.key, desired, digest)
        else:
            known.desired, known.digest = desired, digest
        self.queue.add(pod.uid)

    def reported(self, pod_uid: str) -> None:
        """The agent sent a message: it may be another process than the one that got the desired adapters."""
        known = self._wanted.get(pod_uid)
        if known is None:
            return
        boot = self._signals.agent_boot(pod_uid)
        if boot is not None and boot != known.boot:
            self.queue.add(pod_uid)

    def begin(self) -> None:
        """A new term: another leader may have sent other desired adapters."""
        self._wanted.clear()

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if before is not None and (after is None or after.uid != before.uid or after.finished):
            self._wanted.pop(before.uid, None)

    async def run(self) -> None:
        """Tells until cancelled."""
        # Agents are in the cluster: never through the proxy of the environment (trust_env is off by default).
        connector = aiohttp.TCPConnector(limit=16, force_close=True)
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            try:
                await self.queue.run(self.write)
            finally:
                self._session = None

    async def write(self, pod_uid: str) -> float | None:
        """Tells one agent, unless it knows. Raises FloorRefused: the queue tries again."""
        known = self._wanted.get(pod_uid)
        boot = self._signals.agent_boot(pod_uid)
        if known is None or boot is None:
            return None  # the stream calls `heard`
        pod, install = self._world.pods.get(known.pod_key), self._install.keys
        if pod is None or pod.uid != pod_uid or pod.ip is None or pod.model_uid is None or install is None:
            return None
        if (known.boot, known.sent_digest) == (boot, known.digest):
            return None
        floor, digest = known.desired, known.digest
        known.sent_digest = ""  # an answer that is lost does not tell whether the agent took them
        try:
            await self._put(peers.agent(pod, install, pod.model_uid, self._credentials), floor)
        except DesiredAdaptersRefused as error:
            SENT.labels("failed").inc()
            raise DesiredAdaptersRefused(f"the agent of pod {pod.key} was not told what to hold: {error}") from None
        SENT.labels("written").inc()
        log.debug("desired adapters are written", pod=pod.key, adapters=len(floor))
        known.boot, known.sent_digest = boot, digest
        return None

    async def _put(self, peer: StreamPeer, floor: tuple[DesiredAdapter, ...]) -> None:
        if self._session is None:
            raise DesiredAdaptersRefused("not now")
        body = (
            DesiredAdapters(operator=self._identity.name, boot=self._identity.boot, adapters=floor)
            .model_dump_json()
            .encode()
        )
        headers = {"authorization": f"Bearer {peer.key}", "content-type": "application/json"}
        url = f"{peer.base_url}{names.ADAPTERS_PATH}"
        try:
            secured = dial(peer.credentials, peer.server_name)
            async with self._session.put(url, data=body, headers=headers, allow_redirects=False, **secured) as response:
                if response.status >= 300:
                    raise DesiredAdaptersRefused(f"status {response.status}: {(await response.text())[:300]}")
        except NoCertificate as none:
            raise DesiredAdaptersRefused(str(none)) from None
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise DesiredAdaptersRefused(f"{type(error).__name__}: {error}") from None
