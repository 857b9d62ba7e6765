"""What became of the requests to routes in the last minute, by target. The caller gives the time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shoal.core.routing.canary import FAILED
from shoal.core.routing.routes import RouteRole

WINDOW_SECONDS: Final = 60
STEP_SECONDS: Final = 5
TTFT_BOUNDS: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0)
"""Upper bounds of the histogram of times to the first byte, in seconds. One more count is of what took longer."""
MOST_TARGETS: Final = 8192
"""Targets with requests in the window. Requests to further ones are not counted."""


class TargetKey(NamedTuple):
    """A target of a route, in the role that it had for a request."""

    route: str
    """namespace/name."""
    target: str
    """Key of the Model, the adapter, or the external target."""
    role: RouteRole


@dataclass(slots=True)
class TargetCounts:
    """Requests of a span of time."""

    requests: int = 0
    """That have ended."""
    failed: int = 0
    output_tokens: int = 0
    first_bytes: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS) + 1))
    """Streams by their time to the first byte."""

    def add(self, other: "TargetCounts") -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.output_tokens += other.output_tokens
        self.first_bytes = [own + more for own, more in zip(self.first_bytes, other.first_bytes, strict=True)]


class RouteWindows:
    """Counts of the last `WINDOW_SECONDS`, in steps. Times are of one monotonic clock."""

    def __init__(self, now: float, most: int = MOST_TARGETS) -> None:
        self._began = now
        self._most = most
        self._kept: dict[TargetKey, deque[tuple[int, TargetCounts]]] = {}

    def note(self, now: float, key: TargetKey, outcome: str | None, tokens: int, ttft_seconds: float | None) -> None:
        """A request has ended. `ttft_seconds`: of a stream that began."""
        step = int(now // STEP_SECONDS)
        steps = self._kept.get(key)
        if steps is None:
            if len(self._kept) >= self._most:
                self._prune(step)
                if len(self._kept) >= self._most:
                    return
            steps = self._kept[key] = deque()
        if not steps or steps[-1][0] != step:
            _drop(steps, step)
            steps.append((step, TargetCounts()))
        counts = steps[-1][1]
        counts.requests += 1
        counts.failed += outcome in FAILED or outcome == "cut"
        counts.output_tokens += tokens
        if ttft_seconds is not None:
            counts.first_bytes[_bucket(ttft_seconds)] += 1

    def read(self, now: float) -> tuple[float, dict[TargetKey, TargetCounts]]:
        """For how many seconds requests were counted, and the counts of each target that had any."""
        step = int(now // STEP_SECONDS)
        self._prune(step)
        found: dict[TargetKey, TargetCounts] = {}
        for key, steps in self._kept.items():
            counts = found[key] = TargetCounts()
            for _, each in steps:
                counts.add(each)
        # The oldest step may have begun up to one step before the window.
        oldest = (step - WINDOW_SECONDS // STEP_SECONDS + 1) * STEP_SECONDS
        return max(1.0, now - max(self._began, oldest)), found

    def _prune(self, step: int) -> None:
        for key, steps in list(self._kept.items()):
            _drop(steps, step)
            if not steps:
                del self._kept[key]


def _drop(steps: deque[tuple[int, TargetCounts]], step: int) -> None:
    while steps and steps[0][0] <= step - WINDOW_SECONDS // STEP_SECONDS:
        steps.popleft()


def _bucket(seconds: float) -> int:
    return next((at for at, bound in enumerate(TTFT_BOUNDS) if seconds <= bound), len(TTFT_BOUNDS))


def quantile(first_bytes: Sequence[int], share: float) -> float | None:
    """Seconds within which this share of the streams began, linear within a bound's range; None: there were none, or
    it is more than the largest bound."""
    total = sum(first_bytes)
    wanted, seen, below = share * total, 0, 0.0
    for bound, count in zip(TTFT_BOUNDS, first_bytes, strict=False):
        if count and seen + count >= wanted:
            return below + (bound - below) * (wanted - seen) / count
        seen, below = seen + count, bound
    return None
