"""The install key's files: from them the gateway derives what it says to agents and engines."""

from pathlib import Path

import structlog

from shoal.api import keys

log = structlog.get_logger()


class KeyRing:
    """Install keys by fingerprint, read again when the mounted Secret changes. The folder may appear later."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keys: dict[str, bytes] = {}
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._derived: dict[tuple[str, str], str] = {}
        self._said: dict[tuple[keys.Role, str], tuple[str, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def refresh(self) -> bool:
        """Reads the files when they have changed; True when they had. Two small files: cheap enough to poll."""
        found: dict[str, Path] = {}
        seen: list[tuple[str, int, int]] = []
        for name in ("current", "previous"):
            path = self._directory / name
            try:
                stat = path.stat()
            except OSError:
                continue
            found[name] = path
            seen.append((name, stat.st_mtime_ns, stat.st_ino))
        if tuple(seen) == self._seen:
            return False
        read: dict[str, bytes] = {}
        for path in found.values():
            try:
                value = path.read_bytes()
            except OSError as error:
                log.warning("cannot read the install key", path=str(path), error=error.strerror)
                return False
            if value:
                read[keys.fingerprint(value)] = value
        self._seen = tuple(seen)
        changed = read != self._keys
        self._keys = read
        self._derived.clear()
        self._said.clear()
        if changed:
            log.info("install keys", fingerprints=sorted(read))
        return changed

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        """The gateway's key towards the pods of a Model; None when the pod's install key is not known (any more)."""
        if fingerprint is None:
            return None
        known = self._derived.get((fingerprint, model_uid))
        if known is None and (install_key := self._keys.get(fingerprint)) is not None:
            known = self._derived[fingerprint, model_uid] = keys.derive(install_key, "gateway", model_uid)
        return known

    def demand_keys(self, role: keys.Role) -> tuple[str, ...]:
        """What `role` says to a gateway's demand stream, by each valid install key, the current one's first."""
        return self.said_by(role, keys.DEMAND)

    def said_by(self, role: keys.Role, subject: str) -> tuple[str, ...]:
        """What `role` says to `subject` (a Model's uid, `keys.DEMAND`, `keys.LEDGER`), by each valid install key, the
        current one's first; empty while there is none."""
        known = self._said.get((role, subject))
        if known is None:
            known = self._said[role, subject] = tuple(keys.derive(k, role, subject) for k in self._keys.values())
        return known
