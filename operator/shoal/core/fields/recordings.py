"""A recorded sound to be transcribed: what kind of file it is, how long it is, and what an engine would unpack.

An engine decodes the whole file at once, and a few KiB of FLAC or Ogg hold hours of silence. So the frames themselves
are walked, without decoding them: what the file's header states about its length binds no decoder. MP4 is not taken: a
packet of AAC may have any number of frames, which only a decoder finds, and one of 4 bytes makes 1,024 samples.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from shoal.core.fields.images import UnreadableError
from shoal.core.fields.kinds import Facts, FieldProblem, wrong
from shoal.core.fields.matroska import OpusFile
from shoal.core.fields.sounds import (
    CHANNELS,
    LEAST_RATE,
    MOST_RATE,
    Data,
    milliseconds_of,
    mp3_frames,
    mp3_milliseconds,
    wav_header,
)

MOST_SECONDS: Final = 3_600
MOST_SAMPLES: Final = 1 << 27
"""Samples of all channels: 512 MiB when an engine unpacks them as floats of 32 bits."""
_MOST_FRAMES: Final = 250_000
"""Frames, packets and pages of a file that are looked at."""
_ID3V1: Final = 128
"""Bytes of a tag after the last frame of an MP3."""
_MOST_BLOCKS: Final = 128
"""Blocks before the first frame of a FLAC file."""
WORDS: Final = (
    "The file is WAV (plain samples in one chunk), MP3, FLAC, Ogg with Opus or Vorbis, or WebM or Matroska with one "
    "track, of Opus. Its first bytes tell; the name and the type that the client gives are not used. MP4 and M4A are "
    "not taken: nothing outside of a decoder bounds what they unpack to. Engines whose image has no FFmpeg refuse "
    "WebM.",
    f"It has at most {MOST_SECONDS} seconds, and {MOST_SAMPLES} samples over all channels.",
    "The length of Ogg Vorbis, of FLAC or Opus whose header or time stamps contradict its frames, and of MP3 with "
    "something after its last frame is only known to the engine: for these `response_format` is `json` or "
    "`verbose_json`, and `stream` is not set.",
)


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of a known kind. `most_seconds` and `samples`: no decoder makes more of it."""

    kind: str
    """wav, mp3, flac, ogg, webm or mkv."""
    size: int
    """Bytes."""
    most_seconds: float
    samples: float
    """Over all channels."""
    milliseconds: int | None
    """Its length; None: only a decoder knows it."""


TYPES: Final = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg"} | {
    "webm": "audio/webm",
    "mkv": "audio/x-matroska",
}
"""Content type of each kind."""


@dataclass(frozen=True, slots=True)
class RecordingField:
    """A recording within the bounds."""

    @property
    def describe(self) -> str:
        return f"a sound file of at most {MOST_SECONDS} seconds"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, Recording):
            return wrong(at, "a sound file", "invalid_type")
        if value.most_seconds > MOST_SECONDS:
            text = f"`{at}` lasts up to {value.most_seconds:.0f} seconds; at most {MOST_SECONDS} are accepted."
            return FieldProblem(at, text, "too_much_work")
        if value.samples > MOST_SAMPLES:
            text = (
                f"`{at}` has up to {value.samples:.0f} samples over all channels; at most {MOST_SAMPLES} are accepted. "
                "Send it with a lower rate, or one channel."
            )
            return FieldProblem(at, text, "too_much_work")
        return None


def recording(data: Data) -> Recording:
    """
    Raises:
        UnreadableError: it is no file of a kind that is taken, or it is damaged.
    """
    if data[:4] == b"RIFF":
        return _wav(data)
    if data[:4] == b"fLaC":
        return _flac(data)
    if data[:4] == b"OggS":
        return _ogg(data)
    if data[:4] == _EBML:
        return _matroska(data)
    mp3 = data[:1] == b"\xff" and len(data) > 1 and data[1] & 0xE0 == 0xE0 and data[1] & 0xF6 != 0xF0
    if data[:3] == b"ID3" or mp3:
        return _mp3(data)
    if (container := _container(data)) is not None:
        raise UnreadableError(
            f"{_TAKEN}, and it is {container}, of which only a decoder knows how long it is: {_CONVERT}"
        )
    raise UnreadableError(_TAKEN)


_TAKEN: Final = "a sound file: WAV, MP3, FLAC, Ogg or WebM"
_CONVERT: Final = "convert it, for instance with `ffmpeg -i FILE -vn -c:a libopus FILE.ogg`"
_BRANDS: Final = {b"M4A ": "M4A", b"M4B ": "M4A", b"qt  ": "QuickTime", b"3gp": "3GP"}
_EBML: Final = b"\x1aE\xdf\xa3"
_LONGEST_EBML: Final = 64
"""Bytes of a Matroska file in which its kind stands."""


