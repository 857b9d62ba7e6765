"""Acknowledgements (streams.md): each agent learns which of its states this gateway acts on, and what this gateway has
in flight there.

An agent that drains stops its engine once every gateway has acknowledged the draining phase with nothing in flight. One
sender runs per replica with a live stream. It sends every 5 s, and at once when the phase changes, when an adapter
begins to retire, when the last request leaves a draining replica or a retiring adapter, and when an unused lease is
given back for a caller that waits for a slot. Pods that are being deleted are followed until they are gone.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Mapping
from typing import Final, Protocol

import orjson
import structlog

from shoal.api.names import ACK_PATH
from shoal.api.replica import HEARTBEAT_SECONDS, Phase
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.upstream import AbortHandle, Upstream, UpstreamAddress, UpstreamError, agent_request
from shoal.net.stream import ListenerIdentity
from shoal.signals.replica import ReplicaStream

log = structlog.get_logger()

SEND_SECONDS: Final = 3.0
RETRY_SECONDS: Final = 0.5
_MOST_BYTES: Final = 64 * 1024
_NO_SUCH_PATH: Final = (404, 405)
"""From an agent of an older version, which does not wait for acknowledgements."""


class Leases(Protocol):
    """What acknowledgements do to this gateway's leases. By uid of the pod."""

    def acknowledged(self, uid: str, names: Collection[str], at: float) -> None:
        """The agent knows that these adapters run; `at` is a time before the acknowledgement was sent."""
        ...

    def may_give_back(self, uid: str) -> bool:
        """Whether callers wait for a slot that an unused lease takes."""
        ...

    def give_back(self, uid: str) -> dict[str, int]:
        """Ends such leases: adapter -> grant."""
        ...


class NoLeases:
    """Of a gateway without adapters."""

    def acknowledged(self, uid: str, names: Collection[str], at: float) -> None:
        pass

    def may_give_back(self, uid: str) -> bool:
        return False

    def give_back(self, uid: str) -> dict[str, int]:
        return {}


class _Sender:
    def __init__(
        self, uid: str, fleet: ReplicaPool, identity: ListenerIdentity, client: Upstream, leases: Leases
    ) -> None:
        self.phase: Phase | None = None
        self.retiring: frozenset[str] = frozenset()
        self.due = asyncio.Event()
        self._uid = uid
        self._fleet = fleet
        self._identity = identity
        self._client = client
        self._leases = leases
        self._given_back: dict[str, int] = {}
        """Leases that ended here. No answer of the agent has confirmed that yet."""

    async def run(self) -> None:
        """Raises nothing but cancellation."""
        while True:
            self.due.clear()
            sent = await self._send()
            # Between 4 and 5 s, so that thousands of senders that began together spread out.
            pause = HEARTBEAT_SECONDS * random.uniform(0.8, 1.0) if sent else RETRY_SECONDS  # noqa: S311
            if self._leases.may_give_back(self._uid):
                pause = RETRY_SECONDS  # what was given back freed no slot: other gateways have leases of that adapter
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.due.wait()

    async def _send(self) -> bool:
        stream = self._fleet.streams.get(self._uid)
        if stream is None:
            return True  # the stream is down: there is no state to acknowledge
        began, running = time.monotonic(), tuple(self._fleet.residency.running(self._uid))
        self._given_back |= self._leases.give_back(self._uid)
        given_back = dict(self._given_back)
        request = _request(stream, self._identity, self._fleet, self._uid, given_back)
        error = ""
        try:
            async with asyncio.timeout(SEND_SECONDS):
                answer = await self._client.start(*request, AbortHandle())
                try:
                    await answer.read_all(_MOST_BYTES)
                    status = answer.status
                finally:
                    answer.release()
            if status < 300 and running:
                self._leases.acknowledged(self._uid, running, began)
            if status < 500:
                self._given_back = {n: grant for n, grant in self._given_back.items() if given_back.get(n) != grant}
            if status < 300 or status in _NO_SUCH_PATH:
                return True
            error = f"status {status}"
        except TimeoutError:
            error = f"no answer within {SEND_SECONDS:g} s"
        except UpstreamError as failure:
            error = str(failure)
        log.debug("acknowledgement failed", pod=stream.peer.name, reason=error)
        return False


class Acks:
    """`client` should keep idle connections for longer than the time between two acknowledgements."""

    def __init__(
        self,
        fleet: ReplicaPool,
        identity: ListenerIdentity,
        client: Upstream,
        leases: Leases | None = None,
    ) -> None:
        self._fleet = fleet
        self._identity = identity
        self._client = client
        self._leases = leases or NoLeases()
        self._senders: dict[str, tuple[_Sender, asyncio.Task[None]]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._closed = False
        fleet.changed.append(self._on_report)
        fleet.emptied = self._on_emptied
        fleet.residency.ended = self._on_adapter_ended

    def _on_report(self, uid: str) -> None:
        signal = self._fleet.live.get(uid)
        known = self._senders.get(uid)
        if signal is None:
            if known is not None:
                self._end(uid)
        elif known is not None:
            retiring = self._fleet.residency.retiring(uid)
            if known[0].phase != signal.phase or not retiring <= known[0].retiring or self._leases.may_give_back(uid):
                known[0].due.set()
            known[0].phase, known[0].retiring = signal.phase, retiring
        elif not self._closed:
            sender = _Sender(uid, self._fleet, self._identity, self._client, self._leases)
            sender.phase, sender.retiring = signal.phase, self._fleet.residency.retiring(uid)
            self._senders[uid] = (sender, asyncio.create_task(sender.run(), name=f"acks to {uid}"))

    def _on_emptied(self, uid: str) -> None:
        known = self._senders.get(uid)
        if known is not None and known[0].phase == "draining":
            known[0].due.set()

    def _on_adapter_ended(self, uid: str, name: str) -> None:
        known = self._senders.get(uid)
        if known is not None and (name in known[0].retiring or self._leases.may_give_back(uid)):
            known[0].due.set()

    def _end(self, uid: str) -> None:
        _, task = self._senders.pop(uid)
        task.cancel()
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)

    async def close(self) -> None:
        """Ends all senders."""
        self._closed = True
        for uid in list(self._senders):
            self._end(uid)
        await asyncio.gather(*self._ended, return_exceptions=True)


def _request(
    stream: ReplicaStream, identity: ListenerIdentity, fleet: ReplicaPool, uid: str, given_back: Mapping[str, int]
) -> tuple[UpstreamAddress, bytes, bytes]:
    """The agent's boot id, the number of the state acted on and the requests in flight, read without an await
    between."""
    message: dict[str, object] = {
        "gateway": identity.name,
        "boot": identity.boot,
        "agentBoot": stream.boot,
        "seq": stream.seq,
        "running": fleet.in_flight(uid),
    }
    if adapters := fleet.residency.running(uid):
        message["runningByAdapter"] = dict(adapters)
    if given_back:
        message["givenBack"] = given_back
    body = orjson.dumps(message)
    return agent_request(stream.peer, ACK_PATH, body)
