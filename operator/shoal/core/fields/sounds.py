"""Length of a sound from its headers: what an engine would unpack, without unpacking it.

Only WAV and MP3, whose bytes bound their samples. FLAC, Ogg and containers can hold hours of silence in a few KiB, and
their stated length means nothing.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from shoal.core.fields.images import UnreadableError

Data = bytes | memoryview
LEAST_RATE: Final = 8_000
"""Samples per second. A reader resamples to the model's rate, so a sound with a rate of 1 would grow by 16,000."""
MOST_RATE: Final = 192_000
CHANNELS: Final = 8
_PIECES: Final = 256
_FRAMES: Final = 40_000
"""Frames of an MP3; the shortest have 24 ms."""
_REST: Final = 4_096
"""Bytes after the last frame of an MP3, for tags."""


class SoundLength(NamedTuple):
    """How long a sound is."""

    most_seconds: float
    """No decoder makes more of it."""
    milliseconds: int
    """What it plays, as usage records count it."""


def sound_length(kind: str, data: Data) -> SoundLength:
    """The length of a sound; `kind` is a type of `READERS`.

    Raises:
        UnreadableError: the file is not of that kind, or its length is not determined.
    """
    return READERS[kind](data)


def sound_seconds(kind: str, data: Data) -> float:
    """The most seconds that a decoder makes of a sound. Raises UnreadableError, as `sound_length`."""
    return sound_length(kind, data).most_seconds


