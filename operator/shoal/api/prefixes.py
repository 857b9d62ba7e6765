"""Messages of `GET /v1/prefixes`, with which gateways report to each other which prompts they sent to which replica.

The rules of the agent's stream apply (`replica.py`). `seq` grows by one with each message that carries `sent`. The
first message has the last prompts, later ones those since the message before. A prompt is named by its marks
(`core/advice/marks.py`), 8 bytes each, little-endian, in base64: a checksum that begins with a secret of Model, adapter
and tenant, and the characters before it. Only gateways may read it: they have that secret.
"""

import base64
import binascii
import sys
from array import array
from collections.abc import Mapping
from typing import Any, Final, cast

MOST_PROMPTS: Final = 4096
"""In one message."""
MOST_MARKS: Final = 64
"""Of one prompt."""
_MOST_TEXT: Final = MOST_MARKS * 8 * 4 // 3 + 4
_MOST_UID: Final = 512


def to_text(marks: bytes) -> str:
    """Marks as they are sent."""
    return base64.b64encode(_little(marks)).decode()


def read_sent(content: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Uid and marks of each prompt of a message's `sent`: texts by uid of the replica's pod. Raises ValueError where
    it is not understood, or has more than a message may have."""
    found: list[tuple[str, bytes]] = []
    for uid, texts in content.items():
        if len(uid) > _MOST_UID or not isinstance(texts, list):
            raise ValueError("no prompts of a replica")
        prompts = cast("list[Any]", texts)
        if len(found) + len(prompts) > MOST_PROMPTS:
            raise ValueError("too many prompts")
        for text in prompts:
            if not isinstance(text, str) or len(text) > _MOST_TEXT:
                raise ValueError("no marks")
            try:
                marks = base64.b64decode(text, validate=True)
            except binascii.Error:
                raise ValueError("no marks") from None
            if len(marks) % 8:
                raise ValueError("no whole marks")
            found.append((uid, _little(marks)))
    return found


def _little(marks: bytes) -> bytes:
    """Between the machine's order of bytes and that of the message."""
    if sys.byteorder == "little":
        return marks
    numbers = array("I", marks)
    numbers.byteswap()
    return numbers.tobytes()
