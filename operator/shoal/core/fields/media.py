"""Images and sounds in messages: only as data, so that no engine fetches or opens an address from a client, and bounded
by what their headers say they unpack to. `remote.py` decides what a gateway fetches first.

Video is refused: no decoder is bound by what a container states about frames and their size, and engines take hundreds
of frames of any size from a few MiB. Clients can send frames as images.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import pybase64

from shoal.core.fields.images import MOST_RATIO, MOST_SIDE, UnreadableError, image_size
from shoal.core.fields.images import READERS as IMAGES
from shoal.core.fields.kinds import Choice, Facts, FieldProblem, FieldType, Medium, ObjectField, Text, Whole, wrong
from shoal.core.fields.remote import MOST_URL, remote
from shoal.core.fields.sounds import LEAST_RATE, MOST_RATE, sound_seconds
from shoal.core.fields.sounds import READERS as SOUNDS

_MOST_BASE64: Final = 8 << 20
MOST_FETCHED: Final = _MOST_BASE64 // 4 * 3
"""Bytes of a file that a gateway fetches: as many as the base64 of a `data:` URL may hold."""
MOST_MEDIA: Final = 16
"""Images and sounds of one request."""
MOST_PIXELS: Final = 1 << 25
"""Pixels of all images of one request, with all frames of animated ones: 128 MiB when an engine unpacks them."""
MOST_PIECES: Final = 128
"""Images times the pieces that each may be cut into: a piece has about 450 x 450 pixels, whatever the image's size."""
MOST_SECONDS: Final = 900
"""Seconds of all sounds of one request."""
_PATCHES: Final = Whole(1, 64)
_PIXELS: Final = Whole(1, 16_384)

# Left out on purpose: `content_hash`, with which one client's image could be used for another client's.
_SHAPES: Final[dict[str, tuple[Medium, ObjectField]]] = {
    "image_url": (
        "image",
        ObjectField(
            {
                "url": Text(),
                "detail": Choice(("auto", "low", "high", "default")),
                "max_dynamic_patch": _PATCHES,
                "min_dynamic_patch": _PATCHES,
                "max_long_side_pixel": _PIXELS,
            },
            needed=("url",),
        ),
    ),
    "input_audio": (
        "audio",
        ObjectField({"data": Text(), "format": Choice(("wav", "mp3"))}, needed=("data", "format")),
    ),
    "audio_url": ("audio", ObjectField({"url": Text()}, needed=("url",))),
}
TYPES: Final[Mapping[Medium, tuple[str, ...]]] = {"image": tuple(IMAGES), "audio": tuple(SOUNDS)}
"""Content types of media."""
KINDS: Final = (*_SHAPES, "video_url")
"""Types of message parts that hold media."""
_PARTS: Final[dict[str, FieldType]] = {
    kind: ObjectField({"type": Choice((kind,)), kind: shape}, (kind,), frozenset({"cache_control"}))
    for kind, (_, shape) in _SHAPES.items()
}
WORDS: Final = (
    f"Images and sounds are `data:` URLs in base64 ({', '.join((*IMAGES, *SOUNDS))}) of at most "
    f"{_MOST_BASE64 >> 20} MiB, and what their type says; at most {MOST_MEDIA} of them.",
    "Or they are https URLs of hosts that the Model names in `spec.media.allowedHosts`, where the installation has "
    f"`gateway.media.egress`: at most {MOST_URL} characters, the host by its name, port 443, no user name and no "
    "fragment. The gateway fetches each into a `data:` URL, which is then judged like any; engines get no other.",
    f"Images have at most {MOST_PIXELS} pixels in all, each frame of one that moves counted; at most {MOST_SIDE} a "
    f"side and {MOST_RATIO} times longer than wide. Images times `max_dynamic_patch` is at most {MOST_PIECES}.",
    f"Sounds are WAV (plain samples in one chunk, {LEAST_RATE} to {MOST_RATE} a second) or MP3, of at most "
    f"{MOST_SECONDS} seconds in all. FLAC and Ogg are not taken: a few KiB of them unpack to hours.",
    "Beside images and sound, texts hold none of the models' own tokens: nothing like `<|...|>`, `<image>` or `[IMG]`; "
    "with Qwen-VL, whose tokens all look like the first, the others are text.",
    "Video is not taken: nothing outside of a decoder bounds what it unpacks to. Send frames as images.",
)


@dataclass(frozen=True, slots=True)
class Load:
    """What media unpack to."""

    items: int = 0
    pixels: int = 0
    seconds: float = 0
    patches: int = 0
    """The largest `max_dynamic_patch` of an image; 0: none is given."""

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.items + other.items,
            self.pixels + other.pixels,
            self.seconds + other.seconds,
            max(self.patches, other.patches),
        )


NOTHING: Final = Load()
_PIPED: Final = r"<\|[^|<>\s]{1,64}\|?>|<[^|<>\s]{1,64}\|>|<<<__"
_PLACEHOLDER: Final = re.compile(
    _PIPED + r"|(?i:</?(?:image|img|video|audio|im|patch|so|slice|start_of|end_of)(?:[_-][\w-]{0,32})?>)"
    r"|\[(?:IMG|AUDIO|BEGIN_AUDIO)[A-Z_]{0,16}\]"
)
"""Placeholders that processors replace by a medium, of all models that SGLang 0.5.23 supports."""
_PIPED_PLACEHOLDER: Final = re.compile(_PIPED)
"""The same, of models with `Facts.piped`: to them `<img>` is text, as in a page that a client asks about."""