def milliseconds_of(samples: int, rate: int) -> int:
    """Length of samples of one channel, rounded."""
    return (samples * 1000 + rate // 2) // rate


class WavHeader(NamedTuple):
    """What stands before the samples of a WAV file."""

    rate: int
    """Samples per second."""
    channels: int
    block: int
    """Bytes of one sample of all channels."""
    start: int
    """First byte of the samples."""
    stated: int
    """Bytes of samples, as the file states."""

    def samples(self, size: int) -> int:
        """Samples of one channel in a file of `size` bytes: those that are there, or fewer if it states fewer."""
        there = size - self.start
        return (self.stated if 0 < self.stated < there else there) // self.block


def wav_header(data: Data) -> WavHeader:
    """
    Raises:
        UnreadableError: it is no WAV of plain samples.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise UnreadableError("WAV, as its type says")
    at, found = 12, None
    for _ in range(_PIECES):
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            if found is not None:
                raise UnreadableError("WAV with one header")
            found = _format(data[at + 8 : at + 8 + length])
        elif name == b"data":
            if found is None:
                raise UnreadableError("WAV whose header comes first")
            if at + 8 > len(data):
                break
            end = at + 8 + length
            # FFmpeg plays all chunks of samples, one after another. Where the first has an odd length, it looks for the
            # next one with and without the byte that fills it up.
            if length and any(_has_samples(data, start) for start in {end, end + (end & 1)}):
                break
            return WavHeader(*found, at + 8, length)
        elif len(name) < 4:
            break
        at += 8 + length + (length & 1)
    raise UnreadableError(f"WAV of at most {_PIECES} chunks with one of data")


def _has_samples(data: Data, at: int) -> bool:
    """Whether there is a chunk of samples from `at` on. What is there need not be chunks at all."""
    for _ in range(_PIECES):
        name = data[at : at + 4]
        if name == b"data":
            return True
        if len(name) < 4:
            return False
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + length + (length & 1)
    return b"data" in bytes(data[at:])


def _wav(data: Data) -> SoundLength:
    header = wav_header(data)
    # Whatever length the header states, there are no more bytes than these.
    most = (len(data) - header.start) / (header.rate * header.block)
    return SoundLength(most, milliseconds_of(header.samples(len(data)), header.rate))


def _format(header: Data) -> tuple[int, int, int]:
    """Rate, channels and bytes of one sample of all channels."""
    code, channels, rate, _, block, bits = (
        int.from_bytes(header[i:j], "little") for i, j in ((0, 2), (2, 4), (4, 8), (8, 12), (12, 14), (14, 16))
    )
    if code == 0xFFFE:
        code = int.from_bytes(header[24:26], "little")
    if code not in (1, 3) or bits not in (8, 16, 24, 32, 64) or block != channels * bits // 8:
        raise UnreadableError("WAV of plain samples (PCM)")
    if not LEAST_RATE <= rate <= MOST_RATE or not 1 <= channels <= CHANNELS:
        raise UnreadableError(f"WAV of {LEAST_RATE} to {MOST_RATE} samples a second and 1 to {CHANNELS} channels")
    return rate, channels, block


_FULL_RATES: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_HALF_RATES: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
_SAMPLE_RATES: Final = (44_100, 48_000, 32_000, 0)


def _mp3(data: Data) -> SoundLength:
    frames = mp3_frames(data, _FRAMES)
    return SoundLength(frames.seconds, mp3_milliseconds(data, frames))


class Mp3Frames(NamedTuple):
    """The frames of an MP3."""

    seconds: float
    rate: int
    """The highest of a frame."""
    channels: int
    first: int
    """Where the first frame begins."""
    end: int
    """Where the last one ends."""


def mp3_frames(data: Data, most: int) -> Mp3Frames:
    """

    Raises:
        UnreadableError: it is no MP3, or has more than `most` frames.
    """
    at = 0
    if data[:3] == b"ID3" and len(data) > 10:
        sizes = data[6:10]
        at = 10 + (sizes[0] << 21 | sizes[1] << 14 | sizes[2] << 7 | sizes[3])
    if data[4:8] == b"ftyp":
        # Engines check for this type first.
        raise UnreadableError("MP3, as its type says")
    first, seconds, frames, rate, channels = at, 0.0, 0, 0, 1
    while (found := _frame(header := data[at : at + 4])) is not None:
        frames += 1
        if frames > most:
            raise UnreadableError(f"MP3 of at most {most} frames")
        at += found[0]
        seconds += found[1]
        rate = max(rate, found[2])
        if header[3] >> 6 != 3:
            channels = 2
    if not frames or len(data) - at > _REST:
        # A reader would search for the next frame in other data.
        raise UnreadableError("MP3, as its type says, frame after frame")
    return Mp3Frames(seconds, rate, channels, first, at)


_SIDE: Final = {(3, False): 32, (3, True): 17, (2, False): 17, (2, True): 9, (0, False): 17, (0, True): 9}
"""Bytes between the header of a frame and its content, by version and whether it has one channel."""


def mp3_milliseconds(data: Data, frames: Mp3Frames) -> int:
    """What the frames play: without what the encoder added."""
    return max(0, round(frames.seconds * 1000 - _spare(data, frames.first) * 1000 / frames.rate))


def _spare(data: Data, first: int) -> int:
    """Samples that a decoder leaves out, as the tag in the first frame says: that frame itself, and what the encoder
    added at both ends. 0: there is no such tag."""
    head = data[first : first + 4]
    version, mono = head[1] >> 3 & 3, head[3] >> 6 == 3
    at = first + 4 + _SIDE.get((version, mono), 0)
    if data[at : at + 4] not in (b"Xing", b"Info"):
        return 0
    flags = int.from_bytes(data[at + 4 : at + 8])
    at += 8 + 4 * (flags & 1) + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1)
    added = int.from_bytes(data[at + 21 : at + 24]) if data[at : at + 4] in (b"LAME", b"Lavf", b"Lavc") else 0
    return (1152 if version == 3 else 576) + (added >> 12) + (added & 0xFFF)


def _frame(header: Data) -> tuple[int, float, int] | None:
    """(bytes, seconds, rate) of a frame of layer III; None: it is no frame, or its length is not determined."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return None
    version = header[1] >> 3 & 3
    bitrate = (_FULL_RATES if version == 3 else _HALF_RATES)[header[2] >> 4] * 1000
    rate = _SAMPLE_RATES[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}.get(version, 32)
    if not bitrate or not rate:
        return None
    samples = 1152 if version == 3 else 576
    return samples // 8 * bitrate // rate + (header[2] >> 1 & 1), samples / rate, rate


READERS: Final[Mapping[str, Callable[[Data], SoundLength]]] = {
    "audio/wav": _wav,
    "audio/x-wav": _wav,
    "audio/mpeg": _mp3,
    "audio/mp3": _mp3,
}
