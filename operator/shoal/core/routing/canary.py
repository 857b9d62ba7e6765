"""When a canary is halted: too many of its requests fail, or their answers begin too late.

Each gateway judges the last requests that it sent to the canary itself, by their number and not by time, so no clock
matters. A canary is halted as soon as its failures are too many for the whole of `minRequests`, however the rest of
them would end: a canary that fails at once is halted after a few requests.
"""

from collections import deque
from typing import Final, Literal, NamedTuple

FAILED: Final = frozenset({"failed", "refused", "expired"})
"""Outcomes that count against a canary. What the engine rejects (4xx) does not: the client's mistake would halt the
canary for all. Neither does a request whose client left."""


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
        what = "failed" if self.reason == "Errors" else "began to be answered too late"
        return f"{self.bad} of its last {self.of} requests at a gateway {what}"


class CanaryWindow:
    """The last requests of one canary at one gateway."""

    __slots__ = ("_failed", "_limits", "_slow")

    def __init__(self, limits: HaltLimits) -> None:
        self._limits = limits
        self._failed: deque[bool] = deque(maxlen=limits.min_requests)
        self._slow: deque[bool] = deque(maxlen=limits.min_requests)

    def note(self, outcome: str | None, ttft_seconds: float | None) -> CanaryHalt | None:
        """Notes an ended request, and returns why the canary is halted now; None: it is not. `outcome`: as in usage
        records (metering/record.py); `ttft_seconds`: of a
        stream, from acceptance to the first byte; None: the answer is no stream, or never began."""
        limits = self._limits
        if outcome in FAILED:
            self._failed.append(True)
        elif outcome == "answered":
            self._failed.append(False)
            if ttft_seconds is not None and limits.ttft_seconds is not None:
                self._slow.append(ttft_seconds > limits.ttft_seconds)
        return judge(sum(self._failed), len(self._failed), sum(self._slow), len(self._slow), limits)


def judge(failed: int, requests: int, slow: int, streams: int, limits: HaltLimits) -> CanaryHalt | None:
    """Why a canary is halted: more failures than `error_percent` of `min_requests`, or more than half of
    `min_requests` streams that began late (their median is above the limit)."""
    if failed * 100 > limits.error_percent * limits.min_requests:
        return CanaryHalt("Errors", failed, requests)
    if limits.ttft_seconds is not None and slow * 2 > limits.min_requests:
        return CanaryHalt("Slow", slow, streams)
    return None
