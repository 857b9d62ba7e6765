"""Who calls the ledger: by a key derived from an install key (`api/keys.py`), as a bearer token or in x-shoal-key."""

import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.api import keys, names


class LedgerKeys(Protocol):
    """The part of the key ring that is needed here (`serving.installkey.KeyRing`)."""

    def bearers_of(self, role: keys.Role, subject: str) -> Iterable[str]:
        """What `role` says to `subject`, by each valid install key."""
        ...

    def old_bearers_of(self, role: keys.Role, subject: str) -> Iterable[str]:
        """Of those, the ones by an install key of before the role keys."""
        ...


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """Whose key a call has."""

    role: keys.Role
    old: bool
    """It is derived from the install key of before (`InstallKey.old`)."""


def match_key(headers: Mapping[bytes, bytes], roles: Collection[keys.Role], known: LedgerKeys) -> KeyMatch | None:
    """Whose key the call has, among `roles`. All are compared, so that the time tells nothing."""
    given = headers.get(names.HEADER_KEY.encode(), b"").strip()
    if not given:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else b""
    found: KeyMatch | None = None
    for role in roles:
        old = set(known.old_bearers_of(role, keys.LEDGER))
        for key in known.bearers_of(role, keys.LEDGER):
            if hmac.compare_digest(given, key.encode()):
                found = KeyMatch(role, key in old)
    return found if given else None
