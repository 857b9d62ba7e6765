"""Which requests may wait at a gateway, for how long, and the Retry-After of refused ones."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

COLD_START_FACTOR: Final = 2.0
COLD_START_EXTRA_SECONDS: Final = 30.0
"""A request waits for at most two measured cold starts and this."""
UNMEASURED_START_SECONDS: Final = 1800.0
"""A first start of a large model, with the download of its weights, takes less."""
FIRST_LOAD_SECONDS: Final = 360.0
"""The first load of an adapter takes less: agents end the fetch of its files after 300 s, and its load after 30 s."""
RETRY_AFTER_UNKNOWN_SECONDS: Final = 30
RETRY_AFTER_MAX_SECONDS: Final = 60
"""Clients ignore a longer Retry-After."""

Bound = Literal["requests", "bytes", "tenant"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a Model's `spec.hold` allows at each gateway."""

    max_requests: int = 2000
    max_bytes: int = 256 * 1024 * 1024
    max_tenant_percent: int = 50
    timeout_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """Waiting requests, of a Model or of one tenant in it."""

    requests: int = 0
    bytes: int = 0


def over(limits: Limits, size: int, all_held: Held, tenants_held: Held) -> Bound | None:
    """The bound that one more request with a body of `size` bytes would exceed; None: it may wait.

    A tenant's share counts for requests and for bytes, and is never less than one request.
    """
    if all_held.requests + 1 > limits.max_requests:
        return "requests"
    if all_held.bytes + size > limits.max_bytes:
        return "bytes"
    if tenants_held.requests and (
        (tenants_held.requests + 1) * 100 > limits.max_requests * limits.max_tenant_percent
        or (tenants_held.bytes + size) * 100 > limits.max_bytes * limits.max_tenant_percent
    ):
        return "tenant"
    return None


def longest_wait(limits: Limits, cold_start_seconds: float | None, ceiling_seconds: float) -> float:
    """Seconds that a request waits at most: the Model's timeout, or two cold starts and 30 s if that is less.

    `cold_start_seconds`: measured; None: not measured yet. `ceiling_seconds`: the gateway's own limit.
    """
    longest = min(limits.timeout_seconds, ceiling_seconds)
    if cold_start_seconds is None:
        return longest
    return min(longest, COLD_START_FACTOR * cold_start_seconds + COLD_START_EXTRA_SECONDS)


def retry_after(cold_start_seconds: float | None, waking_seconds: float) -> int:
    """Seconds until a retry makes sense: the rest of the cold start that began `waking_seconds` ago; 1 to 60."""
    if cold_start_seconds is None:
        return RETRY_AFTER_UNKNOWN_SECONDS
    left = cold_start_seconds - waking_seconds
    return max(1, min(RETRY_AFTER_MAX_SECONDS, int(left) + (left > int(left))))


def may_come(cold_start_seconds: float | None, ages: Iterable[float | None]) -> bool:
    """Whether a Model that has no replica may soon have its first: no pod has had twice the measured cold start and
    30 s without becoming one. `ages`: as of `expected_wait`."""
    if cold_start_seconds is None:
        most = UNMEASURED_START_SECONDS
    else:
        most = COLD_START_FACTOR * cold_start_seconds + COLD_START_EXTRA_SECONDS
    return max((age for age in ages if age is not None), default=0.0) <= most


def expected_wait(cold_start_seconds: float | None, ages: Iterable[float | None]) -> float | None:
    """Seconds until a Model that has no replica has one: the rest of its measured cold start. None: unknown, because it
    is not measured, or because a start takes longer than measured.

    `ages`: for how long the pods that start have existed; None: unknown. Without a pod the whole cold start is ahead.
    """
    known = list(ages)
    if cold_start_seconds is None or None in known:
        return None
    oldest = max((age for age in known if age is not None), default=0.0)
    left = cold_start_seconds - max(0.0, oldest)
    return left if left > 0 else None
