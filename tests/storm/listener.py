"""Listens to every agent in a storm, as a process inside the lab's network: `python -m tests.storm.listener CONFIG`.

One journal line whenever a replica says that it has other adapters in its engine, or other leases, than before.
"""

import asyncio
import base64
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import orjson
from pydantic import BaseModel, ConfigDict

from shoal.api import identity, names
from shoal.api.config import MTLS
from shoal.api.keys import InstallKey
from shoal.api.replica import ReplicaKeys
from shoal.controllers.installkey import InstallKeys
from shoal.core.routing.replica import Replica
from shoal.gateway.directory import project_pod
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.reflector import Reflector
from shoal.kube.resources import PODS, SECRETS
from shoal.net.authorities import KeptAuthorities
from shoal.net.stream import StreamPeer, agent_peer
from shoal.net.tls import TLSCredentials
from shoal.signals.replica import ListenerIdentity, ReplicaStreams

_FOLLOW_SECONDS: Final = 1.0
_LIFE: Final = timedelta(days=1)
IN_ENGINE: Final = frozenset({"loaded", "retiring"})
"""`loading` is also said of one whose files are there and that waits until another has left the engine."""


class ListenerConfig(BaseModel):
    """What the storm hands over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: str
    shoal_namespace: str
    journal: Path


class Operator:
    """An operator's keys and certificate, as the cluster has them at the moment: an upgrade brings others."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._install: InstallKeys | None = None
        self._trust = ""
        self.credentials = TLSCredentials()

    async def refresh(self) -> None:
        """What cannot be read now is read later."""
        try:
            found = [InstallKey(key) for key in await self._values(names.ROOT_KEY_SECRET)]
            found += [InstallKey(key, old=True) for key in await self._values(names.INSTALL_KEY_SECRET)]
            if found:
                self._install = InstallKeys(found[0], tuple(found[1:]))
            await self._certificate()
        except (KubeError, TimeoutError):
            return

    async def _certificate(self) -> None:
        """One of the operator's, which signs its own for itself and keeps it."""
        try:
            kept = KeptAuthorities.read(await self._client.get(SECRETS, names.AUTHORITY_SECRET, self._namespace))
        except NotFound:
            return
        if kept.current is not None and kept.trust != self._trust:
            own = identity.process(MTLS().trust_domain, self._namespace, "operator")
            pair = kept.current.issue(own, datetime.now(UTC), _LIFE, calls=True)
            self.credentials.put(pair, kept.trust)
            self._trust = kept.trust

    def peer(self, pod: Replica) -> StreamPeer | None:
        """None: its keys are not known yet."""
        if self._install is None or not pod.ip:
            return None
        said = self._install.of(pod.install_key).bearer_for("operator", pod.model_uid)
        return agent_peer(
            pod.uid,
            pod.name,
            pod.ip,
            said,
            model_uid=pod.model_uid,
            mtls=pod.mtls,
            credentials=self.credentials,
        )

    async def _values(self, name: str) -> list[bytes]:
        data = await self._data(name)
        return [data[key] for key in ("current", "previous") if data.get(key)]

    async def _data(self, name: str) -> dict[str, bytes]:
        try:
            secret = await self._client.get(SECRETS, name, self._namespace)
        except NotFound:
            return {}
        return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}


class AgentListener:
    def __init__(self, config: ListenerConfig, operator: Operator) -> None:
        self._operator = operator
        self._file = os.open(config.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._names: dict[str, str] = {}
        self._last: dict[str, tuple[object, ...]] = {}
        # Known as nobody's gateway: what it hears, no drain waits for.
        self.streams = ReplicaStreams(self._heard, ListenerIdentity("storm"))

    def follow(self, reflector: Reflector) -> None:
        pods = [pod for pod in reflector.objects.values() if pod.ip]
        self._names = {pod.uid: pod.name for pod in pods}
        self.streams.set_peers(peer for pod in pods if (peer := self._operator.peer(pod)) is not None)

    def _heard(self, uid: str, said: ReplicaKeys | None) -> None:
        if said is None or said.adapters is None:
            return
        there = sorted(name for name, adapter in said.adapters.items() if adapter.state in IN_ENGINE)
        now = (there, said.adapter_slots, said.adapter_slots_leased)
        if self._last.get(uid) == now:
            return
        self._last[uid] = now
        line = {
            "at": time.time(),
            "pod": self._names.get(uid, uid),
            "adapters": there,
            "slots": said.adapter_slots,
            "leased": said.adapter_slots_leased,
        }
        os.write(self._file, orjson.dumps(line) + b"\n")


async def main(config: ListenerConfig) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    async with await KubeClient.from_environment() as client:
        operator = Operator(client, config.shoal_namespace)
        listener = AgentListener(config, operator)
        listener.streams.start()
        pods = Reflector(client, PODS, namespace=config.namespace, label_selector=selector, project=project_pod)
        watching = asyncio.create_task(pods.run())
        try:
            while not stop.is_set():
                await operator.refresh()
                listener.follow(pods)
                try:
                    async with asyncio.timeout(_FOLLOW_SECONDS):
                        await stop.wait()
                except TimeoutError:
                    continue
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await listener.streams.close()


if __name__ == "__main__":
    asyncio.run(main(ListenerConfig.model_validate_json(Path(sys.argv[1]).read_bytes())))
