"""Demand per Model at this gateway, and when it is published (`GET /v1/demand`, streams.md).

The request path only updates counters; nothing is encoded or sent until a message is due:

- the first held request appears or the last one is gone: at once;
- the first request of a quiet Model arrives, or its last one ends: at once;
- a tenant's requests end, for which other gateways may be refusing its further ones: within 50 ms;
- everything else: at most once per second.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Literal

import orjson

from shoal.api.demand import MOST_FIRST_TOKENS, ModelDemand
from shoal.core.routing.canary import CanaryHalt
from shoal.gateway.adapterdemand import AdapterDemandState
from shoal.gateway.canarycounts import CanaryCountState
from shoal.gateway.tenantdemand import TenantUsageState
from shoal.net.hub import Caller, StreamHub

QUIET_SECONDS: Final = 1.0
"""Between two regular messages."""
GAP_SECONDS: Final = 0.01
"""Between two urgent messages: bounds what a burst of small Models costs the readers."""
FREED_SECONDS: Final = 0.05
"""Until what a tenant no longer uses of its concurrent requests is published, and so between two such messages. A
client that sends its next request to the same gateway keeps its place: else the gateways would only ever tell each
other of the moments between the requests of a busy client."""

Due = Literal["urgent", "freed", "regular"]
"""Which message there is something for: each has its own timer."""

_NOTHING: Final = ModelDemand()


class _Count:
    """One Model's counters."""

    __slots__ = ("_gone", "_since", "arrivals", "held", "held_tokens", "in_flight", "published_at")

    def __init__(self) -> None:
        self.arrivals = self.in_flight = self.held = self.held_tokens = 0
        self.published_at = float("-inf")
        self._since: list[float] = []
        """Heap of the times at which held requests began to wait. It may still contain requests that have left."""
        self._gone: dict[float, int] = {}
        """Times in the heap that belong to requests which have left: an entry is removed only when it becomes the
        oldest."""

    def hold(self, tokens: int, since: float) -> None:
        self.held += 1
        self.held_tokens += tokens
        heapq.heappush(self._since, since)

    def unhold(self, tokens: int, since: float) -> None:
        self.held -= 1
        self.held_tokens -= tokens
        if self.held:
            self._gone[since] = self._gone.get(since, 0) + 1
        else:
            self._since.clear()
            self._gone.clear()

    def oldest(self) -> float | None:
        """When the oldest held request began to wait."""
        since, gone = self._since, self._gone
        while since and (left := gone.get(since[0])):
            if left == 1:
                del gone[since[0]]
            else:
                gone[since[0]] = left - 1
            heapq.heappop(since)
        return since[0] if since else None

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self.held


