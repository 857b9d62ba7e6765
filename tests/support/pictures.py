"""Images and sounds in their smallest form, true ones and such as mean harm."""

import base64
import io
import random
import struct
import zlib
from typing import Any

from PIL import Image


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def ihdr(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))


def png(width: int, height: int, *before: bytes) -> bytes:
    """Black, one bit a pixel: 1 KiB for 8 million pixels. `before` are chunks between header and pixels."""
    pack = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    pixels = b"".join([*(pack.compress(row) for _ in range(height)), pack.flush()])
    parts = (ihdr(width, height), *before, chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def made(form: str, width: int = 8, height: int = 6, frames: int = 1, seed: int = 0, **more: Any) -> bytes:
    """By Pillow: PNG, JPEG, WEBP or GIF, of noise."""
    pick = random.Random(seed)  # noqa: S311
    images = [Image.frombytes("RGB", (width, height), pick.randbytes(width * height * 3)) for _ in range(frames)]
    out = io.BytesIO()
    several = {"save_all": True, "append_images": images[1:], "duration": 40} if frames > 1 else {}
    images[0].save(out, form, **several, **more)
    return out.getvalue()


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def many_scans(width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    out = io.BytesIO()
    Image.new("L", (width, height)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def gif(width: int, height: int, *blocks: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + b"".join(blocks) + b";"


def gif_frame(left: int, top: int, width: int, height: int) -> bytes:
    return b"," + struct.pack("<HHHHB", left, top, width, height, 0) + b"\x02\x02\x44\x01\x00"


def webp_canvas(width: int, height: int, *chunks: bytes) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + sides + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def exif(tags: int, size: int = 0) -> bytes:
    """A table of so many tags, each of which says that it is all of it."""
    entries = b"".join(struct.pack("<HHII", 0x9000 + i, 7, max(size, 5), 8) for i in range(tags))
    return (b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", tags) + entries + bytes(4)).ljust(size, b"\0")


def wav(seconds: float, rate: int = 16_000, channels: int = 1, bits: int = 16, code: int = 1) -> bytes:
    block = channels * bits // 8
    header = struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits)
    data = bytes(int(seconds * rate) * block)
    body = b"WAVEfmt " + struct.pack("<I", len(header)) + header + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def mp3(frames: int) -> bytes:
    """MPEG-1 layer III, 32 kbit/s, 48 kHz: 96 bytes and 24 ms a frame."""
    return (b"\xff\xfb\x14\xc4" + bytes(92)) * frames


def unpacked(given: str) -> list[int]:
    """As an engine does it, for a child process with limits: width, height."""
    image = Image.open(io.BytesIO(base64.b64decode(given)))
    image.load()
    image.convert("RGB")
    return list(image.size)


def scaled(given: str) -> list[int]:
    """The shorter side to 336, as CLIP's processor does it."""
    image = Image.open(io.BytesIO(base64.b64decode(given))).convert("RGB")
    factor = 336 / min(image.size)
    return list(image.resize((round(image.width * factor), round(image.height * factor))).size)
