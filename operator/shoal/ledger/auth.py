"""Who calls the ledger: by a key derived from an install key (`api/keys.py`), as a bearer token or in x-shoal-key."""

import hmac
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from shoal.api import keys, names


class Keys(Protocol):
    """The part of the key ring that is needed here (`gateway.installkey.KeyRing`)."""

    def said_by(self, role: keys.Role, subject: str) -> Iterable[str]:
        """What `role` says to `subject`, by each valid install key."""
        ...


def role_of(headers: Mapping[bytes, bytes], roles: Collection[keys.Role], known: Keys) -> keys.Role | None:
    """Whose key the call has, among `roles`. All are compared, so that the time tells nothing."""
    given = headers.get(names.HEADER_KEY.encode(), b"").strip()
    if not given:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else b""
    found: keys.Role | None = None
    for role in roles:
        for key in known.said_by(role, keys.LEDGER):
            if hmac.compare_digest(given, key.encode()):
                found = role
    return found if given else None
