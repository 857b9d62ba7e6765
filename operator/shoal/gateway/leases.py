"""Leases (streams.md, "Slots"): what this gateway may use of the adapters at each replica.

A lease is asked for once, kept while acknowledgements show the adapter running, and renewed in the background while it
is used, so that a request finds it in memory. It is over when the agent calls the adapter anything but `loaded`, when
the engine has another boot id, and when the stream is down.
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
from shoal.core.resolve import ServedAdapter
from shoal.gateway.fleet import Fleet
from shoal.gateway.metrics import Metrics
from shoal.gateway.upstream import AbortHandle, Target, Upstream, UpstreamError, to_agent
from shoal.signals.replica import ReplicaStream
from shoal.signals.stream import Me

log = structlog.get_logger()

MARGIN_SECONDS: Final = HEARTBEAT_SECONDS + 0.5
"""A request goes only under a lease that lasts for longer: by then an acknowledgement has shown it running."""
RENEW_SECONDS: Final = 8.0
"""One that lasts for less is renewed when it is used."""
WAIT_SECONDS: Final = 30.0
"""How long an agent may keep a call waiting for a slot and for loading."""
_ANSWER_SECONDS: Final = 1.0
"""How old a grant may be when it is read."""
_GRACE_SECONDS: Final = 3.0
"""What the call itself may take on top."""
_RETRY_SECONDS: Final = 1.0
"""A replica that refused is not asked again for so long, unless it says otherwise."""
_RETRY_LEAST_SECONDS: Final = 0.1
_RETRY_MOST_SECONDS: Final = 30.0
_MOST_REFUSALS: Final = 1000
"""So many are kept before those that are over are let go."""
_MOST_BYTES: Final = 256 * 1024

Key = tuple[str, str]
"""Uid of the pod, engine name of the adapter."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is no lease, and until when there is no use in asking again (time.monotonic())."""

    reason: str
    until: float
    never: bool = False
    """The adapter cannot be loaded there as it is."""


class _Lease:
    __slots__ = ("boot", "until")

    def __init__(self, boot: str, until: float) -> None:
        self.boot = boot
        self.until = until


class Flight:
    """One call for a lease, for all requests that want it."""

    def __init__(self) -> None:
        self.done = False
        self.refused: Refused | None = None
        self.waiting: dict[Callable[[], None], None] = {}
        """What is called when it is over."""


