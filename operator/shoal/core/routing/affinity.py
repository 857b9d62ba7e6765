"""Which replica holds the beginning of a prompt in its cache already, guessed by where its like went before.

The head of a prompt is what stands before the model's first answer: the system prompt and the first user message, each
as far as `HEAD_CHARACTERS`. All turns of a conversation have the same head, and so have questions on one long document.
Tenants that find each other's prompts (prefixcache.py) have the same heads; others never do. Heads belong to replicas
by rendezvous hashing: every gateway sends the same one to the same replica without asking anybody, and a replica that
comes or goes moves only its share.

**Bounded load** (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016): a replica gets no
more than 1.25 times the mean of what this gateway has in flight, and always a few; what is beyond goes to the head's
next replica. So one head that everybody has spreads over as many replicas as it needs, always the same ones first.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from shoal.core.lora.placement.rendezvous import digest, score

HEAD_CHARACTERS: Final = 1024
"""Of the system prompt, and of the first user message."""
LEAST_CHARACTERS: Final = 256
"""A shorter head is as good as none: 60 tokens are read faster than they are looked for."""
SLACK: Final = 4
"""Requests that a replica may have however little the others have: so few cost each other next to nothing."""
_MOST_MESSAGES: Final = 8
"""Before the first user message; what comes after them says no more."""

R = TypeVar("R")


def head_of(space: str, fields: Mapping[str, Any]) -> int | None:
    """The head of a request's prompt, as a number of 64 bits; `fields` are those of its body, decoded, and `space`
    says whose prompts it may find (prefixcache.py). None: it has none that is worth anything, or none that is
    understood."""
    texts: list[str] = []
    messages = fields.get("messages")
    if isinstance(messages, list):
        for message in cast(list[Any], messages)[:_MOST_MESSAGES]:
            if not isinstance(message, dict):
                return None
            said = cast(dict[str, Any], message)
            texts.append(_text(said.get("content"))[:HEAD_CHARACTERS])
            if said.get("role") == "user":
                break
    else:
        texts.append(_text(fields.get("prompt"))[:HEAD_CHARACTERS])
    if sum(map(len, texts)) < LEAST_CHARACTERS:
        return None
    head = "\0".join((space, *texts)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(head, digest_size=8).digest())


def favourite(head: int, replicas: Sequence[R], uids: Sequence[str], loads: Sequence[int]) -> R:
    """The replica of at least one to which a head belongs, among those that may have one more; `uids` and `loads` are
    theirs, in the same order."""
    count = len(replicas)
    most = max(SLACK, -(-5 * (sum(loads) + 1) // (4 * count)))
    found, highest = 0, -1
    for at, load in enumerate(loads):
        if load < most and (points := score(head, digest(uids[at]))) > highest:
            found, highest = at, points
    return replicas[found]


def _text(content: Any) -> str:
    """Of a message's content, or of a prompt: the first text where there are several."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        first = cast(list[Any], content)[0]
        if isinstance(first, str):
            return first
        if isinstance(first, int):
            return str(cast(list[Any], content)[: HEAD_CHARACTERS // 4])  # token ids
        if isinstance(first, dict):
            text = cast(dict[str, Any], first).get("text")
            return text if isinstance(text, str) else ""
    return ""