class DemandState:
    """Counts per uid of a Model, for the event loop only.

    Times are those of `clock`. `due` is called when there is something to publish.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.due: Callable[[Due], None] = lambda _due: None
        self.adapters = AdapterDemandState(lambda: self.due("regular"))
        self.tenants = TenantUsageState(lambda: self.due("regular"), freed=lambda: self.due("freed"))
        self.currency: str | None = None
        """Currency of the current price list; None: unknown."""
        self.prices_refused: str | None = None
        """Why the ledger refuses price lists; None: it does not, as far as is known."""
        self.canaries: Mapping[str, CanaryHalt] = {}
        """Halted canaries, by revision."""
        self.canary_counts = CanaryCountState(lambda: self.due("regular"))
        self._clock = clock
        self._counts: dict[str, _Count] = {}
        self._first_tokens: dict[str, dict[str, Mapping[str, float | None]]] = {}
        """By uid of the Model and of the pod: `FirstToken` as JSON."""
        self._changed: set[str] = set()
        self._urgent: set[str] = set()

    # --- counting, by the request path --------------------------------------------------------------------------------

    def arrived(self, uid: str) -> None:
        """A request was accepted. Called once per request, whatever its outcome."""
        count = self._of(uid)
        count.arrivals += 1
        # A request that may not wait shows up in no other counter, and must still wake its Model.
        self._note(uid, urgent=count.idle and self._quiet(count))

    def sent(self, uid: str) -> None:
        """A replica was chosen for a request, which is in flight from now on."""
        count = self._of(uid)
        count.in_flight += 1
        self._note(uid, urgent=count.in_flight == 1 and self._quiet(count))

    def ended(self, uid: str) -> None:
        """A request left its replica: it was answered, failed, or waits again."""
        count = self._of(uid)
        if count.in_flight <= 0:
            raise ValueError("a request ended that was not sent")
        count.in_flight -= 1
        self._note(uid, urgent=not count.in_flight and self._quiet(count))

    def held(self, uid: str, tokens: int, since: float) -> None:
        """A request began to wait at `since`. `tokens` estimates its prompt and bounded answer."""
        count = self._of(uid)
        count.hold(tokens, since)
        self._note(uid, urgent=count.held == 1)

    def released(self, uid: str, tokens: int, since: float) -> None:
        """A request no longer waits. `tokens` and `since` are those passed to `held`."""
        count = self._of(uid)
        if count.held <= 0:
            raise ValueError("a request left that was not held")
        count.unhold(tokens, since)
        self._note(uid, urgent=not count.held)

    def first_token(self, uid: str, pod: str, after: float, seconds: float | None) -> None:
        """The first request to a new replica has shown its first token, or will not show it (`FirstToken`)."""
        told = self._first_tokens.setdefault(uid, {})
        told[pod] = {"after": round(after, 3), "seconds": None if seconds is None else round(seconds, 3)}
        while len(told) > MOST_FIRST_TOKENS:
            del told[next(iter(told))]
        self._note(uid)

    # --- reading ------------------------------------------------------------------------------------------------------

    def demand(self, uid: str) -> ModelDemand:
        """A Model's demand now."""
        count = self._counts.get(uid)
        if count is None:
            return _NOTHING
        return ModelDemand(
            arrivals=count.arrivals,
            in_flight=count.in_flight,
            held=count.held,
            held_tokens=count.held_tokens,
            oldest_seconds=self._oldest_seconds(count),
        )

    def held_count(self, uid: str) -> int:
        """The Model's held requests at this gateway."""
        count = self._counts.get(uid)
        return count.held if count else 0

    def uids(self) -> Collection[str]:
        """Models with counters."""
        return self._counts.keys()

    def retain(self, uids: Collection[str]) -> None:
        """Drops deleted Models: those not in `uids` with nothing in flight or held."""
        for uid in [u for u, count in self._counts.items() if count.idle and u not in uids]:
            del self._counts[uid]
            self._first_tokens.pop(uid, None)
            self._note(uid)

    def retain_pods(self, pods: Collection[str]) -> None:
        """Drops what is known of pods that are gone. Nobody asks for it, so no message says so."""
        for uid, told in list(self._first_tokens.items()):
            for pod in [pod for pod in told if pod not in pods]:
                del told[pod]
            if not told:
                del self._first_tokens[uid]

    # --- publishing ---------------------------------------------------------------------------------------------------

    def take_urgent(self) -> bytes | None:
        """Content of an urgent message; None when nothing is urgent. Counts as published."""
        urgent, self._urgent = self._urgent, set()
        self._changed -= urgent
        return self._encode(urgent) if urgent else None

    def take_freed(self) -> bytes | None:
        """Content of a message about tenants that use less than the other gateways believe; None when there are none.
        Counts as published."""
        freed = self.tenants.take_freed()
        return None if freed is None else _with(b"{}", b"tenants", freed)

    def take(self) -> bytes | None:
        """Content of a message about everything that changed; None when nothing did. Counts as published."""
        changed, self._changed = self._changed, set()
        self._urgent.clear()
        content = self._encode(changed) if changed else None
        for field, more in (
            (b"adapters", self.adapters.take()),
            (b"tenants", self.tenants.take()),
            (b"canaryCounts", self.canary_counts.take()),
        ):
            if more is not None:
                content = _with(content or b"{}", field, more)
        return content

    def first(self, caller: Caller) -> bytes:
        """Content of the first message of a stream: for another gateway with what tenants used in the last minute."""
        return self.full(first=caller.role == "gateway")

    def full(self, *, first: bool = False) -> bytes:
        """Content of a full message."""
        models = orjson.dumps({uid: self._row(uid, count) for uid, count in self._counts.items()})
        tenants = self.tenants.full(recent=first)
        content = _with(_with(models, b"adapters", self.adapters.full()), b"tenants", tenants)
        if first and (gone := self.tenants.gone(len(tenants))) is not None:
            content = _with(content, b"tenantsGone", gone)
        if self.tenants.left_out:
            content = _with(content, b"tenantsPartial", b"true")
        if (counts := self.canary_counts.full()) is not None:
            content = _with(content, b"canaryCounts", counts)
        if self.canaries:
            halted = {at: halt._asdict() for at, halt in self.canaries.items()}
            content = _with(content, b"canaries", orjson.dumps(halted))
        if self.prices_refused is not None:
            content = _with(content, b"pricesRefused", orjson.dumps(self.prices_refused))
        return content if self.currency is None else _with(content, b"currency", orjson.dumps(self.currency))

    def _of(self, uid: str) -> _Count:
        count = self._counts.get(uid)
        if count is None:
            count = self._counts[uid] = _Count()
        return count

    def _note(self, uid: str, *, urgent: bool = False) -> None:
        if urgent and uid not in self._urgent:
            self._urgent.add(uid)
            self._changed.add(uid)
            self.due("urgent")
        elif uid not in self._changed:
            self._changed.add(uid)
            self.due("regular")

    def _quiet(self, count: _Count) -> bool:
        return self._clock() - count.published_at >= QUIET_SECONDS

    def _encode(self, uids: Iterable[str]) -> bytes:
        now = self._clock()
        content: dict[str, Mapping[str, object] | None] = {}
        for uid in uids:
            count = self._counts.get(uid)
            if count is not None:
                count.published_at = now
            content[uid] = self._row(uid, count) if count is not None else None
        return orjson.dumps(content)

    def _row(self, uid: str, count: _Count) -> Mapping[str, object]:
        """`ModelDemand` as JSON; a test parses it back. Zeros are included, because an absent field means unknown."""
        row: dict[str, object] = {"arrivals": count.arrivals, "inFlight": count.in_flight, "held": count.held}
        if count.held:
            row["heldTokens"] = count.held_tokens
            row["oldestSeconds"] = round(self._oldest_seconds(count), 3)
        if self._first_tokens and (told := self._first_tokens.get(uid)):
            row["firstTokens"] = told
        return row

    def _oldest_seconds(self, count: _Count) -> float:
        oldest = count.oldest()
        return max(0.0, self._clock() - oldest) if oldest is not None else 0.0


