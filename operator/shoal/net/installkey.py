"""A process's keys, from its mounted Secret: the keys that it shows to others, and those that it accepts."""

import hashlib
import hmac
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

import structlog

from shoal.api import keys

log = structlog.get_logger()

_FILES: Final = ("current", "previous")


class _Source(Protocol):
    def bearer_for(self, role: keys.Role, subject: str) -> str | None: ...


class KeyRing:
    """Keys by the fingerprint of their install key, read again when the mounted Secret changes. The folder may appear
    later. `old`: where the install key of before is mounted while pods live that know no other."""

    def __init__(self, directory: Path, old: Path | None = None) -> None:
        self._paths: list[tuple[Path, Callable[[bytes], tuple[str, _Source]]]] = [
            (directory / name, _read_bundle) for name in _FILES
        ]
        self._paths += [(old / name, _read_old) for name in _FILES if old is not None]
        self._keys: dict[str, _Source] = {}
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._derived: dict[tuple[str, str], str] = {}
        self._role_keys: dict[tuple[keys.Role, str], tuple[str, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def refresh(self) -> bool:
        """Reads the files when they have changed; True when they had. A few small files: cheap enough to poll."""
        seen: list[tuple[str, int, int]] = []
        found: list[tuple[Path, Callable[[bytes], tuple[str, _Source]]]] = []
        for path, read in self._paths:
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((path, read))
            seen.append((str(path), stat.st_mtime_ns, stat.st_ino))
        if tuple(seen) == self._seen:
            return False
        known: dict[str, _Source] = {}
        for path, read in found:
            try:
                if value := path.read_bytes():
                    fingerprint, source = read(value)
                    known.setdefault(fingerprint, source)
            except OSError as error:
                log.warning("cannot read the keys", path=str(path), error=error.strerror)
                return False
            except ValueError:
                # Of the error nothing: it would show what is in the file.
                log.warning("the keys are not understood; keeping those before", path=str(path))
                return False
        self._seen = tuple(seen)
        changed = known != self._keys
        self._keys = known
        self._derived.clear()
        self._role_keys.clear()
        if changed:
            log.info("install keys", fingerprints=sorted(known))
        return changed

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        """The gateway's key towards the pods of a Model; None when the pod's install key is not known (any more)."""
        if fingerprint is None:
            return None
        known = self._derived.get((fingerprint, model_uid))
        if known is None and (source := self._keys.get(fingerprint)) is not None:
            known = source.bearer_for("gateway", model_uid)
            if known is not None:
                self._derived[fingerprint, model_uid] = known
        return known

    def demand_keys(self, role: keys.Role) -> tuple[str, ...]:
        """What `role` says to a gateway's demand stream, by each valid install key, the current one's first."""
        return self.bearers_of(role, keys.DEMAND)

    def bearers_of(self, role: keys.Role, subject: str) -> tuple[str, ...]:
        """What `role` says to `subject` (a Model's uid, `keys.DEMAND`, `keys.LEDGER`), by each valid install key, the
        current one's first; empty while there is none."""
        known = self._role_keys.get((role, subject))
        if known is None:
            known = self._role_keys[role, subject] = tuple(
                key for source in self._keys.values() if (key := source.bearer_for(role, subject)) is not None
            )
        return known

    def old_bearers_of(self, role: keys.Role, subject: str) -> tuple[str, ...]:
        """Of the same, those that a process of before the role keys says: by an install key of before."""
        olds = (source for source in self._keys.values() if isinstance(source, keys.InstallKey) and source.old)
        return tuple(source.bearer_for(role, subject) for source in olds)

    def cache_salt(self, model_uid: str, space: str) -> str:
        """The salt with which the Model's engines keep the prompts of one space apart (`affinity.py`): the same at
        every gateway and after a restart. Another install key makes another salt, so caches are cold once.

        Without a key it is made of nothing, and still tells spaces apart: a client cannot send one.
        """
        bearers = self.bearers_of("gateway", keys.CACHE_SALT)
        secret = bearers[0] if bearers else ""
        return _cache_salt(secret, model_uid, space)

    def mark_secret(self, model_uid: str, adapter_uid: str, space: str) -> int:
        """32 bits with which checksums of prompts begin (`core/advice/marks.py`), the same at every gateway."""
        bearers = self.bearers_of("gateway", keys.PROMPT_MARKS)
        secret = bearers[0] if bearers else ""
        return _mark_secret(secret, model_uid, adapter_uid, space)


@lru_cache(maxsize=4096)
def _mark_secret(secret: str, model_uid: str, adapter_uid: str, space: str) -> int:
    named = f"{model_uid}\0{adapter_uid}\0{space}".encode()
    return int.from_bytes(hmac.digest(secret.encode(), named, hashlib.sha256)[:4])


@lru_cache(maxsize=4096)  # each request asks, and the HMAC was the largest single cost of a small one
def _cache_salt(secret: str, model_uid: str, space: str) -> str:
    return hmac.digest(secret.encode(), f"{model_uid}\0{space}".encode(), hashlib.sha256).hex()[:32]


def _read_bundle(value: bytes) -> tuple[str, _Source]:
    found = keys.KeyBundle.model_validate_json(value)
    return found.fingerprint, found


def _read_old(value: bytes) -> tuple[str, _Source]:
    return keys.fingerprint(value), keys.InstallKey(value, old=True)
