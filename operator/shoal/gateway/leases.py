"""Leases (streams.md, "Slots"): the adapters that this gateway may use at each replica.

A lease is requested once, extended by acknowledgements that show the adapter running, and renewed in the background
while it is used, so that a request finds the adapter in memory. It ends when the agent reports another state than
`loaded`, when the engine has another boot id, and when the stream is down. While callers wait for a slot at the
replica, the gateway gives back leases that none of its requests uses there, the longest unused first.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import pydantic
import structlog

from shoal.api import adapters as api
from shoal.api import reasons
from shoal.api.names import ADAPTERS_PATH
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.core.routing.resolve import ServedAdapter
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.upstream import AbortHandle, Upstream, UpstreamAddress, UpstreamError, agent_request
from shoal.net.stream import ListenerIdentity
from shoal.signals.replica import ReplicaStream

log = structlog.get_logger()

MARGIN_SECONDS: Final = HEARTBEAT_SECONDS + 0.5
"""A request needs a lease that lasts longer than this: by then an acknowledgement has reported it as running."""
RENEW_SECONDS: Final = 8.0
"""A lease with less time left is renewed when it is used."""
WAIT_SECONDS: Final = 30.0
"""How long an agent may let a call wait for a slot and for loading."""
_ANSWER_SECONDS: Final = 1.0
"""Longest time from the agent's grant to its reading here."""
_GRACE_SECONDS: Final = 3.0
"""Time that the call may take beyond the agent's own wait."""
_RETRY_SECONDS: Final = 1.0
"""Pause after a refusal, unless the agent names another one."""
_RETRY_LEAST_SECONDS: Final = 0.1
_RETRY_MOST_SECONDS: Final = 30.0
_LOAD_SECONDS: Final = 1.0
"""Of an adapter, until one was loaded."""
_LOAD_SHARE: Final = 0.2
"""Of the last load in the mean."""
UNUSED_SECONDS: Final = 0.1
"""A lease is given back at the earliest so long after its grant or its last use: the request for which it was requested
may not have been sent yet."""
_MOST_REFUSALS: Final = 1000
"""Beyond this number, expired refusals are dropped."""
_MOST_BYTES: Final = 256 * 1024

Key = tuple[str, str]
"""Uid of the pod, engine name of the adapter."""


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """Why there is no lease, and until when a new request is useless (time.monotonic())."""

    reason: str
    until: float
    never: bool = False
    """The replica cannot load this revision of the adapter."""


class _Lease:
    __slots__ = ("boot", "grant", "until", "used")

    def __init__(self, boot: str, until: float, grant: int, used: float) -> None:
        self.boot = boot
        self.until = until
        self.grant = grant
        self.used = used
        """When it was granted, or a request was sent under it, or seen to run."""


class Flight:
    """One call for a lease, shared by all requests that need it."""

    def __init__(self) -> None:
        self.done = False
        self.refused: LeaseRefused | None = None
        self.waiting: dict[Callable[[], None], None] = {}
        """Called when the call is over."""


