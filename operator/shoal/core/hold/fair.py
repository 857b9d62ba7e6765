"""Start-time fair queueing (Goyal, Vin and Cheng, 1996): which request is next, by the tokens each flow has had.

Each flow (a tenant) has a start tag: the virtual time at which its next request would begin if all waiting flows were
served at once. The flow with the smallest start tag is next; serving a request moves the flow's tag on by the request's
cost over the flow's weight. A flow that did not wait begins at the current virtual time, so it neither collects credit
nor pays for others: however many requests one flow has waiting, the first request of another flow is next.

Exact within one queue. Each gateway has its own, so over several gateways it is only as fair as clients spread.
"""

import heapq
from collections.abc import Callable
from itertools import islice
from typing import Final, Generic, TypeVar

_TIDY_AT: Final = 64
"""Number of flows above which those without a debt are dropped."""

_MOST_ASKED: Final = 64
"""Items that one search for a fitting item looks at. Those behind them wait until some of these are served."""

T = TypeVar("T")


class _Flow(Generic[T]):
    __slots__ = ("finish", "items", "queued")

    def __init__(self) -> None:
        # A dict keeps the order of insertion, and removes an item in the middle in constant time.
        self.items: dict[T, tuple[float, float]] = {}
        self.finish = 0.0
        self.queued = False


class FairQueue(Generic[T]):
    """Items must be hashable, and each may be in the queue once."""

    __slots__ = ("_flows", "_heap", "_order", "_size", "_tidy_at", "_virtual")

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._virtual = 0.0
        self._order = 0
        self._size = 0
        self._tidy_at = _TIDY_AT

    def __len__(self) -> int:
        return self._size

    def push(self, flow: str, item: T, cost: float, weight: float = 1.0) -> None:
        """Adds an item behind those of its flow. `cost`: cost of serving it, in one unit for all items.

        Raises:
            ValueError: `cost` or `weight` is not above 0, or the item waits already.
        """
        if not (cost > 0 and weight > 0):
            raise ValueError(f"cost {cost} and weight {weight} must be above 0")
        found = self._flows.get(flow)
        if found is None:
            found = self._flows[flow] = _Flow()
        elif item in found.items:
            raise ValueError("the item waits already")
        found.items[item] = (cost, weight)
        self._size += 1
        if not found.queued:
            self._enter(flow, found)

    def pop(self, fits: Callable[[T], bool] | None = None) -> T | None:
        """Takes out the next item, of those that `fits` accepts; None: there is none. Items that are passed over keep
        their place and cost nothing."""
        passed: list[tuple[float, int, str]] = []
        asked = 0
        item: T | None = None
        while asked < _MOST_ASKED and (flow := self._first()) is not None:
            entry = heapq.heappop(self._heap)
            candidates = islice(flow.items, _MOST_ASKED - asked)
            if fits is None:
                item = next(candidates)
            else:
                for each in candidates:
                    asked += 1
                    if fits(each):
                        item = each
                        break
            if item is not None:
                self._serve(entry, flow, item)
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return item

    def _serve(self, entry: tuple[float, int, str], flow: _Flow[T], item: T) -> None:
        start, _, name = entry
        cost, weight = flow.items.pop(item)
        self._size -= 1
        # A flow that was passed over may have begun earlier.
        self._virtual = max(self._virtual, start)
        flow.finish = start + cost / weight
        flow.queued = False
        if flow.items:
            self._enter(name, flow)
        if not self._size:
            self._forget()
        elif len(self._flows) > self._tidy_at:
            self._tidy()

    def remove(self, flow: str, item: T) -> bool:
        """Takes out an item before its turn, without cost for its flow; False: it is not in the queue."""
        found = self._flows.get(flow)
        if found is None or item not in found.items:
            return False
        del found.items[item]
        self._size -= 1
        if not self._size:
            self._forget()
        return True

    def items(self) -> list[T]:
        """All items, flow by flow."""
        return [item for flow in self._flows.values() for item in flow.items]

    def _enter(self, name: str, flow: _Flow[T]) -> None:
        flow.queued = True
        self._order += 1
        heapq.heappush(self._heap, (max(self._virtual, flow.finish), self._order, name))

    def _first(self) -> _Flow[T] | None:
        while self._heap:
            flow = self._flows[self._heap[0][2]]
            if flow.items:
                return flow
            flow.queued = False
            heapq.heappop(self._heap)
        return None

    def _tidy(self) -> None:
        """Drops flows without items and without a debt."""
        done = [name for name, f in self._flows.items() if not f.queued and f.finish <= self._virtual]
        for name in done:
            del self._flows[name]
        self._tidy_at = 2 * len(self._flows) + _TIDY_AT

    def _forget(self) -> None:
        """The queue is empty: a new round begins, without debts."""
        self._flows.clear()
        self._heap.clear()
        self._virtual = 0.0
