"""Size of an image from its headers: what an engine would unpack, without unpacking it.

Engines read images with Pillow, which accepts more than the formats allow. The readers here accept less: all readers
make the same picture of a file that they accept; every other file is refused. They also bound what costs a reader time
before the pixels: pieces of a file, scans of a JPEG, compressed texts and tables of EXIF. Nothing is decoded; the work
grows with the number of pieces, which is bounded.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

MOST_SIDE: Final = 16_384
"""Pixels of the longer side."""
MOST_RATIO: Final = 200
"""Longer side over shorter: a processor that scales the shorter side to a fixed length scales the longer one too."""
_PIECES: Final = 8192
"""Chunks of a PNG or WebP; a reader handles each of them."""
_SEGMENTS: Final = 512
"""Segments of a JPEG."""
_SCANS: Final = 32
"""Scans of a JPEG: each covers all pixels, even if it has only a few bytes. Encoders write at most 20."""
_BLOCKS: Final = 65_536
"""Blocks of a GIF; encoders fill them with 255 bytes each."""
_COMPRESSED: Final = 16
"""Compressed texts and profiles of a PNG, of which each may unpack to 1 MiB."""
_COMMENTS: Final = 65_536
"""Bytes of a GIF's comments: some readers join them in quadratic time."""
_EXIF_BYTES: Final = 65_536
_EXIF_TAGS: Final = 512
"""Tags of one table: each may be as long as the whole table."""


@dataclass(frozen=True, slots=True)
class Size:
    """The unpacked size of an image."""

    width: int
    height: int
    frames: int = 1

    @property
    def pixels(self) -> int:
        """Pixels of all frames: in memory each is as large as the whole image."""
        return self.width * self.height * self.frames


class UnreadableError(ValueError):
    """Why a file is refused, as the end of the sentence 'must be ...'."""


def image_size(kind: str, data: bytes) -> Size:
    """The size of an image; `kind` is a type of `READERS`.

    Raises:
        UnreadableError: the file is not of that kind, or exceeds the bounds that are checked without unpacking.
    """
    size = READERS[kind](data)
    short, long = sorted((size.width, size.height))
    if short < 1:
        raise UnreadableError("an image with pixels")
    if long > MOST_SIDE or long > MOST_RATIO * short:
        raise UnreadableError(
            f"an image of at most {MOST_SIDE} pixels a side, and at most {MOST_RATIO} times longer than wide; "
            f"it has {size.width} x {size.height}"
        )
    return size


def _png(data: bytes) -> Size:
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[8:16] != b"\0\0\0\rIHDR":
        raise UnreadableError("a PNG image, as its type says")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    at, compressed, controls, frames = 33, 0, 0, 1
    for _ in range(_PIECES):
        if at + 8 > len(data):
            return Size(width, height, max(frames, controls))
        length, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        if name == b"IHDR":
            # Readers may take the last header.
            raise UnreadableError("a PNG image with one header")
        if name in (b"zTXt", b"iTXt", b"iCCP"):
            compressed += 1
            if compressed > _COMPRESSED:
                raise UnreadableError(f"a PNG image with at most {_COMPRESSED} compressed texts")
        elif name == b"eXIf":
            _exif(data[at + 8 : at + 8 + length])
        elif name == b"acTL":
            frames = max(frames, int.from_bytes(data[at + 8 : at + 12]))
        elif name == b"fcTL":
            controls += 1
        elif name == b"IEND":
            return Size(width, height, max(frames, controls))
        at += 12 + length
    raise UnreadableError(f"a PNG image of at most {_PIECES} chunks")


