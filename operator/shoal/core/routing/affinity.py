"""Prefix caches: which replica probably has the beginning of a prompt in its cache, and which tenants may share it.

The head of a prompt is the text before the model's first answer: the system prompt and the first user message, each up
to `HEAD_CHARACTERS`. All turns of a conversation have the same head, and so have questions on one long document. Heads
belong to replicas by rendezvous hashing: every gateway sends a head to the same replica without communication, and a
replica that comes or goes moves only its share.

**Bounded load** (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016): a replica gets no
more than 1.25 times the mean of what this gateway has in flight, and always a few requests; the rest goes to the head's
next replica. A head that is very common thus spreads over as many replicas as it needs, always the same ones first.

**Isolation**: an engine answers a prompt sooner if it has computed the same beginning before, which the time and
`cached_tokens` reveal. Requests are therefore separated by a *space*: each finds only prompts of its own space. The
gateway derives the engine's `cache_salt` from the space, and heads begin with it. Within a space, an engine itself
separates what each adapter computed.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from shoal.core.access import KeyIdentity
from shoal.core.fields.mediasize import media_part_of
from shoal.core.hold.capacity import BYTES_PER_TOKEN
from shoal.core.lora.placement.rendezvous import digest, score
from shoal.core.routing.prefixes import Points
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.reuse import Prompt

HEAD_CHARACTERS: Final = 1024
"""Of the system prompt, and of the first user message, at most."""
LEAST_CHARACTERS: Final = 256
"""A shorter head is ignored: 60 tokens are computed faster than they are looked up."""
SLACK: Final = 4
"""Requests that a replica may always have, however few the others have: so few hardly slow each other down."""
_MOST_MESSAGES: Final = 8
"""Messages considered before the first user message."""
_CHECKED_CHARACTERS: Final = 1 << 16
"""Of an image or a sound, at its end."""
_MOST_NEW: Final = 64
"""Messages considered at the end of a conversation."""
SHARED: Final = ""
"""The space of a Model whose tenants share all prompts."""

R = TypeVar("R")


def prefix_space(model: ServedModel, identity: KeyIdentity) -> str:
    """The space of a tenant's requests for a Model; `SHARED` where the Model's `prefixCache.isolation` is Shared."""
    if model.shares_prefixes:
        return SHARED
    group = identity.prefix_cache_group
    # Different prefixes: a Tenant cannot join a group by having its name.
    return f"tenant/{identity.tenant}" if group is None else f"group/{group}"


def head_of(space: str, fields: Mapping[str, Any]) -> int | None:
    """The 64-bit head of a request's prompt; None: the prompt is short or not understood.

    `fields`: decoded fields of the request's body; `space`: from `prefix_space`."""
    return prompt_of(space, fields, 0).head


