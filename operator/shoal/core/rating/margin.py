"""Revenue and cost of GPU classes. Exact, before any rounding, and without credits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.core.rating.bill import Usage, amount, rated
from shoal.core.rating.schedule import Schedule

Key = tuple[str, ...]
"""Group of a sum, such as (GPU class, day)."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of GPUs over some time."""

    gpu_seconds: float
    amount: int
    """10^-12 of `currency`."""
    currency: str
    """'': the class had no price."""


@dataclass(frozen=True, slots=True)
class Result:
    """The sums of one key. None: unknown."""

    tokens: int = 0
    unpriced_tokens: int = 0
    audio_ms: int = 0
    unpriced_audio_ms: int = 0
    """Of audio without a price, that of usage without tokens, such as transcriptions. Sounds in chats, documents and
    images without a price are billed by their tokens."""
    revenue: int | None = None
    """10^-12 of the price lists' currency; None: none of the usage has a price."""
    gpu_seconds: float | None = None
    unpriced_gpu_seconds: float = 0.0
    costs: Mapping[str, int] = field(default_factory=dict[str, int])
    """By currency; empty: unknown."""

    def margin(self, currency: str | None) -> int | None:
        """Revenue minus cost; None: one of them is not fully known, or they are in different currencies."""
        if self.revenue is None or self.unpriced_tokens or self.unpriced_audio_ms or self.unpriced_gpu_seconds:
            return None
        return self.revenue - self.costs[currency] if currency and set(self.costs) == {currency} else None


@dataclass(slots=True)
class _Sum:
    tokens: int = 0
    unpriced_tokens: int = 0
    audio_ms: int = 0
    unpriced_audio_ms: int = 0
    revenue: int | None = None
    gpu_seconds: float | None = None
    unpriced_gpu_seconds: float = 0.0
    costs: dict[str, int] = field(default_factory=dict[str, int])


def margins(
    usage: Iterable[tuple[Key, Usage]], spent: Iterable[tuple[Key, Spent]], schedule: Schedule
) -> dict[Key, Result]:
    """Sums usage and costs by key."""
    sums: dict[Key, _Sum] = {}
    for key, one in usage:
        total = sums.setdefault(key, _Sum())
        total.tokens += one.counts.tokens
        total.audio_ms += one.counts.audio_ms
        found = rated(one, schedule)
        if found is None or (found[1].audio_ms is None and not one.counts.tokens):
            total.unpriced_audio_ms += one.counts.audio_ms
        if found is None:
            total.unpriced_tokens += one.counts.tokens
        else:
            total.revenue = (total.revenue or 0) + amount(one.counts, found[1], found[0].prices.unknown_cached)
    for key, cost in spent:
        total = sums.setdefault(key, _Sum())
        total.gpu_seconds = (total.gpu_seconds or 0.0) + cost.gpu_seconds
        if cost.currency:
            total.costs[cost.currency] = total.costs.get(cost.currency, 0) + cost.amount
        else:
            total.unpriced_gpu_seconds += cost.gpu_seconds
    return {
        key: Result(
            total.tokens,
            total.unpriced_tokens,
            total.audio_ms,
            total.unpriced_audio_ms,
            # GPUs that were held without usage have a known revenue of zero.
            0
            if total.revenue is None and not (total.unpriced_tokens or total.unpriced_audio_ms) and schedule.lists
            else total.revenue,
            total.gpu_seconds,
            total.unpriced_gpu_seconds,
            total.costs,
        )
        for key, total in sorted(sums.items())
    }
