"""Server-sent events of an engine: joined across reads, edited as bytes, parsed only where necessary.

Editing bytes is safe because inside a JSON string every quote is escaped, so `"usage":` and `"model":` can only be
keys. Both compact JSON (SGLang's) and JSON with one space after colons and commas are understood.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import orjson

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024
MAX_EXTERNAL_EVENT_BYTES: Final = 4 * 1024 * 1024
"""Of an external target. The last event of a response repeats the whole answer."""
SMALL_EVENT_BYTES: Final = 64 * 1024
"""An unfinished event up to this size does not count towards the memory budget."""
DONE: Final = b"data: [DONE]"

_USAGE: Final = b'"usage":'
_NO_CHOICES: Final = b'"choices":[]'
_A_CHOICE: Final = b'"choices":[{'
_BEGINNING: Final = b'data: {"id":'
_RETURN: Final = ord("\r")
_ABORT: Final = b'"abort"'
_TAIL: Final = 128
"""Bytes before a chunk's usage in which engines say why an answer ended."""


class EventTooLarge(Exception):
    """An event that does not end within its limit."""


class Splitter:
    """Splits bytes into whole events, without the blank line at the end. Lines may end in LF, CRLF or CR."""

    __slots__ = ("_held_return", "_most", "_rest")

    def __init__(self, most: int = MAX_EVENT_BYTES) -> None:
        """`most`: bytes of an event."""
        self._most = most
        self._rest = bytearray()
        """The unfinished event. It grows in place: an event of megabytes that comes in small reads is copied once."""
        self._held_return = False

    @property
    def held(self) -> int:
        """Bytes of an event that has not ended yet."""
        return len(self._rest)

    @property
    def between(self) -> bool:
        """Whether what arrives next begins an event."""
        return not self._rest and not self._held_return

    def feed(self, data: bytes) -> list[bytes]:
        """
        Raises:
            EventTooLarge: an event does not end within the limit.
        """
        if self._held_return or _RETURN in data:
            data = self._normal(data)
        if rest := self._rest:
            searched = len(rest) - 1  # its last byte may be the first half of a blank line
            rest += data
            if rest.find(b"\n\n", searched) < 0:
                if len(rest) > self._most:
                    raise EventTooLarge
                return []
            data = bytes(rest)
            rest.clear()
        elif data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2:
            # Exactly one whole event, which is what engines usually send: half the cost of the general case.
            return [event] if (event := data.strip(b"\n")) else []
        events = data.split(b"\n\n")
        rest += events.pop()
        if len(rest) > self._most:
            raise EventTooLarge
        return [event for event in (part.strip(b"\n") for part in events) if event]

    def _normal(self, data: bytes) -> bytes:
        # A CR at the end of a read may be the first half of a CRLF: wait for the next byte.
        if self._held_return:
            data = b"\r" + data
        self._held_return = data.endswith(b"\r")
        if self._held_return:
            data = data[:-1]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def plain_chunks(data: bytes, rewrite: Callable[[bytes], bytes] | None = None) -> tuple[bytes, bytes] | None:
    """What arrived without the chunks' usage, and the last one's usage, if that is nothing but chunks as SGLang writes
    them: their usage comes last and contains no object. Else None, which says nothing: the functions below understand
    all events. Almost all reads of a stream are one such chunk, and on a busy core some; this takes half of their time.
    `rewrite` is applied to each chunk."""
    # `b"\r" in data` would take ten times as long: Python first tries whether it is a number, and raises an error.
    end = len(data)
    if data.find(b"\n") != end - 2:
        return _several(data, rewrite)
    # The last brace that opens must be that of the usage. Searches for one byte, and one that ends early, are cheap.
    at = data.rfind(b"{")
    if (
        data[at - 9 : at] != b',"usage":'
        or not data.endswith(b"}}\n\n")
        or data.find(b"}", at) != end - 4
        or not data.startswith(_BEGINNING)
        or _RETURN in data
        or data.find(_A_CHOICE) < 0
        or data.find(_ABORT, max(0, at - _TAIL), at) >= 0
    ):
        return None
    out = data[: at - 9] + b"}\n\n"
    return (out if rewrite is None else rewrite(out)), data[at : end - 3]


