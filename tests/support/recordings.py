"""Sound files, also such as mean harm, and forms that carry them."""

import email
import itertools
import struct
from email.message import Message
from typing import Any

BOUNDARY = b"----a-boundary"
TYPE = b"multipart/form-data; boundary=" + BOUNDARY


def wav(seconds: float = 1.0, rate: int = 16_000, channels: int = 1, stated: int | None = None) -> bytes:
    """Silence. `stated`: the length that the file states, in bytes."""
    data = bytes(int(seconds * rate) * 2 * channels)
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    size = len(data) if stated is None else stated
    return (
        b"RIFF"
        + struct.pack("<I", 36 + len(data))
        + b"WAVEfmt \x10\0\0\0"
        + head
        + b"data"
        + struct.pack("<I", size)
        + data
    )


def crc8(data: bytes) -> int:
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value << 1 ^ 7) & 0xFF if value & 0x80 else value << 1
    return value


def crc16(data: bytes) -> int:
    value = 0
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1 ^ 0x8005) & 0xFFFF if value & 0x8000 else value << 1
    return value


def crc32(data: bytes) -> int:
    """The checksum of a page of Ogg."""
    value = 0
    for byte in data:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ 0x04C11DB7) & 0xFFFFFFFF if value & 0x80000000 else value << 1
    return value


def utf8_number(number: int) -> bytes:
    """A number as FLAC writes it: UTF-8, of up to 36 bits."""
    if number < 0x80:
        return bytes([number])
    more = 1
    while number >= 1 << (6 * more + 6 - more):
        more += 1
    rest = [0x80 | number >> 6 * at & 0x3F for at in reversed(range(more))]
    return bytes([(0xFF00 >> more + 1) & 0xFF | number >> 6 * more, *rest])


def flac(frames: int, rate: int = 8_000, block: int = 65_535, total: int | None = None, channels: int = 1) -> bytes:
    """Silence: a frame has a dozen bytes. `total`: the length that the header states; default: the true one."""
    samples = frames * block if total is None else total
    facts = rate << 44 | channels - 1 << 41 | 15 << 36 | samples
    info = struct.pack(">HH", block, block) + bytes(6) + facts.to_bytes(8) + bytes(16)
    parts = [b"fLaC\x80\0\0\x22" + info]
    for number in range(frames):
        head = bytes([0xFF, 0xF8, 0x70, channels - 1 << 4 | 8]) + utf8_number(number) + struct.pack(">H", block - 1)
        frame = head + bytes([crc8(head)]) + bytes(3 * channels)
        parts.append(frame + struct.pack(">H", crc16(frame)))
    return b"".join(parts)


def ogg(packets: list[bytes], granules: list[int], serial: int = 7) -> bytes:
    """A page for each packet, which is below 255 bytes."""
    pages: list[bytes] = []
    for number, (packet, granule) in enumerate(zip(packets, granules, strict=True)):
        kind = 2 if not number else 0
        head = b"OggS\0" + bytes([kind]) + struct.pack("<QII", granule, serial, number)
        body = bytes([1, len(packet)]) + packet
        pages.append(head + struct.pack("<I", crc32(head + bytes(4) + body)) + body)
    return b"".join(pages)


def opus(packets: int, toc: bytes = b"\x08", samples: int = 960, skip: int = 312, end: int | None = None) -> bytes:
    """Opus in Ogg: each packet has `toc` and a little more, and stands for `samples` at 48 kHz."""
    head = b"OpusHead\x01\x01" + struct.pack("<HIhB", skip, 48_000, 0, 0)
    granules = [0, 0, *(samples * (at + 1) for at in range(packets))]
    if end is not None:
        granules[-1] = end
    return ogg([head, b"OpusTags" + bytes(8), *[toc + b"\0\0"] * packets], granules)


