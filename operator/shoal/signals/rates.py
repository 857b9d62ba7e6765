"""Rates from counters that grow, for people; decisions measure their own."""

from typing import Final

WINDOW_SECONDS: Final = 15.0
"""A rate is that of the last 15 to 30 s."""


class CounterRate:
    """Per second, of one counter that belongs to a boot. A smaller value under a new boot is a restart: the rate begins
    anew and is never negative."""

    __slots__ = ("_at", "_boot", "_mark_at", "_mark_value", "_old_at", "_old_value", "_value")

    def __init__(self) -> None:
        self._boot: str | None = None
        self._at: float | None = None
        self._value = self._old_value = self._mark_value = 0
        self._old_at = self._mark_at = 0.0

    def note(self, now: float, boot: str | None, value: int) -> None:
        """A reading. O(1)."""
        if self._at is None or boot != self._boot or value < self._value:
            self._boot, self._at, self._value = boot, now, value
            self._old_at = self._mark_at = now
            self._old_value = self._mark_value = value
            return
        self._at, self._value = now, value
        if now - self._mark_at >= WINDOW_SECONDS:
            self._old_at, self._old_value = self._mark_at, self._mark_value
            self._mark_at, self._mark_value = now, value

    def per_second(self, now: float) -> float | None:
        """None until a second has been seen. A counter that is not reported has not changed."""
        if self._at is None or now - self._old_at < 1.0:
            return None
        if now - self._at > 2 * WINDOW_SECONDS:
            return 0.0
        return (self._value - self._old_value) / (now - self._old_at)
