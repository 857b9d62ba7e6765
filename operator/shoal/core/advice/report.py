"""The advice on one Model: how much of its prompts engines had to compute, how much another routing would have saved or
cost, and what that is in GPU time and money.

All shares are over the same requests (`replay.counted`). A replay of the recorded routing shows how true replays are.
Where it finds more than the engines delivered, the other replays have as much less of the KV caches as it takes; what
then still differs scales their results. None is unknown, and a note says why.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from shoal.core.advice.facts import ClassFact, Fleet, RequestFact, TrafficWindow
from shoal.core.advice.locality import AdapterLocality, adapter_locality
from shoal.core.advice.pools import LongPrompts, PoolsEstimate, long_prompts, pools_estimate
from shoal.core.advice.rates import LEAST_SAMPLES, prefill_rates
from shoal.core.advice.replay import LeastInFlight, Placement, Replay, RoundRobin, one_cache, recorded

LEAST_REQUESTS: Final = 200
LARGER: Final = 2
"""How many times as large the larger KV cache is."""
OFF: Final = 0.2
"""Difference between replay and engines from which on a note says so, as a share of what the engines delivered."""
DAY: Final = 86_400.0
LEAST_USABLE: Final = 0.5
"""Of the KV caches: what a smaller part would explain has another reason."""
_FITS: Final = 5
"""Steps to find the usable part of the KV caches: to 1/64."""


@dataclass(frozen=True, slots=True)
class PrefillWorth:
    """What a difference of computed prompt tokens is worth. Negative: it costs."""

    share: float
    """Of all prompt tokens."""
    tokens_per_day: float
    gpu_hours_per_day: float | None
    cost_per_day: Decimal | None


@dataclass(frozen=True, slots=True)
class ClassAdvice:
    """What was used of a GPU class. An unknown class has the name ""."""

    gpu_class: str
    requests: int
    prefill_rate: float | None
    """Prompt tokens per second and replica, measured."""
    kv_tokens_per_replica: int | None


@dataclass(frozen=True, slots=True)
class CachedShares:
    """Shares of prompt tokens that were, or would have been, in a prefix cache; from 0 to 1."""

    unlimited: float
    """One cache for all that forgets nothing: all reuse that the traffic holds."""
    fleet_sized: float | None
    """One cache for all, as large as those of all replicas together: the best that any routing can get."""
    delivered: float
    """As the engines reported."""
    replayed: float | None
    """The recorded routing, replayed with whole KV caches: how true the replays are."""
    usable_kv: float | None
    """Part of the KV caches with which this replay finds what the engines delivered, and that the following use."""
    least_in_flight: float | None
    round_robin: float | None
    larger_kv: float | None
    """The recorded routing with `LARGER` times the KV cache."""


@dataclass(frozen=True, slots=True)
class AdviceReport:
    since: float
    """Seconds since 1970; all requests between the two times are known."""
    until: float
    gateways: int
    requests: int
    counted: int
    """Requests over which shares are taken."""
    replicas: int
    """Starts of engines that served them."""
    prompt_tokens_per_day: float
    classes: tuple[ClassAdvice, ...]
    shares: CachedShares
    saved: PrefillWorth | None
    """By the recorded routing, over the least loaded replica."""
    better_routing: PrefillWorth | None
    """What the best routing would save in addition, at most."""
    larger_kv: PrefillWorth | None
    """What a larger KV cache would save in addition."""
    currency: str | None
    long: LongPrompts
    pools: PoolsEstimate
    adapters: AdapterLocality | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotEnoughTraffic:
    message: str


def advise(
    window: TrafficWindow, fleet: Fleet, *, prompt_tokens_per_day: float | None = None
) -> AdviceReport | NotEnoughTraffic:
    """`prompt_tokens_per_day`: as counted elsewhere over a longer time; None: that of the window."""
    requests = window.requests
    rates = prefill_rates(requests)
    replay = Replay(window, rates)
    chosen = [requests[number] for number in sorted(replay.counted)]
    if (problem := _too_few(requests, chosen)) is not None:
        return problem
    notes: list[str] = []
    kv = _kv_tokens(requests, fleet, notes)
    shares = _shares(replay, chosen, kv, notes)
    if prompt_tokens_per_day is None:
        tokens = sum(one.prompt for one in requests)
        prompt_tokens_per_day = tokens * DAY / window.seconds if window.seconds > 0 else 0.0
    worth = _Worth(chosen, fleet, rates, prompt_tokens_per_day, notes)
    classes = sorted({one.gpu_class for one in requests}, key=lambda name: name or "")
    return AdviceReport(
        window.since,
        window.until,
        window.gateways,
        len(requests),
        len(chosen),
        len({one.replica for one in requests}),
        prompt_tokens_per_day,
        tuple(
            ClassAdvice(
                name or "",
                sum(one.gpu_class == name for one in requests),
                rates.get(name),
                _fact(fleet, name).kv_tokens,
            )
            for name in classes
        ),
        shares,
        worth.of(shares.least_in_flight, shares.delivered),
        worth.of(shares.delivered, _best(shares)),
        worth.of(shares.delivered, shares.larger_kv),
        worth.currency,
        long_prompts(requests),
        pools_estimate(requests, rates),
        adapter_locality(replay),
        tuple(notes),
    )


def _too_few(requests: Sequence[RequestFact], chosen: Sequence[RequestFact]) -> NotEnoughTraffic | None:
    if len(chosen) >= LEAST_REQUESTS:
        return None
    uncounted = sum(one.cached is None for one in requests)
    unread = sum(not one.marks for one in requests)
    reasons = [
        f"{number:,} {why}"
        for number, why in (
            (uncounted, "without `cached_tokens` from the engine"),
            (unread, "whose prompt has media or is not understood"),
        )
        if number
    ]
    left_out = f", among them {' and '.join(reasons)}" if reasons else ""
    return NotEnoughTraffic(
        f"advice needs at least {LEAST_REQUESTS} requests after the first tenth, which fills the caches; the gateways "
        f"know {len(requests):,}{left_out}"
    )


def _fact(fleet: Fleet, name: str | None) -> ClassFact:
    return fleet.get(name or "", ClassFact())


def _kv_tokens(requests: Sequence[RequestFact], fleet: Fleet, notes: list[str]) -> Mapping[int, int] | None:
    """KV tokens by replica; None: unknown for some."""
    classes = {one.replica: one.gpu_class for one in requests}
    found: dict[int, int] = {}
    unknown: set[str] = set()
    for replica, name in classes.items():
        tokens = _fact(fleet, name).kv_tokens
        if tokens is None:
            unknown.add(name or "an unknown class")
        else:
            found[replica] = tokens
    if unknown:
        notes.append(f"the KV cache of a replica on {', '.join(sorted(unknown))} is unknown, so nothing is replayed")
        return None
    return found


def _shares(
    replay: Replay, chosen: Sequence[RequestFact], kv: Mapping[int, int] | None, notes: list[str]
) -> CachedShares:
    delivered = sum(one.cached or 0 for one in chosen) / sum(one.prompt for one in chosen)
    unlimited = replay.run(one_cache, lambda _replica: None).share
    if kv is None:
        return CachedShares(unlimited, None, delivered, None, None, None, None, None)

    def run(choose: Placement, tokens: Callable[[int], int]) -> float:
        return replay.run(choose, tokens).share

    sizes = kv
    replayed = run(recorded, sizes.__getitem__)
    usable = _usable(delivered, replayed, lambda part: run(recorded, lambda replica: int(part * sizes[replica])))
    kv = {replica: int(usable * tokens) for replica, tokens in sizes.items()}
    if abs(replayed - delivered) > OFF * max(delivered, 0.01):
        notes.append(
            f"the replay of the recorded routing finds {replayed:.1%} of the prompts cached and the engines reported "
            f"{delivered:.1%}: read what other routing would get as a rough estimate"
        )
    fitted = run(recorded, kv.__getitem__)
    scale = delivered / fitted if fitted > 0 else None if delivered > 0 else 1.0

    def scaled(share: float) -> float | None:
        return None if scale is None else min(1.0, share * scale)

    whole = _together(replay.requests, sizes)
    one_replica = len(kv) == 1
    if one_replica:
        notes.append("one replica served all requests, so routing made no difference")
    least = fitted if one_replica else run(LeastInFlight(), kv.__getitem__)
    around = fitted if one_replica else run(RoundRobin(), kv.__getitem__)
    return CachedShares(
        unlimited,
        run(one_cache, lambda _replica: whole),
        delivered,
        replayed,
        usable,
        scaled(least),
        scaled(around),
        scaled(run(recorded, lambda replica: int(LARGER * usable * sizes[replica]))),
    )


def _usable(delivered: float, replayed: float, find: Callable[[float], float]) -> float:
    """The part of the KV caches with which the replay of the recorded routing finds what the engines delivered."""
    if replayed <= delivered:
        return 1.0
    low, high = LEAST_USABLE, 1.0
    found = {high: replayed}
    for _ in range(_FITS):
        middle = (low + high) / 2
        found[middle] = find(middle)
        if found[middle] > delivered:
            high = middle
        else:
            low = middle
    return min(found, key=lambda part: abs(found[part] - delivered))


def _together(requests: Sequence[RequestFact], kv: Mapping[int, int]) -> int:
    """KV tokens of the replicas that there were at one time, on average over the requests' arrivals."""
    ends: defaultdict[int, float] = defaultdict(float)
    starts: dict[int, float] = {}
    for one in requests:
        starts.setdefault(one.replica, one.at)
        ends[one.replica] = max(ends[one.replica], one.ended)
    span = max(ends.values()) - min(starts.values())
    if span <= 0:
        return sum(kv.values())
    return round(sum(kv[replica] * (ends[replica] - starts[replica]) / span for replica in starts))


