"""Private keys in PEM in what programs write. A log may be cut off, or its program may print the first line of a key
alone: then the lines that look like a key's are its end, and not the rest of the log. The last lines of a log may begin
amid a key: then the lines above its END line that look like a key's are its beginning."""

import re
from collections.abc import Iterator
from typing import Final

LONGEST: Final = 32 << 10
"""Bytes of a key at most, with what a log puts before each line. One of RSA with 16,384 bits has 12.5 KiB."""
_BEGIN: Final = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_END: Final = re.compile(rb"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_SAME_LINE: Final = re.compile(rb"(?:[A-Za-z0-9+/=]|\\+[nrt]|[ \t])*")
"""A key in a string, whose ends of lines are escaped."""
_ENCODED: Final = re.compile(rb"[A-Za-z0-9+/=]+")
_CHECKSUM: Final = re.compile(rb"=[A-Za-z0-9+/]{4}")
"""Below the last line of a key of PGP, which may be short too."""
_HEADER: Final = re.compile(rb"[ \t]*(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset): [^\n]*")
_FULL: Final = 40
"""Bytes of a line that is not a key's last one, and more."""
_PREFIX: Final = 256
_ESCAPED_KEY: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\")
"""Bytes of a key in a string."""


def key_blocks(text: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each private key."""
    begins = [match.span() for match in _BEGIN.finditer(text)]
    ends = [match.span() for match in _END.finditer(text)]
    known = at = 0
    for number, (start, body) in enumerate([*begins, (len(text), len(text))]):
        # END lines that no BEGIN line precedes.
        while at < len(ends) and ends[at][0] < start:
            if ends[at][0] >= known:
                yield _beginning(text, known, ends[at][0]), ends[at][1]
                known = ends[at][1]
            at += 1
        if number < len(begins):
            limit = min(body + LONGEST, begins[number + 1][0] if number + 1 < len(begins) else len(text))
            end = _END.search(text, body, limit)
            known = end.end() if end else _end_of_lines(text, start, body, limit)
            yield start, known


def _beginning(text: bytes, known: int, end: int) -> int:
    """Where a key begins of which a text has the END line, at `end`, and no BEGIN line. Only what is after `known` may
    be part of it. Each line is full but the last one, a checksum below it, and the first one of the text, where it may
    be cut off."""
    known = max(known, end - LONGEST)
    at = text.rfind(b"\n", known, end) + 1 or known
    if end > at and text[end - 1] in _ESCAPED_KEY:
        start = end
        while start > at and text[start - 1] in _ESCAPED_KEY:
            start -= 1
        return start
    words, start, last = len(text[at:end].split()), end, True
    while at > known:
        stop = at - 1
        at = text.rfind(b"\n", known, stop) + 1 or known
        line = text[at:stop]
        found = line.split()
        if not found or _HEADER.match(line):
            continue
        cut_off = not (at or last) and len(found) <= words + 1
        if (len(found) != words + 1 and not cut_off) or not _ENCODED.fullmatch(found[-1]):
            break
        if len(found[-1]) < _FULL and not (cut_off or last):
            break
        start = at + line.rfind(found[-1])
        last = last and _CHECKSUM.fullmatch(found[-1]) is not None
    return start


def _end_of_lines(text: bytes, start: int, body: int, limit: int) -> int:
    """Where a key without an END line ends. Its lines have one word each, after as many words as the BEGIN line has in
    front of it: a time, a stream, the name of a pod."""
    before = text[max(0, start - _PREFIX) : start]
    words = len(before[before.rfind(b"\n") + 1 :].split())
    same = _SAME_LINE.match(text, body, limit)
    end = same.end() if same else body
    at = text.find(b"\n", body, limit)
    while at >= 0:
        stop = text.find(b"\n", at + 1, limit)
        line = text[at + 1 : stop if stop >= 0 else limit]
        found = line.split()
        if found and not _HEADER.match(line):
            if len(found) > words + 1 or not _ENCODED.fullmatch(found[-1]):
                break
            end = at + 1 + len(line.rstrip())
            if len(found) > 1 and len(found[-1]) < _FULL:
                break
        at = stop
    return end
