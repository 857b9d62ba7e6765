"""Length of a sound from its headers: what an engine would unpack, without unpacking it.

Only WAV and MP3, whose bytes bound their samples. FLAC, Ogg and containers can hold hours of silence in a few KiB, and
their stated length means nothing.
"""

from collections.abc import Callable, Mapping
from typing import Final

from shoal.core.fields.images import UnreadableError

LEAST_RATE: Final = 8_000
"""Samples per second. A reader resamples to the model's rate, so a sound with a rate of 1 would grow by 16,000."""
MOST_RATE: Final = 192_000
_CHANNELS: Final = 8
_PIECES: Final = 256
_FRAMES: Final = 40_000
"""Frames of an MP3; the shortest have 24 ms."""
_REST: Final = 4_096
"""Bytes after the last frame of an MP3, for tags."""


def sound_seconds(kind: str, data: bytes) -> float:
    """Length of a sound in seconds; `kind` is a type of `READERS`.

    Raises:
        UnreadableError: the file is not of that kind, or its length is not determined.
    """
    return READERS[kind](data)


def _wav(data: bytes) -> float:
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise UnreadableError("WAV, as its type says")
    at, second = 12, 0
    for _ in range(_PIECES):
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            if second:
                raise UnreadableError("WAV with one header")
            second = _second(data[at + 8 : at + 8 + length])
        elif name == b"data":
            if not second:
                raise UnreadableError("WAV whose header comes first")
            # Whatever length the header states, there are no more bytes than these.
            return (len(data) - at - 8) / second
        elif len(name) < 4:
            break
        at += 8 + length + (length & 1)
    raise UnreadableError(f"WAV of at most {_PIECES} chunks with one of data")


def _second(header: bytes) -> int:
    """Bytes of one second."""
    code, channels, rate, _, block, bits = (
        int.from_bytes(header[i:j], "little") for i, j in ((0, 2), (2, 4), (4, 8), (8, 12), (12, 14), (14, 16))
    )
    if code == 0xFFFE:
        code = int.from_bytes(header[24:26], "little")
    if code not in (1, 3) or bits not in (8, 16, 24, 32, 64) or block != channels * bits // 8:
        raise UnreadableError("WAV of plain samples (PCM)")
    if not LEAST_RATE <= rate <= MOST_RATE or not 1 <= channels <= _CHANNELS:
        raise UnreadableError(f"WAV of {LEAST_RATE} to {MOST_RATE} samples a second and 1 to {_CHANNELS} channels")
    return rate * block


_FULL_RATES: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_HALF_RATES: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
_SAMPLE_RATES: Final = (44_100, 48_000, 32_000, 0)


def _mp3(data: bytes) -> float:
    at = 0
    if data[:3] == b"ID3" and len(data) > 10:
        sizes = data[6:10]
        at = 10 + (sizes[0] << 21 | sizes[1] << 14 | sizes[2] << 7 | sizes[3])
    if data[4:8] == b"ftyp":
        # Engines check for this type first.
        raise UnreadableError("MP3, as its type says")
    seconds, frames = 0.0, 0
    while (found := _frame(data[at : at + 4])) is not None:
        frames += 1
        if frames > _FRAMES:
            raise UnreadableError(f"MP3 of at most {_FRAMES} frames")
        at += found[0]
        seconds += found[1]
    if not frames or len(data) - at > _REST:
        # A reader would search for the next frame in other data.
        raise UnreadableError("MP3, as its type says, frame after frame")
    return seconds


def _frame(header: bytes) -> tuple[int, float] | None:
    """(bytes, seconds) of a frame of layer III; None: it is no frame, or its length is not determined."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return None
    version = header[1] >> 3 & 3
    bitrate = (_FULL_RATES if version == 3 else _HALF_RATES)[header[2] >> 4] * 1000
    rate = _SAMPLE_RATES[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}.get(version, 32)
    if not bitrate or not rate:
        return None
    samples = 1152 if version == 3 else 576
    return samples // 8 * bitrate // rate + (header[2] >> 1 & 1), samples / rate


READERS: Final[Mapping[str, Callable[[bytes], float]]] = {
    "audio/wav": _wav,
    "audio/x-wav": _wav,
    "audio/mpeg": _mp3,
    "audio/mp3": _mp3,
}
