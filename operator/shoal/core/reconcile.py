"""What engines counted themselves beside what was billed, and what their GPUs cost meanwhile.

    unattributed = growth of the engines' own counters - billed

so that billed and unattributed are the engines' counters, always. Billed are final rows whose counts are the engine's
own (`final` or `continuous`). What is counted and never billed, tries whose answer nobody got and estimates, is part of
what is unattributed and explains it. The rest is nobody's: warm-up requests, calls that went around the gateways,
what an engine computed after a client or a gateway was gone, prompts that it counts again for each of several answers.
It is negative where an engine died before it counted, or before anybody read, what was billed.

Counters are cumulative since the start of the engine's process and begin at zero with it: nothing is taken as a
baseline, so that what happened before a reading, or between two far ones, is in the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Final

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
MONEY: Final = 10**9
"""What GPUs cost is whole 10^-9 of a currency: in 10^-12 an hour of a large fleet may leave 64 bits."""
MOST: Final = 2**62 - 1
"""Of any sum that is kept: two of them fit into 64 bits. Beyond is a price that was mistyped."""
MOST_COUNTED: Final = 10**15
"""Tokens that one process of an engine may have counted. Beyond, it was misread."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Input includes cached ones, output reasoning ones; differences may be negative."""

    input: int = 0
    output: int = 0

    @property
    def all(self) -> int:
        return self.input + self.output

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.input + other.input, self.output + other.output)

    def __sub__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.input - other.input, self.output - other.output)


@dataclass(frozen=True, slots=True)
class CounterReading:
    """The counters of one engine process when they were read. Times are milliseconds since 1970 (UTC)."""

    boot: str
    model: str
    """namespace/name."""
    gpu_class: str
    """'' where the pod names none."""
    replica: str
    """namespace/pod."""
    node: str
    read_at: int
    prompt: int | None
    """None: not counted yet, or not reported."""
    generation: int | None


def grown(counted: int, now: int | None) -> int:
    """By how much a counter has grown since `counted` was kept. One that is lower than before under the same boot id
    was misread: it has not grown, and the higher one stays."""
    return 0 if now is None or misread(counted, now) else now - counted


def misread(counted: int, now: int) -> bool:
    """Whether a counter cannot be `now` after it was `counted`, under the same boot id."""
    return not counted <= now <= MOST_COUNTED


@dataclass(frozen=True, slots=True)
class Compared:
    """One line of the comparison."""

    engine: Tokens | None
    """None: no engine's counters are known here, which is not zero."""
    billed: Tokens = Tokens()
    not_billed: Tokens = Tokens()
    """Counted and never billed: tries whose answer nobody got, and estimates."""
    estimated_input: int | None = None
    """Of `not_billed`: prompts that an engine took and of which it said nothing. None: nothing was looked at."""

    @property
    def unattributed(self) -> Tokens | None:
        return None if self.engine is None else self.engine - self.billed

    @property
    def share(self) -> float | None:
        """Unattributed tokens as a part of what engines counted; None where that is nothing or unknown."""
        if self.engine is None or (left := self.unattributed) is None or not self.engine.all:
            return None
        return left.all / self.engine.all

    def __add__(self, other: "Compared") -> "Compared":
        engines = [tokens for tokens in (self.engine, other.engine) if tokens is not None]
        estimates = [input for input in (self.estimated_input, other.estimated_input) if input is not None]
        return Compared(
            sum(engines, Tokens()) if engines else None,
            self.billed + other.billed,
            self.not_billed + other.not_billed,
            sum(estimates) if estimates else None,
        )


# --- GPUs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU of a class costs per hour, in 10^-9 of the currency."""

    hourly: int
    currency: str


@dataclass(frozen=True, slots=True)
class Held:
    """The GPUs of one pod."""

    pod: str
    """Its uid."""
    model: str
    gpu_class: str
    gpus: int
    since: int
    """When it was put on its node."""
    until: int | None = None
    """When it gave them back; None: it still has them."""


def price(amount: Decimal, currency: str) -> Price:
    """Of GPUClass `spec.hourlyCost`. An amount below 10^-9 is rounded."""
    return Price(int((amount * MONEY).to_integral_value(ROUND_HALF_EVEN)), currency)


def held_since(held: Held, counted_until: int | None, first_observation: int) -> int:
    """From when on a pod's GPU time is to be counted: where it was left, or for a pod that is new since it was put on
    its node, but not before anybody looked."""
    return counted_until if counted_until is not None else max(held.since, first_observation)


def by_hour(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The span from `begin` to `end` as (first moment of the hour, milliseconds in it); nothing where it is empty or
    a clock was set back."""
    while begin < end:
        hour = begin - begin % HOUR_MS
        until = min(end, hour + HOUR_MS)
        yield hour, until - begin
        begin = until


def gpu_cost(gpu_ms: int, hourly: int) -> int:
    """What so many GPU milliseconds cost, to the nearest 10^-9; `MOST` at most."""
    return min(MOST, (gpu_ms * hourly + HOUR_MS // 2) // HOUR_MS)
