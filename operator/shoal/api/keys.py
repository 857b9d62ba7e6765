"""Keys between Shoal's processes: all derived from one install key, so that none has to be distributed.

    key(role, model) = HMAC-SHA256(install key, role + ":" + model uid), hex

`role` is that of the caller. The engine's client key is the gateway's; its admin key is the agent's. An agent accepts
the keys of gateways, operators and the ledger. Two install keys can be valid at a time: a pod names its own by
fingerprint in an annotation, so a gateway knows which one to use.
"""

import hashlib
import hmac
from typing import Literal, get_args

from pydantic import BaseModel

Role = Literal["gateway", "operator", "ledger", "agent", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)

LEDGER = "ledger"
"""Stands for the model's uid in keys towards the ledger (`POST /v1/records`, `GET /v1/totals`, queries)."""
DEMAND = "demand"
"""Stands for the model's uid in keys between gateways, and from operators to gateways (`GET /v1/demand`)."""


def derive(install_key: bytes, role: Role, model_uid: str) -> str:
    """The key with which `role` calls the pods of the Model with this uid: 64 hex digits."""
    return hmac.new(install_key, f"{role}:{model_uid}".encode(), hashlib.sha256).hexdigest()


def drain_token(install_key: bytes, model_uid: str) -> str:
    """With which a kubelet asks an agent of the Model whether its engine may be stopped (`GET /v1/drain`).

    A hook's header cannot come from a Secret, so it stands in the pods for whoever may read them, and opens nothing
    but that.
    """
    return hmac.new(install_key, f"drain:{model_uid}".encode(), hashlib.sha256).hexdigest()


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
