"""What one gateway knows of a tenant beyond its own use: from the other gateways, and from the ledger."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.api.demand import TenantUse
from shoal.core.quota.heard import Heard
from shoal.core.quota.limits import Limit
from shoal.core.quota.month import Booked, Total, Unit
from shoal.core.quota.window import Window

FORGET_SECONDS: Final = 7200.0
"""For so long a gateway that is gone counts towards the budget with what the ledger does not have of it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another gateway, as far as this one knows."""

    boot: str | None
    """None: it was never heard."""
    heard_at: float | None
    """When its last message came; None: it is silent, and what it uses is unknown."""


Crowd = Sequence[Peer]
UNKNOWN_CROWD: Final[Crowd] = (Peer(None, None),)
"""While it is not known who else there is: as if there were one more, of whom nothing is heard."""


class Others:
    """`mine` is what this gateway itself has booked, under its boot id `me`: the ledger speaks of it too."""

    __slots__ = ("_heard", "_me", "_mine", "_month", "_total")

    def __init__(self, me: str, mine: Booked) -> None:
        self._me = me
        self._mine = mine
        self._heard: dict[str, Heard] = {}
        """By boot id."""
        self._month = ""
        self._total: Total | None = None

    # --- what they say ------------------------------------------------------------------------------------------------

    def hear(self, boot: str, use: TenantUse | None, now: float, *, anew: bool = False) -> None:
        """What another gateway has; None: nothing any more. `anew`: nothing was heard of that process before, and it
        may have run for long."""
        found = self._heard.get(boot)
        if found is not None:
            found.hear(use or TenantUse(), now)
        elif use is not None:
            found = self._heard[boot] = Heard()
            found.begin(use, now) if anew else found.hear(use, now)
            self._list(boot, found.booked)

    def gone(self, boot: str, now: float) -> None:
        """Another gateway's process is no more."""
        if (found := self._heard.get(boot)) is not None:
            found.gone(now)

    def tidy(self, now: float) -> None:
        """Forgets gateways that are gone and count no more."""
        for boot in [b for b, heard in self._heard.items() if heard.gone_at is not None]:
            heard = self._heard[boot]
            counts = heard.requests.sum(now) or heard.tokens.sum(now)
            if not counts and (not heard.booked.open("tokens") or now - (heard.gone_at or now) > FORGET_SECONDS):
                del self._heard[boot]

    def hear_total(self, total: Total) -> bool:
        """The ledger's. Whether a month has begun."""
        turned = total.month > self._month
        if turned:
            self._turn()
        self._month, self._total = total.month, total
        self._list(self._me, self._mine)
        for boot, heard in self._heard.items():
            self._list(boot, heard.booked)
        return turned

    def at(self, month: str, *, ledger: bool) -> bool:
        """Says which month it is by the clock, which counts while the ledger does not say. Whether one has begun."""
        if month <= self._month or (ledger and self._month):
            return False
        if turned := bool(self._month):
            self._turn()
        self._month = month
        return turned

    # --- what is known ------------------------------------------------------------------------------------------------

    def used(self, limit: Limit, most: int, now: float, crowd: Crowd) -> tuple[int, int]:
        """Of a limit that is not the budget: what they use as far as is known, and how many gateways share the rest.
        One that is silent, or was not heard for a whole window, uses its equal share at least."""
        equal = most // (1 + len(crowd))
        used, live = sum(heard.used(limit, now) for heard in self._heard.values()), 0
        for peer in crowd:
            heard = self._heard.get(peer.boot) if peer.boot is not None else None
            live += peer.heard_at is not None
            if peer.heard_at is None or (heard is not None and heard.unsure(now)):
                used += max(0, equal - (heard.used(limit, now) if heard is not None else 0))
        return used, 1 + live

    def booked(self, unit: Unit) -> int:
        """Of the month's budget: the ledger's total, and what it does not have of them."""
        total = self._total if self._total is not None and self._total.month == self._month else None
        booked = 0 if total is None else total.tokens if unit == "tokens" else total.spent
        return booked + sum(heard.open(unit) for heard in self._heard.values())

    def windows(self, limit: Limit) -> Iterable[Window]:
        return (heard.requests if limit == "requests" else heard.tokens for heard in self._heard.values())

    def _turn(self) -> None:
        self._mine.turn()
        for heard in self._heard.values():
            heard.booked.turn()

    def _list(self, boot: str, booked: Booked) -> None:
        listed = None if self._total is None or self._total.gateways is None else self._total.gateways.get(boot)
        if listed is not None:
            booked.listed(*listed)
