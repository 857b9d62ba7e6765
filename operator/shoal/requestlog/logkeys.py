"""Keys of encryption at rest: a mounted Secret, read again when it changes.

Each of its entries is a key of 32 bytes (raw, base64 or hex). `current` encrypts; the other keys only decrypt. Keys are
identified by their fingerprint, so that an entry can be renamed when a new key is added.
"""

import base64
import binascii
import re
from pathlib import Path
from typing import Final

import structlog

from shoal.api import keys

log = structlog.get_logger()

CURRENT: Final = "current"
KEY_BYTES: Final = 32
_HEX: Final = re.compile(rb"[0-9a-fA-F]{64}")


class LogKeys:
    """The keys in a folder. Without a folder nothing is encrypted, and encrypted files cannot be read."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        # Each is replaced in one assignment, because the writer and readers use them from their own threads.
        self._keys: dict[str, bytes] = {}
        self._current: tuple[str, bytes] | None = None
        self._seen: list[tuple[str, int, int]] | None = None
        self.error: str | None = None
        """Why nothing may be written: no log is better than one that is not encrypted."""
        self.refresh()

    @property
    def encrypts(self) -> bool:
        return self._directory is not None

    @property
    def current(self) -> tuple[str, bytes] | None:
        """Fingerprint and key."""
        return self._current

    def get(self, fingerprint: str) -> bytes | None:
        return self._keys.get(fingerprint)

    def refresh(self) -> None:
        """Reads the keys again if the files changed. Blocks briefly."""
        if self._directory is None:
            return
        try:
            paths = sorted(p for p in self._directory.iterdir() if not p.name.startswith("..") and p.is_file())
            seen = [(path.name, (stat := path.stat()).st_mtime_ns, stat.st_ino) for path in paths]
            if seen == self._seen:
                return
            read = {path.name: _key(path.read_bytes()) for path in paths}
        except OSError as error:
            self._set_error(f"the keys of the request log cannot be read: {error.strerror}")
            return
        self._seen = seen
        self._keys = {keys.fingerprint(key): key for key in read.values() if key is not None}
        wrong = [name for name, key in read.items() if key is None]
        current = read.get(CURRENT)
        self._current = None if current is None else (keys.fingerprint(current), current)
        if current is None:
            self._set_error(
                f"the Secret of the request log's keys has no usable entry {CURRENT!r}: put {KEY_BYTES} random bytes "
                "there (openssl rand -base64 32)"
            )
        else:
            self.error = None
            log.info("request log keys", current=keys.fingerprint(current), known=sorted(self._keys), unusable=wrong)

    def _set_error(self, error: str) -> None:
        if error != self.error:
            log.error("request log: nothing is written", reason=error)
        self.error = error


def _key(raw: bytes) -> bytes | None:
    if len(raw) == KEY_BYTES:
        return raw
    text = raw.strip()
    if _HEX.fullmatch(text):
        return bytes.fromhex(text.decode())
    try:
        decoded = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return decoded if len(decoded) == KEY_BYTES else None
