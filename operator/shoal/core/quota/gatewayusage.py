"""What one gateway has heard of another's use of one tenant: from monotonic counters, so that a message may be lost,
late or come twice."""

from shoal.api.demand import TenantUse
from shoal.core.quota.limits import Limit
from shoal.core.quota.month import Booked, Unit
from shoal.core.quota.window import WINDOW_SECONDS, Window


class GatewayUsage:
    """Of one boot of a gateway. What it used counts from when it was heard."""

    __slots__ = (
        "_last",
        "_unknown_until",
        "booked",
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
        """Since when its process is no more."""
        self._last = (0, 0)
        self._unknown_until = float("-inf")

    def begin(self, use: TenantUse, now: float) -> None:
        """The first that this gateway hears of a process that may have run before: when it counted is not known."""
        self._last = (use.requests, use.tokens)
        if use.requests or use.tokens:
            self._unknown_until = now + WINDOW_SECONDS + 1
        self.update(use, now)
        self.booked.close_month()

    def update(self, use: TenantUse, now: float) -> None:
        requests, tokens = self._last
        self._last = (use.requests, use.tokens)
        # Smaller: a Tenant of the same name was made anew, and its counters with it.
        self._add(self.requests, now, use.requests - requests if use.requests >= requests else use.requests)
        self._add(self.tokens, now, use.tokens - tokens if use.tokens >= tokens else use.tokens)
        self.in_flight, self.reserved_tokens = use.in_flight, use.reserved_tokens
        self.reserved_spend = use.reserved_spend
        self.booked.tokens, self.booked.spent = use.booked, use.spent
        self.gone_at = None

    def mark_gone(self, now: float) -> None:
        """Its process is no more: what was running there is taken for used."""
        if self.gone_at is None:
            self.gone_at = now
            self._add(self.tokens, now, self.reserved_tokens)
            self.in_flight = self.reserved_tokens = self.reserved_spend = 0

    def used(self, limit: Limit, now: float) -> int:
        """Of a limit that is not the budget."""
        if limit == "requests":
            return self.requests.sum(now)
        if limit == "tokens":
            return self.tokens.sum(now) + self.reserved_tokens
        return self.in_flight

    def open(self, unit: Unit) -> int:
        """Of the budget, what is not in the ledger's total."""
        return self.booked.open(unit) + (self.reserved_tokens if unit == "tokens" else self.reserved_spend)

    def window_unknown(self, now: float) -> bool:
        """What it used in the window from before it was heard is not known."""
        return now < self._unknown_until

    @staticmethod
    def _add(window: Window, now: float, amount: int) -> None:
        if amount:
            window.add(now, amount)