class LeaseClient:
    """`client` should keep idle connections. For the event loop only."""

    def __init__(
        self, fleet: ReplicaPool, identity: ListenerIdentity, client: Upstream, metrics: GatewayMetrics
    ) -> None:
        self._counted = metrics.leases
        self._fleet = fleet
        self._identity = identity
        self._client = client
        self._leases: dict[str, dict[str, _Lease]] = {}
        self._flights: dict[Key, tuple[Flight, asyncio.Task[None]]] = {}
        self._refused: dict[Key, LeaseRefused] = {}
        self._report_waiters: dict[str, list[asyncio.Future[None]]] = {}
        """By pod: futures that wait for its agent's next report."""
        self._closed = False
        self.load_seconds = _LOAD_SECONDS
        """How long a call took lately in which the agent loaded the adapter: the wait for a slot, and the load."""
        fleet.changed.append(self._on_report)

    def is_valid(self, uid: str, name: str) -> bool:
        """Whether a request may be sent under the lease now."""
        lease = self._leases.get(uid, _NO_LEASES).get(name)
        return lease is not None and lease.until - time.monotonic() > MARGIN_SECONDS

    def used(self, uid: str, adapter: ServedAdapter) -> None:
        """A request uses the lease: renews it if it is about to end."""
        lease, now = self._leases[uid][adapter.engine_name], time.monotonic()
        lease.used = now
        if lease.until - now < RENEW_SECONDS:
            self.ask(uid, adapter)

    def adapter_missing(self, uid: str, name: str) -> None:
        """The engine reported that it does not have the adapter."""
        self.drop(uid, name)
        self._refuse((uid, name), LeaseRefused("NotThere", time.monotonic() + _RETRY_SECONDS))

    def refused(self, uid: str, name: str) -> LeaseRefused | None:
        """The recent refusal at a pod, if it still holds."""
        found = self._refused.get((uid, name))
        if found is not None and found.until <= time.monotonic():
            del self._refused[uid, name]
            return None
        return found

    def ask(self, uid: str, adapter: ServedAdapter) -> Flight:
        """The running call to a pod's agent, or a new one."""
        key = (uid, adapter.engine_name)
        known = self._flights.get(key)
        if known is not None:
            return known[0]
        flight = Flight()
        if self._closed:
            flight.done, flight.refused = True, LeaseRefused("Stopping", time.monotonic() + _RETRY_SECONDS)
            self._refuse(key, flight.refused)
            return flight
        task = asyncio.create_task(self._run_flight(flight, key, adapter), name=f"lease of {adapter.engine_name}")
        self._flights[key] = (flight, task)
        return flight

    def under_way(self, name: str) -> list[Flight]:
        """Running calls for an adapter, at all pods."""
        return [flight for (_, of), (flight, _) in self._flights.items() if of == name]

    def leave(self, uid: str, name: str) -> None:
        """A request got the adapter elsewhere. Cancels the call at this pod if no other request waits for it, so that
        it takes no slot."""
        found = self._flights.get((uid, name))
        if found is not None and not found[0].waiting:
            found[1].cancel()

    def drop(self, uid: str, name: str) -> None:
        """Ends a lease: the engine does not have the adapter."""
        leases = self._leases.get(uid)
        if leases is not None and leases.pop(name, None) is not None and not leases:
            del self._leases[uid]

    def acknowledged(self, uid: str, names: Collection[str], at: float) -> None:
        """An agent acknowledged that these adapters run at its pod; `at` is a time before the acknowledgement was
        sent."""
        leases = self._leases.get(uid)
        if leases is not None:
            for name in names:
                lease = leases.get(name)
                if lease is not None:
                    lease.until = max(lease.until, at + api.LEASE_SECONDS)
                    lease.used = max(lease.used, at)

    # --- slots that this gateway does not use -------------------------------------------------------------------------

    def spare(self, uid: str) -> int:
        """Slots at a pod that this gateway's unused leases take, beyond those that its running calls there need."""
        unused = len(self._unused(uid))
        return max(0, unused - sum(of == uid for of, _ in self._flights)) if unused else 0

    def may_give_back(self, uid: str) -> bool:
        """Whether callers wait for a slot at a pod, and this gateway has leases there that it does not use."""
        return bool(self._wanted(uid) and self._unused(uid))

    def give_back(self, uid: str) -> dict[str, int]:
        """Ends unused leases, as many as callers wait for a slot: adapter -> grant. The next acknowledgement has to
        contain them."""
        leases = self._leases.get(uid, _NO_LEASES)
        found = {name: leases[name].grant for name in self._unused(uid)[: self._wanted(uid)]}
        for name in found:
            self.drop(uid, name)
        return found

    def _wanted(self, uid: str) -> int:
        report = self._fleet.report(uid)
        return (report.adapters_waiting or 0) if report is not None else 0

    def _unused(self, uid: str) -> list[str]:
        """The longest unused first."""
        if (leases := self._leases.get(uid)) is None:
            return []
        running, before = self._fleet.residency.running(uid), time.monotonic() - UNUSED_SECONDS
        found = [
            name
            for name, lease in leases.items()
            if lease.grant and lease.used <= before and name not in running and (uid, name) not in self._flights
        ]
        return sorted(found, key=lambda name: leases[name].used)

    async def close(self) -> None:
        """Ends all calls."""
        self._closed = True
        tasks = [task for _, task in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_report(self, uid: str) -> None:
        for waiting in self._report_waiters.pop(uid, ()):
            if not waiting.done():
                waiting.set_result(None)
        leases = self._leases.get(uid)
        if leases is None:
            return
        signal = self._fleet.live.get(uid)
        loaded = self._fleet.residency.loaded(uid) if signal is not None else ()
        for name, lease in list(leases.items()):
            if signal is None or name not in loaded or signal.engine_boot != lease.boot:
                self.drop(uid, name)

    async def _run_flight(self, flight: Flight, key: Key, adapter: ServedAdapter) -> None:
        uid, name = key
        began = time.monotonic()
        try:
            flight.refused = await self._call(uid, adapter)
            refused = flight.refused
            if refused is None:
                self._refused.pop(key, None)
            else:
                self._refuse(key, refused)
                log.debug("no lease", pod=uid, adapter=name, reason=refused.reason)
        finally:
            flight.done = True
            if flight.refused is None and not self._leases.get(uid, _NO_LEASES).get(name):
                flight.refused = LeaseRefused("Interrupted", began)
            del self._flights[key]
            for wake in flight.waiting:
                wake()

    async def _call(self, uid: str, adapter: ServedAdapter) -> LeaseRefused | None:
        began = time.monotonic()
        stream = self._fleet.streams.get(uid)
        if stream is None or stream.boot is None:
            return self._failed("NotHeard")
        try:
            async with asyncio.timeout(WAIT_SECONDS + _GRACE_SECONDS):
                answer = await self._client.start(
                    *_request(stream, stream.boot, self._identity, adapter), AbortHandle()
                )
                try:
                    status, body = answer.status, await answer.read_all(_MOST_BYTES)
                finally:
                    answer.release()
        except (TimeoutError, UpstreamError) as error:
            log.debug("the agent did not answer", pod=uid, reason=str(error) or "timeout")
            return self._failed("NotAnswered")
        if status != 200:
            return self._refusal(status, body)
        try:
            lease = api.Lease.model_validate_json(body)
        except pydantic.ValidationError:
            return self._failed("NotUnderstood")
        signal = self._fleet.live.get(uid)
        if signal is None or signal.engine_boot != lease.engine_boot:
            # The stream lags behind, or the engine restarted.
            return self._failed(reasons.ENGINE_RESTARTED)
        if not await self._caught_up(stream, lease):
            return self._failed("NotThere")
        now = time.monotonic()
        if lease.loaded:
            self.load_seconds += _LOAD_SHARE * (now - began - self.load_seconds)
        until = now + lease.seconds - _ANSWER_SECONDS
        if until - now <= MARGIN_SECONDS:
            return self._failed("LeaseTooShort")
        self._leases.setdefault(uid, {})[adapter.engine_name] = _Lease(lease.engine_boot, until, lease.grant, now)
        self._counted.labels("loaded" if lease.loaded else "granted").inc()
        return None

    def _refuse(self, key: Key, refused: LeaseRefused) -> None:
        if len(self._refused) >= _MOST_REFUSALS:
            now = time.monotonic()
            self._refused = {k: r for k, r in self._refused.items() if r.until > now}
        self._refused[key] = refused

    async def _caught_up(self, stream: ReplicaStream, lease: api.Lease) -> bool:
        """Waits until the stream has delivered the state in which the agent granted the lease. Before that, a request
        would act on an older state than its acknowledgement names, and a retirement would not wait for it."""
        uid, boot = stream.peer.uid, stream.boot
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                while stream.seq < lease.seq:
                    waiting = asyncio.get_running_loop().create_future()
                    self._report_waiters.setdefault(uid, []).append(waiting)
                    await waiting
                    if self._fleet.streams.get(uid) is not stream or stream.boot != boot:
                        return False
        except TimeoutError:
            return False
        return not lease.seq or lease.name in self._fleet.residency.loaded(uid)

    def _failed(self, reason: str) -> LeaseRefused:
        self._counted.labels("failed").inc()
        return LeaseRefused(reason, time.monotonic() + _RETRY_SECONDS)

    def _refusal(self, status: int, body: bytes) -> LeaseRefused:
        try:
            answer = api.AdapterRefusal.model_validate_json(body)
        except pydantic.ValidationError:
            return self._failed(f"status {status}")
        self._counted.labels("refused").inc()
        after = _RETRY_SECONDS if answer.retry_after is None else float(answer.retry_after)
        if status == 422:
            after = max(after, _RETRY_MOST_SECONDS / 3)
        until = time.monotonic() + max(_RETRY_LEAST_SECONDS, min(after, _RETRY_MOST_SECONDS))
        return LeaseRefused(answer.reason, until, never=status == 422)


_NO_LEASES: Final[dict[str, _Lease]] = {}


def _request(
    stream: ReplicaStream, boot: str, identity: ListenerIdentity, adapter: ServedAdapter
) -> tuple[UpstreamAddress, bytes, bytes]:
    body = (
        api.Ensure(
            name=adapter.engine_name,
            revision=adapter.revision,
            uri=adapter.uri,
            gateway=identity.name,
            boot=identity.boot,
            agent_boot=boot,
            wait_seconds=WAIT_SECONDS,
        )
        .model_dump_json()
        .encode()
    )
    return agent_request(stream.peer, f"{ADAPTERS_PATH}/{quote(adapter.engine_name, safe='@')}/ensure", body)
