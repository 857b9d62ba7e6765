"""Acknowledgements (streams.md): tells each agent which of its states this gateway acts on, and what it has there.

An agent that drains lets its engine go when every gateway has said "I act on that, and nothing of mine runs here". One
sender per replica with a live stream: at once when the phase changes or an adapter begins to retire, when the last
request leaves a replica that drains or a retiring adapter there, and every 5 s. Pods that are being deleted are
followed until they are gone.
"""

import asyncio
import contextlib
import random
import time
from typing import Final

import orjson
import structlog

from shoal.api.names import ACK_PATH
from shoal.api.replica import HEARTBEAT_SECONDS, Phase
from shoal.gateway.fleet import Fleet
from shoal.gateway.upstream import AbortHandle, Target, Upstream, UpstreamError, to_agent
from shoal.signals.replica import ReplicaStream
from shoal.signals.stream import Me

log = structlog.get_logger()

SEND_SECONDS: Final = 3.0
RETRY_SECONDS: Final = 0.5
_MOST_BYTES: Final = 64 * 1024
_NO_SUCH_PATH: Final = (404, 405)
"""An agent of an older version, that does not wait for acknowledgements."""


class _Sender:
    def __init__(self, uid: str, fleet: Fleet, me: Me, client: Upstream) -> None:
        self.phase: Phase | None = None
        self.retiring: frozenset[str] = frozenset()
        self.due = asyncio.Event()
        self._uid = uid
        self._fleet = fleet
        self._me = me
        self._client = client

    async def run(self) -> None:
        """Raises nothing but cancellation."""
        while True:
            self.due.clear()
            sent = await self._send()
            # Between 4 and 5 s: thousands of senders that began at the same moment spread.
            pause = HEARTBEAT_SECONDS * random.uniform(0.8, 1.0) if sent else RETRY_SECONDS  # noqa: S311
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.due.wait()

    async def _send(self) -> bool:
        stream = self._fleet.streams.get(self._uid)
        if stream is None:
            return True  # the stream is down: nothing can be said of what it said
        began, running = time.monotonic(), tuple(self._fleet.residency.running(self._uid))
        request = _request(stream, self._me, self._fleet, self._uid)
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
                self._fleet.acknowledged(self._uid, running, began)
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
    """`client` should keep connections for longer than the time between two acknowledgements."""

    def __init__(self, fleet: Fleet, me: Me, client: Upstream) -> None:
        self._fleet = fleet
        self._me = me
        self._client = client
        self._senders: dict[str, tuple[_Sender, asyncio.Task[None]]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._closed = False
        fleet.changed.append(self._heard)
        fleet.emptied = self._emptied
        fleet.residency.ended = self._ended_adapter

    def _heard(self, uid: str) -> None:
        heard = self._fleet.heard.get(uid)
        known = self._senders.get(uid)
        if heard is None:
            if known is not None:
                self._end(uid)
        elif known is not None:
            retiring = self._fleet.residency.retiring(uid)
            if known[0].phase != heard.phase or not retiring <= known[0].retiring:
                known[0].due.set()
            known[0].phase, known[0].retiring = heard.phase, retiring
        elif not self._closed:
            sender = _Sender(uid, self._fleet, self._me, self._client)
            sender.phase, sender.retiring = heard.phase, self._fleet.residency.retiring(uid)
            self._senders[uid] = (sender, asyncio.create_task(sender.run(), name=f"acks to {uid}"))

    def _emptied(self, uid: str) -> None:
        known = self._senders.get(uid)
        if known is not None and known[0].phase == "draining":
            known[0].due.set()

    def _ended_adapter(self, uid: str, name: str) -> None:
        known = self._senders.get(uid)
        if known is not None and name in known[0].retiring:
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


def _request(stream: ReplicaStream, me: Me, fleet: Fleet, uid: str) -> tuple[Target, bytes, bytes]:
    """Boot and number of the state that is acted on now, and what is in flight now, without a pause between."""
    said: dict[str, object] = {
        "gateway": me.name,
        "boot": me.boot,
        "agentBoot": stream.boot,
        "seq": stream.seq,
        "running": fleet.in_flight(uid),
    }
    if adapters := fleet.residency.running(uid):
        said["runningByAdapter"] = dict(adapters)
    body = orjson.dumps(said)
    return to_agent(stream.peer, ACK_PATH, body)
