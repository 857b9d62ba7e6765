"""Listens to every agent during a storm, as a process inside the lab's network: `python -m tests.storm.voices CONFIG`.

One journal line whenever a replica says that it has other adapters in its engine, or other leases, than before.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import orjson
from pydantic import BaseModel, ConfigDict

from shoal.api import keys, names
from shoal.api.replica import ReplicaKeys
from shoal.gateway.directory import project_pod
from shoal.kube.client import Client
from shoal.kube.reflector import Reflector
from shoal.kube.resources import PODS
from shoal.signals.replica import Me, Peer, ReplicaStreams

_FOLLOW_SECONDS: Final = 1.0
IN_ENGINE: Final = frozenset({"loaded", "retiring"})
"""`loading` is also said of one whose files are there and that waits until another has left the engine."""


class VoicesConfig(BaseModel):
    """What the storm hands over."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    namespace: str
    install_key: bytes
    journal: Path


class Voices:
    def __init__(self, config: VoicesConfig) -> None:
        self._install_key = config.install_key
        self._file = os.open(config.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._names: dict[str, str] = {}
        self._last: dict[str, tuple[object, ...]] = {}
        # Known as nobody's gateway: what it hears, no drain waits for.
        self.streams = ReplicaStreams(self._heard, Me("storm"))

    def follow(self, reflector: Reflector) -> None:
        pods = [pod for pod in reflector.objects.values() if pod.ip]
        self._names = {pod.uid: pod.name for pod in pods}
        self.streams.set_peers(
            Peer(pod.uid, pod.name, pod.ip, keys.derive(self._install_key, "operator", pod.model_uid)) for pod in pods
        )

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


async def main(config: VoicesConfig) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    voices = Voices(config)
    voices.streams.start()
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    async with await Client.from_environment() as client:
        pods = Reflector(client, PODS, namespace=config.namespace, label_selector=selector, project=project_pod)
        watching = asyncio.create_task(pods.run())
        try:
            while not stop.is_set():
                voices.follow(pods)
                try:
                    async with asyncio.timeout(_FOLLOW_SECONDS):
                        await stop.wait()
                except TimeoutError:
                    continue
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await voices.streams.close()


if __name__ == "__main__":
    asyncio.run(main(VoicesConfig.model_validate_json(Path(sys.argv[1]).read_bytes())))
