"""What a tenant has used of this month's budget: the ledger's total, and what gateways know of and the ledger does not.

    known = total of the month + sum over gateways of (its counter - what the ledger has of it) + what is reserved

A gateway's counter grows from its start on, whatever the month; the ledger says how much of each it has (`TenantTotal.
gateways`). Each request is in either, so the sum is exact as often as the ledger speaks.

- A gateway that the ledger does not name: what it named last counts, or else what the counter was when it was first
  heard of, for that is with the ledger or was before this gateway's time.
- A month's turn: what was counted until then belongs to the month before. While the ledger is heard, its month counts;
  else the clock's.
- Prices: when the ledger has all tokens of a gateway, what is left of money is a difference of prices (a new list, a
  discount on cached tokens) and is forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["tokens", "money"]

PICO: Final = 10**12
"""Money is counted in 10^-12 of its currency."""


@dataclass(frozen=True, slots=True)
class MonthlyQuota:
    """What may be used in a calendar month (UTC), in tokens or in 10^-12 of a currency."""

    unit: Unit
    most: int
    currency: str | None = None
    refuse_unknown: bool = False
    """While the ledger's total is not known, nothing is let pass."""


@dataclass(frozen=True, slots=True)
class MonthTotal:
    """What the ledger says of a tenant. Frozen where it was when the ledger fell silent."""

    month: str
    tokens: int = 0
    spent: int = 0
    gateways: Mapping[str, tuple[int, int]] | None = None
    """By boot id of a gateway: tokens and money of it that are in the total."""


class Booked:
    """The counters of one gateway's boot, and how much of them counts elsewhere: in the ledger, or last month."""

    __slots__ = ("_difference", "_spent_elsewhere", "_tokens_elsewhere", "spent", "tokens")

    def __init__(self) -> None:
        self.tokens = self.spent = 0
        self._tokens_elsewhere = self._spent_elsewhere = self._difference = 0

    def close_month(self) -> None:
        """All that was counted until now counts elsewhere."""
        self._tokens_elsewhere, self._spent_elsewhere = self.tokens, self.spent

    def set_listed(self, tokens: int, spent: int) -> None:
        """The ledger has so much of it."""
        if tokens == self.tokens:
            self._difference = self.spent - spent
        self._tokens_elsewhere = tokens
        self._spent_elsewhere = spent + self._difference

    def open(self, unit: Unit) -> int:
        """What only the gateway has."""
        if unit == "tokens":
            return max(0, self.tokens - self._tokens_elsewhere)
        return max(0, self.spent - self._spent_elsewhere)
