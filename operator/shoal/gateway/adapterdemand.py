"""Demand per adapter at this gateway: a part of the demand stream's messages (`api/demand.py`, AdapterDemand)."""

from collections.abc import Callable, Collection, Iterable, Mapping

import orjson

from shoal.api.demand import AdapterDemand


class _Count:
    __slots__ = ("arrivals", "held", "in_flight", "misses", "model")

    def __init__(self, model: str) -> None:
        self.model = model
        self.arrivals = self.in_flight = self.held = self.misses = 0


class AdapterDemandState:
    """Counts per uid of a LoRAAdapter. `due` is called when there is something for the next message. Nothing here is
    urgent: the Model's own demand counts the same requests."""

    def __init__(self, due: Callable[[], None] = lambda: None) -> None:
        self._due = due
        self._counts: dict[str, _Count] = {}
        self._changed: set[str] = set()

    def arrived(self, uid: str, model: str, *, missed: bool) -> None:
        """A request was accepted; `model` is the Model's uid. `missed`: no replica had the adapter loaded."""
        count = self._of(uid, model)
        count.model = model
        count.arrivals += 1
        count.misses += missed

    def sent(self, uid: str, model: str) -> None:
        """A request is in flight at a replica."""
        self._of(uid, model).in_flight += 1

    def ended(self, uid: str, model: str) -> None:
        """A request is no longer in flight."""
        self._of(uid, model).in_flight -= 1

    def held(self, uid: str, model: str) -> None:
        """A request waits for a replica, a slot or the adapter itself."""
        self._of(uid, model).held += 1

    def released(self, uid: str, model: str) -> None:
        """A request no longer waits."""
        self._of(uid, model).held -= 1

    def demand(self, uid: str) -> AdapterDemand | None:
        """An adapter's demand now; None: it was never requested."""
        count = self._counts.get(uid)
        return None if count is None else AdapterDemand.model_validate(_row(count))

    def retain(self, uids: Collection[str]) -> None:
        """Drops deleted adapters: those not in `uids` with nothing in flight or held."""
        gone = [u for u, c in self._counts.items() if u not in uids and not c.in_flight and not c.held]
        for uid in gone:
            del self._counts[uid]
            self._note(uid)

    def take(self) -> bytes | None:
        """What changed since the last call, as JSON; None when nothing did."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, set()
        return self._encode(changed)

    def full(self) -> bytes:
        """Everything, as JSON."""
        return self._encode(self._counts)

    def _of(self, uid: str, model: str) -> _Count:
        count = self._counts.get(uid)
        if count is None:
            count = self._counts[uid] = _Count(model)
        self._note(uid)
        return count

    def _note(self, uid: str) -> None:
        if uid not in self._changed:
            self._changed.add(uid)
            self._due()

    def _encode(self, uids: Iterable[str]) -> bytes:
        counts = self._counts
        return orjson.dumps({uid: _row(counts[uid]) if uid in counts else None for uid in uids})


def _row(count: _Count) -> Mapping[str, object]:
    """`AdapterDemand` as JSON, without zeros."""
    row: dict[str, object] = {"model": count.model, "arrivals": count.arrivals}
    if count.in_flight:
        row["inFlight"] = count.in_flight
    if count.held:
        row["held"] = count.held
    if count.misses:
        row["misses"] = count.misses
    return row