def placeholder_problem(fields: Mapping[str, Any], facts: Facts) -> FieldProblem | None:
    """Whether a checked chat with media contains placeholders of media in its texts.

    Transformers takes the next medium for each placeholder, and raises StopIteration when there are no more. A future
    cannot hold that exception: SGLang never answers such a request.
    """
    messages = cast("list[dict[str, Any]]", fields["messages"])
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and _has_media(cast("list[dict[str, Any]]", content)):
            break
    else:
        return None
    # Texts are joined, because a template may put two of them together.
    texts = {
        "messages": _of_messages(messages),
        "tools": _texts(fields.get("tools")),
        "chat_template_kwargs": _texts(fields.get("chat_template_kwargs")),
    }
    for name, found in texts.items():
        if (_PIPED_PLACEHOLDER if facts.piped else _PLACEHOLDER).search("".join(found)) is not None:
            text = (
                f"`{name}` must not hold a model's own tokens, like <|image_pad|> or <image>, beside images or sound."
            )
            return FieldProblem(name, text, "token_not_allowed")
    return None


def _has_media(parts: list[dict[str, Any]]) -> bool:
    return any(part.get("type") in KINDS for part in parts)


def _of_messages(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        for key, value in message.items():
            if key == "content" and isinstance(value, list):
                for part in cast("list[dict[str, Any]]", value):
                    if part.get("type") not in KINDS:
                        yield part.get("text") or ""
                        yield part.get("thinking") or ""
            elif key == "tool_calls":
                for call in cast("list[dict[str, Any]]", value or ()):
                    yield from _texts(call)
                    yield from _texts(_decoded(call["function"].get("arguments")))
            elif key != "role":
                yield from _texts(value)


def _decoded(arguments: Any) -> Any:
    """A call's arguments as a template writes them: engines decode them first. None: nothing is encoded."""
    if not isinstance(arguments, str) or "\\" not in arguments:
        return None
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _texts(value: Any) -> Iterator[str]:
    """Keys and strings of a value whose depth is bounded."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield key
            yield from _texts(inner)


def media_part(part: dict[str, Any], kind: str, at: str, facts: Facts) -> FieldProblem | Load:
    """What a part of a message unpacks to, or why it is refused; `kind` is one of `KINDS`."""
    if kind == "video_url":
        text = f"`{at}` is a video, and videos are not accepted. Send frames as images."
        return FieldProblem(at, text, NOT_READ)
    medium, _ = _SHAPES[kind]
    if medium not in facts.media:
        return not_read(at, medium, facts)
    if (found := _PARTS[kind].check(part, at, facts)) is not None:
        return found
    inside = cast("dict[str, Any]", part[kind])
    if kind == "input_audio":
        return _load(f"audio/{inside['format']}", inside["data"], f"{at}.{kind}.data", inside)
    at = f"{at}.{kind}.url"
    url: str = inside["url"]
    if not url.startswith("data:"):
        there = remote(url, at, facts.media_hosts)
        return there if isinstance(there, FieldProblem) else Load(1, patches=inside.get("max_dynamic_patch") or 0)
    head, _, data = url.partition(",")
    types = TYPES[medium]
    if not head.endswith(";base64") or (named := head[5:-7]) not in types:
        return wrong(at, f"a `data:` URL in base64 of one of these types: {', '.join(types)}")
    return _load(named, data, at, inside)


def _load(kind: str, data: str, at: str, inside: dict[str, Any]) -> FieldProblem | Load:
    if len(data) > _MOST_BASE64:
        return wrong(at, f"base64 of at most {_MOST_BASE64 >> 20} MiB")
    try:
        raw = pybase64.b64decode(data, validate=True)
    except ValueError:
        return wrong(at, "base64")
    try:
        if kind in IMAGES:
            return Load(1, image_size(kind, raw).pixels, patches=inside.get("max_dynamic_patch") or 0)
        return Load(1, seconds=sound_seconds(kind, raw))
    except UnreadableError as error:
        return wrong(at, str(error), NOT_READ)


def too_much_media(load: Load, at: str) -> FieldProblem | None:
    """Whether the media of the messages so far exceed the bounds together."""
    if load.items > MOST_MEDIA:
        return wrong(at, f"messages with at most {MOST_MEDIA} images and sounds")
    if load.pixels > MOST_PIXELS:
        text = f"The images of `{at}` have {load.pixels} pixels; one request may have {MOST_PIXELS}. Send smaller ones."
        return FieldProblem(at, text, "too_much_work")
    if load.seconds > MOST_SECONDS:
        text = f"The sounds of `{at}` last {load.seconds:.0f} seconds; one request may have {MOST_SECONDS}."
        return FieldProblem(at, text, "too_much_work")
    if load.items * load.patches > MOST_PIECES:
        text = f"Images times `max_dynamic_patch` must be at most {MOST_PIECES}."
        return FieldProblem(at, text, "too_much_work")
    return None


NOT_READ: Final = "media_not_supported"


def not_read(at: str, medium: Medium, facts: Facts) -> FieldProblem:
    names: dict[Medium, str] = {"image": "images", "audio": "sound"}
    reads = " and ".join(["text", *(names[each] for each in sorted(facts.media))]) if facts.media else "text only"
    return FieldProblem(at, f"This model does not read {names[medium]}: it reads {reads}.{facts.able}", NOT_READ)
