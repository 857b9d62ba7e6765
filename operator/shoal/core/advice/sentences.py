"""The advice in plain sentences, the most important first."""

from collections.abc import Iterator
from typing import Final

from shoal.core.advice.pools import LONG_TOKENS
from shoal.core.advice.report import LARGER, AdviceReport, PrefillWorth

_NOTHING: Final = "nothing"
_LEAST: Final = 0.0005
"""Share of the prompt tokens that is less than what is printed of one."""


def sentences(report: AdviceReport) -> tuple[str, ...]:
    return tuple(_sentences(report))


def _sentences(report: AdviceReport) -> Iterator[str]:
    shares = report.shares
    yield _saved(report)
    yield (
        f"The engines had {_percent(shares.delivered)} of the prompt tokens in their caches. The traffic holds "
        f"{_percent(shares.unlimited)} for a cache that forgets nothing"
        + (
            "."
            if shares.fleet_sized is None
            else f", and {_percent(shares.fleet_sized)} for one cache of the fleet's size."
        )
    )
    if report.better_routing is not None:
        yield f"Better routing would save {_at_most(report.better_routing, report.currency)} more."
    if report.larger_kv is not None:
        yield f"{LARGER} times the KV cache would save {_worth(report.larger_kv, report.currency)} more."
    long = report.long
    prompts = (
        f"{_percent(long.requests)} of the prompts have {LONG_TOKENS:,} tokens or more; they are "
        f"{_percent(long.tokens)} of the prompt tokens."
    )
    if report.pools.most_gain is None:
        yield f"{prompts} What prefill/decode pools would gain is unknown: too few answers were streams."
    else:
        yield (
            f"{prompts} Estimate: prefill/decode pools would shorten generation by at most "
            f"{_percent(report.pools.most_gain)}, without the transfer of the KV cache."
        )
    if (adapters := report.adapters) is not None:
        resident = "" if adapters.resident is None else f"; {_percent(adapters.resident)} found it loaded"
        yield (
            f"{adapters.requests:,} requests were for {adapters.adapters:,} adapters{resident}. They needed at least "
            f"{adapters.pairs:,} loads; with the least loaded replica it would have been "
            f"{adapters.pairs_least_in_flight:,}."
        )


def _saved(report: AdviceReport) -> str:
    if report.saved is None:
        return "What routing saved is unknown."
    verb = "saved" if report.saved.share >= 0 else "cost"
    size = report.saved if report.saved.share >= 0 else _negated(report.saved)
    return f"Prefix routing {verb} {_worth(size, report.currency)}, compared with the least loaded replica."


def _negated(worth: PrefillWorth) -> PrefillWorth:
    return PrefillWorth(
        -worth.share,
        -worth.tokens_per_day,
        None if worth.gpu_hours_per_day is None else -worth.gpu_hours_per_day,
        None if worth.cost_per_day is None else -worth.cost_per_day,
    )


def _at_most(worth: PrefillWorth, currency: str | None) -> str:
    found = _worth(worth, currency)
    return found if found == _NOTHING else f"at most {found}"


def _worth(worth: PrefillWorth, currency: str | None) -> str:
    """`31 % of the prefill = 4.2 GPU-hours a day = 9.20 USD a day`."""
    if abs(worth.share) < _LEAST:
        return _NOTHING
    parts = [f"{_percent(worth.share)} of the prompt tokens"]
    if worth.gpu_hours_per_day is not None:
        parts.append(f"{number(worth.gpu_hours_per_day)} GPU-hours a day")
    if worth.cost_per_day is not None:
        parts.append(f"{worth.cost_per_day:,.2f} {currency or ''}".rstrip() + " a day")
    return " = ".join(parts)


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