def _several(data: bytes, rewrite: Callable[[bytes], bytes] | None) -> tuple[bytes, bytes] | None:
    """`plain_chunks` of a read that is not one chunk."""
    if not data.endswith(b"}}\n\n") or _RETURN in data:
        return None
    out: list[bytes] = []
    event, at = b"", 0
    for event in data[:-2].split(b"\n\n"):
        at = event.rfind(b"{")
        if (
            event[at - 9 : at] != b',"usage":'
            or not event.endswith(b"}}")
            or event.find(b"}", at) != len(event) - 2
            or not event.startswith(_BEGINNING)
            or event.find(b"\n") >= 0
            or event.find(_A_CHOICE) < 0
            or event.find(_ABORT, max(0, at - _TAIL), at) >= 0
        ):
            return None
        out.append(event[: at - 9] + b"}\n\n")
    return b"".join(out if rewrite is None else map(rewrite, out)), event[at:-1]


def find_usage(event: bytes) -> tuple[int, int] | None:
    """The span (start, end) of the object after `"usage":`; None if there is none, or null."""
    at = event.rfind(_USAGE)
    if at < 0:
        return None
    start = at + len(_USAGE)
    while event[start : start + 1] == b" ":
        start += 1
    if event[start : start + 1] != b"{":
        return None
    depth = 0
    at = start
    while True:
        close = event.find(b"}", at)
        if close < 0:
            return None
        depth += event.count(b"{", at, close) - 1
        at = close + 1
        if depth == 0:
            return start, at


def without_usage(event: bytes, span: tuple[int, int]) -> bytes:
    """The event without its `usage` member; `span` is the result of `find_usage`."""
    start, end = span
    key = event.rfind(_USAGE, 0, start)
    if event[key - 1 : key] == b",":
        return event[: key - 1] + event[end:]
    if event[end : end + 1] == b",":
        return event[:key] + event[end + 1 :]
    if event[key - 2 : key] == b", ":
        return event[: key - 2] + event[end:]
    return event[:key] + event[end:].lstrip(b", ")


def is_closing_usage(event: bytes) -> bool:
    """Whether this is the chunk that carries only the closing usage."""
    return event.find(_NO_CHOICES) >= 0 or event.find(b'"choices": []') >= 0


def closing_usage(event: bytes, model_name: str) -> bytes:
    """The chunk that carries only the usage, made from one that has choices too."""
    return b"data: " + orjson.dumps((payload(event) or {}) | {"choices": [], "model": model_name})


def is_done(event: bytes) -> bool:
    """Whether an event says that the stream is complete. The space is optional in the format, and some write none."""
    return event in (DONE, b"data:[DONE]")


def is_error(event: bytes) -> bool:
    """Whether an event is an error of the engine: `data: {"error": ...}`."""
    return event.startswith((b'data: {"error"', b'data:{"error"'))


def is_aborted(data: bytes) -> bool:
    """Whether a chunk or a whole answer says that the engine gave the request up: it is no whole answer."""
    at = data.find(_ABORT)
    return at >= 0 and (data.find(b'"finish_reason":"abort"') >= 0 or data.find(b'"finish_reason": "abort"') >= 0)


def payload(event: bytes) -> dict[str, Any] | None:
    """The decoded JSON object of an event's `data:` lines, or None."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        decoded: object = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return cast(dict[str, Any], decoded) if isinstance(decoded, dict) else None


def written(kind: str, decoded: dict[str, Any]) -> bytes:
    """An event of this type, without the blank line at its end."""
    # A line break in the type would begin another line of the event.
    name = kind.replace("\r", "").replace("\n", "").encode(errors="replace")
    return b"event: %b\ndata: %b" % (name, orjson.dumps(decoded))
