"""Times in queries: always UTC and whole hours, because usage is summed by the hour."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
LONGEST_DAYS: Final = 3_700
_LAST_YEAR: Final = 9998
_LAST_MS: Final = int(datetime(_LAST_YEAR + 1, 1, 1, tzinfo=UTC).timestamp()) * 1000
"""The latest end: the month after it is in Python's last year too."""
_MONTH: Final = re.compile(r"^\d{4}-(0[1-9]|1[0-2])$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` until before `end`, in milliseconds since 1970."""

    start: int
    end: int

    def months(self) -> Iterator[tuple[str, "Span"]]:
        """The whole calendar months that overlap the span."""
        at = month_of(self.start)
        while (whole := month_span(at)).start < self.end:
            yield at, whole
            at = month_of(whole.end)

    def days(self) -> Iterator["Span"]:
        """The calendar days of the span, cut to it."""
        start = self.start
        while start < self.end:
            end = min(self.end, start - start % DAY_MS + DAY_MS)
            yield Span(start, end)
            start = end


def span(request: ShellRequest, now: int, *, longest_days: int = LONGEST_DAYS) -> Span:
    """Parameters `from` and `to`; default: the current month. Raises Problem."""
    start, end = request.one("from"), request.one("to")
    found = Span(
        month_span(month_of(now)).start if start is None else moment("from", start),
        month_span(month_of(now)).end if end is None else moment("to", end),
    )
    if found.end - found.start > longest_days * DAY_MS:
        raise Problem(400, f"from and to are more than {longest_days} days apart: ask in parts")
    if max(found.start, found.end) > _LAST_MS:
        raise Problem(400, f"{'from' if found.start > _LAST_MS else 'to'} is after {_LAST_YEAR}, the last year")
    if found.end <= found.start:
        raise Problem(400, f"to ({text(found.end)}) is not after from ({text(found.start)})")
    return found


def moment(name: str, value: str) -> int:
    """Parses 2026-11, 2026-11-01 or a time on the hour to milliseconds since 1970. Raises Problem."""
    if value < "1970":
        raise Problem(400, f"{name}={value[:40]} is before 1970")
    if _MONTH.match(value):
        return month_span(value).start
    try:
        found = datetime.fromisoformat(value.replace(" ", "+"))  # a plus that was not escaped
    except ValueError:
        raise Problem(400, f"{name}={value[:40]}: write 2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC)") from None
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found
    milliseconds = round(found.timestamp() * 1000)
    if milliseconds % HOUR_MS:
        raise Problem(400, f"{name}={value[:40]} is not on the hour: usage is summed by the hour (UTC)")
    if milliseconds < 0:
        raise Problem(400, f"{name}={value[:40]} is before 1970")
    return milliseconds


def month(value: str | None) -> str:
    """Checks a month such as 2026-11. Raises Problem."""
    if value is None or not _MONTH.match(value) or value < "1970":
        raise Problem(400, "month is missing" if value is None else f"month={value[:40]}: write one such as 2026-11")
    return value


def month_span(month: str) -> Span:
    """Span of a month such as 2026-11."""
    year, number = int(month[:4]), int(month[5:])
    first, then = datetime(year, number, 1, tzinfo=UTC), (year + number // 12, number % 12 + 1)
    after = datetime(then[0], then[1], 1, tzinfo=UTC) if then[0] <= 9999 else datetime.max.replace(tzinfo=UTC)
    return Span(int(first.timestamp()) * 1000, int(after.timestamp()) * 1000)


def month_of(moment: int) -> str:
    """The month of a time, such as 2026-11."""
    return datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m")


def day_of(moment: int) -> str:
    """The day of a time, such as 2026-11-01."""
    return datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%d")


def text(moment: int) -> str:
    """A time as text, such as 2026-11-01T06:00:00Z."""
    return datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
