"""The token of the gateway's own pod, which the kubelet mounts and renews."""

from pathlib import Path
from typing import Final

_LONGEST: Final = 16_384


class TokenFile:
    """The mounted token. A call reads it again if the file has changed, and returns it; empty while there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._token = ""

    def __call__(self) -> str:
        try:
            stat = self._path.stat()  # follows the kubelet's symlinks: each renewal is a new file
            seen = stat.st_mtime_ns, stat.st_ino
            if seen != self._seen:
                token = self._path.read_bytes()[:_LONGEST].decode("ascii").strip()
                # Only printable text may be sent as a header.
                self._token = token if token.isprintable() else ""
                self._seen = seen
        except (OSError, ValueError):
            self._token, self._seen = "", None
        return self._token
