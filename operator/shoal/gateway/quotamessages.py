"""Answers to clients about their limits: refusals in OpenAI's format, and OpenAI's headers."""

from functools import lru_cache
from math import ceil
from typing import Final

from shoal.core.quota.limits import Limit, Limits, LimitState, Over
from shoal.core.quota.month import PICO
from shoal.net.asgi import HeaderLines, Headers
from shoal.net.errors import DO_NOT_RETRY, ApiError

_NAMES: Final[dict[Limit, str]] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "requests at a time",
    "budget": "monthly budget",
}
_TYPES: Final[dict[Limit, str]] = {
    "requests": "requests",
    "tokens": "tokens",
    "concurrent": "requests",
    "budget": "tokens",
}
_FIELDS: Final[dict[Limit, str]] = {
    "requests": "requestsPerMinute",
    "tokens": "tokensPerMinute",
    "concurrent": "concurrentRequests",
    "budget": "budget",
}
"""Of a spec."""
EXHAUSTED: Final = "insufficient_quota"
_HEADER_LINES: Final[dict[Limit, bytes]] = {
    name: (
        f"x-ratelimit-limit-{name}: %d\r\nx-ratelimit-remaining-{name}: %d\r\nx-ratelimit-reset-{name}: %b\r\n".encode()
    )
    for name in _NAMES
}


class MayFitSoon(ApiError):
    """The request may fit when the other gateways have reported again: the limit has room for it, but not this
    gateway's share; or the limit is used up, but by requests at other gateways that may have ended, by what they
    reserve, or by what is assumed of one that has not reported yet."""

    def __init__(self, over: Over, text: str) -> None:
        super().__init__(
            429,
            text,
            "rate_limit_exceeded",
            type=_TYPES[over.limit],
            retry_after=over.retry_after,
            limit=_limit_of_route(over),
        )
        self.over = over


def refusal(over: Over, limits: Limits) -> ApiError:
    """The error for a client that is over a limit."""
    name, when = _NAMES[over.limit], f"Try again in {over.retry_after} s."
    if over.route is not None:
        name = f"{name} of ModelRoute {over.route}"
        when = f"Try again in {over.retry_after} s, or name another model: such requests do not count here."
    if over.limit == "budget":
        return _budget_refusal(over, limits)
    if over.why == "never":
        text = (
            f"The request is larger than your limit on {name}: limit {over.most}, asked for {over.requested} "
            "(its prompt, estimated, and the longest answer that it allows). Send less, or lower `max_tokens`."
        )
        return _limited(over, text, DO_NOT_RETRY)
    asked = f", asked for {over.requested}" if over.limit == "tokens" else ""
    if over.why == "share":
        text = f"Your limit on {name} is shared out: limit {over.most}, used {over.used}{asked}. {when}"
        return MayFitSoon(over, text)
    text = f"You have reached your limit on {name}: limit {over.most}, used {over.used}{asked}. {when}"
    return MayFitSoon(over, text) if over.why == "elsewhere" else _limited(over, text)


def _limited(over: Over, text: str, headers: Headers = ()) -> ApiError:
    return ApiError(
        429,
        text,
        "rate_limit_exceeded",
        type=_TYPES[over.limit],
        retry_after=over.retry_after,
        headers=tuple(headers),
        limit=_limit_of_route(over),
    )


def _limit_of_route(over: Over) -> str | None:
    """Whose limit it is, for the installation's own people; None: the Tenant's own."""
    if over.route is None:
        return None
    return f"{_FIELDS[over.limit]} of ModelRoute {over.route}, {over.most} for each tenant"


def _budget_refusal(over: Over, limits: Limits) -> ApiError:
    budget = limits.budget
    if over.why == "share":
        text = f"What is left of your monthly budget is shared out. Try again in {over.retry_after} s."
        return MayFitSoon(over, text)
    if over.why == "unknown":
        text = "What you have used of your monthly budget is not known right now, so nothing is served. Try again."
        return ApiError(429, text, EXHAUSTED, type=EXHAUSTED, retry_after=over.retry_after)
    if over.why == "currency":
        text = "Your monthly budget is in another currency than the prices, so nothing is served."
    elif over.why == "never":
        text = "The request is larger than your monthly budget. Send less, or lower `max_tokens`."
    else:
        money = budget is not None and budget.unit == "money"
        unit = f"{budget.currency}" if money and budget is not None else "tokens"
        most, used = (_money(over.most), _money(over.used)) if money else (str(over.most), str(over.used))
        if over.why in ("elsewhere", "reserved"):
            text = (
                f"What is left of your monthly budget is reserved for requests that run: {used} of {most} {unit} are "
                f"used or reserved. Try again in {over.retry_after} s, or lower `max_tokens`."
            )
            return MayFitSoon(over, text) if over.why == "elsewhere" else _limited(over, text)
        text = (
            f"You have used up your monthly budget: {used} of {most} {unit}. It begins anew with the next month (UTC)."
        )
    return ApiError(429, text, EXHAUSTED, type=EXHAUSTED, retry_after=over.retry_after, headers=DO_NOT_RETRY)


def _money(pico: int) -> str:
    """An amount with two decimals, rounded down."""
    whole, cents = divmod(max(0, pico) // (PICO // 100), 100)
    return f"{whole}.{cents:02d}"


def header_lines_of(state: LimitState) -> HeaderLines:
    return _HEADER_LINES[state.limit] % (state.most, state.left, duration(state.reset_seconds))


def duration(seconds: float) -> bytes:
    """A duration in Go's format, as in OpenAI's headers: 0s, 120ms, 12.5s, 1m0s. Rounded up to milliseconds."""
    return _duration(ceil(seconds * 1000))


@lru_cache(maxsize=4096)
def _duration(millis: int) -> bytes:
    # A busy tenant's windows end in 60 to 61 s, so there are few different ones.
    if millis < 1000:
        return b"%dms" % millis if millis else b"0s"
    minutes, millis = divmod(millis, 60_000)
    text = f"{millis / 1000:g}s"
    return (f"{minutes}m{text}" if minutes else text).encode()
