"""Times as people give them: `90d`, `12h`, `2027-06-01`, `2027-06-01T12:00:00Z`, `never`."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_UNITS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_WORDS: Final = "give a time from now (90d, 12h, 2w), a date (2027-06-01), or a time (2027-06-01T12:00:00Z)"


def moment(text: str, now: datetime) -> datetime:
    """A date is its beginning, in UTC; so is a time without a zone. Raises ValueError with what is accepted."""
    if found := re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text):
        try:
            return now + timedelta(seconds=int(found[1]) * _UNITS[found[2]])
        except OverflowError:
            raise ValueError(f"{text} is too far away: {_WORDS}") from None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time: {_WORDS}") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def future(text: str, now: datetime) -> datetime:
    """Raises ValueError also for what is past."""
    at = moment(text, now)
    if at <= now:
        raise ValueError(f"{text} is past: {_WORDS}")
    return at


def span(seconds: float) -> str:
    """Roughly, in the largest unit that fits."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