def element(id_: int, *content: bytes, size: int | None = None, unknown: bool = False) -> bytes:
    """An element of EBML. `size`: what it states of its content, if that is not the truth."""
    body = b"".join(content)
    stated = (1 << 56) - 1 if unknown else len(body) if size is None else size
    return id_.to_bytes((id_.bit_length() + 7) // 8) + (1 << 56 | stated).to_bytes(8) + body


def block(packets: list[bytes], time: int = 0, track: int = 1, lacing: int = 0, discarded: int | None = None) -> bytes:
    """A simple block; a group, if `discarded` nanoseconds of it do not count. `lacing`: 1 Xiph, 2 one size, 3 EBML."""
    head = bytes([0x80 | track]) + struct.pack(">hB", time, lacing << 1)
    sizes = b""
    if lacing:
        sizes = bytes([len(packets) - 1])
    if lacing == 1:
        sizes += b"".join(b"\xff" * (len(p) // 255) + bytes([len(p) % 255]) for p in packets[:-1])
    if lacing == 3:
        lengths = [len(p) for p in packets[:-1]]
        sizes += (1 << 14 | lengths[0]).to_bytes(2)
        sizes += b"".join((1 << 14 | b - a + (1 << 13) - 1).to_bytes(2) for a, b in itertools.pairwise(lengths))
    content = head + sizes + b"".join(packets)
    if discarded is None:
        return element(0xA3, content)
    return element(0xA0, element(0xA1, content), element(0x75A2, discarded.to_bytes(8, signed=True)))


def cluster(time: int, *blocks: bytes, unknown: bool = False) -> bytes:
    return element(0x1F43B675, element(0xE7, time.to_bytes(4)), *blocks, unknown=unknown)


def track(channels: int = 1, codec: bytes = b"A_OPUS", kind: int = 2, skip: int = 312, *more: bytes) -> bytes:
    head = b"OpusHead\x01" + bytes([channels]) + struct.pack("<HIhB", skip, 48_000, 0, 0)
    facts = [element(0xD7, b"\x01"), element(0x83, bytes([kind])), element(0x86, codec), element(0x63A2, head)]
    return element(0xAE, *facts, *more)


def matroska(
    *clusters: bytes, doctype: bytes = b"webm", tracks: list[bytes] | None = None, live: bool = False, end: bytes = b""
) -> bytes:
    """A file that states a false length. `live`: as browsers record it, without sizes of what has not ended yet."""
    header = element(0x1A45DFA3, element(0x4282, doctype))
    info = element(0x1549A966, element(0x2AD7B1, (1_000_000).to_bytes(3)), element(0x4489, struct.pack(">d", 5.0)))
    listed = element(0x1654AE6B, *([track()] if tracks is None else tracks))
    return header + element(0x18538067, element(0xEC, bytes(9)), info, listed, *clusters, unknown=live) + end


def webm(packets: int, toc: bytes = b"\x08", milliseconds: int = 20, live: bool = True, **more: Any) -> bytes:
    """Opus as `opus` has it, a second in each cluster."""
    each = max(1, 1000 // milliseconds)
    clusters = [
        cluster(
            first * milliseconds,
            *(block([toc + b"\0\0"], (at - first) * milliseconds) for at in range(first, min(first + each, packets))),
            unknown=live,
        )
        for first in range(0, packets, each)
    ]
    return matroska(*clusters, live=live, **more)


def vorbis(packets: int, rate: int = 8_000, block: int = 13) -> bytes:
    head = b"\x01vorbis" + struct.pack("<IBI", 0, 1, rate) + bytes(12) + bytes([block << 4 | 8, 1])
    return ogg([head, *[b"\0\0"] * (packets + 2)], [0] * (packets + 3))


def mp3(frames: int) -> bytes:
    """Layer III, 32 kbit/s, 16 kHz, one channel: 36 ms each."""
    return (b"\xff\xf3\x48\xc0" + bytes(140)) * frames


def part(name: str, value: bytes | str, head: str = "", filename: str | None = None) -> bytes:
    """A part of a form, with its boundary before it."""
    content = value.encode() if isinstance(value, str) else value
    named = "" if filename is None else f'; filename="{filename}"'
    lines = f'Content-Disposition: form-data; name="{name}"{named}\r\n{head}'
    return b"--" + BOUNDARY + b"\r\n" + lines.encode() + b"\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"


def asked(audio: bytes | None = None, **fields: str) -> bytes:
    """A form as SDKs send it."""
    given = [part(name.replace("__", "[]"), value) for name, value in ({"model": "llama"} | fields).items()]
    return form(*given, part("file", wav() if audio is None else audio, filename="a.wav"))


def read_form(content_type: str, raw: bytes) -> dict[str, Any]:
    """A form as another reader understands it: texts, and (name, type, content) of files."""
    message: Message = email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + raw)
    found: dict[str, Any] = {}
    for one in message.get_payload():  # pyright: ignore[reportUnknownVariableType]
        assert isinstance(one, Message)
        name, content = one.get_param("name", header="content-disposition"), one.get_payload(decode=True)
        assert isinstance(name, str)
        assert isinstance(content, bytes)
        value = (
            content.decode() if one.get_filename() is None else (one.get_filename(), one.get_content_type(), content)
        )
        if name.endswith("[]"):
            found.setdefault(name, []).append(value)
        else:
            assert name not in found
            found[name] = value
    return found