_BASELINE_TO_PROGRESSIVE: Final = frozenset({0xC0, 0xC1, 0xC2})
_START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_JPEG_SEGMENTS: Final = _BASELINE_TO_PROGRESSIVE | {0xC4, _START_OF_SCAN, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}
_AFTER_SCAN: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""The next marker after the data of a scan, in which 0xFF is followed only by 0 or a restart marker."""


def _jpeg(data: bytes) -> Size:
    if data[:3] != b"\xff\xd8\xff":
        raise UnreadableError("a JPEG image, as its type says")
    at, scans, exif = 2, 0, False
    size: Size | None = None
    for _ in range(_SEGMENTS):
        if data[at : at + 1] != b"\xff" or at + 4 > len(data):
            if scans and size is not None and at + 2 >= len(data):
                return size
            raise UnreadableError("a JPEG image without other data between its segments")
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == _END_OF_IMAGE and scans and size is not None:
            return size
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker not in _JPEG_SEGMENTS or length < 2:
            raise UnreadableError("a baseline or progressive JPEG image")
        body = data[at + 4 : at + 2 + length]
        at += 2 + length
        if marker in _BASELINE_TO_PROGRESSIVE:
            if size is not None:
                raise UnreadableError("a JPEG image with one header")
            size = Size(int.from_bytes(body[3:5]), int.from_bytes(body[1:3]))
        elif body[:6] == b"Exif\0\0":
            if exif:
                # Readers join several tables.
                raise UnreadableError("a JPEG image with one table of EXIF")
            exif = True
            _exif(body[6:])
        elif body[:4] == b"MPF\0":
            _exif(body[4:])
        elif marker == _START_OF_SCAN:
            scans += 1
            if size is None or scans > _SCANS:
                raise UnreadableError(f"a JPEG image of at most {_SCANS} scans")
            following = _AFTER_SCAN.search(data, at)
            if following is None:
                return size
            at = following.start()
    raise UnreadableError(f"a JPEG image of at most {_SEGMENTS} segments")


def _gif(data: bytes) -> Size:
    if data[:6] not in (b"GIF87a", b"GIF89a") or len(data) < 13:
        raise UnreadableError("a GIF image, as its type says")
    width, height = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    at = 13 + _palette(data[10])
    frames = comments = blocks = 0
    while at < len(data) and data[at] != 0x3B:
        kind = data[at]
        if kind == 0x2C and at + 9 < len(data):
            left, top, wide, high = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (1, 3, 5, 7))
            # A frame that extends beyond the image enlarges it.
            width, height = max(width, left + wide), max(height, top + high)
            frames += 1
            at += 10 + _palette(data[at + 9]) + 1
        elif kind == 0x21 and (data[at + 1 : at + 2] == b"\xfe" or data[at + 2 : at + 3] != b"\0"):
            # Readers take an extension without blocks for the beginning of one with blocks.
            at += 2
        else:
            raise UnreadableError("a GIF image without other data between its blocks")
        comment = kind == 0x21 and data[at - 1 : at] == b"\xfe"
        while at < len(data) and (length := data[at]):
            blocks += 1
            comments += length if comment else 0
            if blocks > _BLOCKS or comments > _COMMENTS:
                raise UnreadableError(f"a GIF image of at most {_BLOCKS} blocks and {_COMMENTS} bytes of comments")
            at += 1 + length
        blocks += 1
        at += 1
        if blocks > _BLOCKS:
            raise UnreadableError(f"a GIF image of at most {_BLOCKS} blocks and {_COMMENTS} bytes of comments")
    return Size(width, height, max(frames, 1))


def _palette(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp(data: bytes) -> Size:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        raise UnreadableError("a WebP image, as its type says")
    first, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise UnreadableError("a WebP image")
    if first == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return Size(int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF)
    if first == b"VP8L" and body[:1] == b"\x2f":
        bits = int.from_bytes(body[1:5], "little")
        return Size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if first != b"VP8X":
        raise UnreadableError("a WebP image")
    # With this header the image must have the size it states, and frames must lie within it.
    width, height = 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    # Frames are counted anywhere: readers continue after a frame that is longer or shorter than it states.
    at, frames = 12, data.count(b"ANMF")
    for _ in range(_PIECES):
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if len(name) < 4:
            return Size(width, height, max(frames, 1))
        if name == b"EXIF":
            exif = data[at + 8 : at + 8 + length]
            _exif(exif[6:] if exif[:6] == b"Exif\0\0" else exif)
        at += 8 + length + (length & 1)
    raise UnreadableError(f"a WebP image of at most {_PIECES} chunks")


def _exif(data: bytes) -> None:
    """Bounds a table of tags: readers copy the values, which may overlap."""
    order = "big" if data[:2] == b"MM" else "little"
    table = int.from_bytes(data[4:8], order)
    tags = int.from_bytes(data[table : table + 2], order)
    # BigTIFF has wider numbers at other offsets.
    if len(data) > _EXIF_BYTES or tags > _EXIF_TAGS or 43 in data[2:4]:
        raise UnreadableError(f"an image with at most {_EXIF_BYTES >> 10} KiB and {_EXIF_TAGS} tags of EXIF")


READERS: Final[Mapping[str, Callable[[bytes], Size]]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/webp": _webp,
    "image/gif": _gif,
}
