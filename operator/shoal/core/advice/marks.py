"""What a gateway keeps of a prompt for advice: checksums of its beginnings, up to some marks.

Two prompts of one tenant with the same mark begin with the same text. Marks are at growing lengths from `FIRST`
characters on (long documents), after the system prompt and the first user message, and around the last answers in a
conversation: the prompt up to an answer is the whole prompt of an earlier request. The answer itself has no checksum,
because the request that produced it has none yet: it is taken for repeated if what is before it is.

On the request path a mark is a CRC-32 that begins with a secret of Model, adapter and tenant, because it costs least.
Only gateways have it, and send it to each other (api/prefixes.py). `MarkSealer` makes of it what others may get: a
keyed hash (BLAKE2b). Without the key nobody can test a guess, and equal prompts of two tenants have different hashes.
"""

import sys
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, cast
from zlib import crc32

import orjson

from shoal.api.traffic import AFTER_ANSWER, MARK

FIRST: Final = 1024
"""Characters up to the first mark by length; the further ones are at 3/2, 2, 3, 4, 6, ... times as many."""
LAST: Final = FIRST << 9
"""Characters up to the last mark by length."""
MOST_MESSAGES: Final = 128
"""A longer conversation has no marks."""
NEAR_END: Final = 8
"""Messages at the end of a conversation around whose answers there are marks."""
LEAST: Final = 256
"""Characters of a system prompt with a mark of its own."""
WHOLE: Final = 8192
"""Characters of a prompt that are read in full; of each further piece its ends and a sample, so that the cost is
bounded."""
_ENDS: Final = 256
_SAMPLE: Final = 512
Marks = bytes
"""Pairs of 32-bit numbers in the machine's order: a checksum, and the characters before the mark, with `AFTER_ANSWER`.
The last pair is at the prompt's end."""


def prompt_marks(secret: int, fields: Mapping[str, Any]) -> Marks | None:
    """The marks of a request. None: it has media or several prompts in it, or is not understood. `fields`: decoded
    fields of its body, of chat or completions; `secret`: 32 bits."""
    messages = fields.get("messages")
    try:
        if isinstance(messages, list):
            return _of_chat(secret, cast("list[Any]", messages), fields.get("tools"))
        return _of_prompt(secret, fields.get("prompt"))
    except UnicodeEncodeError:
        return None  # half a character


def _of_chat(secret: int, turns: list[Any], tools: Any) -> Marks | None:
    # Every request comes through here: one loop, without objects.
    count = len(turns)
    if count > MOST_MESSAGES:
        return None
    crc, size, after = secret, 0, FIRST
    found: list[int] = []
    if tools:
        text = orjson.dumps(tools).decode()
        crc, after = _read(text, crc, 0, after, found)
        size = len(text)
    near, opening = count - NEAR_END, True
    for at, message in enumerate(turns):
        if not isinstance(message, dict):
            return None
        turn = cast("dict[str, Any]", message)
        text = turn.get("content")
        if not isinstance(text, str) and (text := _text(text)) is None:
            return None
        role, answer, head = turn.get("role"), False, False
        if role == "assistant":
            if calls := turn.get("tool_calls"):
                text += orjson.dumps(calls).decode()
            answer = at >= near
        elif opening and role == "user":
            opening, head = False, True
        if (answer or (head and size >= LEAST)) and size and not (found and found[-1] == size):
            found += (crc, size)
        end = size + len(text)
        if end < after and end <= WHOLE:
            crc = crc32(text.encode(), crc)
        else:
            # Within an answer with a mark of its own there is no other: that mark refers to the one before it.
            crc, after = _read(text, crc, size, after, None if answer else found)
        if answer:
            if end > size:
                found += (crc, end | AFTER_ANSWER)
        elif (head or at == count - 1) and end and not (found and found[-1] == end):
            found += (crc, end)
        size = end
    return array("I", found).tobytes() if found else None


def _of_prompt(secret: int, prompt: Any) -> Marks | None:
    if isinstance(prompt, list):
        ids = cast("list[Any]", prompt)
        if not ids or not isinstance(ids[0], int):
            return None
        try:
            # A token counts as eight characters.
            prompt = array("q", ids).tobytes().decode("latin-1")
        except (TypeError, OverflowError):
            return None
    if not isinstance(prompt, str) or not prompt:
        return None
    found: list[int] = []
    crc, _ = _read(prompt, secret, 0, FIRST, found)
    if not found or found[-1] != len(prompt):
        found += (crc, len(prompt))
    return array("I", found).tobytes()


def _read(text: str, crc: int, size: int, after: int, found: list[int] | None) -> tuple[int, int]:
    """Reads a piece of text after `size` characters, with the marks by length in it; `after`: the next of those.
    Returns the checksum behind it, and the next mark by length."""
    end, start = size + len(text), 0
    while after <= end and after <= LAST:
        stop = start + after - size
        crc = _checksum(text[start:stop], crc, size)
        if found is not None:
            found += (crc, after)
        size, start = after, stop
        after = after * 4 // 3 if after % 3 == 0 else after * 3 // 2
    return _checksum(text[start:], crc, size), after


def _checksum(text: str, before: int, at: int) -> int:
    if at + len(text) > WHOLE and len(text) > 4 * _ENDS:
        step = max(1, len(text) // _SAMPLE)
        text = f"{text[:_ENDS]}{text[_ENDS:-_ENDS:step]}{text[-_ENDS:]}"
    return crc32(text.encode(), before)


def _text(content: Any) -> str | None:
    """The text of a message's content; None: it has media in it."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in cast("list[Any]", content):
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


class MarkSealer:
    """Makes of marks what may leave the process."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[bytes, bytes] = {}

    def seal(self, marks: Marks) -> bytes:
        """Each mark as `MARK`."""
        known, sealed = self._known, bytearray()
        for at in range(0, len(marks), 8):
            pair = marks[at : at + 8]
            found = known.get(pair)
            if found is None:
                name = blake2b(pair, digest_size=8, key=self._key).digest()
                found = known[pair] = MARK.pack(name, int.from_bytes(pair[4:], sys.byteorder))
            sealed += found
        return bytes(sealed)
