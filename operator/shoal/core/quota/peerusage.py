"""What one gateway knows of a tenant beyond its own use: from the other gateways, and from the ledger."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.api.demand import TenantUse
from shoal.core.quota.gatewayusage import GatewayUsage
from shoal.core.quota.limits import Limit
from shoal.core.quota.month import Booked, MonthTotal, Unit
from shoal.core.quota.window import Window

FORGET_SECONDS: Final = 7200.0
"""For so long a gateway that is gone counts towards the budget with what the ledger does not have of it."""


@dataclass(frozen=True, slots=True)
class GatewayPeer:
    """Another gateway, as far as this one knows."""

    boot: str | None
    """None: it was never heard."""
    reported_at: float | None
    """When its last message came; None: it is silent, and what it uses is unknown."""


GatewayPeers = Sequence[GatewayPeer]
UNKNOWN_PEERS: Final[GatewayPeers] = (GatewayPeer(None, None),)
"""While it is not known who else there is: as if there were one more, of whom nothing is heard."""


class PeerUsage:
    """`mine` is what this gateway itself has booked, under its boot id `me`: the ledger speaks of it too."""

    __slots__ = ("_boot", "_gateways", "_month", "_own", "_total")

    def __init__(self, boot: str, own: Booked) -> None:
        self._boot = boot
        self._own = own
        self._gateways: dict[str, GatewayUsage] = {}
        """By boot id."""
        self._month = ""
        self._total: MonthTotal | None = None

    # --- what they say ------------------------------------------------------------------------------------------------

    def update(self, boot: str, use: TenantUse | None, now: float, *, unknown_before: bool = False) -> None:
        """What another gateway has; None: nothing any more. `anew`: nothing was heard of that process before, and it
        may have run for long."""
        found = self._gateways.get(boot)
        if found is not None:
            found.update(use or TenantUse(), now)
        elif use is not None:
            found = self._gateways[boot] = GatewayUsage()
            found.begin(use, now) if unknown_before else found.update(use, now)
            self._list(boot, found.booked)

    def mark_gone(self, boot: str, now: float) -> None:
        """Another gateway's process is no more."""
        if (found := self._gateways.get(boot)) is not None:
            found.mark_gone(now)

    def tidy(self, now: float) -> None:
        """Forgets gateways that are gone and count no more."""
        for boot in [b for b, heard in self._gateways.items() if heard.gone_at is not None]:
            heard = self._gateways[boot]
            counts = heard.requests.sum(now) or heard.tokens.sum(now)
            if not counts and (not heard.booked.open("tokens") or now - (heard.gone_at or now) > FORGET_SECONDS):
                del self._gateways[boot]

    def apply_total(self, total: MonthTotal) -> bool:
        """The ledger's. Whether a month has begun."""
        turned = total.month > self._month
        if turned:
            self._close_month()
        self._month, self._total = total.month, total
        self._list(self._boot, self._own)
        for boot, heard in self._gateways.items():
            self._list(boot, heard.booked)
        return turned

    def enter_month(self, month: str, *, ledger: bool) -> bool:
        """Says which month it is by the clock, which counts while the ledger does not say. Whether one has begun."""
        if month <= self._month or (ledger and self._month):
            return False
        if turned := bool(self._month):
            self._close_month()
        self._month = month
        return turned

    # --- what is known ------------------------------------------------------------------------------------------------

    def used(self, limit: Limit, most: int, now: float, peers: GatewayPeers) -> tuple[int, int]:
        """Of a limit that is not the budget: what they use as far as is known, and how many gateways share the rest.
        One that is silent, or was not heard for a whole window, uses its equal share at least."""
        equal = most // (1 + len(peers))
        used, live = sum(heard.used(limit, now) for heard in self._gateways.values()), 0
        for peer in peers:
            heard = self._gateways.get(peer.boot) if peer.boot is not None else None
            live += peer.reported_at is not None
            if peer.reported_at is None or (heard is not None and heard.window_unknown(now)):
                used += max(0, equal - (heard.used(limit, now) if heard is not None else 0))
        return used, 1 + live

    def booked(self, unit: Unit) -> int:
        """Of the month's budget: the ledger's total, and what it does not have of them."""
        total = self._total if self._total is not None and self._total.month == self._month else None
        booked = 0 if total is None else total.tokens if unit == "tokens" else total.spent
        return booked + sum(heard.open(unit) for heard in self._gateways.values())

    def windows(self, limit: Limit) -> Iterable[Window]:
        return (heard.requests if limit == "requests" else heard.tokens for heard in self._gateways.values())

    def _close_month(self) -> None:
        self._own.close_month()
        for heard in self._gateways.values():
            heard.booked.close_month()

    def _list(self, boot: str, booked: Booked) -> None:
        listed = None if self._total is None or self._total.gateways is None else self._total.gateways.get(boot)
        if listed is not None:
            booked.set_listed(*listed)