class Leases:
    """`client` should keep connections. Not for threads."""

    def __init__(self, fleet: Fleet, me: Me, client: Upstream, metrics: Metrics) -> None:
        self._counted = metrics.leases
        self._fleet = fleet
        self._me = me
        self._client = client
        self._leases: dict[str, dict[str, _Lease]] = {}
        self._flights: dict[Key, tuple[Flight, asyncio.Task[None]]] = {}
        self._refused: dict[Key, Refused] = {}
        self._listening: dict[str, list[asyncio.Future[None]]] = {}
        """By pod: those that wait for the next word of its agent."""
        self._closed = False
        fleet.changed.append(self._heard)
        fleet.acknowledged = self.acknowledged

    def good(self, uid: str, name: str) -> bool:
        """Whether a request may go there now."""
        lease = self._leases.get(uid, _NO_LEASES).get(name)
        return lease is not None and lease.until - time.monotonic() > MARGIN_SECONDS

    def used(self, uid: str, adapter: ServedAdapter) -> None:
        """A request goes there: renews a lease that is about to end."""
        lease = self._leases[uid][adapter.engine_name]
        if lease.until - time.monotonic() < RENEW_SECONDS:
            self.ask(uid, adapter)

    def lacking(self, uid: str, name: str) -> None:
        """The engine says that it does not have the adapter."""
        self.drop(uid, name)
        self._refuse((uid, name), Refused("NotThere", time.monotonic() + _RETRY_SECONDS))

    def refused(self, uid: str, name: str) -> Refused | None:
        """Why it was refused there a moment ago."""
        found = self._refused.get((uid, name))
        if found is not None and found.until <= time.monotonic():
            del self._refused[uid, name]
            return None
        return found

    def ask(self, uid: str, adapter: ServedAdapter) -> Flight:
        """A call to the agent of a pod: the one that is under way, or a new one."""
        key = (uid, adapter.engine_name)
        known = self._flights.get(key)
        if known is not None:
            return known[0]
        flight = Flight()
        if self._closed:
            flight.done, flight.refused = True, Refused("Stopping", time.monotonic() + _RETRY_SECONDS)
            self._refuse(key, flight.refused)
            return flight
        task = asyncio.create_task(self._fly(flight, key, adapter), name=f"lease of {adapter.engine_name}")
        self._flights[key] = (flight, task)
        return flight

    def under_way(self, name: str) -> list[Flight]:
        """Calls for an adapter, at whatever pod."""
        return [flight for (_, of), (flight, _) in self._flights.items() if of == name]

    def leave(self, uid: str, name: str) -> None:
        """Nobody wants the adapter there any more, who has got it elsewhere: a call that nobody waits for is taken
        back, so that it takes no slot from others."""
        found = self._flights.get((uid, name))
        if found is not None and not found[0].waiting:
            found[1].cancel()

    def drop(self, uid: str, name: str) -> None:
        """The lease is void: the engine does not have the adapter after all."""
        leases = self._leases.get(uid)
        if leases is not None and leases.pop(name, None) is not None and not leases:
            del self._leases[uid]

    def acknowledged(self, uid: str, names: Collection[str], at: float) -> None:
        """The agent has heard that these run there; `at` is from before it was told."""
        leases = self._leases.get(uid)
        if leases is not None:
            for name in names:
                lease = leases.get(name)
                if lease is not None:
                    lease.until = max(lease.until, at + api.LEASE_SECONDS)

    async def close(self) -> None:
        """Ends all calls."""
        self._closed = True
        tasks = [task for _, task in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _heard(self, uid: str) -> None:
        for waiting in self._listening.pop(uid, ()):
            if not waiting.done():
                waiting.set_result(None)
        leases = self._leases.get(uid)
        if leases is None:
            return
        heard = self._fleet.heard.get(uid)
        loaded = self._fleet.residency.loaded(uid) if heard is not None else ()
        for name, lease in list(leases.items()):
            if heard is None or name not in loaded or heard.engine_boot != lease.boot:
                self.drop(uid, name)

    async def _fly(self, flight: Flight, key: Key, adapter: ServedAdapter) -> None:
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
                flight.refused = Refused("Interrupted", began)
            del self._flights[key]
            for wake in flight.waiting:
                wake()

    async def _call(self, uid: str, adapter: ServedAdapter) -> Refused | None:
        stream = self._fleet.streams.get(uid)
        if stream is None or stream.boot is None:
            return self._failed("NotHeard")
        try:
            async with asyncio.timeout(WAIT_SECONDS + _GRACE_SECONDS):
                answer = await self._client.start(*_request(stream, stream.boot, self._me, adapter), AbortHandle())
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
        heard = self._fleet.heard.get(uid)
        if heard is None or heard.engine_boot != lease.engine_boot:
            # The stream lags behind, or the engine was started again meanwhile.
            return self._failed(reasons.ENGINE_RESTARTED)
        if not await self._caught_up(stream, lease):
            return self._failed("NotThere")
        now = time.monotonic()
        until = now + lease.seconds - _ANSWER_SECONDS
        if until - now <= MARGIN_SECONDS:
            return self._failed("LeaseTooShort")
        self._leases.setdefault(uid, {})[adapter.engine_name] = _Lease(lease.engine_boot, until)
        self._counted.labels("loaded" if lease.loaded else "granted").inc()
        return None

    def _refuse(self, key: Key, refused: Refused) -> None:
        if len(self._refused) >= _MOST_REFUSALS:
            now = time.monotonic()
            self._refused = {k: r for k, r in self._refused.items() if r.until > now}
        self._refused[key] = refused

    async def _caught_up(self, stream: ReplicaStream, lease: api.Lease) -> bool:
        """Waits until the stream has said what the agent had said when it gave the lease. Before that a request would
        act on an older state than the one that its acknowledgement names, and a retirement would not wait for it."""
        uid, boot = stream.peer.uid, stream.boot
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                while stream.seq < lease.seq:
                    waiting = asyncio.get_running_loop().create_future()
                    self._listening.setdefault(uid, []).append(waiting)
                    await waiting
                    if self._fleet.streams.get(uid) is not stream or stream.boot != boot:
                        return False
        except TimeoutError:
            return False
        return not lease.seq or lease.name in self._fleet.residency.loaded(uid)

    def _failed(self, reason: str) -> Refused:
        self._counted.labels("failed").inc()
        return Refused(reason, time.monotonic() + _RETRY_SECONDS)

    def _refusal(self, status: int, body: bytes) -> Refused:
        try:
            said = api.AdapterRefusal.model_validate_json(body)
        except pydantic.ValidationError:
            return self._failed(f"status {status}")
        self._counted.labels("refused").inc()
        after = _RETRY_SECONDS if said.retry_after is None else float(said.retry_after)
        if status == 422:
            after = max(after, _RETRY_MOST_SECONDS / 3)
        until = time.monotonic() + max(_RETRY_LEAST_SECONDS, min(after, _RETRY_MOST_SECONDS))
        return Refused(said.reason, until, never=status == 422)


_NO_LEASES: Final[dict[str, _Lease]] = {}


def _request(stream: ReplicaStream, boot: str, me: Me, adapter: ServedAdapter) -> tuple[Target, bytes, bytes]:
    body = (
        api.Ensure(
            name=adapter.engine_name,
            revision=adapter.revision,
            uri=adapter.uri,
            gateway=me.name,
            boot=me.boot,
            agent_boot=boot,
            wait_seconds=WAIT_SECONDS,
        )
        .model_dump_json()
        .encode()
    )
    return to_agent(stream.peer, f"{ADAPTERS_PATH}/{quote(adapter.engine_name, safe='@')}/ensure", body)