def _best(shares: CachedShares) -> float | None:
    return None if shares.fleet_sized is None else max(shares.fleet_sized, shares.delivered)


class _Worth:
    """GPU time and money of prompt tokens, by the classes that computed them."""

    def __init__(
        self,
        chosen: Sequence[RequestFact],
        fleet: Fleet,
        rates: Mapping[str | None, float | None],
        tokens_per_day: float,
        notes: list[str],
    ) -> None:
        self._tokens = tokens_per_day
        self._gpu_seconds: float | None = 0.0
        """Of one prompt token."""
        self._cost: Decimal | None = Decimal(0)
        """Of one prompt token."""
        self.currency: str | None = None
        by_class: defaultdict[str | None, int] = defaultdict(int)
        for one in chosen:
            by_class[one.gpu_class] += one.prompt
        currencies: set[str] = set()
        for name, tokens in by_class.items():
            fact, rate, weight = _fact(fleet, name), rates.get(name), tokens / sum(by_class.values())
            where = name or "an unknown class"
            if rate is None or fact.gpus is None:
                missing = f"fewer than {LEAST_SAMPLES} streams tell how fast it reads prompts" if rate is None else (
                    "the GPUs of a replica are unknown"
                )  # fmt: skip
                notes.append(f"GPU time on {where} is unknown: {missing}")
                self._gpu_seconds = self._cost = None
                continue
            seconds = weight * fact.gpus / rate
            if self._gpu_seconds is not None:
                self._gpu_seconds += seconds
            if fact.hourly_cost is None:
                notes.append(f"the cost of {where} is unknown")
                self._cost = None
            else:
                currencies.add(fact.currency or "")
                if self._cost is not None:
                    self._cost += Decimal(seconds) * fact.hourly_cost / 3600
        if len(currencies) > 1:
            notes.append("the classes have costs in several currencies")
            self._cost = None
        elif self._cost is not None:
            self.currency = next(iter(currencies), None)

    def of(self, less: float | None, more: float | None) -> PrefillWorth | None:
        """What it is worth that `more` of the prompt tokens are cached instead of `less`."""
        if less is None or more is None:
            return None
        tokens = (more - less) * self._tokens
        return PrefillWorth(
            more - less,
            tokens,
            None if self._gpu_seconds is None else tokens * self._gpu_seconds / 3600,
            None if self._cost is None else (Decimal(tokens) * self._cost).quantize(Decimal("0.0001")),
        )
