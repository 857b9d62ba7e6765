"""Leader election on a Lease: one operator acts, the other keeps its watches warm.

Own code because the clients' electors are broken: they use wall clocks, set no deadline on a call, go on leading when
the API server is away, and do not notice that the leading task died. A lease is not a fence: destructive calls carry
preconditions of their own.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import prometheus_client
import structlog

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from shoal.kube.resources import LEASES

log = structlog.get_logger()

LEADING = prometheus_client.Gauge("shoal_leading", "1 while this process holds the operator's Lease.")

DURATION: Final = 15.0
"""Seconds after the last renewal when another may take over."""
DEADLINE: Final = 10.0
"""Seconds without a renewal after which the leader stops, before anybody else may start."""
PERIOD: Final = 2.0
STOP_SECONDS: Final = 5.0

_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


class StuckLeader(RuntimeError):
    """The workers did not stop within STOP_SECONDS after the Lease was lost: the process must end."""


class Elector:
    """Stands for election until cancelled; runs `lead` while it holds the Lease."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration: float = DURATION,
        deadline: float = DEADLINE,
        period: float = PERIOD,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._client = client
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration, self._deadline, self._period, self._clock = duration, deadline, period, clock
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = clock()
        self._lease: JsonObject | None = None
        self.leading = False
        self._renewed = float("-inf")

    @property
    def certain(self) -> bool:
        """Leads, and renewed lately enough that nobody else can: also right after this process was stopped for a while,
        when nothing of it has noticed yet."""
        return self.leading and self._clock() - self._renewed < self._duration

    @property
    def holder(self) -> str:
        """Who held the Lease when this process last looked; "" while nobody did, or it has not looked yet."""
        return self._identity if self.leading else self._seen[0]

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Raises what `lead` raises, and StuckLeader. When cancelled, the workers stop before the Lease is freed."""
        while True:
            # Others count from when the Lease was written, and its answer may have come late.
            self._renewed = await self._acquire()
            log.info("leading", identity=self._identity)
            self.leading = True
            LEADING.set(1)
            task = asyncio.ensure_future(lead())
            try:
                await self._hold(task)
            finally:
                self.leading = False
                LEADING.set(0)
                await _stop(task)
                await self._release()
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error
            log.warning("lost the lease, contending for it again", identity=self._identity)

    async def _acquire(self) -> float:
        """Returns when the call began that got the Lease."""
        while True:
            begin = self._clock()
            try:
                if await self._try():
                    return begin
            except KubeError as error:
                log.warning("lease cannot be read or written", error=error.message)
            except TimeoutError:
                log.warning("lease cannot be read or written", error="timeout")
            await asyncio.sleep(self._period * random.uniform(0.75, 1.25))  # noqa: S311

    async def _try(self) -> bool:
        async with asyncio.timeout(self._deadline / 2):
            try:
                lease = await self._client.get(LEASES, self._name, self._namespace)
            except NotFound:
                try:
                    self._lease = await self._client.create(LEASES, self._body(None, transitions=0))
                except AlreadyExists:
                    return False
                return True
            spec: JsonObject = lease.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            now = self._clock()
            mark = (holder, f"{spec.get('renewTime')}/{spec.get('leaseTransitions')}")
            if mark != self._seen:
                self._seen, self._seen_at = mark, now
            free = not holder or holder == self._identity
            # Another machine's clock may differ: what counts is the time since this process last saw a renewal.
            if not free and now - self._seen_at < self._duration:
                return False
            try:
                transitions = int(spec.get("leaseTransitions") or 0) + 1
                self._lease = await self._client.replace(
                    LEASES, self._body(lease, transitions=transitions), manager="shoal-operator"
                )
            except Conflict:
                return False
            return True

    async def _hold(self, task: asyncio.Future[None]) -> None:
        """Renews until it fails for DEADLINE seconds, another process has the Lease, or the task ends."""
        renewed = self._renewed
        while not task.done():
            await asyncio.wait([task], timeout=self._period)
            if task.done():
                return
            begin = self._clock()
            try:
                # One that is never answered leaves time for another, on another connection.
                async with asyncio.timeout(max(0.1, min(self._deadline / 2, renewed + self._deadline - begin))):
                    if not await self._renew():
                        return
                renewed = self._renewed = begin
            except (KubeError, TimeoutError) as error:
                log.warning("lease not renewed", error=str(error) or "timeout")
            if self._clock() - renewed >= self._deadline:
                return

    async def _renew(self) -> bool:
        assert self._lease is not None  # noqa: S101 - held
        spec = self._lease["spec"]
        try:
            self._lease = await self._client.replace(
                LEASES, self._body(self._lease, transitions=spec["leaseTransitions"]), manager="shoal-operator"
            )
        except Conflict:
            # An earlier renewal may have been carried out although its answer was lost.
            lease = await self._client.get(LEASES, self._name, self._namespace)
            if lease["spec"].get("holderIdentity") != self._identity:
                return False
            self._lease = lease
        except NotFound:
            return False
        return True

    async def _release(self) -> None:
        """Frees the Lease if it is still ours, so that the other one need not wait."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        freed = self._body(lease, transitions=lease["spec"]["leaseTransitions"])
        freed["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            async with asyncio.timeout(2):
                await self._client.replace(LEASES, freed, manager="shoal-operator")
        except (KubeError, TimeoutError) as error:
            log.info("lease not released; it runs out by itself", error=str(error) or "timeout")

    def _body(self, lease: JsonObject | None, *, transitions: int) -> JsonObject:
        now = datetime.now(UTC).strftime(_FORMAT)
        spec = {} if lease is None else dict(lease["spec"])
        if lease is None or spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._duration) or 1,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        metadata: JsonObject = {"name": self._name, "namespace": self._namespace}
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}


async def _stop(task: asyncio.Future[None]) -> None:
    task.cancel()
    _, pending = await asyncio.wait([task], timeout=STOP_SECONDS)
    if pending:
        raise StuckLeader(f"the workers did not stop within {STOP_SECONDS:.0f} s after the lease was lost")
