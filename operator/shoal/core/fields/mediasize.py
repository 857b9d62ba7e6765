"""How many images, sounds and files a chat has, how long the sounds are, and how many tokens they all are about.

Their base64 says nothing of the tokens: a photo of 2 MB in the body is about a thousand tokens of the prompt. What an
image becomes is decided by the model's own processor, which a gateway does not have. `IMAGE_PIXELS_PER_TOKEN` and
`MOST_IMAGE_TOKENS` are those of Qwen2-VL (squares of 28 x 28 pixels, 12.8 million pixels at most); other models make
fewer tokens of a large image, and a fixed number of a small one. Files, such as PDFs, are read by external targets
only.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, cast

import pybase64

from shoal.core.fields.images import READERS as IMAGES
from shoal.core.fields.images import image_size
from shoal.core.fields.media import MOST_MEDIA, MOST_SECONDS
from shoal.core.fields.sounds import READERS as SOUNDS
from shoal.core.fields.sounds import sound_length
from shoal.core.hold.capacity import BYTES_PER_TOKEN

IMAGE_PIXELS_PER_TOKEN: Final = 28 * 28
LEAST_IMAGE_TOKENS: Final = 256
MOST_IMAGE_TOKENS: Final = 16_384
AUDIO_TOKENS_PER_SECOND: Final = 50
"""Whisper reads 1,500 positions for 30 seconds."""
PAGE_TOKENS: Final = 2_500
"""Providers read a page of a PDF as its text and an image of it."""
MOST_PAGES: Final = 100
"""Of one file, for the estimate."""
BYTES_PER_PAGE: Final = 1 << 17
"""Of a file that does not show its pages: between a page of text and one that was scanned."""
_PDF: Final = "JVBERi"
"""How the base64 of a PDF begins."""
_PAGE: Final = re.compile(rb"/Type\s{0,4}/Page(?![A-Za-z])")
"""A page in a PDF, unless it is compressed with others."""
_LOOKED: Final = 1 << 21
"""Characters of base64 in which pages are looked for, of all files of a request: bytes can be made such that each MiB
of them takes 6 ms."""
_HEADERS: Final = (1 << 12, 1 << 16)
"""Characters of base64 in which the size of most images is found, and of those that begin with a camera's notes."""


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Of all images, sounds and files of a request."""

    images: int = 0
    sounds: int = 0
    characters: int = 0
    """That they take in the body."""
    tokens: int = 0
    """Estimated."""
    sound_ms: int | None = 0
    """Length of all sounds in milliseconds; None: that of one of them is not known."""
    files: int = 0

    @property
    def each(self) -> int:
        """Bytes of text of which an engine would read about as much as of one of them, in the mean."""
        return self.tokens * BYTES_PER_TOKEN // max(1, self.images + self.sounds + self.files)

    def text_bytes(self, body_bytes: int) -> int:
        """Bytes of text of which an engine would read about as much as of a body of this size with the media."""
        return max(0, body_bytes - self.characters) + self.tokens * BYTES_PER_TOKEN


NO_MEDIA: Final = MediaSize()


def media_size(fields: Mapping[str, Any]) -> MediaSize:
    """The media of a chat, also of one that has not been checked. What cannot be read, and what is not there yet
    because it is a URL, counts as the smallest image, and a sound has no known length then. No more is read than a
    check would read: the rest counts as the mean."""
    if not may_have_media(fields.get("messages")):
        return NO_MEDIA
    images = sounds = files = characters = tokens = heard = read = 0
    milliseconds: int | None = 0
    reads = True
    parts = list(media_parts(fields.get("messages")))
    looked = _LOOKED // min(max(1, sum(kind == "file" for kind, _ in parts)), MOST_MEDIA)
    for kind, inside in parts:
        named, data = _named(kind, inside)
        characters += len(data)
        found = length = None
        if kind == "image_url":
            images += 1
            found = _image_tokens(named, data) if reads else None
        elif kind == "file":
            files += 1
            found = _file_tokens(named, data, looked) if reads else None
        else:
            sounds += 1
            found, length = _sound_size(named, data) if reads else (None, None)
            heard += found or 0
            milliseconds = None if milliseconds is None or length is None else milliseconds + length
        if reads:
            tokens += LEAST_IMAGE_TOKENS if found is None else found
            read += 1
            reads = found is not None and read < MOST_MEDIA and heard <= MOST_SECONDS * AUDIO_TOKENS_PER_SECOND
    if not read:
        return NO_MEDIA
    of_all = tokens * (images + sounds + files) // read
    return MediaSize(images, sounds, characters, of_all, milliseconds, files)


def has_media(fields: Mapping[str, Any]) -> bool:
    """Whether a chat has an image, a sound or a file."""
    messages = fields.get("messages")
    return may_have_media(messages) and next(media_parts(messages), None) is not None


def may_have_media(messages: Any) -> bool:
    """Whether a chat's messages have parts. Almost all have texts alone, which this tells in a tenth of the time in
    which their parts are looked for."""
    for message in cast("list[Any]", messages) if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(cast("dict[str, Any]", message).get("content"), list):
            return True
    return False


def media_parts(messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Type and content of each image, sound and file in a chat's messages, whether or not they have been checked."""
    for message in cast("list[Any]", messages) if isinstance(messages, list) else ():
        content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            if (found := media_part_of(part)) is not None:
                yield found


