"""The open log files, one per active tenant; for the writer thread only, except `is_open`."""

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, Final

from shoal.requestlog.frames import Sealer
from shoal.requestlog.store import Folder, LogFile

MOST_OPEN: Final = 256
"""Most open files; beyond this number the oldest is closed."""


@dataclass(slots=True)
class _Open:
    where: LogFile
    file: IO[bytes]
    sealer: Sealer
    key: str | None
    """Fingerprint of the key; None: not encrypted."""
    began: float
    size: int = 0
    synced: int = 0


class Growing:
    """The open files. `gateway` is in their names. A file is closed at `rotate_bytes` or when `rotate_seconds` old."""

    def __init__(self, folder: Folder, gateway: str, rotate_bytes: int, rotate_seconds: float) -> None:
        self._folder = folder
        self._gateway = gateway
        self._rotate_bytes = rotate_bytes
        self._rotate_seconds = rotate_seconds
        self._open: dict[str, _Open] = {}
        self._names: dict[str, str] = {}
        """Names of files that are open or about to be: set before they appear in the folder."""
        self._last_number = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def is_open(self, file: LogFile) -> bool:
        """Whether a file is still being written. Callable from any thread."""
        return self._names.get(file.tenant) == file.name

    def append(self, tenant: str, key: tuple[str, bytes] | None, lines: bytes) -> int:
        """Writes lines as a frame; returns its size in bytes. After any error the file ends with its last whole frame.

        Raises:
            OSError: a disk error.
        """
        try:
            opened = self._file(tenant, key)
            frame = opened.sealer.frame(lines)
            _write(opened.file, frame)
        except BaseException:
            self._abandon(tenant)
            raise
        opened.size += len(frame)
        if opened.size >= self._rotate_bytes:
            self.close(tenant)
        return len(frame)

    def rotate(self) -> None:
        """Closes files that are too old, or of an earlier day. Raises OSError."""
        now, today = time.monotonic(), _today()
        for tenant, opened in list(self._open.items()):
            if now - opened.began >= self._rotate_seconds or opened.where.date != today:
                self.close(tenant)

    def sync(self) -> None:
        """Syncs all open files to the disk. Raises OSError."""
        for tenant in list(self._open):
            self._sync(tenant)

    def close(self, tenant: str | None = None) -> None:
        """Closes one tenant's file, or all. Raises OSError."""
        for name in list(self._open) if tenant is None else [tenant]:
            self._sync(name)
            if (opened := self._open.pop(name, None)) is not None:
                opened.file.close()
                self._names.pop(name, None)

    def _file(self, tenant: str, key: tuple[str, bytes] | None) -> _Open:
        date, name = _today(), key[0] if key else None
        opened = self._open.get(tenant)
        if opened is not None:
            if opened.where.date == date and opened.key == name:
                return opened
            self.close(tenant)
        while len(self._open) >= MOST_OPEN:
            self.close(next(iter(self._open)))
        sealer = Sealer(tenant, key)
        self._last_number = max(self._last_number + 1, time.time_ns() // 1_000_000)
        where = LogFile(tenant, date, f"{self._gateway}-{self._last_number}{sealer.suffix}", 0)
        self._names[tenant] = where.name
        file = self._folder.create(where)
        opened = self._open[tenant] = _Open(where, file, sealer, name, time.monotonic())
        _write(file, sealer.head)
        opened.size = len(sealer.head)
        return opened

    def _sync(self, tenant: str) -> None:
        opened = self._open.get(tenant)
        if opened is None or opened.synced == opened.size:
            return
        try:
            os.fsync(opened.file.fileno())
        except OSError:
            self._abandon(tenant)
            raise
        opened.synced = opened.size

    def _abandon(self, tenant: str) -> None:
        """Truncates the file after its last whole frame and closes it: a partial frame would hide all later ones."""
        opened = self._open.pop(tenant, None)
        if opened is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(opened.file.fileno(), opened.size)
            with contextlib.suppress(OSError):
                opened.file.close()
        self._names.pop(tenant, None)


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _write(file: IO[Any], data: bytes) -> None:
    """Writes all bytes: a full disk may take only a part at first."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
