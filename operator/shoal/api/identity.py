"""Who a process is, as its certificate says.

Two names in each certificate: a URI in the style of SPIFFE, by which a server knows its caller's role, and a DNS name,
by which a client knows its server within the TLS handshake, before it says anything.

    spiffe://TRUST DOMAIN/ns/NAMESPACE/gateway          gateway.shoal.internal
    spiffe://TRUST DOMAIN/ns/NAMESPACE/model/UID        UID.model.shoal.internal

NAMESPACE is Shoal's own, also for Models: two installations in one trust domain are not each other's.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

DOMAIN: Final = "shoal.internal"
"""Of the DNS names. They are in no DNS: peers are dialled by address."""

ProcessRole = Literal["gateway", "operator", "ledger"]
PROCESS_ROLES: Final[tuple[ProcessRole, ...]] = get_args(ProcessRole)


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """The two names of one certificate."""

    uri: str
    dns: str


def process(trust_domain: str, namespace: str, role: ProcessRole) -> CertificateIdentity:
    """A process of Shoal's own; all gateways share one identity."""
    return CertificateIdentity(f"{_prefix(trust_domain, namespace)}{role}", server_name(role))


def model(trust_domain: str, namespace: str, uid: str) -> CertificateIdentity:
    """The pods of the Model with this uid; `namespace` is Shoal's."""
    return CertificateIdentity(f"{_prefix(trust_domain, namespace)}model/{uid}", model_server_name(uid))


def server_name(role: ProcessRole) -> str:
    """What a client expects of a process of Shoal's."""
    return f"{role}.{DOMAIN}"


def model_server_name(uid: str) -> str:
    """What a client expects of an engine pod."""
    return f"{uid}.model.{DOMAIN}"


def role_of(own_uri: str, uri: str) -> ProcessRole | None:
    """The role that `uri` names in the installation to which `own_uri` belongs; None: it is of another one, or a
    Model's."""
    prefix = own_uri.removesuffix("/").rpartition("/model/")[0] or own_uri.rpartition("/")[0]
    for role in PROCESS_ROLES:
        if uri == f"{prefix}/{role}":
            return role
    return None


def _prefix(trust_domain: str, namespace: str) -> str:
    return f"spiffe://{trust_domain}/ns/{namespace}/"
