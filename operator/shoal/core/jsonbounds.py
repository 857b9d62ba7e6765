"""What a JSON text would become in memory, counted before it is decoded.

A decoded value takes many times its text (an empty object: 2 bytes of text, 70 of memory), so a bound in bytes bounds
little. Counting bytes is a hundred times faster than decoding, and only a text that could be over a bound is counted
exactly, without what its strings hold.
"""

from dataclasses import dataclass
from typing import Final

_NO_BRACKETS: Final = bytes(c for c in range(256) if c not in b"[]{}")
_OPENS: Final = frozenset(b"[{")
_FIRST: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Most that one text may hold."""

    values: int
    """Of every kind, those inside others too."""
    containers: int
    """Arrays and objects."""
    strings: int
    """Names of members included."""
    depth: int
    """Levels of arrays and objects inside each other."""


def beyond(raw: bytes, most: JsonBounds) -> str | None:
    """What the text has too much of, in words for its author; None: it is within the bounds.

    Right for the valid beginning of any text, which is what a decoder gets to see: behind an error the count may be
    anything, and never lower than what came before.
    """
    size = len(raw)
    if size <= most.depth:
        return None
    # Upper bounds first: what stands in strings counts as if it were structure.
    opens = raw.count(b"[") + raw.count(b"{")
    if (
        opens <= most.depth
        and opens <= most.containers
        and (size <= 2 * most.strings or raw.count(b'"') <= 2 * most.strings)
        and (size <= most.values or raw.count(b",") + opens < most.values)
    ):
        return None
    if size > 2 * _FIRST and (what := _exactly(raw[:_FIRST], most)) is not None:
        return what  # most that is too much is so from the beginning
    return _exactly(raw, most)


def _exactly(raw: bytes, most: JsonBounds) -> str | None:
    # A run of backslashes is pairs from its beginning on: behind them an escaped quote is left, or nothing of ours.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    if plain.count(b'"') > 2 * most.strings:
        return f"more than {most.strings} strings"
    outside = b"".join(plain.split(b'"')[::2])
    opens = outside.count(b"[") + outside.count(b"{")
    if opens > most.containers:
        return f"more than {most.containers} arrays and objects"
    # Each value is the first one, or the first of an array or object, or comes after a comma.
    if outside.count(b",") + opens + 1 > most.values:
        return f"more than {most.values} values"
    return f"more than {most.depth} levels" if opens > most.depth and _depth(outside) > most.depth else None


def _depth(outside: bytes) -> int:
    level = deepest = 0
    for bracket in outside.translate(None, _NO_BRACKETS):
        if bracket in _OPENS:
            level += 1
            deepest = max(deepest, level)
        else:
            level -= 1
    return deepest