def prompt_of(space: str, fields: Mapping[str, Any], size: int, points: Points = (), *, medium: int = 0) -> Prompt:
    """What routing needs to know of a request's prompt. `size`: bytes of the body, of which lengths are estimated;
    `medium`: of them, those that each image or sound counts for (core/fields/mediasize.py). `points`: of the prompt
    (prefixes.py)."""
    messages = fields.get("messages")
    tokens = max(1, size // BYTES_PER_TOKEN)
    if not isinstance(messages, list):
        # A score's query is the beginning of each of its prompts.
        first = fields.get("prompt") or (None if fields.get("item_first") else fields.get("query"))
        return Prompt(tokens, _hash(space, [_first(first)[:HEAD_CHARACTERS]]), points=points)
    turns = cast("list[Any]", messages)
    texts: list[str] = []
    before, sees = 0, False
    for message in turns[:_MOST_MESSAGES]:
        if not isinstance(message, dict):
            return Prompt(tokens, points=points)
        turn = cast("dict[str, Any]", message)
        content = turn.get("content")
        text, media = _content(content)
        texts.append(text)
        sees = sees or bool(media)
        if turn.get("role") == "user":
            break
        before += _length(content, medium)
    head = _hash(space, texts, least=0 if sees else LEAST_CHARACTERS)
    if head is None:
        return Prompt(tokens, points=points)
    system = _hash(space, texts[:-1]) if len(texts) > 1 else None
    return Prompt(
        tokens,
        head,
        max(0, tokens - _new_characters(turns, medium) // BYTES_PER_TOKEN) if len(turns) > len(texts) else 0,
        system,
        min(tokens, before // BYTES_PER_TOKEN) if system is not None else 0,
        points,
    )


def conversation_of(fields: Mapping[str, Any]) -> str | None:
    """The beginning of a conversation: a hash of all texts, images, sounds and files up to the user's first message.
    Texts are hashed whole, since conversations under one system prompt, or about one document, may differ at its end
    only. All turns of a conversation have the same. None: the request has no messages.

    `fields`: decoded fields of the request's body."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    hashed = hashlib.sha256()  # of a long text it takes a third of the time of blake2b
    for number, message in enumerate(cast("list[Any]", messages)[:_MOST_MESSAGES]):
        if not isinstance(message, dict):
            return None
        turn = cast("dict[str, Any]", message)
        if number:
            hashed.update(b"\0")
        content = turn.get("content")
        for shown in (content,) if isinstance(content, str) else _shown(content):
            hashed.update(shown.encode(errors="surrogatepass"))
        if turn.get("role") == "user":
            break
    return hashed.hexdigest()[:32]


def _shown(content: Any) -> Iterator[str]:
    """The texts of a message's parts, and the checksums of its images, sounds and files."""
    for part in cast("list[Any]", content) if isinstance(content, list) else ():
        if (medium := media_part_of(part)) is not None:
            yield _checksum(medium[1])
        elif text := _part_text(part):
            yield text


def _new_characters(turns: Sequence[Any], medium: int) -> int:
    """Characters after the last answer in the messages; more than any prompt has, where there is no answer."""
    new = 0
    for message in reversed(turns[-_MOST_NEW:]):
        if not isinstance(message, dict):
            break
        turn = cast("dict[str, Any]", message)
        if turn.get("role") == "assistant":
            return new
        new += _length(turn.get("content"), medium)
    return 1 << 40


def _hash(space: str, texts: Sequence[str], least: int = LEAST_CHARACTERS) -> int | None:
    """64 bits of the texts; None: they are too short."""
    if sum(map(len, texts)) < least:
        return None
    head = "\0".join((space, *texts)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(head, digest_size=8).digest())


def favourite(head: int, replicas: Sequence[R], uids: Sequence[str], loads: Sequence[int]) -> R:
    """The replica to which a head belongs, of those that may have one more request. `replicas` is not empty; `uids` and
    `loads` are theirs, in the same order."""
    count = len(replicas)
    most = max(SLACK, -(-5 * (sum(loads) + 1) // (4 * count)))
    found, highest = 0, -1
    for at, load in enumerate(loads):
        if load < most and (points := score(head, digest(uids[at]))) > highest:
            found, highest = at, points
    return replicas[found]


def _first(prompt: Any) -> str:
    """The text of a prompt; the first of several."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        first = cast("list[Any]", prompt)[0]
        if isinstance(first, str):
            return first
        if isinstance(first, int):
            return str(cast("list[Any]", prompt)[: HEAD_CHARACTERS // 4])  # token ids
    return ""


def _content(content: Any) -> tuple[str, int]:
    """What a message's content adds to the head, and how many images and sounds are in it. Engines find these in their
    caches by what they show, so each adds its own checksum."""
    if isinstance(content, str):
        return content[:HEAD_CHARACTERS], 0
    found: list[str] = []
    length = media = 0
    for part in cast("list[Any]", content) if isinstance(content, list) else ():
        if (medium := media_part_of(part)) is not None:
            media += 1
            found.append(_checksum(medium[1]))
        elif length < HEAD_CHARACTERS and (text := _part_text(part)):
            found.append(text[: HEAD_CHARACTERS - length])
            length += len(text)
    return "".join(found), media


def _checksum(medium: Mapping[str, Any]) -> str:
    """Of an image, a sound or a file: its length, and the end of its base64 or of its address. Headers are alike."""
    data = medium.get("url") or medium.get("data") or medium.get("file_data")
    if not isinstance(data, str):
        return ""
    end = data[-_CHECKED_CHARACTERS:].encode(errors="surrogatepass")
    return f"\1{len(data)} {hashlib.blake2b(end, digest_size=8).hexdigest()}"


def _part_text(part: Any) -> str:
    text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _length(content: Any, medium: int) -> int:
    """Characters of a message's content, with `medium` for each image or sound."""
    if isinstance(content, str):
        return len(content)
    return sum(
        len(_part_text(part)) if media_part_of(part) is None else medium
        for part in (cast("list[Any]", content) if isinstance(content, list) else ())
    )
