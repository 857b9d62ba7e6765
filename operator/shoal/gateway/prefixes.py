"""What gateways tell each other of the prompts that they sent to replicas (`GET /v1/prefixes`, streams.md), so that
each knows what is in a replica's prefix cache (core/routing/prefixes.py), and what lies ahead of a prompt there before
the replica's agent reports it (core/routing/score.py).

The request path only appends. Ten times a second a message is made of it; what the others say is taken in slices, so
that no request waits for it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import orjson

from shoal.api.prefixes import MOST_MARKS, MOST_PROMPTS, to_text
from shoal.core.routing.prefixes import points_of
from shoal.core.routing.score import ReplicaScores
from shoal.net.hub import StreamHub

TELL_SECONDS: Final = 0.1
"""Between two messages. Agents look at a busy engine every 0.5 s: a later message would say nothing new of its load."""
RECENT: Final = 1024
"""Prompts in the first message to a gateway that connects."""
_SLICE: Final = 64
"""Prompts that are taken without a pause: about a millisecond."""
_MOST_WAITING: Final = 16_384
"""Prompts of other gateways that wait to be taken. Those that came first are dropped: it is knowledge, not a duty."""

_START_SECONDS: Final = 0.5
_START_TRIES: Final = 20

_Prompt = tuple[str, bytes]
"""Uid of the replica's pod, and marks."""


class PrefixShare:
    """This gateway's side, for the event loop only."""

    def __init__(self, scores: ReplicaScores, boot: str | None = None) -> None:
        self.hub = StreamHub("sent", self._full, boot)
        self._scores = scores
        self._new: deque[_Prompt] = deque(maxlen=MOST_PROMPTS)
        self._recent: deque[_Prompt] = deque(maxlen=RECENT)
        self._heard: deque[tuple[_Prompt, float | None]] = deque(maxlen=_MOST_WAITING)
        """With the time (time.monotonic) at which the message came; None: the prompt may be an old one."""
        self._came = asyncio.Event()

    def sent(self, uid: str, marks: bytes) -> None:
        """This gateway sent a prompt to a replica."""
        if len(marks) <= MOST_MARKS * 8:
            self._new.append((uid, marks))

    def heard(self, prompts: Sequence[_Prompt], *, full: bool) -> None:
        """Another gateway said what it sent; `full`: the first message, with prompts of some time."""
        at = None if full else time.monotonic()
        self._heard.extend((prompt, at) for prompt in prompts)
        self._came.set()

    async def run(self) -> None:
        """Tells and takes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell())
            group.create_task(self._take())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self.publish()

    def publish(self) -> None:
        """Tells what was sent since the last time."""
        if self._new:
            self.hub.publish(_encode(self._new))
            self._recent.extend(self._new)
            self._new.clear()

    async def _take(self) -> None:
        await self._came.wait()
        # A prompt at a replica that never reported is dropped. Of a gateway that has just started, the streams to
        # agents begin with those to gateways.
        for _ in range(_START_TRIES):
            await asyncio.sleep(_START_SECONDS)
            if self._scores.has_reports():
                break
        while True:
            await self._came.wait()
            self._came.clear()
            while self._heard:
                self.take(_SLICE)
                await asyncio.sleep(0)

    def take(self, most: int) -> None:
        """Takes at most so many of the prompts of others."""
        for _ in range(min(most, len(self._heard))):
            (uid, marks), at = self._heard.popleft()
            self._scores.told(uid, points_of(marks), at)

    def _full(self) -> bytes:
        return _encode(self._recent)


def _encode(prompts: Iterable[_Prompt]) -> bytes:
    by_uid: dict[str, list[str]] = {}
    for uid, marks in prompts:
        by_uid.setdefault(uid, []).append(to_text(marks))
    return orjson.dumps(by_uid)
