"""Watches engine pods and GPU classes, reads the agents' streams, and stores new readings every few seconds.

It never blocks the ingestion of records: without API server, install key or agent the ledger continues, the engines'
counters stay at their last reading, and `EngineCoverage` reports it. A missed reading is covered by the next one,
because counters are cumulative. Only tokens that an engine counts between its last reading and its end are lost.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import structlog
from sqlalchemy import Connection

from shoal.api import names
from shoal.api.keys import Role
from shoal.api.replica import ReplicaKeys
from shoal.core.ownership import Link, link
from shoal.core.reconcile import DAY_MS, Held, Price
from shoal.kube.client import KubeClient
from shoal.kube.enginepods import EnginePods
from shoal.kube.reflector import Reflector, ReflectorEvent
from shoal.kube.resources import GPUCLASSES, MODELS
from shoal.ledger.reconcile.keep import forget, keep_gpu_time, keep_readings, knows_gpu_time
from shoal.ledger.reconcile.pods import EnginePod, GPUPrice, project_class, project_pod
from shoal.ledger.reconcile.readings import Readings
from shoal.ledger.store import DatabaseUnavailable
from shoal.net.stream import ListenerIdentity, StreamPeer, agent_peer
from shoal.net.tls import TLSCredentials
from shoal.signals.replica import ReplicaStreams

log = structlog.get_logger()

T = TypeVar("T")

ROUND_SECONDS: Final = 5.0
"""Interval between rounds; a round follows soon after an engine is gone."""
SOON_SECONDS: Final = 0.25
"""Delay of the round after an engine is gone: other engines may end at the same time."""
GPU_SECONDS: Final = 60.0
"""Interval at which GPU time is counted while no pod ends."""


class ReadingStore(Protocol):
    """The part of `ledger.store.LedgerStore` that is needed here."""

    async def write(self, work: Callable[[Connection], T]) -> T: ...
    async def read(self, work: Callable[[Connection], T]) -> T: ...


class ReadKeys(Protocol):
    """The part of the key ring that is needed here (`net.installkey.KeyRing`)."""

    def bearers_of(self, role: Role, subject: str) -> Iterable[str]: ...


@dataclass(frozen=True, slots=True)
class EngineCoverage:
    """Coverage of the engines' counters."""

    watching: bool
    """Whether engine pods are known: the API server was reached at least once, and the connection is up."""
    live: int
    """Engine pods with a live agent stream."""
    stale: tuple[str, ...]
    """namespace/name of the other running engine pods: their counters are as old as their last reading."""


