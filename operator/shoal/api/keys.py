"""Keys between Shoal's processes. All keys are derived in two steps from one install key, so none has to be
distributed.

    role key    = HMAC-SHA256(install key, "role:" + role)
    key         = HMAC-SHA256(role key, subject), hex

`role` is the role of the caller. `subject` is the callee: a Model's uid (its pods), LEDGER or DEMAND. Only the operator
has the install key. Every other process has a `KeyBundle`: its own role key, and the keys with which others call it,
which are valid for its own subject only. An engine's client key is the gateway's key. Its admin key belongs to a role
that no process has, and exists only in the pod's own Secret. Two install keys can be valid at the same time: a pod
names its own by fingerprint in an annotation, so a gateway knows which key to use.

Up to version 0.1 every process had the install key and derived keys in one step (`derive_old`). `InstallKey.old`
supports pods that were made by 0.1 until they are replaced (controllers/installkey.py).
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import BaseModel, ConfigDict

Role = Literal["gateway", "operator", "ledger", "admin", "billing", "logs"]
"""`admin`: administration of an engine; `billing`, `logs`: people who read bills or request logs."""
ROLES: tuple[Role, ...] = get_args(Role)

LEDGER = "ledger"
"""Subject of the ledger (`POST /v1/records`, `GET /v1/totals`, queries)."""
DEMAND = "demand"
"""Subject of gateways, called by gateways and operators (`GET /v1/demand`)."""


CACHE_SALT = "cache-salt"
"""Subject of the key from which gateways compute `cache_salt` of requests to engines."""
PROMPT_MARKS = "prompt-marks"
"""Subject of the key from which gateways compute hashes of prompts' beginnings (`core/advice/marks.py`)."""


def role_key(install_key: bytes, role: Role) -> bytes:
    """The key from which all keys of one role are derived."""
    return hmac.digest(install_key, f"role:{role}".encode(), hashlib.sha256)


def bearer_for(own: bytes, subject: str) -> str:
    """Bearer with which the holder of the role key `own` calls `subject`: 64 hex digits."""
    return hmac.digest(own, subject.encode(), hashlib.sha256).hex()


def derive(install_key: bytes, role: Role, subject: str) -> str:
    """Derives a key from the install key in both steps."""
    return bearer_for(role_key(install_key, role), subject)


def derive_old(install_key: bytes, role: Role, subject: str) -> str:
    """Derives a key in one step, as up to version 0.1."""
    return hmac.digest(install_key, f"{_OLD_ROLES.get(role, role)}:{subject}".encode(), hashlib.sha256).hex()


_OLD_ROLES: Final[dict[Role, str]] = {"admin": "agent", "billing": "admin", "logs": "admin"}


@dataclass(frozen=True, slots=True, repr=False)
class InstallKey:
    """The install key, from which all keys are derived. It is never logged: hence no repr."""

    value: bytes
    old: bool = False
    """Key of version 0.1: keys are derived in one step, and every process has it."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.value)

    def bearer_for(self, role: Role, subject: str) -> str:
        """Bearer with which `role` calls `subject`."""
        return derive_old(self.value, role, subject) if self.old else derive(self.value, role, subject)


class KeyBundle(BaseModel):
    """Keys of one install key that a gateway or the ledger has: one file of its Secret."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    """Fingerprint of the install key."""
    role: Role
    own: str
    """The role key, hex."""
    subject: str
    """Subject with which others call this role."""
    callers: dict[Role, str]
    """Bearers with which they call `subject`."""

    def bearer_for(self, role: Role, subject: str) -> str | None:
        """Bearer with which `role` calls `subject`; None: not known to this process."""
        if role == self.role:
            return bearer_for(bytes.fromhex(self.own), subject)
        return self.callers.get(role) if subject == self.subject else None

    def __repr__(self) -> str:  # never logged
        return f"KeyBundle({self.fingerprint}, {self.role})"


_CALLED: Final[dict[Role, tuple[str, tuple[Role, ...]]]] = {
    "gateway": (DEMAND, ("operator", "logs")),
    "ledger": (LEDGER, ("gateway", "billing")),
}
"""Callers of each role, except calls to agents. Gateways call each other with the key of their own role."""
BUNDLES: Final[tuple[Role, ...]] = tuple(_CALLED)
"""Roles of processes that have a Secret with a KeyBundle."""
PEOPLE: Final[dict[Role, str]] = {"billing": LEDGER, "logs": DEMAND}
"""Roles of people -> the subject that they call. Their Secret contains that one key."""


def bundle(install_key: bytes, role: Role) -> KeyBundle:
    """The key bundle of a role in BUNDLES."""
    subject, callers = _CALLED[role]
    return KeyBundle(
        fingerprint=fingerprint(install_key),
        role=role,
        own=role_key(install_key, role).hex(),
        subject=subject,
        callers={caller: derive(install_key, caller, subject) for caller in callers},
    )


def fingerprint(install_key: bytes) -> str:
    """Identifies an install key without revealing it: 8 hex digits of its SHA-256."""
    return hashlib.sha256(install_key).hexdigest()[:8]


def hash_api_key(key: str) -> str:
    """Hash of an API key as listed in a Tenant: SHA-256 in lower-case hex."""
    return hashlib.sha256(key.encode()).hexdigest()


class AgentKeys(BaseModel):
    """Content of `agent.json`: the keys that the agent accepts, and the keys that it uses to call the engine."""

    callers: dict[str, str]
    """Role -> key, of the roles that may call the agent."""
    engine: str
    """The engine's client key (`Authorization: Bearer`)."""
    admin: str
    """The engine's admin key."""