def media_part_of(part: Any) -> tuple[str, dict[str, Any]] | None:
    """Type and content of a message's part; None: it is no image, no sound and no file."""
    if not isinstance(part, dict):
        return None
    kind = cast("dict[str, Any]", part).get("type")
    if kind not in ("image_url", "input_audio", "audio_url", "file"):
        return None
    inside = cast("dict[str, Any]", part).get(kind)
    return (kind, cast("dict[str, Any]", inside)) if isinstance(inside, dict) else None


def _named(kind: str, inside: Mapping[str, Any]) -> tuple[str, str]:
    """Content type and base64; "": there is none."""
    if kind == "input_audio":
        data = inside.get("data")
        return f"audio/{inside.get('format')}", data if isinstance(data, str) else ""
    url = inside.get("file_data" if kind == "file" else "url")
    if not isinstance(url, str) or not url.startswith("data:"):
        return "", url if kind == "file" and isinstance(url, str) else ""
    head, _, data = url.partition(",")
    return head[5:].removesuffix(";base64"), data


def _image_tokens(kind: str, data: str) -> int | None:
    """None: it is not of the type that it has."""
    if kind not in IMAGES:
        return LEAST_IMAGE_TOKENS
    for characters in (*(most for most in _HEADERS if most < len(data)), len(data)):
        try:
            size = image_size(kind, pybase64.b64decode(data[:characters]))
        except ValueError:
            continue
        return min(max(size.width * size.height // IMAGE_PIXELS_PER_TOKEN, LEAST_IMAGE_TOKENS), MOST_IMAGE_TOKENS)
    return None


def _file_tokens(kind: str, data: str, looked: int) -> int:
    """Of a text, those of its letters. Of a PDF, those of its pages; of others, and where pages do not show, as many as
    a file of that size may have."""
    size = len(data) * 3 // 4
    if kind.startswith("text/"):
        return size // BYTES_PER_TOKEN
    pages = _pages(data, looked) if data.startswith(_PDF) else 0
    return PAGE_TOKENS * min(pages or size // BYTES_PER_PAGE or 1, MOST_PAGES)


def _pages(data: str, looked: int) -> int:
    """Pages of a PDF; 0: none shows. Of one that is longer than `looked` characters, the beginning and the end are
    read. Between them, pages are taken to be as frequent as in the one that shows fewer: some programs write all pages
    at one end."""
    if len(data) <= looked:
        return _shown(data)
    half = looked // 8 * 4
    first, last = _shown(data[:half]), _shown(data[(len(data) - half) // 4 * 4 :])
    return first + last + min(first, last) * (len(data) - looked) // half


def _shown(data: str) -> int:
    with suppress(ValueError):
        return sum(1 for _ in islice(_PAGE.finditer(pybase64.b64decode(data)), MOST_PAGES))
    return 0


def _sound_size(kind: str, data: str) -> tuple[int | None, int | None]:
    """(tokens, milliseconds); None: it is not of the type that it has, or its length is not known."""
    if kind not in SOUNDS:
        return LEAST_IMAGE_TOKENS, None
    try:
        length = sound_length(kind, pybase64.b64decode(data))
    except ValueError:
        return None, None
    return int(length.most_seconds * AUDIO_TOKENS_PER_SECOND), length.milliseconds
