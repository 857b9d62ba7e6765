"""What one gateway knows of a tenant's use beyond its own: from other gateways, and from the ledger."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.api.demand import TenantUse
from shoal.core.quota.gatewayusage import GatewayUsage
from shoal.core.quota.limits import Limit
from shoal.core.quota.month import Booked, MonthTotal, Unit
from shoal.core.quota.recent import Recent
from shoal.core.quota.window import Window

FORGET_SECONDS: Final = 7200.0
"""Seconds for which a gateway that is gone counts towards the budget with what the ledger does not have of it."""


@dataclass(frozen=True, slots=True)
class GatewayPeer:
    """Another gateway, as known here."""

    boot: str | None
    """None: it has never reported."""
    reported_at: float | None
    """When its last message came; None: its stream is silent, so its use is unknown."""
    expected: bool = False
    """Its stream is silent, but its first message may come at any moment: it is being connected to, or reported
    less than 12 s ago."""


GatewayPeers = Sequence[GatewayPeer]
UNKNOWN_PEERS: Final[GatewayPeers] = (GatewayPeer(None, None, expected=True),)
"""Used while the other gateways are unknown: one peer that never reported."""


class PeerUsage:
    """Use of other gateways. `own`: what this gateway itself has booked, since the ledger reports on it too, under the
    boot id `boot`."""

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
        """Takes another gateway's report; `use` None: it has nothing any more. `unknown_before`: this is the first
        report of a process that may have run for long."""
        found = self._gateways.get(boot)
        if found is not None and found.direct:
            found.update(use or TenantUse(), now)
        elif use is not None:
            found = self._gateways[boot] = GatewayUsage()
            found.begin(use, now) if unknown_before else found.update(use, now)
            self._list(boot, found.booked)

    def relay(self, boot: str, recent: Recent, now: float) -> None:
        """Takes what another gateway knew of the last minute of a process whose stream has ended, such as the one that
        ran here before. If that process itself has reported to this gateway, its own reports count."""
        if boot == self._boot:
            return
        found = self._gateways.get(boot)
        if found is None:
            found = self._gateways[boot] = GatewayUsage()
            found.direct, found.gone_at = False, now
        if not found.direct:
            found.relay(recent, now)

    def of(self, boots: Collection[str]) -> Sequence[tuple[str, GatewayUsage]]:
        """What is known of some processes."""
        gateways = self._gateways
        return [(boot, gateways[boot]) for boot in boots if boot in gateways] if gateways else ()

    def end_all(self, boot: str, now: float) -> None:
        """Nothing runs at another gateway any more."""
        if (found := self._gateways.get(boot)) is not None:
            found.end_all(now)

    def mark_gone(self, boot: str, now: float) -> None:
        """Another gateway's process is gone."""
        if (found := self._gateways.get(boot)) is not None:
            found.mark_gone(now)

    def tidy(self, now: float) -> None:
        """Drops gateways that no longer count: those that have nothing any more, and those that are gone."""
        for boot, gateway in list(self._gateways.items()):
            if gateway.unused(now):
                del self._gateways[boot]
                continue
            if gateway.gone_at is None:
                continue
            counts = gateway.requests.sum(now) or gateway.tokens.sum(now)
            if not counts and (not gateway.booked.open("tokens") or now - (gateway.gone_at or now) > FORGET_SECONDS):
                del self._gateways[boot]

    def apply_total(self, total: MonthTotal) -> bool:
        """Takes the ledger's total. Returns whether a month has begun."""
        turned = total.month > self._month
        if turned:
            self._close_month()
        self._month, self._total = total.month, total
        self._list(self._boot, self._own)
        for boot, gateway in self._gateways.items():
            self._list(boot, gateway.booked)
        return turned

    def enter_month(self, month: str, *, ledger: bool) -> bool:
        """Sets the month of the clock, which counts while the ledger is silent. Returns whether a month has begun."""
        if month <= self._month or (ledger and self._month):
            return False
        if turned := bool(self._month):
            self._close_month()
        self._month = month
        return turned

    def __bool__(self) -> bool:
        """Whether any other gateway has reported."""
        return bool(self._gateways)

    # --- what is known ------------------------------------------------------------------------------------------------

    def used(self, limit: Limit, most: int, now: float, peers: GatewayPeers) -> tuple[int, int]:
        """(use, gateways): the known use of the others of a limit other than the budget, and how many gateways share
        the rest. A gateway that is silent, or did not report for a whole window, counts with its equal share at
        least."""
        equal = most // (1 + len(peers))
        used, live = sum(gateway.used(limit, now) for gateway in self._gateways.values()), 0
        for peer in peers:
            gateway = self._gateways.get(peer.boot) if peer.boot is not None else None
            live += peer.reported_at is not None
            if peer.reported_at is None or (gateway is not None and gateway.window_unknown(now)):
                used += max(0, equal - (gateway.used(limit, now) if gateway is not None else 0))
        return used, 1 + live

    def assumed(self, limit: Limit, most: int, now: float, peers: GatewayPeers) -> int:
        """Part of `used` that is only assumed of gateways whose first message may come at any moment."""
        equal, found = most // (1 + len(peers)), 0
        for peer in peers:
            if peer.expected:
                gateway = self._gateways.get(peer.boot) if peer.boot is not None else None
                found += max(0, equal - (gateway.used(limit, now) if gateway is not None else 0))
        return found

    def may_have_ended(self, of: Limit | Unit, peers: GatewayPeers) -> int:
        """Use by requests that run at live gateways by their last reports."""
        live = (self._gateways.get(peer.boot) for peer in peers if peer.boot and peer.reported_at is not None)
        return sum(gateway.running(of) for gateway in live if gateway is not None)

    def booked(self, unit: Unit) -> int:
        """Known use of the month's budget by others: the ledger's total, and what gateways have beyond it."""
        total = self._total if self._total is not None and self._total.month == self._month else None
        booked = 0 if total is None else total.tokens if unit == "tokens" else total.spent
        return booked + sum(gateway.open(unit) for gateway in self._gateways.values())

    def windows(self, limit: Limit) -> Iterable[Window]:
        return (gateway.requests if limit == "requests" else gateway.tokens for gateway in self._gateways.values())

    def _close_month(self) -> None:
        self._own.close_month()
        for gateway in self._gateways.values():
            gateway.booked.close_month()

    def _list(self, boot: str, booked: Booked) -> None:
        listed = None if self._total is None or self._total.gateways is None else self._total.gateways.get(boot)
        if listed is not None:
            booked.set_listed(*listed)
