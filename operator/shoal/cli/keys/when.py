"""Parses times: `90d`, `12h`, `2027-06-01`, `2027-06-01T12:00:00Z`."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_UNITS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_FORMATS: Final = "give a time from now (90d, 12h, 2w), a date (2027-06-01), or a time (2027-06-01T12:00:00Z)"


def moment(text: str, now: datetime) -> datetime:
    """The time that `text` means. A date is its start in UTC; a time without a zone is in UTC. Raises ValueError."""
    if found := re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text):
        try:
            return now + timedelta(seconds=int(found[1]) * _UNITS[found[2]])
        except OverflowError:
            raise ValueError(f"{text} is too far in the future: {_FORMATS}") from None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: {_FORMATS}") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def future(text: str, now: datetime) -> datetime:
    """Like `moment`. Raises ValueError for times in the past too."""
    at = moment(text, now)
    if at <= now:
        raise ValueError(f"{text} is in the past: {_FORMATS}")
    return at


def span(seconds: float) -> str:
    """A duration in the largest unit that fits, rounded down."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
