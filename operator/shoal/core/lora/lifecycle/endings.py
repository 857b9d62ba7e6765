"""Which loads of adapters an engine's end is blamed on.

An adapter whose load ends the engine process would do so again after each restart of the engine. The first end blames
nobody for long: the engine may have ended for another reason. An engine that ends by itself soon after each start does
so while it loads the adapter that is loaded first: where it also ended without a load, no adapter is blamed. Times are
monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

SURVIVED_SECONDS: Final = 10.0
"""An engine that still serves so long after a load failed does not end because of that load. vLLM's server takes some
5 s to notice that its engine is dead."""
TOLERATED: Final = 1
"""Ends in a row after which a load is tried again at once."""
BACKOFF_SECONDS: Final = 600.0
"""Seconds until the next try after further ends."""
REMEMBER_SECONDS: Final = 86_400.0
"""Seconds for which an end of the engine counts."""
LIVES: Final = 4
"""Ends of the engine, the newest ones of a day, among which none may have come by itself for an adapter to be
blamed."""


class EngineEnds(NamedTuple):
    """Ends of the engine in a row while one adapter was loaded."""

    times: int
    at: float
    """The last one."""


class EngineEnd(NamedTuple):
    """One end of the engine."""

    at: float
    by_itself: bool
    """It served, and ended within BACKOFF_SECONDS while it loaded no adapter."""


@dataclass(slots=True)
class EndedLoads:
    """Per adapter, by engine name. At most one entry per adapter and end of the engine."""

    suspects: dict[str, float] = field(default_factory=dict[str, float])
    """Loads that broke off, and when: the engine may have ended, and its end is not seen yet."""
    ends: dict[str, EngineEnds] = field(default_factory=dict[str, EngineEnds])
    lives: tuple[EngineEnd, ...] = ()
    """The last ends of a day, the newest last. An engine that never served loaded nothing, and is not counted."""
    served: tuple[float, float] | None = None
    """When this start of the engine was first and last seen to serve."""

    def broke_off(self, name: str, now: float) -> None:
        """A load got no proper answer from the engine."""
        self.suspects[name] = now

    def engine_serves(self, now: float) -> None:
        """The engine that got the loads serves still."""
        self.served = (self.served[0] if self.served is not None else now, now)
        self.suspects = {name: at for name, at in self.suspects.items() if now - at < SURVIVED_SECONDS}

    def engine_ended(self, under_way: Iterable[str], now: float) -> dict[str, int]:
        """Takes the end of the engine, with the loads that were under way; each is counted once, also if its call broke
        off before. Returns how often in a row the engine ended, for adapters that have to wait now. Where it ended by
        itself, adapters of its last ends are no longer in `ends`: they need not wait any more."""
        self.ends = {name: ends for name, ends in self.ends.items() if now - ends.at < REMEMBER_SECONDS}
        blamed = {*under_way, *self.suspects}
        self.suspects = {}
        by_itself = not blamed and self.served is not None and self.served[1] - self.served[0] < BACKOFF_SECONDS
        if blamed or self.served is not None:
            known = [end for end in self.lives if now - end.at < REMEMBER_SECONDS]
            self.lives = (*known, EngineEnd(now, by_itself))[-LIVES:]
        self.served = None
        if by_itself:
            self.ends = {name: ends for name, ends in self.ends.items() if ends.at < self.lives[0].at}
        for name in blamed:
            before = self.ends.get(name)
            self.ends[name] = EngineEnds(before.times + 1 if before else 1, now)
        if any(end.by_itself for end in self.lives):
            return {}
        return {name: count for name in sorted(blamed) if (count := self.ends[name].times) > TOLERATED}

    def loaded(self, name: str) -> None:
        """The engine has loaded the adapter, and lives."""
        self.suspects.pop(name, None)
        self.ends.pop(name, None)


def message(count: int, retry_at: float) -> str:
    """What the adapter's status says. `retry_at`: seconds since 1970."""
    at = datetime.fromtimestamp(retry_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"the engine ended while it loaded this adapter, {count} times in a row; next try at {at}"
