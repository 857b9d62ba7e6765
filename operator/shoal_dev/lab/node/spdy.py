"""SPDY/3.1 frames, as far as `kubectl port-forward` speaks it: streams with headers, data, resets and pings.

Kubernetes still tunnels this protocol through its WebSockets, and no maintained Python library has it. Pure: bytes in,
frames out, and frames to bytes. Source: the SPDY protocol, draft 3.1. Kubernetes' peer (moby/spdystream) knows no flow
control, so there is none here.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

_NAMES: Final = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_REST: Final = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative "
    "Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 "
    "Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec "
    "00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8"
    "charset=iso-8859-1,utf-,*,enq=0."
)


def _with_length(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


DICTIONARY: Final = b"".join(_with_length(n.replace("_", " ").encode()) for n in _NAMES.split()) + _REST.encode()
"""The draft's, section 2.6.10.1: both ends compress headers with it."""

_CONTROL: Final = 0x8003
"""Control bit and version."""
_FIN: Final = 1
_HEADER: Final = 8
CANCEL: Final = 5
"""Status of a reset: the stream is not wanted any more."""


class FrameKind(IntEnum):
    """Control frames that are handled here."""

    SYN_STREAM = 1
    SYN_REPLY = 2
    RST_STREAM = 3
    PING = 6
    GOAWAY = 7


class SpdyError(Exception):
    """The peer sent what is no SPDY."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The peer opens a stream. Header names in lower case."""

    stream: int
    headers: dict[str, str]
    fin: bool


@dataclass(frozen=True, slots=True)
class Data:
    stream: int
    payload: bytes
    fin: bool
    """The peer sends no more on this stream."""


@dataclass(frozen=True, slots=True)
class Reset:
    stream: int


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class GoAway:
    """The peer opens no more streams."""


Frame = StreamOpened | Data | Reset | Ping | GoAway


class SPDYPeer:
    """One connection: headers of all its streams share one compression state in each direction."""

    def __init__(self) -> None:
        self._buffer = b""
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def receive(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises SpdyError."""
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _HEADER:
            first, flags_length = struct.unpack_from(">II", self._buffer)
            end = _HEADER + (flags_length & 0xFFFFFF)
            if len(self._buffer) < end:
                break
            payload, self._buffer = self._buffer[_HEADER:end], self._buffer[end:]
            frame = self._frame(first, flags_length >> 24, payload)
            if frame is not None:
                frames.append(frame)
        return frames

    def _frame(self, first: int, flags: int, payload: bytes) -> Frame | None:
        if not first >> 31:
            return Data(first, payload, bool(flags & _FIN))
        if first >> 16 != _CONTROL:
            raise SpdyError(f"frame of version {first >> 16 & 0x7FFF}, expected 3")
        try:
            match first & 0xFFFF:
                case FrameKind.SYN_STREAM:
                    return StreamOpened(_number(payload), self._headers(payload[10:]), bool(flags & _FIN))
                case FrameKind.RST_STREAM:
                    return Reset(_number(payload))
                case FrameKind.PING:
                    return Ping(_number(payload, mask=0xFFFFFFFF))
                case FrameKind.GOAWAY:
                    return GoAway()
                case _:
                    return None  # settings and window updates change nothing here
        except (struct.error, zlib.error, UnicodeDecodeError) as error:
            raise SpdyError(f"broken frame: {error}") from error

    def _headers(self, block: bytes) -> dict[str, str]:
        text = self._inflate.decompress(block)
        (count,) = struct.unpack_from(">I", text)
        words: list[str] = []
        at = 4
        for _ in range(count * 2):
            (size,) = struct.unpack_from(">I", text, at)
            words.append(text[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return {name.lower(): value for name, value in zip(words[::2], words[1::2], strict=True)}

    def reply(self, stream: int) -> bytes:
        """Accepts a stream, without headers. To be sent in the order of the calls: compression has state."""
        block = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _control(FrameKind.SYN_REPLY, struct.pack(">I", stream) + block)


def data(stream: int, payload: bytes, *, fin: bool = False) -> bytes:
    """At most 16 MiB."""
    return struct.pack(">II", stream, (_FIN if fin else 0) << 24 | len(payload)) + payload


def reset(stream: int) -> bytes:
    return _control(FrameKind.RST_STREAM, struct.pack(">II", stream, CANCEL))


def ping(number: int) -> bytes:
    return _control(FrameKind.PING, struct.pack(">I", number))


def _control(kind: int, payload: bytes) -> bytes:
    return struct.pack(">HHI", _CONTROL, kind, len(payload)) + payload


def _number(payload: bytes, mask: int = 0x7FFFFFFF) -> int:
    return struct.unpack_from(">I", payload)[0] & mask
