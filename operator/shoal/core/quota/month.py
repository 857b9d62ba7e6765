"""Use of this month's budget: the ledger's total, and what gateways have counted and the ledger does not have yet.

    known = total of the month + sum over gateways of (its counter - the ledger's part of it) + reservations

A gateway's counter grows from its start, across months; the ledger reports how much of each counter it has
(`TenantTotal.gateways`). Each request is in exactly one of the two, so the sum is exact at every report of the ledger.

- A gateway that the ledger does not list: the last listed value counts; without one, the counter's value when the
  gateway was first seen, since that part is in the ledger or from before this gateway's time.
- Change of the month: what was counted until then belongs to the former month. While the ledger reports, its month
  counts; else the clock's.
- Prices: when the ledger has all tokens of a gateway, the remaining difference in money is a difference of prices (a
  new list, a discount on cached tokens) and is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["tokens", "money"]

PICO: Final = 10**12
"""Money is counted in 10^-12 of its currency."""


@dataclass(frozen=True, slots=True)
class MonthlyQuota:
    """The budget of a calendar month (UTC), in tokens or in 10^-12 of a currency."""

    unit: Unit
    most: int
    currency: str | None = None
    refuse_unknown: bool = False
    """Requests are refused while the ledger's total is unknown."""


@dataclass(frozen=True, slots=True)
class MonthTotal:
    """The ledger's last report on a tenant; kept while the ledger is silent."""

    month: str
    tokens: int = 0
    spent: int = 0
    gateways: Mapping[str, tuple[int, int]] | None = None
    """By boot id of a gateway: tokens and money of it in the total."""


class Booked:
    """Counters of one gateway's boot, and the part of them that counts elsewhere: in the ledger, or in a former
    month."""

    __slots__ = ("_difference", "_spent_elsewhere", "_tokens_elsewhere", "spent", "tokens")

    def __init__(self) -> None:
        self.tokens = self.spent = 0
        self._tokens_elsewhere = self._spent_elsewhere = self._difference = 0

    def close_month(self) -> None:
        """All that was counted so far counts elsewhere."""
        self._tokens_elsewhere, self._spent_elsewhere = self.tokens, self.spent

    def set_listed(self, tokens: int, spent: int) -> None:
        """The ledger has so much of the counters."""
        if tokens == self.tokens:
            self._difference = self.spent - spent
        self._tokens_elsewhere = tokens
        self._spent_elsewhere = spent + self._difference

    def open(self, unit: Unit) -> int:
        """Use that the ledger does not have."""
        if unit == "tokens":
            return max(0, self.tokens - self._tokens_elsewhere)
        return max(0, self.spent - self._spent_elsewhere)
