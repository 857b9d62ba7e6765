"""Request ids."""

import random
import re
import time
from typing import Final

_random: Final = random.Random()  # noqa: S311 - seeded by the system; an id must be unique, not secret
_CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def uuid7() -> str:
    """A UUID of version 7 (RFC 9562, section 5.7): sorts by time, so index pages are filled in order, and lists of
    requests are in the order of their admission: the 12 bits behind the milliseconds go on with the time (section 6.2,
    method 3), a quarter of a microsecond each."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    value = milliseconds << 80 | 0x7 << 76 | (rest << 12) // 1_000_000 << 64 | 0x2 << 62 | _random.getrandbits(62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def client_request_id(value: bytes | None) -> str | None:
    """The client's x-request-id where it is short and plain; else None."""
    return value.decode() if value is not None and _CLIENT_ID.fullmatch(value) else None


def traceparent(value: bytes | None) -> bytes | None:
    """A W3C traceparent where it is one; else None."""
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None
