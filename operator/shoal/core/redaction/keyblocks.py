"""Private keys in PEM in what programs write. A log may be cut off, or its program may print the first line of a key
alone: then the lines that look like a key's are its end, and not the rest of the log."""

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
_HEADER: Final = re.compile(rb"[ \t]*(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset): [^\n]*")
_FULL: Final = 40
"""Bytes of a line that is not a key's last one, and more."""
_PREFIX: Final = 256


def key_blocks(text: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each private key."""
    begins = [match.span() for match in _BEGIN.finditer(text)]
    for number, (start, body) in enumerate(begins):
        limit = min(body + LONGEST, begins[number + 1][0] if number + 1 < len(begins) else len(text))
        end = _END.search(text, body, limit)
        yield start, end.end() if end else _end_of_lines(text, start, body, limit)


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