def _with(content: bytes, field: bytes, more: bytes) -> bytes:
    """Adds a field to a message's content."""
    return content + b',"' + field + b'":' + more


class DemandPublisher:
    """Publishes the demand through a hub, with an urgent and a regular timer, and one for tenants' ended requests.
    `boot` is the boot id of this gateway's process, by default a random one."""

    def __init__(self, demand: DemandState, boot: str | None = None) -> None:
        self.hub = StreamHub("models", demand.full, boot, first=demand.first)
        demand.tenants.boot = self.hub.boot
        self._demand = demand
        self._urgent: asyncio.TimerHandle | None = None
        self._regular: asyncio.TimerHandle | None = None
        self._freed: asyncio.TimerHandle | None = None
        self._urgent_at = self._regular_at = float("-inf")
        self._closed = False
        demand.due = self._due

    def close(self) -> None:
        """Ends every stream. Later changes are not published."""
        self._closed = True
        for timer in (self._urgent, self._regular, self._freed):
            if timer is not None:
                timer.cancel()
        self.hub.close()

    def set_currency(self, currency: str | None) -> None:
        """Publishes the price list's currency, if it changed."""
        if currency != self._demand.currency:
            self._demand.currency = currency
            if not self._closed:
                self.hub.restate()

    def set_prices_refused(self, why: str | None) -> None:
        """Publishes why the ledger refuses price lists, if it changed."""
        if why != self._demand.prices_refused:
            self._demand.prices_refused = why
            if not self._closed:
                self.hub.restate()

    def set_canaries(self, halted: Mapping[str, CanaryHalt]) -> None:
        """Publishes the halted canaries, if they changed."""
        if halted != self._demand.canaries:
            self._demand.canaries = dict(halted)
            if not self._closed:
                self.hub.restate()

    def _due(self, due: Due) -> None:
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if due == "urgent":
            if self._urgent is None:
                self._urgent = loop.call_at(max(loop.time(), self._urgent_at + GAP_SECONDS), self._publish_urgent)
        elif due == "freed":
            if self._freed is None:
                self._freed = loop.call_later(FREED_SECONDS, self._publish_freed)
        elif self._regular is None:
            self._regular = loop.call_at(max(loop.time(), self._regular_at + QUIET_SECONDS), self._publish)

    def _publish_freed(self) -> None:
        self._freed = None
        content = self._demand.take_freed()
        if content is not None:
            self.hub.publish(content)

    def _publish_urgent(self) -> None:
        self._urgent = None
        content = self._demand.take_urgent()
        if content is not None:
            self._urgent_at = asyncio.get_running_loop().time()
            self.hub.publish(content)

    def _publish(self) -> None:
        self._regular = None
        content = self._demand.take()
        if content is not None:
            self._regular_at = asyncio.get_running_loop().time()
            self.hub.publish(content)