def _container(data: Data) -> str | None:
    """The name of a container that is not taken, and that clients record into; None: it is none of them."""
    if data[4:8] == b"ftyp":
        brand = bytes(data[8:12])
        return next((name for start, name in _BRANDS.items() if brand.startswith(start)), "MP4")
    if data[:1] == b"\xff" and len(data) > 1 and data[1] & 0xF6 == 0xF0:
        return "AAC (ADTS)"
    if data[:4] == b"caff":
        return "CAF"
    return None


def _made(kind: str, data: Data, most: float, rate: int, channels: int, exact: int | None) -> Recording:
    """`most` and `exact`: samples of one channel."""
    milliseconds = None if exact is None else milliseconds_of(exact, rate)
    return Recording(kind, len(data), most / rate, most * channels, milliseconds)


def _wav(data: Data) -> Recording:
    header = wav_header(data)
    # Some readers go on to the end of the file, whatever length its header states.
    most = (len(data) - header.start) / header.block
    return _made("wav", data, most, header.rate, header.channels, header.samples(len(data)))


def _mp3(data: Data) -> Recording:
    frames = mp3_frames(data, _MOST_FRAMES)
    rest = data[frames.end :]
    # A decoder would search for further frames in what is no tag. The slowest have 8,000 bits a second.
    tagged = not rest or (len(rest) == _ID3V1 and rest[:3] == b"TAG")
    milliseconds = mp3_milliseconds(data, frames) if tagged else None
    most = frames.seconds + len(rest) / 1000
    return Recording("mp3", len(data), most, most * frames.rate * frames.channels, milliseconds)


# --- FLAC -----------------------------------------------------------------------------------------------------------

