"""When a canary is halted: too many of its requests fail, or their answers begin too late.

The last requests are judged, by their number and not by time, so no clock matters. A canary is halted as soon as its
failures are too many for the whole of `minRequests`, however the rest of them would end: a canary that fails at once is
halted after a few requests.

Each gateway judges the last requests of all gateways: its own one by one, those of the others by message, in the order
in which it knows of them. Gateways publish what they have counted since they started (`CanaryCounts`), so a repeated
message counts once, and the next message makes up for a lost one. While no other gateway's stream is up, a gateway
judges its own requests.
"""

from collections import deque
from operator import add
from typing import Final, Literal, NamedTuple

FAILED: Final = frozenset({"failed", "refused", "expired"})
"""Outcomes that count against a canary. What the engine rejects (4xx) does not: the client's mistake would halt the
canary for all. Neither does a request whose client left, or one that found no place to wait, or left for a fallback,
because the first replica still starts or the adapter is not loaded yet; and a doubtful one only where none is
answered."""

MOST_PEERS: Final = 256
"""Processes of other gateways whose counts are remembered: several restarts of as many gateways as can listen to each
other."""


class HaltLimits(NamedTuple):
    """When to halt a canary."""

    error_percent: int
    ttft_seconds: int | None
    min_requests: int
    """Number of the last requests that are judged."""


class CanaryHalt(NamedTuple):
    """Why a canary was halted."""

    reason: Literal["Errors", "Slow"]
    bad: int
    of: int
    """Requests that were judged at that time."""

    def describe(self) -> str:
        """For people."""
        what = "failed" if self.reason == "Errors" else "waited too long for the first byte"
        return f"{self.bad} of its last {self.of} requests {what}"


class CanaryCounts(NamedTuple):
    """Ended requests of one canary at one gateway, since the gateway's process started."""

    requests: int = 0
    failed: int = 0
    streams: int = 0
    """Streams that were answered or left, where the canary has a limit for them."""
    slow: int = 0
    """Streams that began too late, or that were left after waiting for too long."""
    left: int = 0
    """Streams whose clients left. They say when an answer began, and not how it would have ended."""

    @property
    def ended(self) -> int:
        """Requests that were answered or failed."""
        return self.requests - self.left

    def since(self, before: "CanaryCounts") -> "CanaryCounts":
        """What was counted since the message with `before`. Counters that went down began anew: the gateway
        had forgotten the canary."""
        if any(now < then for now, then in zip(self, before, strict=True)):
            return self
        return CanaryCounts(*(now - then for now, then in zip(self, before, strict=True)))


class _Last:
    """How many of the last requests were bad. They come in batches: requests of another gateway, of which only the
    number is known."""

    __slots__ = ("_bad", "_batches", "_most", "_of")

    def __init__(self, most: int) -> None:
        self._most = most
        self._batches: deque[tuple[int, int]] = deque()
        """Bad ones, and all; the oldest first, and none without a request: at most `most` batches."""
        self._bad = self._of = 0

    def add(self, bad: int, of: int) -> None:
        if of <= 0:
            return
        self._batches.append((bad, of))
        self._bad += bad
        self._of += of
        while self._of - self._batches[0][1] >= self._most:
            bad, of = self._batches.popleft()
            self._bad -= bad
            self._of -= of

    @property
    def bad(self) -> int:
        """Of the oldest batch only a part may be among the last requests: its share of the bad ones, rounded down."""
        over = self._of - self._most
        if over <= 0:
            return self._bad
        bad, of = self._batches[0]
        return self._bad - bad + bad * (of - over) // of

    @property
    def of(self) -> int:
        return min(self._of, self._most)


class CanaryWindow:
    """The last requests of one canary, as one gateway knows of them."""

    __slots__ = ("_doubtful", "_limits", "_peers", "_requests", "_streams", "counts")

    def __init__(self, limits: HaltLimits) -> None:
        self.counts = CanaryCounts()
        """This gateway's own."""
        self._limits = limits
        self._requests, self._streams = _Last(limits.min_requests), _Last(limits.min_requests)
        self._doubtful = 0
        """Doubtful requests since the last one that was answered."""
        self._peers: dict[str, CanaryCounts] = {}
        """The last counts of other gateways, by boot id of the process: the latest ones are at the end."""

    def note(
        self,
        outcome: str | None,
        ttft_seconds: float | None,
        *,
        waited_seconds: float | None = None,
        doubtful: bool = False,
    ) -> CanaryHalt | None:
        """Notes an ended request, and returns why the canary is halted now; None: it is not. `outcome`: as in usage
        records (metering/record.py); `ttft_seconds`: of a stream, from acceptance to the first byte; None: the answer
        is no stream, or never began, or the request waited for the canary's first replica or for its adapter's load.
        `waited_seconds`: the same to the end of a stream that never began.

        A stream whose client left is judged by its first byte alone. Without one it is late if it waited for longer
        than the limit, and else says nothing: so a client that leaves at once halts no canary.

        `doubtful`: the request may be the reason that it failed. So one tenant's prompts could halt the canary for all.
        Such failures count only when there are `min_requests` of them and none was answered meanwhile."""
        if outcome in FAILED and doubtful:
            self._doubtful += 1
            if self._doubtful < (most := self._limits.min_requests):
                return None
            one, self._doubtful = CanaryCounts(most, most), 0
        elif outcome in FAILED:
            one = CanaryCounts(1, 1)
        elif outcome == "answered":
            self._doubtful = 0
            limit = self._limits.ttft_seconds
            if ttft_seconds is None or limit is None:
                one = CanaryCounts(1)
            else:
                one = CanaryCounts(1, 0, 1, int(ttft_seconds > limit))
        elif outcome == "cancelled" and (limit := self._limits.ttft_seconds) is not None:
            waited = waited_seconds if ttft_seconds is None else ttft_seconds
            if waited is None or (ttft_seconds is None and waited <= limit):
                return None
            one = CanaryCounts(1, 0, 1, int(waited > limit), 1)
        else:
            return None
        self.counts = CanaryCounts(*map(add, self.counts, one))
        return self._add(one)

    def heard(self, boot: str, counts: CanaryCounts) -> CanaryHalt | None:
        """Another gateway's process has counted this since it started. Returns why the canary is halted now.

        The first counts of a process are taken whole. If they are of more than `min_requests` requests, then their
        average counts: so old failures do not halt the canary at a gateway that has just started, and no failure of a
        gateway that has is lost."""
        before = self._peers.pop(boot, CanaryCounts())
        self._peers[boot] = counts
        if len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        more = counts.since(before)
        if more.ended > more.failed:
            self._doubtful = 0
        return self._add(more)

    def _add(self, more: CanaryCounts) -> CanaryHalt | None:
        failed, slow = self._requests, self._streams
        failed.add(more.failed, more.ended)
        slow.add(more.slow, more.streams)
        return judge(failed.bad, failed.of, slow.bad, slow.of, self._limits)


def judge(failed: int, requests: int, slow: int, streams: int, limits: HaltLimits) -> CanaryHalt | None:
    """Why a canary is halted: more failures than `error_percent` of `min_requests`, or more than half of
    `min_requests` streams that began late (their median is above the limit)."""
    if failed * 100 > limits.error_percent * limits.min_requests:
        return CanaryHalt("Errors", failed, requests)
    if limits.ttft_seconds is not None and slow * 2 > limits.min_requests:
        return CanaryHalt("Slow", slow, streams)
    return None
