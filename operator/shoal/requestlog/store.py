"""Stores the files of request logs in a folder, as `tenant=<t>/date=<YYYY-MM-DD>/<gateway>-<ms>.jsonl.zst`.

The number is the time at which the file was created, in ms since 1970; all its entries ended after it. Next to the
dates there is a file `retention`: the tenant's retentionDays, used after its Tenant was deleted.
"""

import contextlib
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

from shoal.requestlog.frames import PLAIN, SEALED

_TENANT: Final = "tenant="
_DATE: Final = "date="
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_NAME: Final = re.compile(rf".+-(\d{{1,16}})(?:{re.escape(SEALED)}|{re.escape(PLAIN)})")
RETENTION: Final = "retention"


@dataclass(frozen=True, slots=True)
class LogFile:
    tenant: str
    date: str
    name: str
    size: int

    @property
    def key(self) -> str:
        """Path of the file in every store."""
        return f"{_TENANT}{self.tenant}/{_DATE}{self.date}/{self.name}"

    @property
    def began(self) -> int:
        """When the file was created, in ms since 1970; 0 if the name has no time."""
        match = _NAME.fullmatch(self.name)
        return int(match[1]) if match else 0


class LogStore(Protocol):
    """A store of log files. All methods block, and may raise OSError."""

    def tenants(self) -> list[str]: ...

    def dates(self, tenant: str) -> list[str]:
        """The newest first."""
        ...

    def files(self, tenant: str, date: str) -> list[LogFile]:
        """The newest first."""
        ...

    def read(self, file: LogFile) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Opens a file. Raises FileNotFoundError if it no longer exists."""
        ...

    def replace(self, file: LogFile, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Replaces a file by new content under `name`, atomically."""
        ...

    def remove(self, file: LogFile) -> None: ...

    def retention(self, tenant: str) -> int | None:
        """The tenant's last stored retention; None: never stored."""
        ...

    def keep_retention(self, tenant: str, days: int) -> None: ...

    def forget(self, tenant: str) -> None:
        """Removes the tenant's other data, if it has no more files."""
        ...


class Folder:
    """A `LogStore` in a folder. Only the owner can read its files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tenants(self) -> list[str]:
        return sorted(name.removeprefix(_TENANT) for name in _names(self.root) if name.startswith(_TENANT))

    def dates(self, tenant: str) -> list[str]:
        found = (name.removeprefix(_DATE) for name in _names(self._of(tenant)) if name.startswith(_DATE))
        return sorted(filter(_DAY.fullmatch, found), reverse=True)

    def files(self, tenant: str, date: str) -> list[LogFile]:
        folder = self._of(tenant) / f"{_DATE}{date}"
        found: list[LogFile] = []
        for name in _names(folder):
            if _NAME.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    found.append(LogFile(tenant, date, name, (folder / name).stat().st_size))
        return sorted(found, key=lambda file: (file.began, file.name), reverse=True)

    def path(self, file: LogFile) -> Path:
        return self.root / file.key

    @contextlib.contextmanager
    def read(self, file: LogFile) -> Generator[IO[bytes]]:
        with self.path(file).open("rb") as opened:
            yield opened

    def create(self, file: LogFile) -> IO[bytes]:
        """Creates a new file; raises if it exists."""
        path = self.path(file)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0)

    def replace(self, file: LogFile, name: str, write: Callable[[IO[bytes]], None]) -> None:
        path = self.path(file)
        part = path.with_name(f".{name}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as out:
                write(out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(path.with_name(name))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        if name != file.name:
            path.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def remove(self, file: LogFile) -> None:
        path = self.path(file)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has other files
            path.parent.rmdir()

    def retention(self, tenant: str) -> int | None:
        try:
            return int((self._of(tenant) / RETENTION).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def keep_retention(self, tenant: str, days: int) -> None:
        folder = self._of(tenant)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = folder / f".{RETENTION}.part"
        part.write_text(str(days), encoding="ascii")
        part.replace(folder / RETENTION)

    def forget(self, tenant: str) -> None:
        folder = self._of(tenant)
        for date in self.dates(tenant):
            with contextlib.suppress(OSError):
                (folder / f"{_DATE}{date}").rmdir()
        if not self.dates(tenant):
            (folder / RETENTION).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def clean(self) -> None:
        """Removes files left by an interrupted replacement."""
        for part in self.root.glob(f"{_TENANT}*/{_DATE}*/.*.part"):
            part.unlink(missing_ok=True)

    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for t in self.tenants() for d in self.dates(t) for f in self.files(t, d))

    def _of(self, tenant: str) -> Path:
        return self.root / f"{_TENANT}{tenant}"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