_SYNC: Final = re.compile(rb"\xff[\xf8\xf9]")
_BLOCKS: Final = (0, 192, 576, 1152, 2304, 4608, 0, 0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Samples of a frame by their code; 0: the code 0 is not valid, 6 and 7 say that the number follows."""
_LONGEST_HEADER: Final = 16


def _crc_table() -> bytes:
    table = bytearray()
    for value in range(256):
        for _ in range(8):
            value = (value << 1 ^ 7) & 0xFF if value & 0x80 else value << 1
        table.append(value)
    return bytes(table)


_CRC: Final = _crc_table()


def _flac(data: Data) -> Recording:
    header = data[8:42]
    if len(header) < 34 or data[4] & 0x7F != 0 or int.from_bytes(data[5:8]) != 34:
        raise UnreadableError("FLAC whose first block describes it")
    facts = int.from_bytes(header[10:18])
    rate, channels, total = facts >> 44, (facts >> 41 & 7) + 1, facts & (1 << 36) - 1
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise UnreadableError(f"FLAC of {LEAST_RATE} to {MOST_RATE} samples a second")
    at, last = 42, bool(data[4] & 0x80)
    for _ in range(_MOST_BLOCKS):
        if last:
            break
        last = bool(data[at] & 0x80) if at < len(data) else True
        at += 4 + int.from_bytes(data[at + 1 : at + 4])
    if _frame(data, at) is None:
        raise UnreadableError("FLAC whose frames follow its first blocks")
    # Frames have no length, so the next one is searched. What looks like a frame within another's data counts for the
    # bound, and for the length only if its number is the next.
    most = exact = count = looked = 0
    for found in _SYNC.finditer(data, at):
        looked += 1
        if looked > _MOST_FRAMES:
            raise UnreadableError(f"FLAC of at most {_MOST_FRAMES} frames")
        if (frame := _frame(data, found.start())) is None:
            continue
        samples, number, by_samples = frame
        most += samples
        if number == (exact if by_samples else count):
            exact += samples
            count += 1
    return _made("flac", data, max(most, total), rate, channels, exact if total in (0, exact) else None)


def _frame(data: Data, at: int) -> tuple[int, int, bool] | None:
    """(samples, number, whether that counts samples) of a frame's header; None: it is none."""
    head = data[at : at + _LONGEST_HEADER]
    if len(head) < 6 or head[0] != 0xFF or head[1] & 0xFE != 0xF8 or head[3] & 1:
        return None
    block, rate = head[2] >> 4, head[2] & 15
    more = _continued(head[4])
    if more is None or not block or rate == 15:
        return None
    end = 5 + more
    number = head[4] & (0x7F if not more else (1 << 6 - more) - 1)
    for byte in head[5:end]:
        if byte & 0xC0 != 0x80:
            return None
        number = number << 6 | byte & 0x3F
    samples = _BLOCKS[block]
    if block in (6, 7):
        size = block - 5
        samples = int.from_bytes(head[end : end + size]) + 1
        end += size
    end += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if end >= len(head):
        return None
    check = 0
    for byte in head[:end]:
        check = _CRC[check ^ byte]
    return (samples, number, bool(head[1] & 1)) if check == head[end] else None


def _continued(first: int) -> int | None:
    """Number of bytes that follow the first of a number in UTF-8, which has up to 36 bits here."""
    if first < 0x80:
        return 0
    ones = 8 - (first ^ 0xFF).bit_length()
    return ones - 1 if 2 <= ones <= 7 else None


# --- Ogg ------------------------------------------------------------------------------------------------------------

_OPUS_RATE: Final = 48_000
_NANOSECONDS: Final = 1_000_000_000
_OPUS_MOST: Final = 5_760
"""Samples of a packet."""


def _ogg(data: Data) -> Recording:
    packets = _packets(data)
    first = next(packets, None)
    head = b"" if first is None else bytes(data[first[0] : first[0] + first[1]])
    if head.startswith(b"OpusHead") and len(head) >= 19 and 1 <= head[9] <= CHANNELS:
        return _opus(data, packets, head[9], int.from_bytes(head[10:12], "little"))
    if head.startswith(b"\x01vorbis") and len(head) >= 30 and 1 <= head[11] <= CHANNELS:
        rate, most_block = int.from_bytes(head[12:16], "little"), 1 << (head[28] >> 4)
        if LEAST_RATE <= rate <= MOST_RATE and most_block <= 8192:
            # Each packet makes at most half of the longest block.
            return _made("ogg", data, sum(1 for _ in packets) * most_block / 2, rate, head[11], None)
    raise UnreadableError("Ogg with one stream of Opus or Vorbis")


def _opus(data: Data, packets: Iterator[tuple[int, int, int]], channels: int, skipped: int) -> Recording:
    samples, ends = 0, 0
    for number, (at, length, granule) in enumerate(packets):
        if number:  # the first one has the tags
            samples += _opus_samples(data, at, length)
            ends = granule
    # The last page says how much of the last packet counts.
    regular = skipped <= ends and samples - _OPUS_MOST <= ends <= samples
    return _made("ogg", data, samples, _OPUS_RATE, channels, ends - skipped if regular else None)


def _opus_samples(data: Data, at: int, length: int) -> int:
    if not length:
        raise UnreadableError("Opus without empty packets")
    first = data[at]
    config, code = first >> 3, first & 3
    if config < 12:
        frame = (480, 960, 1920, 2880)[config & 3]
    elif config < 16:
        frame = (480, 960)[config & 1]
    else:
        frame = (120, 240, 480, 960)[config & 3]
    count = (1, 2, 2, data[at + 1] & 63 if length > 1 else 0)[code]
    samples = count * frame
    if not 0 < samples <= _OPUS_MOST:
        raise UnreadableError("Opus with valid packets")
    return samples


_APART: Final = 500_000_000
"""Nanoseconds by which the time stamps of packets may differ from what is before them: they are rounded, and clocks of
browsers are not exact. Some decoders fill larger gaps, others do not."""


def _matroska(data: Data) -> Recording:
    file = OpusFile(data, _MOST_FRAMES)
    samples, discarded, first, regular = 0, 0, None, True
    for packet in file.packets():
        if packet.begins is not None:
            first = packet.begins if first is None else first
            regular &= abs(packet.begins - first - samples * _NANOSECONDS // _OPUS_RATE) <= _APART
            # Only the end of the last block may be left out.
            regular &= not discarded
            discarded = packet.discarded * _OPUS_RATE // _NANOSECONDS
        samples += _opus_samples(data, packet.start, packet.length)
    counted = samples - file.skipped - discarded
    kind = "webm" if b"webm" in bytes(data[:_LONGEST_EBML]) else "mkv"
    return _made(kind, data, samples, _OPUS_RATE, file.channels, counted if regular and counted >= 0 else None)


_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _intact(page: Data) -> bool:
    """Whether the checksum of a page is right: a CRC that takes the highest bit first, unlike zlib's."""
    cleared = b"".join((page[:22], bytes(4), page[26:])).translate(_REVERSED)
    check = zlib.crc32(cleared, 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return check.to_bytes(4, "little").translate(_REVERSED) == bytes(page[22:26])[::-1]


def _packets(data: Data) -> Iterator[tuple[int, int, int]]:
    """(first byte, length, position that the page states) of each packet of the only stream."""
    at, looked, serial = 0, 0, data[14:18]
    begun: tuple[int, int] | None = None
    while at < len(data):
        head = data[at : at + 27]
        if len(head) < 27 or head[:5] != b"OggS\0":
            raise UnreadableError("Ogg, page after page")
        if head[14:18] != serial or bool(head[5] & 1) != (begun is not None):
            raise UnreadableError("Ogg with one stream")
        lacing = data[at + 27 : at + 27 + head[26]]
        granule = int.from_bytes(head[6:14], "little")
        looked += 1 + len(lacing)
        if looked > _MOST_FRAMES:
            raise UnreadableError(f"Ogg of at most {_MOST_FRAMES} pages and segments")
        begins, at = at, at + 27 + head[26]
        # A reader searches within a page whose checksum is wrong, and would find others there.
        if at + sum(lacing) > len(data) or not _intact(data[begins : at + sum(lacing)]):
            raise UnreadableError("Ogg of whole pages with their checksums")
        for size in lacing:
            start, length = begun or (at, 0)
            length += size
            at += size
            begun = (start, length) if size == 255 else None
            if begun is None:
                yield start, length, granule
