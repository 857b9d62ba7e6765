"""The format of a log file: independent frames, so that a truncated file is readable up to its last whole frame.

Not encrypted (`.jsonl.zst`): zstd frames with checksums, one after the other; `zstd -dc FILE` prints them.
Encrypted (`.jsonl.zst.enc`): a head, then per frame its length (4 bytes, big-endian) and AES-256-GCM of a zstd frame.

    head = "SHOALLOG1" | length of the key's name (1 byte) | the key's name | salt (32 bytes)
    key of the file = HKDF-SHA256(key, salt, "shoal-log:" + tenant); nonce = number of the frame (12 bytes);
    the head is authenticated with every frame

The salt is the file's own, so no nonce is used twice under a key, and no frame can be moved to another place, file or
tenant.
"""

import os
import struct
from collections.abc import Iterator
from typing import IO, Final

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.requestlog.logkeys import LogKeys

PLAIN: Final = ".jsonl.zst"
SEALED: Final = ".jsonl.zst.enc"
MOST_FRAME: Final = 256 << 20
"""Most bytes of one frame; a larger one is invalid."""
_MAGIC: Final = b"SHOALLOG1"
_SALT: Final = 32
_LENGTH: Final = struct.Struct(">I")
_LEVEL: Final = 3
_READ: Final = 256 << 10


class Unreadable(Exception):
    """A file that cannot be read at all; the message has the reason."""


class Sealer:
    """Creates the frames of one file. Not thread-safe."""

    def __init__(self, tenant: str, key: tuple[str, bytes] | None) -> None:
        """Without a key the frames are not encrypted."""
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._number = 0
        self._cipher: AESGCM | None = None
        self.head = b""
        """First bytes of the file."""
        self.suffix = PLAIN
        if key is not None:
            name = key[0].encode()
            salt = os.urandom(_SALT)
            self.head = _MAGIC + bytes([len(name)]) + name + salt
            self.suffix = SEALED
            self._cipher = _cipher(key[1], salt, tenant)

    def frame(self, lines: bytes) -> bytes:
        """Encodes lines as the file's next frame. If a frame was not written, no further frame may follow."""
        compressed = self._compressor.compress(lines)
        if self._cipher is None:
            return compressed
        sealed = self._cipher.encrypt(self._number.to_bytes(12), compressed, self.head)
        self._number += 1
        return _LENGTH.pack(len(sealed)) + sealed


def read_frames(file: IO[bytes], name: str, tenant: str, keys: LogKeys) -> Iterator[bytes]:
    """The lines of each whole frame; bytes after the last whole frame are ignored.

    Raises:
        Unreadable: the key is unknown, or the file is not a log of this tenant.
        OSError: a disk error.
    """
    if name.endswith(SEALED):
        return _sealed(file, tenant, keys)
    return _plain(file)


def _plain(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while rest or (rest := file.read(_READ)):
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts: list[bytes] = []
        try:
            while True:
                parts.append(frame.decompress(rest))
                if frame.eof:
                    break
                if not (rest := file.read(_READ)):
                    return
        except zstandard.ZstdError:
            return
        rest = frame.unused_data
        yield b"".join(parts)


def _sealed(file: IO[bytes], tenant: str, keys: LogKeys) -> Iterator[bytes]:
    head = file.read(len(_MAGIC) + 1)
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise Unreadable("this is no encrypted request log")
    if len(head) <= len(_MAGIC):
        return
    named = file.read(head[-1] + _SALT)
    if len(named) < head[-1] + _SALT:
        return
    fingerprint, salt = named[: head[-1]].decode(errors="replace"), named[head[-1] :]
    key = keys.get(fingerprint)
    if key is None:
        raise Unreadable(f"its key {fingerprint} is not among those of the request log")
    cipher, head = _cipher(key, salt, tenant), head + named
    decompressor = zstandard.ZstdDecompressor()
    number = 0
    while len(length := file.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(length)
        if size > MOST_FRAME:
            return
        sealed = file.read(size)
        if len(sealed) < size:
            return
        try:
            lines = decompressor.decompress(cipher.decrypt(number.to_bytes(12), sealed, head))
        except (InvalidTag, zstandard.ZstdError):
            if number == 0:
                raise Unreadable("it was changed, or belongs to another tenant") from None
            return
        number += 1
        yield lines


def _cipher(key: bytes, salt: bytes, tenant: str) -> AESGCM:
    derived = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"shoal-log:" + tenant.encode()).derive(key)
    return AESGCM(derived)
