"""Replays recorded arrivals at replicas that a rule chooses, each with a prefix cache of its own, and counts what the
caches would have had.

Recorded times are kept: when a prompt was scheduled, when its first token came and when its answer ended. Only the
replica differs, so a replay tells of caches and not of waiting: a rule that spreads load worse than the recorded one
looks as good as it is at reuse.

The KV cache of a replica holds prefixes beside what runs: prompts that are being prefilled, and the answers so far.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal.core.advice.cache import ReplayedCache
from shoal.core.advice.facts import PromptMark, RequestFact, TrafficWindow, after_answer

USABLE: Final = 0.95
"""Of a KV cache, for prefixes and what runs."""
WARM_UP: Final = 0.1
"""Share of the requests at the beginning that fill the caches and are not counted."""

_MOMENT: Final = 1e-3
"""Seconds for which a replica is there at least."""
_ARRIVED, _SCHEDULED, _BEGAN, _ENDED = range(4)


class ReplayEvent(NamedTuple):
    at: float
    step: int
    number: int
    """Of the request."""


Placement = Callable[[RequestFact, Sequence[int], Mapping[int, int]], int]
"""Chooses the replica of each request. It gets the replicas that the Model had at that time, and the requests in flight
at each."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Sums over the counted requests."""

    prompt: int
    found: int
    """Tokens of prompts that a cache had."""

    @property
    def share(self) -> float:
        return self.found / self.prompt if self.prompt else 0.0


class Replay:
    """The events of one window, which all rules share."""

    def __init__(self, window: TrafficWindow, rates: Mapping[str | None, float | None]) -> None:
        """`rates`: prompt tokens per second by class; from them and the first token's time follows when the engine
        began with a prompt."""
        self.requests = window.requests
        self.counted = counted(window.requests)
        events: list[ReplayEvent] = []
        for number, one in enumerate(window.requests):
            scheduled, began = _times(one, rates.get(one.gpu_class))
            events.append(ReplayEvent(one.at, _ARRIVED, number))
            events.append(ReplayEvent(scheduled, _SCHEDULED, number))
            events.append(ReplayEvent(began, _BEGAN, number))
            events.append(ReplayEvent(max(began, one.ended), _ENDED, number))
        # At one time each request goes through its steps in their order.
        events.sort()
        self._events = events
        self._present = _Present(window.requests)

    def run(self, choose: Placement, kv_tokens: Callable[[int], int | None]) -> Replayed:
        """`kv_tokens`: of a replica; None: its cache has no bound."""
        requests = self.requests
        caches: defaultdict[int, ReplayedCache] = defaultdict(ReplayedCache)
        running: defaultdict[int, int] = defaultdict(int)
        in_flight: defaultdict[int, int] = defaultdict(int)
        places, founds = [0] * len(requests), [0] * len(requests)
        prompt = found_in_all = 0

        def keep(replica: int, marks: Sequence[PromptMark]) -> None:
            most = kv_tokens(replica)
            caches[replica].keep(marks, None if most is None else max(0, int(most * USABLE) - running[replica]))

        for at, step, number in self._events:
            one, replica = requests[number], places[number]
            if step == _ARRIVED:
                replica = places[number] = choose(one, self._present.at(at), in_flight)
                in_flight[replica] += 1
            elif step == _SCHEDULED:
                found = founds[number] = min(caches[replica].find(one.marks), one.prompt - 1)
                running[replica] += one.prompt - found
                if number in self.counted:
                    prompt += one.prompt
                    found_in_all += found
            elif step == _BEGAN:
                running[replica] += one.answer - (one.prompt - founds[number])
                keep(replica, one.marks)
            else:
                running[replica] -= one.answer
                in_flight[replica] -= 1
                if one.marks:
                    whole = one.marks[-1]
                    keep(replica, (*one.marks, PromptMark(after_answer(whole.key), one.prompt + one.answer)))
        return Replayed(prompt, found_in_all)

    def places(self, choose: Placement) -> Iterator[tuple[RequestFact, int]]:
        """Each request with its replica by a rule."""
        in_flight: defaultdict[int, int] = defaultdict(int)
        chosen: dict[int, int] = {}
        for at, step, number in self._events:
            one = self.requests[number]
            if step == _ARRIVED:
                replica = chosen[number] = choose(one, self._present.at(at), in_flight)
                in_flight[replica] += 1
                yield one, replica
            elif step == _ENDED:
                in_flight[chosen.pop(number)] -= 1


def counted(requests: Sequence[RequestFact]) -> frozenset[int]:
    """Numbers of the requests over which shares are taken: those after the caches filled, whose prompt is understood
    and whose cached tokens the engine reported."""
    cold = int(len(requests) * WARM_UP)
    return frozenset(
        number for number, one in enumerate(requests) if number >= cold and one.marks and one.cached is not None
    )


def _times(one: RequestFact, rate: float | None) -> tuple[float, float]:
    """When the engine looked the prompt up, and when it had read it."""
    sent = max(one.at, one.sent)
    if one.first is None or not one.stream:
        # The first byte came at the end of the answer, or not at all.
        return sent, sent
    first = max(sent, one.first)
    if rate is None:
        return sent, first
    return max(sent, first - (one.prompt - (one.cached or 0)) / rate), first


class _Present:
    """Which replicas there were, from their first request to the end of their last."""

    def __init__(self, requests: Sequence[RequestFact]) -> None:
        spans: dict[int, tuple[float, float]] = {}
        for one in requests:
            start, end = spans.get(one.replica, (one.at, one.ended))
            spans[one.replica] = min(start, one.at), max(end, one.ended, one.at + _MOMENT)
        self._spans = spans
        self._changes = sorted({at for span in spans.values() for at in span})
        self._known: dict[int, Sequence[int]] = {}

    def at(self, at: float) -> Sequence[int]:
        between = bisect.bisect_right(self._changes, at)
        found = self._known.get(between)
        if found is None:
            start = self._changes[between - 1]
            end = self._changes[between] if between < len(self._changes) else start
            found = sorted(uid for uid, (since, until) in self._spans.items() if since <= start and until >= end)
            self._known[between] = found
        return found


# --- rules -----------------------------------------------------------------------------------------------------------


def recorded(request: RequestFact, _replicas: Sequence[int], _in_flight: Mapping[int, int]) -> int:
    """The replica that really served the request."""
    return request.replica


def one_cache(_request: RequestFact, _replicas: Sequence[int], _in_flight: Mapping[int, int]) -> int:
    """All requests find what any of them left."""
    return 0


class RoundRobin:
    def __init__(self) -> None:
        self._next = -1

    def __call__(self, _request: RequestFact, replicas: Sequence[int], _in_flight: Mapping[int, int]) -> int:
        self._next += 1
        return replicas[self._next % len(replicas)]


class LeastInFlight:
    """The replica with the fewest requests; equals take turns."""

    def __init__(self) -> None:
        self._next = -1

    def __call__(self, _request: RequestFact, replicas: Sequence[int], in_flight: Mapping[int, int]) -> int:
        self._next += 1
        start = self._next % len(replicas)
        order = (*replicas[start:], *replicas[:start])
        return min(order, key=lambda uid: in_flight.get(uid, 0))
