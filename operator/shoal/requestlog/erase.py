"""Retention, and deletion by tenant or user. All functions block: run them in their own thread, one at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from typing import IO, Final

from shoal.requestlog.frames import PLAIN, SEALED, Sealer, Unreadable, read_frames
from shoal.requestlog.logkeys import LogKeys
from shoal.requestlog.query import is_user
from shoal.requestlog.store import LogFile, LogStore

DEFAULT_DAYS: Final = 30
"""Used where a tenant's retention was never set."""


@dataclass(slots=True)
class Erased:
    files: int = 0
    """Files removed or rewritten."""
    entries: int | None = 0
    """Deleted entries; None: whole files were removed, without counting."""
    unreadable: list[str] = field(default_factory=list[str])
    """Files that may still contain the user, and why."""


def sweep(store: LogStore, days: Mapping[str, int], today: date) -> int:
    """Deletes files older than their tenant's retention; returns their number. `days` has the existing Tenants; for a
    deleted one its last stored retention applies. Raises OSError."""
    count = 0
    for tenant in store.tenants():
        kept = days.get(tenant)
        if kept is None:
            kept = store.retention(tenant)
        first = (today - timedelta(days=DEFAULT_DAYS if kept is None else kept)).isoformat()
        for day in store.dates(tenant):
            if day < first:
                for file in store.files(tenant, day):
                    store.remove(file)
                    count += 1
        if tenant not in days:
            store.forget(tenant)
    return count


def erase_tenant(store: LogStore, tenant: str, is_open: Callable[[LogFile], bool]) -> Erased:
    """Deletes all files of a tenant except one that is still open. Raises OSError."""
    erased = Erased(entries=None)
    for file in list(_closed(store, tenant, is_open)):
        store.remove(file)
        erased.files += 1
    store.forget(tenant)
    return erased


def erase_user(store: LogStore, keys: LogKeys, tenant: str, user: str, is_open: Callable[[LogFile], bool]) -> Erased:
    """Rewrites the files of a tenant without the entries of a user. Raises OSError."""
    erased = Erased()
    matches = is_user(tenant, user)
    for file in list(_closed(store, tenant, is_open)):
        try:
            count, left = _count(store, file, keys, matches)
            if not count:
                continue
            if left:
                if keys.encrypts and keys.current is None:
                    raise Unreadable(keys.error or "there is no key to rewrite it")
                sealer = Sealer(tenant, keys.current)
                stem = file.name.removesuffix(SEALED).removesuffix(PLAIN)
                store.replace(file, stem + sealer.suffix, partial(_rewrite, store, file, keys, sealer, matches))
            else:
                store.remove(file)
        except FileNotFoundError:
            continue
        except Unreadable as why:
            erased.unreadable.append(f"{file.key}: {why}")
            continue
        erased.files += 1
        erased.entries = (erased.entries or 0) + count
    return erased


def _closed(store: LogStore, tenant: str, is_open: Callable[[LogFile], bool]) -> Iterator[LogFile]:
    for day in store.dates(tenant):
        yield from (file for file in store.files(tenant, day) if not is_open(file))


def _count(store: LogStore, file: LogFile, keys: LogKeys, matches: Callable[[bytes], bool]) -> tuple[int, int]:
    """Number of entries of the user, and of others."""
    count = left = 0
    with store.read(file) as opened:
        for frame in read_frames(opened, file.name, file.tenant, keys):
            for line in frame.splitlines():
                if matches(line):
                    count += 1
                else:
                    left += 1
    return count, left


def _rewrite(
    store: LogStore, file: LogFile, keys: LogKeys, sealer: Sealer, matches: Callable[[bytes], bool], out: IO[bytes]
) -> None:
    out.write(sealer.head)
    with store.read(file) as opened:
        for frame in read_frames(opened, file.name, file.tenant, keys):
            kept = b"".join(line for line in frame.splitlines(keepends=True) if not matches(line))
            if kept:
                out.write(sealer.frame(kept))
