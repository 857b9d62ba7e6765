"""What separate pools for prefill and decode would gain: an estimate.

While an engine prefills one prompt, the answers that it generates for others wait. With separate pools they would not:

    gain <= sum over answers of (seconds that their replica spent on other prompts meanwhile)
            / sum over answers of (seconds from first to last token)

The seconds of a prompt are its tokens that were not cached over the class's prefill rate. Not counted: the transfer of
the KV cache, and that each pool has only a part of the GPUs. So this is the most that generation would get shorter.
"""

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.core.advice.facts import RequestFact

LONG_TOKENS: Final = 8192
"""A prompt of at least so many tokens is long: more than one step of most engines."""


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Shares, from 0 to 1."""

    requests: float
    """Of the requests with a long prompt."""
    tokens: float
    """Of prompt tokens that are in long prompts."""


@dataclass(frozen=True, slots=True)
class PoolsEstimate:
    """None is unknown: no answer was a stream, or no rate is known."""

    most_gain: float | None
    """Of the seconds of generation, at most, from 0 to 1."""


def long_prompts(requests: Sequence[RequestFact]) -> LongPrompts:
    tokens = sum(one.prompt for one in requests)
    found = [one.prompt for one in requests if one.prompt >= LONG_TOKENS]
    return LongPrompts(len(found) / len(requests) if requests else 0.0, sum(found) / tokens if tokens else 0.0)


def pools_estimate(requests: Sequence[RequestFact], rates: Mapping[str | None, float | None]) -> PoolsEstimate:
    """`rates`: prompt tokens per second by class."""
    prefills: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    answers: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in requests:
        rate = rates.get(one.gpu_class)
        if one.first is None or not one.stream or rate is None:
            continue
        answers[one.replica].append((one.first, one.ended))
        seconds = (one.prompt - (one.cached or 0)) / rate
        prefills[one.replica].append((max(one.sent, one.first - seconds), one.first))
    delayed = generating = 0.0
    for replica, spans in answers.items():
        busy = _Busy(prefills[replica])
        for first, ended in spans:
            delayed += busy.until(ended) - busy.until(first)
            generating += ended - first
    return PoolsEstimate(delayed / generating if generating > 0 else None)


class _Busy:
    """Seconds that a replica has spent on prompts up to a time."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []
        total = 0.0
        for start, end in sorted(spans):
            start = max(start, self._ends[-1]) if self._ends else start
            if end > start:
                self._starts.append(start)
                self._ends.append(end)
                self._before.append(total)
                total += end - start

    def until(self, at: float) -> float:
        found = bisect.bisect_right(self._starts, at) - 1
        if found < 0:
            return 0.0
        return self._before[found] + min(at, self._ends[found]) - self._starts[found]