class Reconciler:
    """Call `run`. `now` returns milliseconds since 1970 (UTC)."""

    def __init__(
        self,
        client: KubeClient,
        keys: ReadKeys,
        store: ReadingStore,
        me: ListenerIdentity = ListenerIdentity(),  # noqa: B008 - immutable
        *,
        now: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        agent_port: int = names.AGENT_PORT,
        credentials: TLSCredentials | None = None,
    ) -> None:
        self._keys = keys
        self._store = store
        self._now = now
        self._agent_port = agent_port
        self._credentials = credentials
        self.pods = EnginePods(client, project=project_pod, on_event=self._pod)
        """Only pods that belong to a Model: agents of other pods get no key, and their readings are ignored."""
        self._models = Reflector(client, MODELS, project=link, on_event=self._model, metadata_only=True)
        self._classes = Reflector(client, GPUCLASSES, project=project_class)
        self._by_uid: dict[str, EnginePod] = {}
        self._uids: dict[str, str] = {}
        """namespace/name -> uid."""
        self._gone: dict[str, Held] = {}
        """Released GPUs by uid of the pod, until they are stored."""
        self.readings = Readings(self._by_uid, now)
        self.streams = ReplicaStreams(self._reported, me)
        self._soon = asyncio.Event()
        self._began: int | None = None
        """New pods are not counted for the time before this; None: unknown yet."""
        self._gpus_at = float("-inf")
        self._forgot = 0
        self._problem: str | None = None
        self.lower = 0
        """Number of readings that were lower than an earlier one with the same boot id."""

    @property
    def coverage(self) -> EngineCoverage:
        running = {pod.uid: pod.key for pod in self._by_uid.values() if pod.ip is not None and not pod.finished}
        live = {stream.peer.uid for stream in self.streams.live()}
        return EngineCoverage(
            watching=self.pods.synced.is_set() and self.pods.connected,
            live=sum(uid in live for uid in running),
            stale=tuple(sorted(key for uid, key in running.items() if uid not in live)),
        )

    async def run(self) -> None:
        """Runs until cancelled; then stores the last readings."""
        self.streams.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.pods.run())
                tasks.create_task(self._models.run())
                tasks.create_task(self._classes.run())
                while True:
                    await self._wait()
                    try:
                        await self.round()
                    except Exception:
                        # A failure here must not end the ledger.
                        log.exception("a round failed")
        finally:
            await self.streams.close()
            await self._keep(all_gpus=True)

    async def round(self) -> None:
        """Opens streams to new agents and stores new readings."""
        self.pods.ownership.report()
        self._follow()
        await self._keep()

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _keep(self, *, all_gpus: bool = False) -> None:
        """Stores readings and GPU time; what fails is stored by a later round."""
        prices = self._prices()
        readings = self.readings.take()
        try:
            if readings:
                kept = await self._store.write(lambda c: keep_readings(c, readings, prices))
                if kept.lower:
                    self.lower += len(kept.lower)
                    log.warning("counters of engines were lower than before: not counted", boots=kept.lower[:10])
            readings = []
            await self._gpu_time(prices, all_gpus=all_gpus)
            if self._now() - self._forgot > DAY_MS:
                now = self._forgot = self._now()
                await self._store.write(lambda c: forget(c, now))
        except DatabaseUnavailable as error:
            self.readings.give_back(readings)
            self._log_problem(str(error))
        except BaseException:
            self.readings.give_back(readings)
            raise
        else:
            self._log_problem(None)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(ROUND_SECONDS):
                await self._soon.wait()
            await asyncio.sleep(SOON_SECONDS)
        except TimeoutError:
            pass
        self._soon.clear()

    async def _gpu_time(self, prices: dict[str, Price | None], *, all_gpus: bool) -> None:
        # Without a connection it is unknown which pods still hold GPUs; the time is counted after reconnecting.
        connected = self.pods.synced.is_set() and self.pods.connected and self._classes.synced.is_set()
        now, moment = self._now(), time.monotonic()
        due = connected and (all_gpus or moment - self._gpus_at >= GPU_SECONDS)
        if not due and not self._gone:
            return
        if self._began is None:
            self._began = 0 if await self._store.read(knows_gpu_time) else now
        first_look, gone = self._began, dict(self._gone)
        held = [*gone.values()]
        if due:
            held += [each for pod in self._by_uid.values() if (each := self._held(pod, now)) is not None]
        await self._store.write(lambda c: keep_gpu_time(c, held, prices, now, first_look))
        for uid, each in gone.items():
            if self._gone.get(uid) == each:
                del self._gone[uid]
        if due:
            self._gpus_at = moment

    def _held(self, pod: EnginePod, until: int | None) -> Held | None:
        if pod.finished and pod.ended is None:
            return None  # the pod has released its GPUs, at an unknown time
        of_class: GPUPrice | None = self._classes.objects.get(pod.gpu_class)
        return pod.held(None if of_class is None else of_class.resource, pod.ended if pod.finished else until)

    def _prices(self) -> dict[str, Price | None]:
        classes: Iterable[GPUPrice] = self._classes.objects.values()
        return {each.name: each.price for each in classes}

    def _pod(self, kind: ReflectorEvent, pod: EnginePod) -> None:
        if kind == "delete":
            known = self._by_uid.pop(pod.uid, None)
            if self._uids.get(pod.key) == pod.uid:
                del self._uids[pod.key]
            if known is not None and (held := self._held(known, self._now())) is not None:
                self._gone[pod.uid] = held
            self._soon.set()
            return
        before = self._uids.get(pod.key)
        if before is not None and before != pod.uid and before in self._by_uid:
            # The deletion of a pod was missed, and another pod has its name: the reflector identifies pods by name
            # only.
            self._pod("delete", self._by_uid[before])
        self._by_uid[pod.uid] = pod
        self._uids[pod.key] = pod.uid

    def _model(self, kind: ReflectorEvent, model: Link) -> None:
        if kind == "delete":
            self.pods.ownership.model_gone(model.uid)
        else:
            self.pods.ownership.model(model.uid, model.key)

    def _reported(self, uid: str, keys: ReplicaKeys | None) -> None:
        if self.readings.report(uid, keys):
            self._soon.set()

    def _follow(self) -> None:
        """Keeps one stream to the agent of each running pod. An agent accepts only the keys of its pod's install
        key."""
        peers: list[StreamPeer] = []
        for pod in self._by_uid.values():
            keys = tuple(self._keys.bearers_of("ledger", pod.model_uid))
            if pod.ip is not None and not pod.finished and keys:
                peers.append(
                    agent_peer(
                        pod.uid,
                        pod.key,
                        pod.ip,
                        keys[0],
                        model_uid=pod.model_uid,
                        mtls=pod.mtls,
                        credentials=self._credentials,
                        other_keys=keys[1:],
                        port=self._agent_port,
                    )
                )
        self.streams.set_peers(peers)

    def _log_problem(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            log.warning("readings of engines are not kept yet", reason=problem, waiting=self.readings.waiting)
        self._problem = problem
