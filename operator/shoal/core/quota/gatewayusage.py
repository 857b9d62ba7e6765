"""The use of one tenant that another gateway reported. Reports are counters that grow within an epoch, so a message may
be lost or repeated. One of an earlier epoch must not come after one of a later: it would count again.

A counter does not say when something was used, so a difference counts from when the report came. The first report of a
stream also has the last minute with its age (`TenantUse.recent`), which replaces what was known."""

from shoal.api.demand import TenantUse
from shoal.core.quota.limits import Limit
from shoal.core.quota.month import Booked, Unit
from shoal.core.quota.recent import Recent, cover, recent_use, restore
from shoal.core.quota.window import WINDOW_SECONDS, Window


class GatewayUsage:
    """Use of one boot of a gateway."""

    __slots__ = (
        "_epoch",
        "_last",
        "_unknown_until",
        "booked",
        "direct",
        "gone_at",
        "in_flight",
        "requests",
        "reserved_spend",
        "reserved_tokens",
        "tokens",
    )

    def __init__(self) -> None:
        self.requests, self.tokens = Window(), Window()
        self.booked = Booked()
        self.in_flight = self.reserved_tokens = self.reserved_spend = 0
        self.gone_at: float | None = None
        """Since when its process is gone; None: it is not."""
        self.direct = True
        """It has reported itself; False: another gateway reported what it knew of it (`relay`)."""
        self._epoch, self._last = 0, (0, 0)
        self._unknown_until = float("-inf")

    def begin(self, use: TenantUse, now: float) -> None:
        """The first report of a process that may have run before. Without `recent` the time of its use is unknown."""
        self._epoch, self._last = use.epoch, (use.requests, use.tokens)
        if use.recent is None and (use.requests or use.tokens):
            self._unknown_until = now + WINDOW_SECONDS + 1
        self.update(use, now)
        self.booked.close_month()

    def update(self, use: TenantUse, now: float) -> None:
        requests, tokens = self._last
        # A smaller counter: null, which names no epoch, or a gateway of an older version.
        if use.epoch != self._epoch or use.requests < requests or use.tokens < tokens:
            requests = tokens = 0
        self._epoch, self._last = use.epoch, (use.requests, use.tokens)
        if use.recent is None:
            self._add(self.requests, now, use.requests - requests)
            self._add(self.tokens, now, use.tokens - tokens)
        else:
            restore(use.recent, self.requests, self.tokens, now)
            self._unknown_until = float("-inf")
        self.in_flight, self.reserved_tokens = use.in_flight, use.reserved_tokens
        self.reserved_spend = use.reserved_spend
        self.booked.tokens, self.booked.spent = use.booked, use.spent
        self.gone_at = None

    def relay(self, recent: Recent, now: float) -> None:
        """Takes what another gateway knew of this process, whose stream to that gateway has ended. Of several such
        reports the largest use counts at any time, of requests and of tokens: one gateway may know of more requests,
        and another one of more tokens."""
        cover(recent, self.requests, self.tokens, now)

    def recent(self, now: float, most: int) -> Recent:
        """What is known of its last minute, in at most `most` entries. What it had reserved counts as used."""
        return recent_use(self.requests, self.tokens, now, most, self.reserved_tokens)

    def mark_gone(self, now: float) -> None:
        """Its process is gone."""
        if self.gone_at is None:
            self.gone_at = now
            self.end_all(now)

    def end_all(self, now: float) -> None:
        """What was running there has ended. How much it used is unknown: what was reserved counts as used."""
        self._add(self.tokens, now, self.reserved_tokens)
        self.in_flight = self.reserved_tokens = self.reserved_spend = 0

    def used(self, limit: Limit, now: float) -> int:
        """Use of a limit other than the budget."""
        if limit == "requests":
            return self.requests.sum(now)
        if limit == "tokens":
            return self.tokens.sum(now) + self.reserved_tokens
        return self.in_flight

    def open(self, unit: Unit) -> int:
        """Use of the budget that is not in the ledger's total."""
        return self.booked.open(unit) + self.running(unit)

    def running(self, of: Limit | Unit) -> int:
        """Use by requests that run there. Of requests per minute none: a request counts although it has ended."""
        if of == "concurrent":
            return self.in_flight
        return self.reserved_tokens if of == "tokens" else self.reserved_spend if of == "money" else 0

    def window_unknown(self, now: float) -> bool:
        """Whether its use in the window from before its first report is unknown."""
        return now < self._unknown_until

    def unused(self, now: float) -> bool:
        """Whether it counts nothing, and its next report counts from zero."""
        booked = self.booked
        return not (
            any(self._last)
            or self.in_flight
            or self.reserved_tokens
            or self.reserved_spend
            or booked.tokens
            or booked.spent
            or self.requests.sum(now)
            or self.tokens.sum(now)
            or self.window_unknown(now)
        )

    @staticmethod
    def _add(window: Window, now: float, amount: int) -> None:
        if amount:
            window.add(now, amount)
