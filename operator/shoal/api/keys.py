"""Keys between Shoal's processes: all derived from one install key, in two steps, so that none has to be distributed.

    role key    = HMAC-SHA256(install key, "role:" + role)
    key         = HMAC-SHA256(role key, subject), hex

`role` is that of the caller, `subject` whom it calls: a Model's uid (its pods), LEDGER or DEMAND. The operator alone
has the install key. Every other process has a `KeyBundle`: its own role key, and of those who call it the keys for its
own subject, which open nothing else. The engine's client key is the gateway's; its admin key is of a role that nobody
calls by: it is in the pod's own Secret only. Two install keys can be valid at a time: a pod names its own by
fingerprint in an annotation, so a gateway knows which one to use.

Up to 0.1 every process had the install key itself, and derived in one step (`derive_old`): `InstallKey.old` serves the
pods that were made then, until they are replaced (controllers/installkey.py).
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import BaseModel, ConfigDict

Role = Literal["gateway", "operator", "ledger", "admin", "billing", "logs"]
"""`admin`: of an engine; `billing` and `logs`: of people who read bills, or request logs."""
ROLES: tuple[Role, ...] = get_args(Role)

LEDGER = "ledger"
"""Stands for the model's uid in keys towards the ledger (`POST /v1/records`, `GET /v1/totals`, queries)."""
DEMAND = "demand"
"""Stands for the model's uid in keys between gateways, and from operators to gateways (`GET /v1/demand`)."""


CACHE_SALT = "cache-salt"
"""Stands for the model's uid in the key from which gateways make `cache_salt` of requests to engines."""


def role_key(install_key: bytes, role: Role) -> bytes:
    """From which a role's keys are derived, and no other's."""
    return hmac.digest(install_key, f"role:{role}".encode(), hashlib.sha256)


def bearer_for(own: bytes, subject: str) -> str:
    """What the role with the role key `own` says to `subject`: 64 hex digits."""
    return hmac.digest(own, subject.encode(), hashlib.sha256).hex()


def derive(install_key: bytes, role: Role, subject: str) -> str:
    """Both steps at once, for who has the install key."""
    return bearer_for(role_key(install_key, role), subject)


def derive_old(install_key: bytes, role: Role, subject: str) -> str:
    """As every process derived up to 0.1."""
    return hmac.digest(install_key, f"{_OLD_WORDS.get(role, role)}:{subject}".encode(), hashlib.sha256).hex()


_OLD_WORDS: Final[dict[Role, str]] = {"admin": "agent", "billing": "admin", "logs": "admin"}


@dataclass(frozen=True, slots=True, repr=False)
class InstallKey:
    """From which all keys come. Never logged: hence no repr."""

    value: bytes
    old: bool = False
    """Of before: derived from in one step, and known to every process."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.value)

    def bearer_for(self, role: Role, subject: str) -> str:
        """What `role` says to `subject`."""
        return derive_old(self.value, role, subject) if self.old else derive(self.value, role, subject)


class KeyBundle(BaseModel):
    """All that a gateway or a ledger has of one install key: a file of its Secret."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    """Of the install key."""
    role: Role
    own: str
    """The role key, hex."""
    subject: str
    """By which others call this role."""
    callers: dict[Role, str]
    """What they say to `subject`."""

    def bearer_for(self, role: Role, subject: str) -> str | None:
        """What `role` says to `subject`; None where this process has no business to know."""
        if role == self.role:
            return bearer_for(bytes.fromhex(self.own), subject)
        return self.callers.get(role) if subject == self.subject else None

    def __repr__(self) -> str:  # never logged
        return f"KeyBundle({self.fingerprint}, {self.role})"


_CALLED: Final[dict[Role, tuple[str, tuple[Role, ...]]]] = {
    "gateway": (DEMAND, ("operator", "logs")),
    "ledger": (LEDGER, ("gateway", "billing")),
}
"""Who calls whom, agents apart; gateways call each other with the key of their own role."""
BUNDLES: Final[tuple[Role, ...]] = tuple(_CALLED)
"""Roles of processes that have a Secret with a KeyBundle."""
PEOPLE: Final[dict[Role, str]] = {"billing": LEDGER, "logs": DEMAND}
"""Roles of people -> whom they call: their Secret has that one key."""


def bundle(install_key: bytes, role: Role) -> KeyBundle:
    """Of a role in BUNDLES."""
    subject, callers = _CALLED[role]
    return KeyBundle(
        fingerprint=fingerprint(install_key),
        role=role,
        own=role_key(install_key, role).hex(),
        subject=subject,
        callers={caller: derive(install_key, caller, subject) for caller in callers},
    )


def fingerprint(install_key: bytes) -> str:
    """Names an install key without telling it: 8 hex digits of its SHA-256."""
    return hashlib.sha256(install_key).hexdigest()[:8]


def hash_api_key(key: str) -> str:
    """What a Tenant lists of an API key: SHA-256 in lower-case hex."""
    return hashlib.sha256(key.encode()).hexdigest()


class AgentKeys(BaseModel):
    """Content of `agent.json`: what the agent accepts, and what it uses towards the engine."""

    callers: dict[str, str]
    """Role -> key, of those who may call the agent."""
    engine: str
    """The engine's client key (`Authorization: Bearer`)."""
    admin: str
    """The engine's admin key."""
