"""Asks each engine once per start how many tokens its KV cache holds, with which the computed size is compared, and for
how long it captured CUDA graphs, which is a part of its cold start.
"""

import contextlib
from collections.abc import Callable
from typing import Final

import aiohttp
import prometheus_client
import structlog

from shoal.api import names
from shoal.api import replica as api
from shoal.api.model import Model
from shoal.controllers import peers
from shoal.controllers.calibration import Calibration
from shoal.controllers.installkey import InstallKeySource
from shoal.controllers.sizes import Sizes
from shoal.controllers.world import World
from shoal.core import facts
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.net.tls import TLSCredentials
from shoal.signals.replica import StreamBroken, read_once

log = structlog.get_logger()

SECONDS: Final = 5.0
"""For one answer."""
AGAIN_SECONDS: Final = (2.0, 10.0, 60.0)
"""After a try that brought nothing; then the next start of an engine is waited for."""

PREDICTED = prometheus_client.Gauge(
    "shoal_kv_tokens_predicted",
    "KV cache of one replica in tokens, as predicted before its engine started.",
    ["model", "gpu_class"],
)
ENGINE = prometheus_client.Gauge(
    "shoal_kv_tokens_engine",
    "KV cache of one replica in tokens, as reported by its engine.",
    ["model", "gpu_class"],
)


class EngineSizes:
    """Asks the agents of Ready pods; what they say goes to `Calibration`."""

    def __init__(
        self,
        world: World,
        sizes: Sizes,
        calibration: Calibration,
        install: InstallKeySource,
        queue: WorkQueue,
        learned: Callable[[str | None], object],
        credentials: TLSCredentials | None = None,
        graphs: Callable[[facts.Pod, float], object] = lambda _pod, _seconds: None,
    ) -> None:
        """`learned`: called with the uid of a Model whose figure is another one, which its status is to show; the plan
        may well stay the same. `graphs`: called with a pod and the seconds in which its engine captured graphs."""
        self._world, self._sizes, self._calibration = world, sizes, calibration
        self._install, self.queue, self._learned = install, queue, learned
        self._credentials, self._graphs = credentials, graphs
        self._read: dict[str, tuple[int, int]] = {}
        """Pod's uid -> (restarts of the engine, tries) that were asked about already."""
        self._session: aiohttp.ClientSession | None = None
        self._shown: dict[str, set[tuple[str, str]]] = {}
        """Model -> labels of its gauges."""

    async def run(self) -> None:
        """Asks until cancelled."""
        # Agents are in the cluster: never through the proxy of the environment (trust_env is off by default).
        connector = aiohttp.TCPConnector(limit=16, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            await self.queue.run(self.read)

    def enqueue_all(self) -> None:
        for key, pod in self._world.pods.items():
            if pod.ready and pod.model_uid:
                self.queue.add(key)

    def on_pod(self, key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            self._read.pop(before.uid, None)
        if after is None or not after.model_uid or not after.ready:
            return
        if before is None or not before.ready or before.model_uid != after.model_uid:
            self.queue.add(key)

    def on_model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if after is None:
            for labels in self._shown.pop(key, set()):
                for gauge in (ENGINE, PREDICTED):
                    with contextlib.suppress(KeyError):
                        gauge.remove(*labels)

    async def read(self, key: str) -> float | None:
        """Asks one pod. Returns seconds after which to try again, or None."""
        pod, install = self._world.pods.get(key), self._install.keys
        if pod is None or not pod.ready or pod.deleting or not pod.model_uid or not pod.gpu_class or not pod.ip:
            return None
        custom = self._world.model_by_uid(pod.model_uid)
        if custom is None or custom.object is None or self._session is None:
            return None
        if install is None:
            return AGAIN_SECONDS[0]
        engine = pod.container(names.CONTAINER_ENGINE)
        boot = engine.restarts if engine else 0
        asked, tries = self._read.get(pod.uid, (-1, 0))
        if asked == boot and (tries < 0 or tries >= len(AGAIN_SECONDS)):
            return None
        tries = tries if asked == boot else 0
        peer = peers.agent(pod, install, pod.model_uid, self._credentials)
        try:
            found = await read_once(peer, self._session, seconds=SECONDS)
        except StreamBroken as error:
            log.info("KV cache of the engine not read", pod=pod.key, error=str(error), attempt=tries + 1)
            found, tokens = api.ReplicaKeys(), None
        else:
            tokens = found.kv_tokens_total
        if tokens is None:
            self._read[pod.uid] = (boot, tries + 1)
            return AGAIN_SECONDS[tries]
        self._read[pod.uid] = (boot, -1)
        if found.graph_seconds is not None:
            self._graphs(pod, found.graph_seconds)
        if self._calibration.record(pod.model_uid, pod.gpu_class, tokens):
            self._learned(pod.model_uid)
        self._show(custom, pod.gpu_class, tokens)
        return None

    def _show(self, custom: Custom[Model], gpu_class: str, tokens: int) -> None:
        key = f"{custom.metadata.namespace}/{custom.metadata.name}"
        labels = (key, gpu_class)
        self._shown.setdefault(key, set()).add(labels)
        ENGINE.labels(*labels).set(tokens)
        predicted = self._sizes.predicted(custom.metadata.uid, gpu_class)
        if predicted is not None:
            PREDICTED.labels(*labels).set(predicted)
