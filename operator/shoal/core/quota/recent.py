"""Use in the last 60 seconds with its age: what a gateway reports to another one that has just
connected (`TenantUse.recent`)."""

from collections.abc import Iterator, Sequence

from shoal.core.quota.window import WINDOW_SECONDS, Window

Recent = Sequence[tuple[int, int, int]]
"""(age, requests, tokens), the newest first. Ages are in whole seconds, 0 to 60."""


def recent_use(requests: Window, tokens: Window, now: float, most: int, reserved: int = 0) -> Recent:
    """At most `most` entries (at least 1). Where that is fewer than seconds, neighbouring seconds become one entry with
    the age of the newest of them: the others then count too long, by less than 61 s / `most`, rounded up. `reserved`:
    tokens that count as used now."""
    asked, used = requests.aged(now), tokens.aged(now)
    if not asked and not used:
        return ((0, 0, reserved),) if reserved else ()
    width = -(-(WINDOW_SECONDS + 1) // max(1, most))
    groups: dict[int, tuple[int, int, int]] = {0: (0, 0, reserved)} if reserved else {}
    for age, amount in asked:
        newest, before, more = groups.get(age // width, (age, 0, 0))
        groups[age // width] = age if age < newest else newest, before + amount, more
    for age, amount in used:
        newest, before, more = groups.get(age // width, (age, 0, 0))
        groups[age // width] = age if age < newest else newest, before, more + amount
    return sorted(groups.values())


def restore(recent: Recent, requests: Window, tokens: Window, now: float) -> None:
    """Makes the windows what `recent` says."""
    requests.restore(now, _requests(recent))
    tokens.restore(now, _tokens(recent))


def cover(recent: Recent, requests: Window, tokens: Window, now: float) -> None:
    """Makes the windows at least what `recent` says, now and while it counts: each for itself."""
    requests.cover(now, _requests(recent))
    tokens.cover(now, _tokens(recent))


def _requests(recent: Recent) -> Iterator[tuple[int, int]]:
    """By age, the oldest first."""
    return ((age, asked) for age, asked, _ in sorted(recent, reverse=True))


def _tokens(recent: Recent) -> Iterator[tuple[int, int]]:
    return ((age, used) for age, _, used in sorted(recent, reverse=True))
