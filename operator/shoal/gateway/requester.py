"""Who sends a request: its API key, its tenant's limits, and what of these is reserved for it."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from shoal.core.access import Denied, KeyIdentity, authenticate
from shoal.gateway.quota import Quota, Reserved
from shoal.gateway.shared import Gateway
from shoal.net import errors

_DENIED: Final = {
    "unknown": (401, "Incorrect API key provided.", "invalid_api_key"),
    "disabled": (401, "This API key is disabled.", "disabled_api_key"),
    "expired": (401, "This API key has expired.", "expired_api_key"),
    "suspended": (403, "This account is suspended.", "tenant_suspended"),
}
_API_KEY: Final = b"x-api-key"
"""Where Anthropic's SDK puts the key."""


class Requester:
    __slots__ = ("_app", "key_hash", "quota", "reserved", "route_quota")

    def __init__(self, app: Gateway) -> None:
        self._app = app
        self.key_hash = ""
        self.quota: Quota | None = None
        """The tenant's limits and budget; None: it has none."""
        self.route_quota: Quota | None = None
        """What the route that the request names lets the tenant send; None: it names none, or one without limits."""
        self.reserved: Reserved | None = None

    def identify(self, headers: Mapping[bytes, bytes]) -> KeyIdentity:
        """Authenticates the key of these headers. Raises ApiError."""
        header = headers.get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        key = key.strip()
        if not header:
            key = headers.get(_API_KEY, b"").strip()
        elif scheme.lower() != b"bearer":
            key = b""
        if not key:
            raise errors.unauthorized(
                401, "No API key. Send `Authorization: Bearer <key>` or `x-api-key: <key>`.", "missing_api_key"
            )
        if not self._app.directory.complete:
            # A gateway that has not read all keys must not reject one: SDKs do not retry a 401.
            raise errors.starting()
        self.key_hash = hashlib.sha256(key).hexdigest()
        identity = self.check_key()
        self.quota = self._app.quotas.of(identity)
        return identity

    def check_key(self) -> KeyIdentity:
        """Authenticates the key. Called again after a wait, in case the key was revoked or the budget was used up.
        Raises ApiError."""
        found = authenticate(self._app.directory.snapshot.keys, self.key_hash, datetime.now(UTC))
        if isinstance(found, Denied):
            raise errors.unauthorized(*_DENIED[found.reason])
        if self.reserved is not None and self._app.quotas.of(found) is not None:
            self.reserved.recheck()
        return found

    def same_tenant(self, before: KeyIdentity) -> KeyIdentity:
        """Authenticates the key again after a wait. A key that another tenant has now is refused: what was reserved
        belongs to the previous tenant. Raises ApiError."""
        now = self.check_key()
        if now.tenant != before.tenant:
            raise errors.unauthorized(*_DENIED["unknown"])
        return now
