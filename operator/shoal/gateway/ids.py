"""Request ids."""

import random
import re
import time
from collections.abc import Mapping
from typing import Final

_random: Final = random.Random()  # noqa: S311 - seeded by the system; an id must be unique, not secret
_CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT: Final = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(rb"[\x20-\x7e]{1,512}")
"""512: the size that every participant in a trace must propagate at least (W3C Trace Context, section 3.3.1.5)."""


def uuid7() -> str:
    """A UUID of version 7 (RFC 9562, section 5.7). It sorts by time, so index pages fill in order, and lists of
    requests are in the order of their admission. The 12 bits after the milliseconds continue the time in steps of a
    quarter of a microsecond (section 6.2, method 3)."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    value = milliseconds << 80 | 0x7 << 76 | (rest << 12) // 1_000_000 << 64 | 0x2 << 62 | _random.getrandbits(62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def client_request_id(value: bytes | None) -> str | None:
    """The client's x-request-id if it is short and plain; else None."""
    return value.decode() if value is not None and _CLIENT_ID.fullmatch(value) else None


def trace(headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
    """A client's W3C traceparent and tracestate ("" if absent), if they are well-formed; else None."""
    parent = headers.get(b"traceparent")
    if parent is None or not _TRACEPARENT.fullmatch(parent):
        return None
    state = headers.get(b"tracestate")
    return parent.decode(), state.decode() if state is not None and _TRACESTATE.fullmatch(state) else ""


def trace_lines(headers: Mapping[bytes, bytes]) -> str:
    """The trace as header lines of a request; empty without one."""
    found = trace(headers)
    if found is None:
        return ""
    parent, state = found
    return f"traceparent: {parent}\r\ntracestate: {state}\r\n" if state else f"traceparent: {parent}\r\n"
