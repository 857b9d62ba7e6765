"""Which process calls: by the key of its role (`api/keys.py`), and by its certificate where the listener has mutual
TLS."""

import hmac
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from shoal.api import names
from shoal.api.keys import Role
from shoal.net.asgi import unproved
from shoal.net.errors import Problem
from shoal.net.hub import Caller
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

BEARER: Final = ("authorization",)
"""A key is given as a bearer token only."""
LONGEST_NAME: Final = 253
"""Letters that are kept of what a caller says of itself."""

RoleKeys = Callable[[Role], Iterable[str]]
"""The keys with which a role authenticates here, one per valid install key."""


def given_key(headers: Mapping[str, str], places: Iterable[str] = BEARER) -> str:
    """The key of a call, from the first of these headers that has one; "" without."""
    for place in places:
        value = headers.get(place, "").strip()
        if place == "authorization":
            scheme, _, token = value.partition(" ")
            value = token.strip() if scheme.lower() == "bearer" else ""
        if value:
            return value
    return ""


def role_of(given: str, roles: Iterable[Role], keys: RoleKeys) -> Role | None:
    """The role whose key is given. All keys are compared, so that timing reveals nothing."""
    found: Role | None = None
    for role in roles:
        for key in keys(role):
            if hmac.compare_digest(given.encode(), key.encode()):
                found = role
    return found if given else None


class RoleGuard:
    """Lets callers with a key of one of `roles` through, over mutual TLS only with a certificate of the same role.

    `refused` is the message to a caller without a key. Where keys of more roles are `known`, a caller with one of
    those gets a refusal that names its role. `places` are the headers that may have the key.
    """

    def __init__(
        self,
        roles: Collection[Role],
        keys: RoleKeys,
        refused: str,
        *,
        known: Collection[Role] = (),
        places: tuple[str, ...] = BEARER,
        credentials: TLSCredentials | None = None,
    ) -> None:
        self._roles = roles
        self._keys = keys
        self._refused = refused
        self._known = known or roles
        self._places = places
        self._credentials = credentials

    async def __call__(self, request: ShellRequest) -> None:
        role = role_of(given_key(request.headers, self._places), self._known, self._keys)
        if role is None:
            raise Problem(401, self._refused, {"www-authenticate": "Bearer"})
        if (why := unproved(self._credentials, request.scope, role)) is not None:
            raise Problem(403, why)
        if role not in self._roles:
            raise Problem(403, f"the key of role {role} may not do this: {', '.join(self._roles)} may")
        said = (request.headers.get(name, "")[:LONGEST_NAME] for name in (names.HEADER_CALLER, names.HEADER_BOOT))
        request.caller = Caller(role, *said)
